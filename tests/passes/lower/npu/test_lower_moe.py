"""Mixtures of experts for Ascend: routing and experts, what each becomes, and the numbers."""

from __future__ import annotations

import pytest
import torch
from aten_graphs import run_graph

from torch_pagoda.passes.graph.fx_nodes import value
from torch_pagoda.passes.lower.npu.experts.moe import lower_npu_moe
from torch_pagoda.runtime.npu_target import NpuTarget
from torch_pagoda.runtime.ops.moe.every_expert import every_expert
from torch_pagoda.runtime.ops.moe.moe import moe_reference

from npu_graphs import assert_legal, graph_of, operators, refusals

pagoda = torch.ops.pagoda
EXPERTS, K, H, INNER, N = 8, 2, 32, 16, 11
ROUTED = ["npu.npu_moe_init_routing_v2", "npu.npu_grouped_matmul"]
UNCONVERTED = "npu.npu_moe_token_unpermute: torchair has no GE converter for it"


def tensors(dtype=torch.bfloat16, *, gated=True, bias=False, transposed=False):
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes):
        return (torch.randn(*sizes, generator=generator) / 4).to(dtype)

    j = 2 * INNER if gated else INNER
    up, down = normal(EXPERTS, j, H), normal(EXPERTS, H, INNER)
    found = {"up": up, "down": down} if not transposed else {"up": up.mT.contiguous(), "down": down.mT.contiguous()}
    if bias:
        found |= {"up_bias": normal(EXPERTS, j), "down_bias": normal(EXPERTS, H)}
    return found


def chosen(k=K, dtype=torch.bfloat16, tokens=N):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(tokens, EXPERTS, generator=generator)
    weights, ids = logits.softmax(-1).topk(k, -1)
    return weights.to(dtype), ids


def experts(kind="silu", layout="halves", limit=0.0, *, transposed=False, weight_input=False, bias=False):
    def function(m, packed):
        dtype = m.up.dtype
        k = (packed.shape[1] - H) // 2
        x, weights, ids = packed[:, :H].to(dtype), packed[:, H : H + k].to(dtype), packed[:, H + k :].long()
        up_bias, down_bias = (m.up_bias, m.down_bias) if bias else (None, None)
        return pagoda.moe(
            x, weights, ids, m.up, m.down, up_bias, down_bias, kind, 1.702, limit, layout, transposed, weight_input
        )

    return function


def packed(x, weights, ids):
    """One input, so that its tensors have one number of tokens."""
    return torch.cat((x.float(), weights.float(), ids.float()), 1)


def lowered(function, *inputs, target=None, tolerance=3e-2, paged=True, **parameters):
    graph = graph_of(function, *inputs, target=target, dynamic=(0,), **parameters)
    graph.paged = paged
    expected = run_graph(graph.copy(), *inputs)
    record = lower_npu_moe(graph)
    found = run_graph(graph, *inputs)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    assert_legal(graph)
    assert lower_npu_moe(graph).matches == 0
    return graph, record


X = torch.randn(N, H, generator=torch.Generator().manual_seed(2)).bfloat16()


@pytest.mark.parametrize(
    ("kind", "layout", "limit", "middle"),
    [
        ("silu", "halves", 0.0, "npu.npu_swiglu"),
        ("clipped_swiglu", "halves", 1.0, "npu.npu_clipped_swiglu"),
        ("clipped_swiglu", "interleaved", 1.0, "npu.npu_clipped_swiglu"),
        ("gelu", "plain", 0.0, "npu.npu_gelu"),
        ("gelu_tanh", "halves", 0.0, "npu.npu_geglu"),
    ],
)
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_experts(kind, layout, limit, middle, transposed, bias):
    parameters = tensors(gated=layout != "plain", bias=bias, transposed=transposed)
    function = experts(kind, layout, limit, transposed=transposed, bias=bias)
    graph, record = lowered(function, packed(X, *chosen()), **parameters)
    assert refusals(record) == UNCONVERTED
    names = [n for n in operators(graph) if n.startswith("npu.")]
    assert names == [*ROUTED, middle, ROUTED[1], "npu.npu_moe_finalize_routing"]
    products = [n for n in graph.graph.nodes if "grouped_matmul" in str(n.target)]
    for product in products:
        (weight,) = product.args[1]
        assert weight.op == "placeholder"  # laid out when the program is loaded, not in every step
        assert (product.kwargs["group_type"], product.kwargs["group_list_type"]) == (0, 1)
        if bias:  # float32 beside bfloat16
            (given,) = product.kwargs["bias"]
            assert graph.constants[given.name].dtype is torch.float32


