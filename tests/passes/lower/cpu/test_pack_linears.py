"""Linears over bf16 parameters read packed weights: which do, the numbers, tied weights and released memory."""

from __future__ import annotations

import pytest
import torch
from aten_graphs import aten_of_model
from torch import nn
from transformers.pytorch_utils import Conv1D

from torch_pagoda.compiler import CompileOptions
from torch_pagoda.compiler.build import build_program
from torch_pagoda.compiler.link import linker, packed_rows
from torch_pagoda.compiler.link.linker import LinkedProgram, link
from torch_pagoda.compiler.verify.self_check import check, reference_of_model
from torch_pagoda.compiler.weights import merged_weights
from torch_pagoda.passes.graph.fx_nodes import callee
from torch_pagoda.passes.lower.cpu.pack_linears import pack_linears
from torch_pagoda.passes.recognize.linear import recognize_linear
from torch_pagoda.passes.rewrite.merge_linears import merge_linears
from torch_pagoda.runtime.ops.linear.packed_linear import can_pack, pack_weight, packed_linear_reference

from toy_lm import ToyLM, sdpa

needs_bf16 = pytest.mark.skipif(not can_pack(torch.bfloat16), reason="no packed bf16 products on this CPU")
PACKED = CompileOptions(codegen="none", pack_weights=True)


def rewritten(model, *, merged=True):
    graph = aten_of_model(model)
    recognize_linear(graph)
    if merged:
        merge_linears(graph)
    record = pack_linears(graph)
    graph.recompile()
    return graph, record


def bf16_model(tied=False):
    model = ToyLM(sdpa).bfloat16()
    if tied:
        model.head.weight = model.embedding.weight
    return model


@needs_bf16
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("lead", [(1,), (), (2, 3)])
def test_packed_products_equal_plain_ones(rows, with_bias, lead):
    x = torch.randn(*lead, rows, 48).bfloat16()
    weight = torch.randn(80, 48).bfloat16()
    bias = torch.randn(80).bfloat16() if with_bias else None
    expected = nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    for given in (weight, pack_weight(weight)):
        found = packed_linear_reference(x, given, bias)
        assert (found.dtype, found.shape, found.is_contiguous()) == (torch.bfloat16, expected.shape, True)
        torch.testing.assert_close(found.float(), expected, atol=0.15, rtol=1e-2)


@needs_bf16
@pytest.mark.parametrize("merged", [True, False])
def test_every_linear_over_a_parameter_matches(merged):
    graph, record = rewritten(bf16_model(), merged=merged)
    assert (record.matches, record.rejections) == (3 if merged else 5, [])
    assert [len(p.sources) for p in graph.notes.packed] == ([3, 1, 1] if merged else [1] * 5)
    assert not [n for n in graph.graph.nodes if callee(n) == "linear"]
    assert pack_linears(graph).matches == 0


def test_float32_is_left_alone_with_the_reason():
    graph, record = rewritten(ToyLM(sdpa))
    assert record.matches == 0
    assert {r.reason for r in record.rejections} == {"no packed torch.float32 products on cpu"}
    assert len([n for n in graph.graph.nodes if callee(n) == "linear"]) == 3


@needs_bf16
def test_computed_weights_are_left_alone_with_the_reason():
    model = bf16_model()
    nn.utils.parametrizations.weight_norm(model.o)
    _, record = rewritten(model.requires_grad_(False))
    assert [(r.module, r.reason) for r in record.rejections] == [("o", "the weight is computed, not a parameter")]


@needs_bf16
@pytest.mark.parametrize("release", [True, False])
def test_weights_that_are_stored_transposed_are_packed(release):
    model = bf16_model()
    weight, model.o = model.o.weight, Conv1D(32, 32).bfloat16().requires_grad_(False)
    model.o.weight.copy_(weight.T)
    model.o.bias.normal_()
    reference = reference_of_model(model)
    graph, record = rewritten(model)
    assert (record.matches, record.rejections) == (3, [])
    program = link(graph, graph.module)
    assert check(program, reference).ok
    elements = sum(p.numel() for p in (weight, model.head.weight, model.q.weight, model.k.weight, model.v.weight))
    assert program.pack_weights(release=release) == 2 * elements
    assert check(program, reference).ok
    assert (model.o.weight.numel() == 0) == release


@needs_bf16
@pytest.mark.parametrize("codegen", ["none", "inductor"])
def test_packed_programs_are_verified(codegen):
    model = bf16_model()
    before = model.q.weight.clone()
    program = build_program(model, CompileOptions(codegen=codegen, pack_weights=True))
    assert program.report.verdict is not None and program.report.verdict.ok
    assert program.report.codegen == codegen
    assert program.merged_weights == []
    assert sum(isinstance(a, torch.Tensor) and (a.is_mkldnn or a.dim() == 3) for a in program._args) == 3
    assert torch.equal(model.q.weight, before)


@needs_bf16
def test_owned_weights_are_released_and_a_tied_embedding_stays():
    model = bf16_model(tied=True)
    program = build_program(model, PACKED, owns_weights=True)
    assert program.report.verdict is not None and program.report.verdict.ok
    assert not any(part.weight.untyped_storage().nbytes() for part in (model.q, model.k, model.v, model.o))
    assert model.embedding.weight.numel() > 0


@needs_bf16
def test_rows_of_owned_weights_are_packed_where_they_lie(monkeypatch):
    monkeypatch.setattr(merged_weights, "merge_rows", lambda *_: pytest.fail("rows were copied"))
    monkeypatch.setattr(linker, "merge_rows", lambda *_: pytest.fail("rows were copied"))
    program = build_program(bf16_model(), PACKED, owns_weights=True)
    assert program.report.verdict is not None and program.report.verdict.ok
    monkeypatch.setattr(packed_rows, "pack_weight", lambda *weights: pack_weight(*weights[::-1]))
    with pytest.raises(ValueError, match="with packed weights logits differ"):
        build_program(bf16_model(), PACKED, owns_weights=True)


@needs_bf16
def test_a_wrongly_packed_weight_does_not_pass_the_check(monkeypatch):
    monkeypatch.setattr(packed_rows, "pack_weight", lambda weight: pack_weight(weight.flip(0)))
    with pytest.raises(ValueError, match="with packed weights logits differ"):
        build_program(bf16_model(), PACKED)


def test_without_the_option_nothing_is_packed():
    program = build_program(bf16_model(), CompileOptions(codegen="none"))
    assert isinstance(program, LinkedProgram)
    assert program.pack_weights(release=False) == 0


@needs_bf16
@pytest.mark.parametrize("codegen", ["none", "inductor"])
def test_biases_stay_the_modules_own(codegen):
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
    assert any(tensor is model.q.weight for tensor in program.copied_weights)
    assert not any(tensor is model.q.bias for tensor in program.copied_weights)
