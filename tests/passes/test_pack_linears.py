"""Linears over bf16 parameters read packed weights: which do, the numbers, tied weights and released memory."""

from __future__ import annotations

import pytest
import torch

from torch_pagoda.compiler import CompileOptions, build_program
from torch_pagoda.compiler.linker import LinkedProgram
from torch_pagoda.passes import PASSES
from torch_pagoda.passes.fx_nodes import callee
from torch_pagoda.passes.lower.pack_linears import pack_linears
from torch_pagoda.runtime.ops.packed_linear import can_pack, pack_weights, packed_linear_reference

from toy_lm import ToyLM, sdpa, traced

needs_bf16 = pytest.mark.skipif(not can_pack(torch.bfloat16), reason="oneDNN has no bf16 products on this CPU")
PACKED = CompileOptions(codegen="none", pack_weights=True)


def rewritten(model):
    graph = traced(model)
    records = {p.name: p.apply(graph) for p in PASSES}
    return graph, records["pack_linears"]


def bf16_model(tied=False):
    model = ToyLM(sdpa).bfloat16()
    if tied:
        model.head.weight = model.embedding.weight
    return model


@needs_bf16
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("sizes", [(80,), (64, 16, 32)])
def test_packed_products_equal_plain_ones(rows, with_bias, sizes):
    x = torch.randn(1, rows, 48).bfloat16()
    weights = [torch.randn(n, 48).bfloat16() for n in sizes]
    biases = [torch.randn(n).bfloat16() for n in sizes] if with_bias else []
    bias = torch.cat(biases).float() if with_bias else None
    expected = torch.nn.functional.linear(x.float(), torch.cat(weights).float(), bias)
    nothing = x.new_empty(0)
    packed = [pack_weights(weights), *[nothing] * (len(sizes) - 1)]
    joined = [torch.cat(biases), *[nothing] * (len(sizes) - 1)] if with_bias else []
    for w, b in ((weights, biases), (packed, joined)):
        found = packed_linear_reference(x, w, b)
        assert (found.dtype, found.shape) == (torch.bfloat16, expected.shape)
        torch.testing.assert_close(found.float(), expected, atol=0.15, rtol=1e-2)


@needs_bf16
def test_every_linear_over_a_parameter_matches():
    graph, record = rewritten(bf16_model())
    assert (record.matches, record.rejections) == (5, [])
    assert [len(p.weights) for p in graph.notes["packed"]] == [3, 1, 1], "query, key and value share one call"
    assert not [n for n in graph.graph.nodes if callee(n) == "linear"]
    assert pack_linears(graph).matches == 0


def test_float32_is_left_alone_with_the_reason():
    graph, record = rewritten(ToyLM(sdpa))
    assert record.matches == 0
    assert {r.reason for r in record.rejections} == {"no packed torch.float32 products on cpu"}
    assert len([n for n in graph.graph.nodes if callee(n) == "linear"]) == 5


@needs_bf16
@pytest.mark.parametrize("codegen", ["none", "inductor"])
def test_packed_programs_are_verified(codegen):
    model = bf16_model()
    before = model.q.weight.clone()
    program = build_program(model, CompileOptions(codegen=codegen, pack_weights=True))
    assert program.report.verdict is not None and program.report.verdict.ok
    assert program.report.codegen == codegen
    assert sum(isinstance(a, torch.Tensor) and a.is_mkldnn for a in program._args) == 3
    assert torch.equal(model.q.weight, before)


@needs_bf16
def test_owned_weights_are_released_and_a_tied_embedding_stays():
    model = bf16_model(tied=True)
    program = build_program(model, PACKED, owns_weights=True)
    assert program.report.verdict is not None and program.report.verdict.ok
    assert model.q.weight.numel() == 0
    assert model.embedding.weight.numel() > 0


@needs_bf16
def test_a_wrongly_packed_weight_does_not_pass_the_check(monkeypatch):
    from torch_pagoda.compiler import linker

    monkeypatch.setattr(linker, "pack_weights", lambda weights: pack_weights([w.flip(0) for w in weights]))
    with pytest.raises(ValueError, match="with packed weights logits differ"):
        build_program(bf16_model(), PACKED)


def test_without_the_option_nothing_is_packed():
    program = build_program(bf16_model(), CompileOptions(codegen="none"))
    assert isinstance(program, LinkedProgram)
    assert program.pack_weights(release=False) == 0


@needs_bf16
@pytest.mark.parametrize("codegen", ["none", "inductor"])
def test_biases_are_joined_and_shared_ones_stay(codegen):
    model = bf16_model()
    for name in ("q", "k", "v"):
        layer = getattr(model, name)
        layer.bias = torch.nn.Parameter(torch.randn(layer.out_features).bfloat16(), requires_grad=False)
    model.v.bias = model.k.bias
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    program = build_program(model, CompileOptions(codegen=codegen, pack_weights=True))
    assert program.report.verdict is not None and program.report.verdict.ok
    assert not program.report.dropped_passes
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert any(tensor is model.q.bias for tensor in program.copied_weights)