@pytest.mark.parametrize("rank", range(2))
@pytest.mark.parametrize("soc", ["Ascend910B3", "Ascend310P3"])
def test_experts_of_one_rank(rank, soc):
    """The products leave the rows of others' experts undefined (NaN here), and nothing of that is added."""
    count = EXPERTS // 2
    dtype = torch.float16 if soc == "Ascend310P3" else torch.bfloat16
    parameters = {name: t[rank * count : (rank + 1) * count] for name, t in tensors(dtype).items()}

    def function(m, given):
        ids = pagoda.local_experts(given[:, H + K :].long(), m.first, count)
        x, weights = given[:, :H].to(dtype), given[:, H : H + K].to(dtype)
        return pagoda.moe(x, weights, ids, m.up, m.down, None, None, "silu", 1.0, 0.0, "halves", False, False)

    given = packed(X.to(dtype), *chosen(dtype=dtype))
    given[0, H + K :] = torch.tensor([0, 1]) + (1 - rank) * count  # a token that has no expert here
    graph = graph_of(
        function, given, target=NpuTarget(soc), dynamic=(0,), first=torch.tensor([rank * count]), **parameters
    )
    graph.ranks, graph.rank = 2, rank
    expected = run_graph(graph.copy(), given)
    assert not expected[0].any() and expected.any()
    lower_npu_moe(graph)
    torch.testing.assert_close(run_graph(graph, given), expected, atol=3e-2, rtol=3e-2)
    assert_legal(graph)
    routing = next(n for n in graph.graph.nodes if "init_routing" in str(n.target))
    assert routing.kwargs["expert_num"] == EXPERTS
    assert routing.kwargs["active_expert_range"] == [rank * count, (rank + 1) * count]
    assert not [n for n in graph.graph.nodes if "local_experts" in str(n.target)]


def test_experts_turned_share_the_memory_of_the_parameters():
    graph, _ = lowered(experts(), packed(X, *chosen()), **tensors())
    turned = {name: t for name, t in graph.constants.items() if name.startswith("turned_")}
    assert len(turned) == 2
    own = {t.untyped_storage().data_ptr() for name, t in graph.constants.items() if name not in turned}
    assert all(t.untyped_storage().data_ptr() in own for t in turned.values())


def test_in_the_callers_graph_parameters_may_be_replaced_at_any_call():
    graph, _ = lowered(experts(bias=True), packed(X, *chosen()), paged=False, **tensors(bias=True))
    assert not [name for name in graph.constants if name.startswith(("turned_", "wide_"))]
    assert sum(str(n.target) == "aten.transpose.int" for n in graph.graph.nodes) == 2


def test_one_expert_whose_input_is_weighted():
    graph, _ = lowered(experts(weight_input=True), packed(X, *chosen(1)), **tensors())
    (last,) = [n for n in graph.graph.nodes if "finalize_routing" in str(n.target)]
    assert last.args[4] is None  # weighted already


@pytest.mark.parametrize(
    ("function", "k", "target", "reason"),
    [
        (experts(weight_input=True), 2, None, "2 experts whose inputs are weighted"),
        (experts("gelu", "interleaved"), 2, None, "gate and up of gelu lie in turns"),
        (experts("silu", "halves", 0.5), 2, NpuTarget("Ascend310P3"), "Ascend310P3 has no bfloat16"),
    ],
)
def test_what_has_no_legal_chain_runs_every_expert(function, k, target, reason):
    graph, record = lowered(function, packed(X, *chosen(k)), target=target, **tensors())
    assert not [n for n in operators(graph) if "finalize" in n or "unpermute" in n]
    assert reason in refusals(record)


