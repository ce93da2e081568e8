"""Linears over parameters become quantized ones: which do, with what scheme, and how the weights are held."""

from __future__ import annotations

import pytest
import torch
from aten_graphs import aten_of_model, aten_of_tiny_model
from torch import nn

from torch_pagoda.compiler import CompileOptions
from torch_pagoda.compiler.build import build_program
from torch_pagoda.compiler.costs.traffic import Step, moved
from torch_pagoda.passes.graph.fx_nodes import argument, callee
from torch_pagoda.passes.lower.cpu.pack_linears import pack_linears
from torch_pagoda.passes.lower.cpu.quantize_linears import quantize_linears
from torch_pagoda.passes.recognize.linear import recognize_linear
from torch_pagoda.passes.recognize.moe import recognize_moe
from torch_pagoda.passes.recognize.moe_routing import recognize_moe_routing
from torch_pagoda.passes.rewrite.merge_linears import merge_linears
from torch_pagoda.runtime.ops.linear.quantized_weight import Quantization, packed_bytes

from toy_lm import HIDDEN, VOCAB, ToyLM, sdpa

INT4 = Quantization(4, 64, 8)


def rewritten(model, scheme=INT4, *, merged=True):
    graph = aten_of_model(model)
    graph.quantization = scheme
    recognize_linear(graph)
    if merged:
        merge_linears(graph)
    record = quantize_linears(graph)
    graph.recompile()
    return graph, record


