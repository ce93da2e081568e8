"""Norms, activations and matrix products for Ascend: what each becomes, why not, and the numbers."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from torch_pagoda.passes.graph.fx_nodes import is_tensor, shape, value
from torch_pagoda.passes.lower.npu.activations import lower_npu_activations
from torch_pagoda.passes.lower.npu.linears import lower_npu_linears
from torch_pagoda.passes.lower.npu.mix_dtypes import mix_dtypes
from torch_pagoda.passes.lower.npu.norms import lower_npu_norms
from torch_pagoda.passes.lower.npu.sink_transposes import sink_transposes
from torch_pagoda.passes.lower.npu.spell_out_complex import spell_out_complex
from torch_pagoda.passes.lower.npu.spell_out_leftovers import spell_out_leftovers
from torch_pagoda.passes.lower.npu.split_products import split_products
from torch_pagoda.passes.recognize.linear import recognize_linear
from torch_pagoda.runtime.npu_target import NpuTarget

from npu_graphs import graph_of, lowered, operators, refusals

pagoda = torch.ops.pagoda
BF16 = torch.bfloat16


def weights(dtype=BF16, size=32, **kinds):
    torch.manual_seed(0)
    return {name: (0.3 * torch.randn(size) + mean).to(dtype) for name, mean in kinds.items()}


X = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
R = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(2)).bfloat16()


@pytest.mark.parametrize("rounds", [True, False])
@pytest.mark.parametrize(("offset", "mean", "name"), [(0.0, 1.0, "npu_rms_norm"), (1.0, 0.0, "npu_gemma_rms_norm")])
def test_rms_norm(offset, mean, name, rounds):
    graph, record = lowered(
        lower_npu_norms, lambda m, x: pagoda.rms_norm(x, m.w, 1e-5, offset, rounds), X, **weights(w=mean)
    )
    assert operators(graph) == [f"npu.{name}"]
    assert [(r.operator, r.chosen, r.refused) for r in record.routes] == [("pagoda.rms_norm", (f"npu.{name}",), ())]


def test_rms_norm_without_a_scale_shares_ones():
    def twice(m, x):
        return pagoda.rms_norm(pagoda.rms_norm(x, None, 1e-5, 0.0, False), None, 1e-5, 0.0, False)

    graph, _record = lowered(lower_npu_norms, twice, X)
    assert operators(graph) == ["npu.npu_rms_norm"] * 2
    assert [name for name in graph.constants if name.startswith("ones_")] == ["ones_32_bfloat16"]


def test_rms_norm_with_another_offset_is_spelled_out():
    graph, record = lowered(
        lower_npu_norms, lambda m, x: pagoda.rms_norm(x, m.w, 1e-5, 0.5, False), X, **weights(w=1)
    )
    assert not [n for n in operators(graph) if n.startswith("npu.")]
    assert "stored less 0.5" in refusals(record)


def test_rms_norm_with_a_wide_scale():
    graph, _ = lowered(
        lower_npu_norms, lambda m, x: pagoda.rms_norm(x, m.w, 1e-5, 0.0, False), X, **weights(torch.float32, w=1)
    )
    assert operators(graph) == ["npu.npu_rms_norm"]


def residual(m, x, r, offset=0.0):
    normed, total = pagoda.add_rms_norm(x, r, m.w, 1e-5, offset, False)
    return normed + 0.5 * total


def test_add_rms_norm_takes_the_norm_and_the_sum():
    graph, _ = lowered(lower_npu_norms, residual, X, R, **weights(w=1))
    assert operators(graph)[0] == "npu.npu_add_rms_norm" and "npu.npu_rms_norm" not in operators(graph)
    picked = [n.args[1] for n in graph.graph.nodes if n.name.startswith("getitem")]
    assert sorted(picked) == [0, 2]


@pytest.mark.parametrize(
    ("target", "offset", "dtype", "expected", "reason"),
    [
        (None, 1.0, BF16, "npu.npu_gemma_rms_norm", "stored less 1.0"),
        (None, 0.0, torch.float32, "npu.npu_rms_norm", "dtypes differ: x1 torch.bfloat16"),
        (NpuTarget("Ascend310P3"), 1.0, BF16, None, "Ascend310P3 does not run it"),
    ],
    ids=["gemma", "wide scale", "310P"],
)
def test_add_rms_norm_in_two(target, offset, dtype, expected, reason):
    def function(m, x, r):
        return residual(m, x, r, offset)

    graph, record = lowered(lower_npu_norms, function, X, R, target=target, **weights(dtype, w=1.0 - offset))
    assert operators(graph)[0] == "aten.add"
    assert [n for n in operators(graph) if n.startswith("npu.")] == ([expected] if expected else [])
    assert reason in refusals(record)


def test_layer_norm_is_an_operator_of_the_chip():
    graph, _ = lowered(lower_npu_norms, lambda m, x: pagoda.layer_norm(x, m.w, m.b, 1e-5), X, **weights(w=1, b=0))
    assert operators(graph) == ["aten.native_layer_norm"]


@pytest.mark.parametrize("given", ["w b", "w", ""])
def test_add_layer_norm(given):
    def function(m, x, r):
        scale = m.w if "w" in given else None
        normed, total = pagoda.add_layer_norm(x, r, scale, m.b if "b" in given else None, 1e-5)
        return normed + 0.5 * total

    graph, _ = lowered(lower_npu_norms, function, X, R, **weights(w=1, b=0))
    (node,) = [n for n in graph.graph.nodes if "npu_add_layer_norm" in str(n.target)]
    assert node.args[5] is True  # or else the sum is not written


def halves(x):
    return x[..., :16], x[..., 16:]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("silu", "npu_swiglu"),
        ("gelu", "npu_geglu"),
        ("gelu_tanh", "npu_geglu"),
        ("clipped_swiglu", "npu_clipped_swiglu"),
    ],
)
@pytest.mark.parametrize("cut", [halves, lambda x: x.chunk(2, -1), lambda x: x.split([16, 16], -1)])
def test_gate_and_up_are_halves_of_one_product(kind, name, cut):
    def function(m, x):
        gate, up = cut(x)
        return pagoda.gated_activation(gate, up, kind, 1.702, 2.0)

    graph, _ = lowered(lower_npu_activations, function, X)
    assert operators(graph) == [f"npu.{name}"]
    (node,) = [n for n in graph.graph.nodes if "npu." in str(n.target)]
    if name == "npu_geglu":
        assert node.args[2:] == (int(kind == "gelu_tanh"), True)  # the gate is the left half
    if name == "npu_clipped_swiglu":
        assert node.kwargs == {"alpha": 1.702, "limit": 2.0, "bias": 1.0, "interleaved": False}


@pytest.mark.parametrize(
    "gate_and_up",
    [
        lambda x, r: (x[..., 16:], x[..., :16]),
        lambda x, r: (x[..., :16], r[..., 16:]),
        lambda x, r: (x[..., :15], x[..., 15:30]),
        lambda x, r: (x[..., ::2], x[..., 1::2]),
        lambda x, r: (x, r),
    ],
    ids=["turned round", "of two", "not all", "in turns", "apart"],
)
def test_other_gates_are_two_operators(gate_and_up):
    def function(m, x, r):
        gate, up = gate_and_up(x, r)
        return pagoda.gated_activation(gate, up, "silu", 0.0, 0.0) + 0 * r.sum()

    graph, record = lowered(lower_npu_activations, function, X, R)
    assert operators(graph)[:2] == ["aten.silu", "aten.mul"]
    assert "gate and up are not the halves of one tensor" in refusals(record)


@pytest.mark.parametrize(
    ("kind", "name", "approximate"),
    [
        ("gelu", "npu.npu_gelu", "none"),
        ("gelu_tanh", "npu.npu_gelu", "tanh"),
        ("quick_gelu", "npu.npu_fast_gelu", ""),
    ],
)
def test_gelu_says_which_one(kind, name, approximate):
    graph, _ = lowered(lower_npu_activations, lambda m, x: pagoda.activation(x, kind), X)
    assert operators(graph) == [name]
    (node,) = [n for n in graph.graph.nodes if "npu." in str(n.target)]
    assert node.kwargs.get("approximate", "") == approximate


@pytest.mark.parametrize("kind", ["relu", "relu2", "silu", "sigmoid"])
def test_other_activations_are_spelled_out(kind):
    graph, _ = lowered(lower_npu_activations, lambda m, x: pagoda.activation(x, kind), X)
    assert not [n for n in operators(graph) if n.startswith(("npu.", "pagoda."))]


def test_quick_gelu_is_another_formula_on_310p():
    graph, record = lowered(
        lower_npu_activations, lambda m, x: pagoda.activation(x, "quick_gelu"), X, target=NpuTarget("Ascend310P3")
    )
    assert "npu.npu_fast_gelu" not in operators(graph) and "does not run it" in refusals(record)


@pytest.mark.parametrize("lead", [(1, 5), (2, 5), (5, 3)])
@pytest.mark.parametrize("bias", [True, False])
def test_linears_read_their_weight_as_it_is_stored(lead, bias):
    x = torch.randn(*lead, 32).bfloat16()

    matrix = torch.randn(24, 32).bfloat16() / 6

    def function(m, x):
        return F.linear(x, m.w, m.b if bias else None)

    graph, _ = lowered(lower_npu_linears, function, x, prepare=recognize_linear, w=matrix, **weights(size=24, b=0))
    assert operators(graph) == ["npu.npu_linear"]
    (node,) = [n for n in graph.graph.nodes if "npu_linear" in str(n.target)]
    assert [len(shape(n)) for n in node.args[:2]] == [2, 2]
    assert node.args[1].op == "placeholder"


def test_weights_stored_the_other_way_are_plain_products():
    matrix = torch.randn(32, 24).bfloat16() / 6

    def function(m, x):
        return torch.addmm(m.b, x.view(-1, 32), m.w).view(*x.shape[:-1], 24)

    graph, _ = lowered(lower_npu_linears, function, X, prepare=recognize_linear, w=matrix, **weights(size=24, b=0))
    assert operators(graph) == ["aten.addmm"]


def test_a_chip_without_the_product_keeps_linear():
    graph = graph_of(
        lambda m, x: F.linear(x, m.w), X, target=NpuTarget("Ascend950PR"), w=torch.randn(24, 32).bfloat16()
    )
    recognize_linear(graph)
    record = lower_npu_linears(graph)
    assert operators(graph) == ["aten.linear"] and "does not run it" in refusals(record)


@pytest.mark.parametrize(
    ("cut", "splits"),
    [
        (lambda x: (x[..., :8], x[..., 8:20], x[..., 20:]), 1),
        (lambda x: (x[:, :, :8], x[:, :, 8:]), 1),
        (lambda x: (x[..., :8], x[..., 10:]), 0),
        (lambda x: (x[..., :8], x[..., 6:]), 0),
        (lambda x: (x[..., 4:8],), 0),
        (lambda x: (x[..., ::2], x[..., 1::2]), 0),
    ],
    ids=["three", "two", "a gap", "an overlap", "one", "in turns"],
)
def test_slices_that_tile_are_one_split(cut, splits):
    def function(m, x):
        return torch.cat([part * (i + 1) for i, part in enumerate(cut(x))], -1)

    graph, record = lowered(split_products, function, X)
    assert record.matches == splits == operators(graph).count("aten.split_with_sizes")


@pytest.mark.parametrize(
    ("rest", "copies"),
    [
        (lambda y: y[..., 12:].view(2, -1, 4, 5).clone(memory_format=torch.contiguous_format), 0),
        (lambda y: y[..., 12:].clone() * y[..., 12:].exp(), 1),
    ],
    ids=["of a part", "of a part that something else reads"],
)
def test_captured_parts_are_copied_once(rest, copies):
    def function(m, x):
        return x[..., :12].exp().sum() * rest(x)

    target = NpuTarget(graph_mode="aclgraph")
    graph, record = lowered(split_products, function, X, target=target)
    assert record.matches == 1 and operators(graph).count("aten.split_with_sizes_copy") == 1
    assert operators(graph).count("aten.clone") == copies


CAPTURED = NpuTarget(graph_mode="aclgraph")


@pytest.mark.parametrize(
    ("function", "target", "casts"),
    [
        (lambda m, x: x.float() + m.w, CAPTURED, 0),
        (lambda m, x: m.w * x.float(), CAPTURED, 0),
        (lambda m, x: x.float() * x.sin().float(), CAPTURED, 1),
        (lambda m, x: x.float() + m.w, NpuTarget(), 1),
        (lambda m, x: x.float() + m.w, NpuTarget(soc="Ascend310P3", graph_mode="aclgraph"), 1),
        (lambda m, x: x.float().add(m.w, alpha=2), CAPTURED, 1),
        (lambda m, x: x.float() + m.w.sum(), CAPTURED, 1),
        (lambda m, x: (wide := x.float()) * m.w + wide.sin(), CAPTURED, 1),
    ],
    ids=["sum", "product", "two", "GE", "310P", "alpha", "without dims", "read elsewhere"],
)
def test_casts_that_captured_sums_make_themselves(function, target, casts):
    graph, _ = lowered(mix_dtypes, function, X, target=target, **weights(torch.float32, w=1))
    assert operators(graph).count("aten._to_copy") == casts


def test_heads_are_turned_behind_what_works_on_each():
    def function(m, x):
        turned = x.view(x.shape[0], -1, 2, 48).transpose(1, 2)
        q, k, v = turned.chunk(3, -1)
        q = pagoda.rms_norm(q, m.w, 1e-5, 0.0, False) * 2.0
        return (q + k[..., :16] + v.to(torch.bfloat16)).transpose(1, 2)

    graph, record = lowered(
        lambda g: (sink_transposes(g), lower_npu_norms(g))[0],
        function,
        torch.randn(1, 5, 96).bfloat16(),
        **weights(size=16, w=1),
    )
    assert record.matches == 3
    for node in graph.graph.nodes:
        if "npu_rms_norm" in str(node.target) or "split" in str(node.target):
            assert str(shape(node.args[0])[1]) != "2"  # tokens first


def test_a_turn_stays_where_another_operand_is_turned_too():
    def function(m, x, r):
        return (x.view(2, -1, 4, 8).transpose(1, 2) * r.view(2, -1, 4, 8).transpose(1, 2)).sum(1)

    _graph, record = lowered(sink_transposes, function, X, R)
    assert record.matches == 0


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("given", [{}, {"dim": -1}, {"dim": -1, "correction": 0, "keepdim": True}, {"dim": [0, 2]}])
def test_deviations_are_spelled_out_for_the_graph_engine(given, dtype):
    def function(m, x):
        return x - x.std(**given).view(-1)[0]

    graph, record = lowered(spell_out_leftovers, function, X.to(dtype), target=NpuTarget(graph_mode="ge"))
    assert record.matches == 1 and "aten.std" not in operators(graph)
    graph = graph_of(function, X.to(dtype), target=NpuTarget(graph_mode="aclgraph"))
    assert spell_out_leftovers(graph).matches == 0


ANGLES = torch.linspace(-40, 40, 2 * 5 * 32).view(2, 5, 32)


@pytest.mark.parametrize(
    "read",
    [
        lambda z: z.select(-1, 0) + 2 * z.select(-1, 1),
        lambda z: z[..., -1] - 3 * z.select(z.dim() - 1, -2),
        lambda z: z.flatten(-2),
        lambda z: z.select(-1, 1) * z.flatten(-2)[..., :32],
    ],
)
@pytest.mark.parametrize(
    "rearranged",
    [
        lambda z: z,
        lambda z: z.unsqueeze(1).expand(-1, 3, -1, -1),
        lambda z: z.transpose(1, 2).contiguous().transpose(1, 2)[:, 1:].view(2, -1, 32),
    ],
)
def test_complex_numbers_are_pairs_of_real_ones(read, rearranged):
    def function(m, x):
        turned = torch.polar(x.abs() + 0.5, x)
        return read(torch.view_as_real(rearranged(turned)))

    graph, record = lowered(spell_out_complex, function, ANGLES)
    assert record.matches == 1
    assert not [node for node in graph.graph.nodes if is_tensor(node) and value(node).is_complex()]
    assert "aten.select" not in operators(graph)


def test_complex_numbers_that_are_multiplied_stay():
    def function(m, x):
        turned = torch.polar(torch.ones_like(x), x)
        return torch.view_as_real(turned * turned).flatten(-2) + torch.view_as_real(turned).flatten(-2)

    graph = graph_of(function, ANGLES)
    record = spell_out_complex(graph)
    assert record.matches == 0
    assert [rejection.reason for rejection in record.rejections] == ["mul (mul.Tensor) reads complex numbers"]