@pytest.mark.parametrize("soc", ["Ascend910B3", "Ascend910_9382", "Ascend950PR", "Ascend950DT"])
@pytest.mark.parametrize("mode", ["ge", "aclgraph"])
def test_every_training_chip_runs_each_token_through_its_own_experts(soc, mode):
    """Where the graph engine converts nothing, the sum is the operator's that vllm-ascend trusts."""
    graph, record = lowered(experts(), packed(X, *chosen()), target=NpuTarget(soc, graph_mode=mode), **tensors())
    last = "npu.npu_moe_finalize_routing" if mode == "ge" else "npu.npu_moe_token_unpermute"
    names = [n for n in operators(graph) if n.startswith("npu.")]
    assert names == [*ROUTED, "npu.npu_swiglu", ROUTED[1], last]
    assert refusals(record) == (UNCONVERTED if mode == "ge" else "")
    (route,) = record.routes
    assert route.chosen[-1] == last


def test_one_expert_whose_input_is_weighted_where_calls_are_captured():
    target = NpuTarget(graph_mode="aclgraph")
    graph, _ = lowered(experts(weight_input=True), packed(X, *chosen(1)), target=target, **tensors())
    (last,) = [n for n in graph.graph.nodes if "unpermute" in str(n.target)]
    assert last.args[2] is None  # weighted already


def test_full_precision_runs_every_expert():
    graph, record = lowered(experts(), packed(X, *chosen()), tolerance=1e-5, **tensors(torch.float32))
    assert "rows of torch.float32" in refusals(record) and "aten.bmm" in operators(graph)
    counted = NpuTarget(float32_as=torch.bfloat16)
    graph, record = lowered(experts(), packed(X, *chosen()), target=counted, tolerance=1e-5, **tensors(torch.float32))
    assert refusals(record) == UNCONVERTED