def quantized(graph):
    """Of each quantized linear its outputs, bits, group size and the inputs' bits."""
    return [node.args[3:] for node in graph.graph.nodes if callee(node) == "quantized_linear"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("merged", [True, False])
def test_every_linear_over_a_parameter_matches(merged, dtype):
    graph, record = rewritten(ToyLM(sdpa).to(dtype), merged=merged)
    assert (record.matches, record.rejections) == (3 if merged else 5, [])
    assert not [n for n in graph.graph.nodes if callee(n) == "linear"]
    assert [len(p.sources) for p in graph.notes.packed] == ([3, 1, 1] if merged else [1] * 5)
    assert quantize_linears(graph).matches == 0
    assert pack_linears(graph).matches == 0


def test_the_head_keeps_eight_bits():
    graph, _ = rewritten(ToyLM(sdpa))
    assert quantized(graph) == [(2 * HIDDEN, 4, 64, 8), (HIDDEN, 4, 64, 8), (VOCAB, 8, 256, 8)]
    assert [p.quantization.bits for p in graph.notes.packed] == [4, 4, 8]


def test_traffic_counts_the_bytes_that_are_stored():
    graph, _ = rewritten(ToyLM(sdpa))
    node = next(n for n in graph.graph.nodes if callee(n) == "quantized_linear")
    assert moved(graph, [node], Step()).weights == packed_bytes(2 * HIDDEN, HIDDEN, INT4)


def test_without_a_scheme_nothing_is_touched():
    graph, record = rewritten(ToyLM(sdpa), None)
    assert record.matches == 0 and not graph.notes.packed
    assert len([n for n in graph.graph.nodes if callee(n) == "linear"]) == 3


def test_computed_weights_are_left_alone_with_the_reason():
    model = ToyLM(sdpa)
    nn.utils.parametrizations.weight_norm(model.o)
    _, record = rewritten(model.requires_grad_(False))
    assert [(r.module, r.reason) for r in record.rejections] == [("o", "the weight is computed, not a parameter")]


@pytest.mark.parametrize("recognized", [True, False])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_routers_keep_their_numbers(name, recognized):
    graph = aten_of_tiny_model(name)
    graph.quantization = INT4
    recognize_linear(graph)
    if recognized:
        recognize_moe(graph)
        recognize_moe_routing(graph)
    record = quantize_linears(graph)
    assert {(r.module.rsplit(".", 1)[-1], r.reason) for r in record.rejections} == {("gate", "it is a router")}
    assert record.matches > len(record.rejections)


@pytest.mark.parametrize("codegen", ["none", "inductor"])
@pytest.mark.parametrize("quantization", ["int8", "int8-weight-only", "int4", "int4-weight-only"])
def test_quantized_programs_are_verified(quantization, codegen):
    model = ToyLM(sdpa).bfloat16()
    before = model.q.weight.clone()
    program = build_program(model, CompileOptions(codegen=codegen, quantization=quantization))
    assert program.report.verdict is not None and program.report.verdict.ok
    assert (program.report.codegen, program.merged_weights) == (codegen, [])
    assert program.weight_bits == int(quantization[3])
    assert torch.equal(model.q.weight, before)
    assert any(tensor is model.q.weight for tensor in program.copied_weights)


def test_owned_weights_are_released_and_a_tied_embedding_stays():
    model = ToyLM(sdpa)
    model.head.weight = model.embedding.weight
    program = build_program(model, CompileOptions(codegen="none", quantization="int8"), owns_weights=True)
    assert program.report.verdict is not None and program.report.verdict.ok
    assert not any(part.weight.untyped_storage().nbytes() for part in (model.q, model.k, model.v, model.o))
    assert model.embedding.weight.numel() == VOCAB * HIDDEN
    stored = [a.numel() for a in program._args if isinstance(a, torch.Tensor) and a.dtype is torch.uint8]
    scheme = Quantization(8, 256, 8)
    assert stored == [packed_bytes(rows, HIDDEN, scheme) for rows in (2 * HIDDEN, HIDDEN, VOCAB)]


WRONG = {
    "flipped": lambda weight: weight.flip(0),
    "rolled": lambda weight: weight.roll(1, 1),
    "last row negated": lambda weight: torch.cat([weight[:-1], -weight[-1:]]),
    "scaled": lambda weight: weight * 1.03,  # of 4 bits, rounding cuts off more
}


@pytest.mark.parametrize(
    ("quantization", "what"), [*(("int8", what) for what in WRONG), *(("int4", what) for what in list(WRONG)[:3])]
)
def test_a_wrongly_rounded_weight_does_not_pass_the_check(quantization, what, monkeypatch):
    from torch_pagoda.runtime.ops.linear import quantized_weight

    right, spoil = quantized_weight.quantize_weight, WRONG[what]
    monkeypatch.setattr(quantized_weight, "quantize_weight", lambda weight, *more: right(spoil(weight), *more))
    with pytest.raises(ValueError, match=r"entries of the weight '.*' are wrong after quantization to"):
        build_program(ToyLM(sdpa), CompileOptions(codegen="none", quantization=quantization))


def test_a_wrong_product_does_not_pass_the_check(monkeypatch):
    from torch_pagoda.compiler.link import rounded_weights

    right = rounded_weights.quantized_linear_cpu
    monkeypatch.setattr(rounded_weights, "quantized_linear_cpu", lambda *arguments: right(*arguments) * 1.05)
    with pytest.raises(ValueError, match=r"products, by 0\.05 of the largest, of the weight"):
        build_program(ToyLM(sdpa), CompileOptions(codegen="none", quantization="int8"))


def test_logits_of_something_else_do_not_pass_the_check(monkeypatch):
    from torch_pagoda.compiler.link import packed_rows
    from torch_pagoda.runtime.ops.linear import quantized_weight

    right = quantized_weight.quantize_weight
    monkeypatch.setattr(quantized_weight, "quantize_weight", lambda weight, *more: right(weight.flip(0), *more))
    monkeypatch.setattr(packed_rows, "check_rounded_weight", lambda *arguments: None)
    with pytest.raises(ValueError, match=r"with rounded weights logits differ.*omit quantization"):
        build_program(ToyLM(sdpa), CompileOptions(codegen="none", quantization="int8"))


def test_a_model_without_a_layer_to_round_is_refused(monkeypatch):
    monkeypatch.setattr("torch_pagoda.passes.lower.cpu.quantize_linears._refusal", lambda node: "a test says so")
    with pytest.raises(ValueError, match=r"quantization='int8' finds no linear layer .* a test says so"):
        build_program(ToyLM(sdpa), CompileOptions(codegen="none", quantization="int8"))


def test_the_graph_is_compared_before_its_weights_are_rounded(monkeypatch):
    """A pass that is slightly wrong is found out, though rounding would hide it."""
    from torch_pagoda.compiler.user_passes import register_pass, unregister_pass
    from torch_pagoda.passes import PassRecord

    def spoil(traced):
        head = next(n for n in reversed(traced.graph.nodes) if callee(n) == "linear")
        with traced.before(head):
            x = argument(head, 0, "input")
            head.update_arg(0, traced.call(torch.ops.aten.mul.Tensor, x, 1.05))
        return PassRecord("spoil", 1)

    register_pass("spoil", spoil)
    try:
        program = build_program(ToyLM(sdpa), CompileOptions(codegen="none", quantization="int8"))
    finally:
        unregister_pass("spoil")
    assert [name for name, _ in program.report.dropped_passes] == ["spoil"]
