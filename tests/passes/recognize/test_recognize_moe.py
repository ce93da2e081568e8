"""Mixtures of experts in ATen graphs: the forms that match, what is recorded, what stays, and the numbers."""

from __future__ import annotations

import pytest
import torch
import transformers.integrations.moe  # registers transformers' grouped product
from aten_graphs import aten_of_model, aten_of_module, run_graph
from torch import nn
from torch.nn import functional as F

from torch_pagoda.compiler.link.linker import link
from torch_pagoda.compiler.verify.self_check import check, reference_of_model
from torch_pagoda.passes.graph.fx_nodes import callee
from torch_pagoda.passes.recognize import moe as moe_pass
from torch_pagoda.passes.recognize.moe import recognize_moe
from torch_pagoda.passes.recognize.moe_routing import recognize_moe_routing

from tiny_models import build_tiny_model

HIDDEN, INNER, EXPERTS, CHOSEN = 16, 8, 8, 3
grouped = transformers.integrations.moe._grouped_mm


class Mixture(nn.Module):
    """``function(self, tokens)`` of ``[N, HIDDEN]`` tokens, over the parameters of a mixture of experts."""

    def __init__(self, function, dtype=torch.float32, layers=1):
        super().__init__()
        torch.manual_seed(0)
        self.function, self.layers = function, layers

        def parameter(*shape):
            return nn.Parameter((0.5 * torch.randn(shape)).to(dtype), requires_grad=False)

        self.router = parameter(EXPERTS, HIDDEN)
        self.correction = parameter(EXPERTS)
        self.up, self.down = parameter(EXPERTS, 2 * INNER, HIDDEN), parameter(EXPERTS, HIDDEN, INNER)
        self.up_t, self.down_t = parameter(EXPERTS, HIDDEN, 2 * INNER), parameter(EXPERTS, INNER, HIDDEN)
        self.up_bias, self.down_bias = parameter(EXPERTS, 2 * INNER), parameter(EXPERTS, HIDDEN)
        self.inner = parameter(EXPERTS, INNER, HIDDEN)

    def forward(self, x):
        for _ in range(self.layers):
            x = self.function(self, x.reshape(-1, HIDDEN)).view(x.shape)
        return x


def softmax_routing(m, x):
    weights, ids = F.linear(x, m.router).float().softmax(-1).topk(CHOSEN, -1)
    return weights / weights.sum(-1, keepdim=True), ids


def silu_halves(y):
    gate, up = y.chunk(2, -1)
    return F.silu(gate) * up