@pytest.mark.parametrize("layout", ["halves", "interleaved", "plain"])
@pytest.mark.parametrize("weight_input", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_every_expert_is_the_reference(layout, weight_input, transposed):
    given = tensors(torch.float32, gated=layout != "plain", bias=True, transposed=transposed)
    formula = ("gelu" if layout == "plain" else "silu", 0.0, 0.3, layout, transposed, weight_input)
    arguments = (X.float(), *chosen(dtype=torch.float32), *(given[n] for n in ("up", "down", "up_bias", "down_bias")))
    torch.testing.assert_close(every_expert(*arguments, *formula), moe_reference(*arguments, *formula))


def gating(*arguments):
    def function(m, logits):
        bias = getattr(m, "bias", None)
        weights, ids = pagoda.moe_gating(logits, bias, *arguments)
        return torch.zeros_like(logits).scatter(1, ids, weights)

    return function


LOGITS = torch.randn(N, EXPERTS, generator=torch.Generator().manual_seed(3))
MANY = torch.randn(N, 32, generator=torch.Generator().manual_seed(3))
TOO_FEW = "npu.npu_moe_gating_top_k_softmax_v2: 8 experts; at least 32 with renorm 1"
SUMMED = (K, "softmax", 1, 1, "max", "sum", 1e-20, 1.0)
OVER_CHOSEN = (K, "none", 1, 1, "max", "softmax", 0.0, 1.0)


@pytest.mark.parametrize(
    ("arguments", "bias", "name", "more"),
    [
        ((K, "softmax", 1, 1, "max", "none", 0.0, 1.0), False, "softmax", []),
        ((K, "softmax", 1, 1, "max", "sum", 0.0, 1.0), False, "softmax", ["sum", "div"]),
        ((K, "softmax", 1, 1, "max", "sum", 1e-9, 2.5), False, "softmax", ["sum", "add", "div", "mul"]),
        ((K, "none", 1, 1, "max", "softmax", 0.0, 1.0), False, "softmax", ["sum", "div"]),
        ((K, "sigmoid", 2, 1, "top2", "sum", 1e-20, 2.5), True, "", []),
        ((K, "sigmoid", 2, 1, "max", "sum", 1e-20, 1.0), True, "", []),
        ((K, "sigmoid", 1, 1, "top2", "sum", 1e-20, 1.0), False, "", []),
    ],
)
def test_routing(arguments, bias, name, more):
    parameters = {"bias": torch.linspace(-1, 1, EXPERTS)} if bias else {}
    graph, record = lowered(gating(*arguments), LOGITS, tolerance=1e-5, **parameters)
    assert refusals(record) in ("", TOO_FEW)
    suffix = f"_{name}" if name else ""
    assert [n for n in operators(graph) if n.startswith("npu.")] == [f"npu.npu_moe_gating_top_k{suffix}"]
    kept = [n.removeprefix("aten.") for n in operators(graph) if n.startswith("aten.")]
    assert [n for n in kept if n in ("sum", "div", "add", "mul")] == more


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("arguments", [SUMMED, OVER_CHOSEN])
def test_weights_of_the_chosen_that_add_up_to_one_take_one_operator(arguments, dtype):
    def function(m, x):
        weights, ids = pagoda.moe_gating(x.to(dtype), None, *arguments)
        return torch.zeros_like(x).scatter(1, ids, weights.float())

    graph, _ = lowered(function, MANY, tolerance=1e-5 if dtype is torch.float32 else 1e-2)
    assert operators(graph).count("npu.npu_moe_gating_top_k_softmax_v2") == 1
    assert not {"aten.sum", "aten.div"} & set(operators(graph))


@pytest.mark.parametrize("also", [False, True])
@pytest.mark.parametrize("weighting", ["sum", "none"])
def test_logits_are_not_widened_for_weights_that_are_rounded(weighting, also):
    """transformers takes the softmax in float32 and rounds the weights of the chosen once, as the operators do."""

    def function(m, x):
        logits = x.bfloat16()
        weights, ids = pagoda.moe_gating(logits.float(), None, K, "softmax", 1, 1, "max", weighting, 0.0, 1.0)
        rounded = weights.to(torch.bfloat16)
        kept = weights if also else rounded
        return torch.cat((torch.zeros_like(logits).scatter(1, ids, rounded).float(), kept.float()), 1)

    graph, _ = lowered(function, MANY, tolerance=0 if not also else 1e-5)
    (call,) = [n for n in graph.graph.nodes if "gating_top_k" in str(n.target)]
    assert value(call.args[0]).dtype is (torch.float32 if also else torch.bfloat16)


def test_what_a_routed_result_is_added_to_is_part_of_its_operator():
    """Shared experts, for instance; the sum is rounded once."""

    def function(m, x):
        return experts()(m, x).view(1, -1, H) + x[:, :H].to(torch.bfloat16).view(1, -1, H)

    graph, _ = lowered(function, packed(X, *chosen()), **tensors())
    (last,) = [n for n in graph.graph.nodes if "finalize_routing" in str(n.target)]
    assert last.args[1] is not None and "aten.add" not in operators(graph)


def test_a_routed_result_that_something_else_reads_stays():
    def function(m, x):
        routed = experts()(m, x)
        return routed + x[:, :H].to(torch.bfloat16) * routed

    graph, _ = lowered(function, packed(X, *chosen()), **tensors())
    (last,) = [n for n in graph.graph.nodes if "finalize_routing" in str(n.target)]
    assert last.args[1] is None


@pytest.mark.parametrize(
    ("arguments", "bias", "reason"),
    [
        ((K, "sqrt_softplus", 1, 1, "max", "sum", 0.0, 1.0), False, "sqrt_softplus scores"),
        ((K, "sigmoid", 1, 1, "max", "none", 0.0, 1.0), False, "weights by 'none'"),
        ((K, "softmax", 1, 1, "max", "clamped_sum", 0.5, 1.0), False, "weights by 'clamped_sum'"),
        ((K, "softmax", 1, 1, "max", "sum", 0.0, 1.0), True, "softmax scores"),
        ((1, "sigmoid", 4, 1, "max", "sum", 0.0, 1.0), True, "groups of 2 experts"),
    ],
)
def test_other_routing_is_spelled_out(arguments, bias, reason):
    parameters = {"bias": torch.linspace(-1, 1, EXPERTS)} if bias else {}
    graph, record = lowered(gating(*arguments), LOGITS, tolerance=1e-5, **parameters)
    assert not [n for n in operators(graph) if n.startswith("npu.")]
    assert reason in refusals(record)


def test_a_bias_of_another_dtype_is_widened():
    arguments = (K, "sigmoid", 2, 1, "top2", "sum", 1e-20, 2.5)
    graph, record = lowered(
        gating(*arguments), LOGITS, tolerance=1e-5, bias=torch.linspace(-1, 1, EXPERTS).bfloat16()
    )
    assert not refusals(record) and "npu.npu_moe_gating_top_k" in operators(graph)
