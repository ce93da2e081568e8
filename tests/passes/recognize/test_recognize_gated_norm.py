"""Norms that a gate multiplies: which spellings match, what is left alone and why, and that the numbers stay."""

from __future__ import annotations

import copy

import pytest
import torch
from aten_graphs import aten_of_module, aten_of_tiny_model, run_graph
from torch import nn
from torch.nn import functional as F
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

from torch_pagoda.compiler.options import CompileOptions, selected_passes
from torch_pagoda.passes.graph.fx_nodes import callee, is_tensor, shape
from torch_pagoda.passes.recognize import gated_norm
from torch_pagoda.passes.recognize.activation import recognize_activation
from torch_pagoda.passes.recognize.gated_activation import recognize_gated_activation
from torch_pagoda.passes.recognize.gated_norm import recognize_gated_norm
from torch_pagoda.passes.recognize.rms_norm import recognize_rms_norm
from torch_pagoda.passes.rewrite.remove_noops import remove_noops
from torch_pagoda.passes.rewrite.share_subexpressions import share_subexpressions

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
DIM, GROUP, EPS = 48, 16, 1e-5
# Module, and what it is: round_before_scale in half precision, activation, gate_first, group_size.
MODULES = {
    "qwen3_5": (Qwen3_5RMSNormGated(DIM, EPS), (True, "silu", False, DIM)),
    "kimi_linear": (KimiLinearRMSNormGated(DIM, EPS), (False, "sigmoid", False, DIM)),
    "mamba2": (MambaRMSNormGated(DIM, GROUP, EPS), (True, "silu", True, GROUP)),
    "mamba2, one group": (MambaRMSNormGated(DIM, DIM, EPS), (True, "silu", True, DIM)),
    "falcon_h1": (FalconH1RMSNormGated(DIM, EPS, DIM // GROUP, True), (False, "silu", False, GROUP)),
    "falcon_h1, gate first": (FalconH1RMSNormGated(DIM, EPS, DIM // GROUP, False), (False, "silu", True, GROUP)),
}


class Spelled(nn.Module):
    """``function(self, x, gate)`` over a scale w of DIM and one, v, of GROUP."""

    def __init__(self, function, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.w = nn.Parameter((1 + 0.3 * torch.randn(DIM)).to(dtype), requires_grad=False)
        self.v = nn.Parameter((1 + 0.3 * torch.randn(GROUP)).to(dtype), requires_grad=False)

    def forward(self, *inputs):
        return self.function(self, *inputs)


def of_transformers(name, dtype):
    module = copy.deepcopy(MODULES[name][0]).to(dtype).requires_grad_(False)
    torch.manual_seed(0)
    module.weight.copy_(1 + 0.3 * torch.randn(DIM))
    return module


def prepared(module, *inputs, dynamic=(1,)):
    """The graph as it is when the pass comes."""
    graph = aten_of_module(module, *inputs, dynamic=dynamic)
    for earlier in (remove_noops, share_subexpressions, recognize_rms_norm, recognize_activation):
        earlier(graph)
    return graph


def operators(graph):
    names = [callee(n) for n in graph.graph.nodes if n.op == "call_function" and is_tensor(n)]
    return [name for name in names if name not in ("view", "reshape", "slice.Tensor")]


def gated_of(graph):
    (node,) = [n for n in graph.graph.nodes if callee(n) == "gated_rms_norm"]
    return node


def drawn(dtype, *sizes):
    return [(1 + i) * torch.randn(sizes, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(2)]


def assert_rounded_alike(found, expected):
    dtype = expected.dtype
    assert found.dtype is dtype
    torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    if dtype is not torch.float32:
        assert (found != expected).float().mean() < 0.02


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_modules_of_transformers(name, dtype):
    module, (rounds, *form) = of_transformers(name, dtype), MODULES[name][1]
    graph = prepared(module, *drawn(dtype, 2, 5, DIM))
    record = recognize_gated_norm(graph)
    assert record.matches == 1 and not record.rejections
    assert operators(graph) == ["gated_rms_norm"]
    node = gated_of(graph)
    assert node.args[2].op == "placeholder", "the stored parameter"
    assert node.args[3:] == (EPS, 0.0, rounds and dtype is not torch.float32, *form)
    for tokens in (1, 5, 9):
        inputs = drawn(dtype, 2, tokens, DIM)
        assert_rounded_alike(run_graph(graph, *inputs), module(*inputs))
    assert recognize_gated_norm(graph).matches == recognize_gated_activation(graph).matches == 0


@pytest.mark.parametrize("name", ["mamba2", "falcon_h1", "falcon_h1, gate first"])
def test_scans_in_float32_beside_gates_in_half_precision(name):
    """As in Mamba-2's mixer, which rounds what the norm yields; the gate is part of a projection."""
    norm = of_transformers(name, torch.bfloat16)
    module = Spelled(lambda _, product, x: norm(x, product[..., 8 : 8 + DIM]).to(product.dtype))
    module.norm = norm
    inputs = torch.randn(2, 5, 2 * DIM).bfloat16(), torch.randn(2, 5, DIM)
    graph = prepared(module, *inputs)
    assert recognize_gated_norm(graph).matches == 1
    assert operators(graph) == ["gated_rms_norm"]
    assert gated_of(graph).args[5] is False
    assert_rounded_alike(run_graph(graph, *inputs), module(*inputs))


@pytest.mark.parametrize("dynamic", [(1,), (0, 1)], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_heads_are_read_where_they_lie(dtype, dynamic):
    """Qwen3.5 norms rows of all heads, its gate is part of a merged product: no copy is made of it."""
    norm = of_transformers("qwen3_5", dtype)

    def mixer(_, product, x):
        gate = product[..., 8 : 8 + 3 * DIM].reshape(*x.shape)
        return norm(x.reshape(-1, DIM), gate.reshape(-1, DIM)).reshape(*x.shape[:2], 3 * DIM)

    module = Spelled(mixer)
    module.norm = norm
    inputs = torch.randn(2, 5, 4 * DIM).to(dtype), torch.randn(2, 5, 3, DIM).to(dtype)
    graph = prepared(module, *inputs, dynamic=dynamic)
    assert recognize_gated_norm(graph).matches == 1
    assert [len(shape(n)) for n in gated_of(graph).args[:2]] == [4, 4]
    assert operators(graph) == ["gated_rms_norm"]
    assert_rounded_alike(run_graph(graph, *inputs), module(*inputs))


def root(x):
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def norm(m, x):
    """LlamaRMSNorm."""
    wide = x.float()
    return m.w * (wide * root(wide)).to(x.dtype)


def groups(x):
    return x.unflatten(-1, (-1, GROUP))


def read_again(m, x, gate):
    normed = norm(m, x)
    return normed * F.silu(gate) + normed


def gate_read_again(m, x, gate):
    opened = F.silu(gate)
    return norm(m, x) * opened + opened


def product_read_again(m, x, gate):
    product = x * F.silu(gate)
    return norm(m, product) + product


def rounded_behind_the_scale(m, x, gate):
    normed = (x.float() * root(x.float()) * m.w.float()).to(x.dtype)
    return (normed * F.silu(gate.float())).to(x.dtype)


def scaled_alike(m, x, gate):
    """Every group by the same numbers."""
    h = groups(x * F.silu(gate))
    return (h * root(h) * m.v).flatten(-2)


def heads_normed_together(m, x, gate):
    h = (groups(x) * groups(gate).sigmoid()).flatten(-2)
    return h * root(h)


HALF = torch.bfloat16
NEAR_MISSES = {
    "the norm is read elsewhere": (read_again, torch.float32, "the norm has 2 users"),
    "the activated gate is read elsewhere": (gate_read_again, torch.float32, "the activated gate has 2 users"),
    "the gated product is read elsewhere": (product_read_again, torch.float32, "the gated product has 2 users"),
    "another activation": (lambda m, x, g: norm(m, x) * F.gelu(g), torch.float32, "its gate goes through gelu"),
    "another activation in front": (lambda m, x, g: norm(m, x * F.relu(g)), torch.float32, "goes through relu"),
    "one gate for a row": (lambda m, x, g: norm(m, x) * g[..., :1].sigmoid(), torch.float32, "differ in shape"),
    "one gate for a row, in front": (
        lambda m, x, g: norm(m, x * g[..., :1].sigmoid()),
        torch.float32,
        "differ in shape",
    ),
    "groups scaled alike": (scaled_alike, torch.float32, "its scale has the shape (16,), its rows have 48 entries"),
    "several rows of the gate in one of the norm": (
        heads_normed_together,
        torch.float32,
        "it norms several rows of its gate together",
    ),
    "the activated gate is rounded": (lambda m, x, g: norm(m, x) * F.silu(g), HALF, "the activated gate is rounded"),
    "the gated product is rounded": (lambda m, x, g: norm(m, x * F.silu(g)), HALF, "the gated product is rounded"),
    "a result in float32": (
        lambda m, x, g: norm(m, x) * F.silu(g.float()),
        HALF,
        "it yields torch.float32, its gate is torch.bfloat16",
    ),
    "a result in another half": (
        lambda m, x, g: (norm(m, x) * F.silu(g.float())).half(),
        HALF,
        "it yields torch.float16, its gate is torch.bfloat16",
    ),
    "a norm in another half": (
        lambda m, x, g: (norm(m, x.half()).float() * F.silu(g.float())).to(HALF),
        HALF,
        "torch.float16 is normed beside a gate of torch.bfloat16",
    ),
    "rounded behind the scale": (
        rounded_behind_the_scale,
        HALF,
        "% of its results differ",
    ),
}


@pytest.mark.parametrize("kind", NEAR_MISSES)
def test_near_miss_says_why(kind):
    function, dtype, reason = NEAR_MISSES[kind]
    module, inputs = Spelled(function, dtype), drawn(dtype, 2, 5, DIM)
    graph = prepared(module, *inputs)
    before, expected = [n.name for n in graph.graph.nodes], run_graph(graph.copy(), *inputs)
    record = recognize_gated_norm(graph)
    assert not record.matches and reason in record.rejections[0].reason
    assert [n.name for n in graph.graph.nodes] == before
    assert torch.equal(run_graph(graph, *inputs), expected)


OTHERS = {
    "a norm alone": lambda m, x, g: norm(m, x) + g,
    "a gate without activation": lambda m, x, g: norm(m, x) * g,
    "an activation alone": lambda m, x, g: norm(m, F.silu(x)) + g,
    "a gate that is added": lambda m, x, g: norm(m, x) + F.silu(g),
    "an activation squared": lambda m, x, g: norm(m, F.silu(g) * F.silu(g)) + x,
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_no_gate_multiplies_is_passed_over(kind):
    module, inputs = Spelled(OTHERS[kind]), drawn(torch.float32, 2, 5, DIM)
    graph = prepared(module, *inputs)
    before = [n.name for n in graph.graph.nodes]
    record = recognize_gated_norm(graph)
    assert not record.matches and not record.rejections
    assert [n.name for n in graph.graph.nodes] == before


SPELLINGS = {
    "without scale": lambda m, x, g: (x.float() * root(x.float()) * F.silu(g.float())).to(x.dtype),
    "without scale, rounded first": lambda m, x, g: (
        (x.float() * root(x.float())).to(x.dtype) * F.silu(g.float())
    ).to(x.dtype),
    "scales stored less one": lambda m, x, g: (
        x.float() * root(x.float()) * (1.0 + m.w.float()) * g.float().sigmoid()
    ).to(x.dtype),
    "operands swapped": lambda m, g, x: (F.silu(g.float()) * norm(m, x)).to(x.dtype),
}


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("kind", SPELLINGS)
def test_other_spellings(kind, dtype):
    module, inputs = Spelled(SPELLINGS[kind], dtype), drawn(dtype, 2, 5, DIM)
    graph = prepared(module, *inputs)
    assert recognize_gated_norm(graph).matches == 1
    assert_rounded_alike(run_graph(graph, *inputs), module(*inputs))


def test_a_norm_gated_by_itself():
    module = Spelled(lambda m, x: norm(m, x) * F.silu(x))
    x = torch.randn(2, 5, DIM)
    graph = prepared(module, x)
    assert recognize_gated_norm(graph).matches == 1
    assert_rounded_alike(run_graph(graph, x), module(x))


def gate_behind(m, product, gate):
    return (norm(m, product) * gate.float().sigmoid()).to(product.dtype)


def front_read_again(m, x, gate):
    product = x * F.silu(gate)
    return gate_behind(m, product, gate) + product


FRONTS = {
    "rounded": (lambda m, x, g: gate_behind(m, x * F.silu(g), g), HALF),
    "of another activation": (lambda m, x, g: gate_behind(m, x * F.gelu(g), g), torch.float32),
    "read again": (front_read_again, torch.float32),
    "an activation squared": (lambda m, x, g: gate_behind(m, F.silu(g) * F.silu(g), x), torch.float32),
}


@pytest.mark.parametrize("kind", FRONTS)
def test_a_gate_in_front_that_does_not_fit_hides_none_behind(kind):
    function, dtype = FRONTS[kind]
    module, inputs = Spelled(function, dtype), drawn(dtype, 2, 5, DIM)
    graph = prepared(module, *inputs)
    expected = run_graph(graph.copy(), *inputs)
    record = recognize_gated_norm(graph)
    assert record.matches == 1 and not record.rejections
    assert gated_of(graph).args[6:8] == ("sigmoid", False)
    assert_rounded_alike(run_graph(graph, *inputs), expected)


def normed_in_float32(x):
    return x.float() * root(x.float())


SCALED_BEHIND = {
    "gate behind": lambda m, x, g: (normed_in_float32(x) * F.silu(g.float())).to(HALF).float() * m.w.float(),
    "gate in front": lambda m, x, g: normed_in_float32(x.float() * F.silu(g.float())).to(HALF).float() * m.w.float(),
}


@pytest.mark.parametrize("kind", SCALED_BEHIND)
def test_a_scale_behind_the_result_stays(kind):
    """The result is what has the gate's dtype: float32 behind it is not part of the operator."""
    module, inputs = Spelled(SCALED_BEHIND[kind], HALF), drawn(HALF, 2, 5, DIM)
    graph = prepared(module, *inputs)
    record = recognize_gated_norm(graph)
    assert record.matches == 1 and not record.rejections
    assert gated_of(graph).args[2] is None
    assert operators(graph)[-1] == "mul.Tensor"
    found, expected = run_graph(graph, *inputs), module(*inputs)
    assert found.dtype is torch.float32
    assert (found != expected).float().mean() < 0.02
    torch.testing.assert_close(found, expected, atol=TOLERANCE[HALF], rtol=TOLERANCE[HALF])


@pytest.mark.parametrize("name", MODULES)
def test_what_would_round_elsewhere_stays(name, monkeypatch):
    """Casts are followed, and the operator is run: one that was followed wrongly is found by its last bits."""
    reference = gated_norm.gated_rms_norm_reference

    def inverted(x, gate, weight, eps, offset, rounds, *form):
        return reference(x, gate, weight, eps, offset, not rounds, *form)

    monkeypatch.setattr(gated_norm, "gated_rms_norm_reference", inverted)
    record = recognize_gated_norm(prepared(of_transformers(name, HALF), *drawn(HALF, 2, 5, DIM)))
    assert record.matches == 0
    assert "it is not pagoda::gated_rms_norm: " in record.rejections[0].reason


def test_groups_that_were_followed_wrongly_are_found(monkeypatch):
    reference = gated_norm.gated_rms_norm_reference
    monkeypatch.setattr(gated_norm, "gated_rms_norm_reference", lambda *given: reference(*given[:-1], DIM))
    record = recognize_gated_norm(
        prepared(of_transformers("mamba2", torch.float32), *drawn(torch.float32, 2, 5, DIM))
    )
    assert record.matches == 0
    assert record.rejections[0].reason == "it is not pagoda::gated_rms_norm: its results differ"


# Architecture → what its configuration says, and gated norms of it.
MODELS = {
    "qwen3_5_text": ({}, 2),
    "kimi_linear": ({}, 1),
    "mamba2": ({}, 2),
    "nemotron_h": ({}, 1),
    "zamba2": ({}, 4),
    "falcon_h1": ({"mamba_rms_norm": True}, 2),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_with_state(name):
    overrides, count = MODELS[name]
    graph = aten_of_tiny_model(name, **overrides)
    for entry in selected_passes(CompileOptions(), "aten"):
        record = entry.apply(graph)
        if entry.name == "recognize_gated_norm":
            assert record.matches == count and not record.rejections
    assert [callee(n) for n in graph.graph.nodes].count("gated_rms_norm") == count


def test_it_is_for_a_cpu():
    """No operator of an NPU multiplies a norm: there the two are launched one after the other, as ever."""
    names = {target: [p.name for p in selected_passes(CompileOptions(target=target))] for target in ("cpu", "npu")}
    assert "recognize_gated_norm" in names["cpu"] and "recognize_gated_norm" not in names["npu"]