def clipped_interleaved(y):
    gate, up = y[..., ::2].clamp(max=2.0), y[..., 1::2].clamp(-2.0, 2.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def sorted_rows(m, x, ids):
    """As transformers' grouped_mm experts: experts and order of the rows, the rows, and where each expert ends."""
    experts, order = torch.sort(ids.reshape(-1))
    ends = torch.histc(experts.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
    return experts, order, x[order // CHOSEN], ends


def weighted_sum(x, y, order, weights):
    y = y * weights.reshape(-1)[order].unsqueeze(-1)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.size(0))
    return y[inverse].view(len(x), CHOSEN, HIDDEN).sum(1).to(x.dtype)


def sorted_experts(m, x, routing=softmax_routing, middle=silu_halves, up=None):
    weights, ids = routing(m, x)
    _, order, rows, ends = sorted_rows(m, x, ids)
    y = middle(grouped(rows, (m.up if up is None else up).transpose(-2, -1), ends))
    return weighted_sum(x, grouped(y, m.down.transpose(-2, -1), ends), order, weights)


def with_biases(m, x):
    scores, ids = F.linear(x, m.router, m.correction).topk(CHOSEN, -1)
    experts, order, rows, ends = sorted_rows(m, x, ids)
    y = clipped_interleaved(grouped(rows, m.up_t, ends) + m.up_bias[experts])
    return weighted_sum(x, grouped(y, m.down_t, ends) + m.down_bias[experts], order, scores.softmax(1))


def all_experts(m, x):
    scores, ids = F.linear(x, m.router).topk(CHOSEN, 1)
    scores = torch.full((len(x), EXPERTS), -torch.inf, dtype=x.dtype).scatter_(1, ids, scores)
    scores = torch.sigmoid(scores.float()).to(x.dtype)
    rows = x.repeat(EXPERTS, 1) * scores.transpose(0, 1).reshape(-1, 1)
    gate, up = torch.bmm(rows.view(EXPERTS, -1, HIDDEN), m.up_t).chunk(2, -1)
    return torch.bmm(up * F.gelu(gate), m.down_t).view(-1, HIDDEN).reshape(EXPERTS, -1, HIDDEN).sum(0)


def split_by_expert(m, x):
    scores, ids = F.linear(x, m.router).float().topk(CHOSEN, dim=1)
    counts = torch.zeros(len(x), EXPERTS).scatter(1, ids, 1).long().sum(0).tolist()
    _, order = ids.flatten().sort(0)
    tokens = order.div(CHOSEN, rounding_mode="trunc")

    def product(rows, weight):
        return torch.cat([F.linear(part, weight[i]) for i, part in enumerate(rows.split(counts, 0))], 0)

    y = product(silu_halves(product(x[tokens], m.up)), m.down)
    y = y * scores.softmax(1).type_as(x).flatten()[order][:, None]
    return torch.zeros(len(x), HIDDEN, dtype=x.dtype).index_add(0, tokens, y)


def grouped_routing(m, x, fill=-torch.inf, ranking="top2"):
    scores = F.linear(x.float(), m.router.float()).sigmoid()
    choice = scores + m.correction
    parts = choice.view(-1, 4, EXPERTS // 4)
    ranks = parts.topk(2, -1)[0].sum(-1) if ranking == "top2" else parts.max(-1).values
    best = ranks.topk(2, -1, sorted=False)[1]
    kept = torch.zeros_like(ranks).scatter_(1, best, 1).unsqueeze(-1).expand(-1, 4, EXPERTS // 4)
    choice = choice.masked_fill(~kept.reshape(-1, EXPERTS).bool(), fill)
    ids = choice.topk(CHOSEN, -1, sorted=False)[1]
    weights = scores.gather(1, ids)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5, ids


def clamped_routing(m, x):
    scores = F.linear(x, m.router).float().softmax(-1)
    ids = (scores + m.correction).topk(CHOSEN, -1)[1]
    weights = scores.gather(-1, ids)
    return (weights / weights.sum(-1, keepdim=True).clamp(min=1e-12)).to(x.dtype), ids


def root_routing(m, x):
    scores = F.softplus(F.linear(x, m.router).float()).sqrt()
    weights, ids = scores.topk(CHOSEN, -1)
    return weights * 1.5, ids


FORMS = {
    "softmax": (
        sorted_experts,
        ("silu", 0.0, 0.0, "halves", False, False),
        ("softmax", 1, 1, "max", "sum", 0.0, 1.0),
    ),
    "biases": (
        with_biases,
        ("clipped_swiglu", 1.702, 2.0, "interleaved", True, False),
        ("none", 1, 1, "max", "softmax", 0.0, 1.0),
    ),
    "all experts": (
        all_experts,
        ("gelu", 0.0, 0.0, "halves", True, True),
        ("none", 1, 1, "max", "sigmoid", 0.0, 1.0),
    ),
    "split": (
        split_by_expert,
        ("silu", 0.0, 0.0, "halves", False, False),
        ("none", 1, 1, "max", "softmax", 0.0, 1.0),
    ),
    "groups by two": (
        lambda m, x: sorted_experts(m, x, grouped_routing),
        ("silu", 0.0, 0.0, "halves", False, False),
        ("sigmoid", 4, 2, "top2", "sum", 1e-20, 2.5),
    ),
    "groups by one": (
        lambda m, x: sorted_experts(m, x, lambda m, x: grouped_routing(m, x, ranking="max")),
        ("silu", 0.0, 0.0, "halves", False, False),
        ("sigmoid", 4, 2, "max", "sum", 1e-20, 2.5),
    ),
    "clamped": (
        lambda m, x: sorted_experts(m, x, clamped_routing),
        ("silu", 0.0, 0.0, "halves", False, False),
        ("softmax", 1, 1, "max", "clamped_sum", 1e-12, 1.0),
    ),
    "a large limit": (
        lambda m, x: sorted_experts(
            m, x, middle=lambda y: F.gelu(y.chunk(2, -1)[0].clamp(max=2e4)) * y.chunk(2, -1)[1].clamp(-2e4, 2e4)
        ),
        ("gelu", 0.0, 2e4, "halves", False, False),
        ("softmax", 1, 1, "max", "sum", 0.0, 1.0),
    ),
    "a large whole limit": (
        lambda m, x: sorted_experts(
            m, x, middle=lambda y: F.silu(y.chunk(2, -1)[0].clamp(max=16)) * y.chunk(2, -1)[1].clamp(-16, 16)
        ),
        ("silu", 0.0, 16.0, "halves", False, False),
        ("softmax", 1, 1, "max", "sum", 0.0, 1.0),
    ),
    "no gate": (
        lambda m, x: sorted_experts(m, x, root_routing, lambda y: F.relu(y).square(), m.inner),
        ("relu2", 0.0, 0.0, "plain", False, False),
        ("sqrt_softplus", 1, 1, "max", "none", 0.0, 1.5),
    ),
    "limited": (
        lambda m, x: sorted_experts(
            m, x, middle=lambda y: F.silu(y.chunk(2, -1)[0].clamp(max=1.5)) * y.chunk(2, -1)[1].clamp(-1.5, 1.5)
        ),
        ("silu", 0.0, 1.5, "halves", False, False),
        ("softmax", 1, 1, "max", "sum", 0.0, 1.0),
    ),
}


def all_recorded(graph, name):
    nodes = [n for n in graph.graph.nodes if callee(n) == name]
    return [tuple(a for a in node.args if not isinstance(a, torch.fx.Node | None)) for node in nodes]


def recorded(graph, name):
    (only,) = all_recorded(graph, name)
    return only


def leftovers(graph):
    products = ("grouped_mm_fallback", "_grouped_mm", "bmm", "cat", "topk", "sort", "_softmax", "sigmoid")
    return [callee(n) for n in graph.graph.nodes if callee(n) in products]


@pytest.mark.parametrize("name", FORMS)
def test_forms_match_and_keep_their_numbers(name):
    function, experts, gating = FORMS[name]
    module = Mixture(function)
    graph = aten_of_module(module, torch.randn(2, 5, HIDDEN))
    for recognize in (recognize_moe, recognize_moe_routing):
        record = recognize(graph)
        assert (record.matches, record.rejections) == (1, [])
    assert recorded(graph, "moe") == experts
    assert recorded(graph, "moe_gating") == (CHOSEN, *gating)
    assert leftovers(graph) == []
    for tokens in (5, 1, 13):
        x = torch.randn(2, tokens, HIDDEN)
        torch.testing.assert_close(run_graph(graph, x), module(x), atol=1e-5, rtol=1e-5)
    code = graph.module.code
    assert recognize_moe(graph).matches == recognize_moe_routing(graph).matches == 0
    graph.recompile()
    assert graph.module.code == code


def test_half_precision_matches_alike():
    cases = {name: FORMS[name] for name in ("softmax", "biases", "all experts", "groups by two")}
    module = Mixture(lambda m, x: sum(function(m, x) for function, _, _ in cases.values()), torch.bfloat16)
    graph = aten_of_module(module, torch.randn(2, 5, HIDDEN).bfloat16())
    assert recognize_moe(graph).matches == recognize_moe_routing(graph).matches == len(cases)
    assert all_recorded(graph, "moe") == [experts for _, experts, _ in cases.values()]
    assert all_recorded(graph, "moe_gating") == [(CHOSEN, *gating) for _, _, gating in cases.values()]
    x = torch.randn(2, 7, HIDDEN).bfloat16()
    torch.testing.assert_close(run_graph(graph, x), module(x), atol=0.2, rtol=0.03)


@pytest.mark.parametrize("tokens", [1, 6])
def test_a_fixed_number_of_tokens_matches(tokens):
    module = Mixture(FORMS["groups by two"][0])
    x = torch.randn(1, tokens, HIDDEN)
    graph = aten_of_module(module, x, dynamic=())
    assert recognize_moe(graph).matches == recognize_moe_routing(graph).matches == 1
    assert recorded(graph, "moe_gating") == (CHOSEN, *FORMS["groups by two"][2])
    torch.testing.assert_close(run_graph(graph, x), module(x))


def test_too_many_fixed_tokens_are_not_run(monkeypatch):
    monkeypatch.setattr(moe_pass, "_LARGEST_RUN", 1000)
    graph = aten_of_module(Mixture(sorted_experts), torch.randn(1, 40, HIDDEN), dynamic=())
    record = recognize_moe(graph)
    assert record.matches == 0
    assert "fixed to 120 rows of experts" in record.rejections[0].reason


def test_layers_of_one_structure_are_run_once(monkeypatch):
    runs = []
    find = moe_pass.find_formula
    monkeypatch.setattr(moe_pass, "find_formula", lambda *a: runs.append(1) or find(*a))
    module = Mixture(sorted_experts, layers=3)
    graph = aten_of_module(module, torch.randn(2, 5, HIDDEN))
    assert recognize_moe(graph).matches == recognize_moe_routing(graph).matches == 3
    assert len(runs) == 1
    x = 0.1 * torch.randn(2, 4, HIDDEN)
    torch.testing.assert_close(run_graph(graph, x), module(x), atol=1e-4, rtol=1e-4)


def parts_of_sorted(m, x):
    weights, ids = softmax_routing(m, x)
    experts, order, rows, ends = sorted_rows(m, x, ids)
    return weights, ids, experts, order, rows, ends


def second_reader(m, x):
    weights, _, _, order, rows, ends = parts_of_sorted(m, x)
    y = grouped(rows, m.up.transpose(-2, -1), ends)
    out = weighted_sum(x, grouped(silu_halves(y), m.down.transpose(-2, -1), ends), order, weights)
    return out + y.mean()


def read_before_the_sum(m, x):
    weights, _, _, order, rows, ends = parts_of_sorted(m, x)
    y = grouped(silu_halves(grouped(rows, m.up.transpose(-2, -1), ends)), m.down.transpose(-2, -1), ends)
    return weighted_sum(x, y, order, weights) + y.mean()


def wrong_order(m, x):
    weights, _, _, order, rows, ends = parts_of_sorted(m, x)
    y = grouped(silu_halves(grouped(rows, m.up.transpose(-2, -1), ends)), m.down.transpose(-2, -1), ends)
    y = y * weights.reshape(-1)[order].unsqueeze(-1)
    return y[order].view(len(x), CHOSEN, HIDDEN).sum(1)


def other_ends(m, x):
    weights, _, experts, order, rows, _ = parts_of_sorted(m, x)
    ends = torch.histc(EXPERTS - 1 - experts.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
    y = grouped(silu_halves(grouped(rows, m.up.transpose(-2, -1), ends)), m.down.transpose(-2, -1), ends)
    return weighted_sum(x, y, order, weights)


def next_token(m, x):
    weights, _, _, order, _, ends = parts_of_sorted(m, x)
    rows = x[order // (CHOSEN + 1)]
    y = grouped(silu_halves(grouped(rows, m.up.transpose(-2, -1), ends)), m.down.transpose(-2, -1), ends)
    return weighted_sum(x, y, order, weights)


def separate_gate(m, x):
    weights, _, _, order, rows, ends = parts_of_sorted(m, x)
    gate, up = (grouped(rows, w.transpose(-2, -1), ends) for w in (m.inner, m.up[:, :INNER]))
    return weighted_sum(x, grouped(F.silu(gate) * up, m.down.transpose(-2, -1), ends), order, weights)


def doubled_output(m, x):
    weights, _, _, order, rows, ends = parts_of_sorted(m, x)
    y = grouped(silu_halves(grouped(rows, m.up.transpose(-2, -1), ends)), m.down.transpose(-2, -1), ends)
    return weighted_sum(x, y * 2.0, order, weights)


def scaled_output(m, x):
    weights, _, _, order, rows, ends = parts_of_sorted(m, x)
    y = grouped(silu_halves(grouped(rows, m.up.transpose(-2, -1), ends)), m.down.transpose(-2, -1), ends)
    return weighted_sum(x, y * m.down_bias[0], order, weights)


def one_product(m, x):
    weights, _, _, order, rows, ends = parts_of_sorted(m, x)
    return weighted_sum(x, grouped(rows, m.up[:, :HIDDEN].transpose(-2, -1), ends), order, weights)


def biased_all_experts(m, x):
    scores, ids = F.linear(x, m.router).topk(CHOSEN, 1)
    scores = torch.full((len(x), EXPERTS), -torch.inf).scatter_(1, ids, scores).sigmoid()
    rows = x.repeat(EXPERTS, 1) * scores.transpose(0, 1).reshape(-1, 1)
    gate, up = torch.bmm(rows.view(EXPERTS, -1, HIDDEN), m.up_t).chunk(2, -1)
    return torch.bmm(torch.sigmoid(gate) * (up + 1), m.down_t).sum(0)


NEAR_MISSES = {
    "the first product is read twice": (second_reader, "is also read by"),
    "the second product is read twice": (read_before_the_sum, "has 2 users"),
    "rows are put back in the wrong order": (wrong_order, "not followed by a weighted sum"),
    "ends are counted otherwise": (other_ends, "not over the tokens' rows sorted by expert"),
    "rows are of other tokens": (next_token, "not over the tokens' rows sorted by expert"),
    "gate and up are two products": (separate_gate, "gate and up are not merged"),
    "the output is doubled": (doubled_output, "not followed by a weighted sum"),
    "the output is scaled by a parameter": (scaled_output, "it reads"),
    "an activation that has no name": (
        lambda m, x: sorted_experts(m, x, middle=lambda y: torch.tanh(y[..., :INNER]) * y[..., INNER:]),
        "not a supported activation",
    ),
    "nearly an activation": (
        lambda m, x: sorted_experts(m, x, middle=lambda y: F.silu(y[..., :INNER]) * y[..., INNER:] * 1.001),
        "not a supported activation",
    ),
    "a limit from below": (
        lambda m, x: sorted_experts(m, x, middle=lambda y: F.silu(y[..., :INNER]) * y[..., INNER:].clamp(min=-16)),
        "not a supported activation",
    ),
    "a limit of the scaled up": (
        lambda m, x: sorted_experts(
            m, x, middle=lambda y: F.silu(y[..., :INNER]) * (y[..., INNER:] / 64).clamp(-4, 4) * 64
        ),
        "not a supported activation",
    ),
    "a limit by a comparison": (
        lambda m, x: sorted_experts(
            m, x, middle=lambda y: F.silu(y[..., :INNER]) * torch.where(y[..., INNER:] > 16, 16, y[..., INNER:])
        ),
        "not a supported activation",
    ),
    "experts that were not chosen add something": (biased_all_experts, "not a supported activation"),
    "one product": (one_product, "no second product"),
}


def in_turn(cases):
    """All cases in one graph, one after the other."""
    return lambda m, x: sum(function(m, x) for function, _ in cases.values())


def assert_untouched(graph, recognize, cases):
    """No case matches, and the reasons are those that the cases give, in order."""
    graph.recompile()
    code = graph.module.code
    record = recognize(graph)
    graph.recompile()
    assert record.matches == 0 and graph.module.code == code
    for rejection, (name, (_, reason)) in zip(record.rejections, cases.items(), strict=True):
        assert reason in rejection.reason, name


def test_near_misses_stay_with_a_reason():
    graph = aten_of_module(Mixture(in_turn(NEAR_MISSES)), torch.randn(2, 5, HIDDEN))
    assert_untouched(graph, recognize_moe, NEAR_MISSES)


def read_ids(m, x):
    weights, ids = F.linear(x, m.router).sigmoid().topk(CHOSEN, -1, sorted=False)
    return sorted_experts(m, x, lambda m, x: (weights, ids)) + ids.sum(1, keepdim=True)


def read_scores(m, x):
    scores = F.linear(x, m.router).softmax(-1)
    return sorted_experts(m, x, lambda m, x: scores.topk(CHOSEN, -1)) + scores.amax()


def tabled(m, x):
    ids = (x[:, :1].long() + torch.arange(CHOSEN)).remainder(EXPERTS)
    return F.linear(x, m.router).sigmoid().gather(1, ids), ids


ROUTING_NEAR_MISSES = {
    "ids are read elsewhere": (read_ids, "is not read by the experts alone"),
    "scores are read elsewhere": (read_scores, "is also read by"),
    "weights of another kind": (
        lambda m, x: sorted_experts(
            m, x, lambda m, x: (lambda top: (top[0].square(), top[1]))(F.linear(x, m.router).topk(CHOSEN, -1))
        ),
        "the operator does not support",
    ),
    "groups that are only put back": (
        lambda m, x: sorted_experts(m, x, lambda m, x: grouped_routing(m, x, fill=0.0)),
        "the operator does not support",
    ),
    "a learned scale": (
        lambda m, x: sorted_experts(
            m, x, lambda m, x: (lambda w, ids: (w + m.correction[ids], ids))(*softmax_routing(m, x))
        ),
        "depends on more than their scores",
    ),
    "experts by a table": (lambda m, x: sorted_experts(m, x, tabled), "not chosen by scores of all of them"),
}


def test_unknown_routing_stays_with_a_reason():
    module = Mixture(in_turn(ROUTING_NEAR_MISSES))
    graph = aten_of_module(module, torch.randn(2, 5, HIDDEN))
    assert recognize_moe(graph).matches == len(ROUTING_NEAR_MISSES)
    assert_untouched(graph, recognize_moe_routing, ROUTING_NEAR_MISSES)
    x = torch.randn(2, 4, HIDDEN)
    torch.testing.assert_close(run_graph(graph, x), module(x), atol=1e-4, rtol=1e-4)


def test_a_float32_correction_of_half_precision_scores_matches():
    def corrected(m, x):
        scores = F.linear(x, m.router).sigmoid()
        ids = (scores + m.correction).topk(CHOSEN, -1).indices
        return scores.gather(1, ids), ids

    module = Mixture(lambda m, x: sorted_experts(m, x, corrected), torch.bfloat16)
    module.correction.data = torch.randn(EXPERTS)
    graph = aten_of_module(module, torch.randn(2, 5, HIDDEN).bfloat16())
    assert recognize_moe(graph).matches == recognize_moe_routing(graph).matches == 1
    assert recorded(graph, "moe_gating") == (CHOSEN, "sigmoid", 1, 1, "max", "none", 0.0, 1.0)
    x = torch.randn(2, 7, HIDDEN).bfloat16()
    torch.testing.assert_close(run_graph(graph, x), module(x), atol=0.2, rtol=0.03)


def test_what_reads_the_choice_reads_the_operators():
    def scaled_by_expert(m, x):
        weights, ids = softmax_routing(m, x)
        return sorted_experts(m, x, lambda m, x: (weights * m.correction[ids], ids)) + ids.sum(1, keepdim=True)

    module = Mixture(scaled_by_expert)
    graph = aten_of_module(module, torch.randn(2, 5, HIDDEN))
    assert recognize_moe(graph).matches == recognize_moe_routing(graph).matches == 1
    assert recorded(graph, "moe_gating") == (CHOSEN, "softmax", 1, 1, "max", "sum", 0.0, 1.0)
    x = torch.randn(2, 4, HIDDEN)
    torch.testing.assert_close(run_graph(graph, x), module(x), atol=1e-5, rtol=1e-5)


def test_scores_of_another_kind_are_computed_before_the_choice():
    module = Mixture(
        lambda m, x: sorted_experts(m, x, lambda m, x: (F.linear(x, m.router).tanh() * m.correction).topk(CHOSEN, -1))
    )
    graph = aten_of_module(module, torch.randn(2, 5, HIDDEN))
    assert recognize_moe(graph).matches == recognize_moe_routing(graph).matches == 1
    assert recorded(graph, "moe_gating") == (CHOSEN, "none", 1, 1, "max", "none", 0.0, 1.0)
    assert "tanh" in [callee(n) for n in graph.graph.nodes]
    x = torch.randn(2, 4, HIDDEN)
    torch.testing.assert_close(run_graph(graph, x), module(x))


def test_whole_models_by_the_layer():
    layers = 2
    model = build_tiny_model("mixtral", num_hidden_layers=layers)
    graph = aten_of_model(model)
    for recognize in (recognize_moe, recognize_moe_routing):
        record = recognize(graph)
        assert (record.matches, record.rejections) == (layers, [])
    graph.recompile()
    assert check(link(graph, graph.module), reference_of_model(model)).ok
