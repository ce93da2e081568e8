"""Experts are rounded where it is asked for, and not where it cannot be; near misses carry their reasons."""

from __future__ import annotations

import pytest
import torch
from aten_graphs import aten_of_tiny_model
from stored_weights import stored_weight
from torch import nn

from torch_pagoda.compiler import CompileOptions
from torch_pagoda.compiler.build import build_program
from torch_pagoda.passes.lower.cpu.quantize_experts import quantize_experts
from torch_pagoda.passes.recognize.moe import recognize_moe
from torch_pagoda.runtime.ops.linear.quantized_weight import Quantization
from torch_pagoda.runtime.ops.linear.stored_weight import StoredWeight
from torch_pagoda.runtime.ops.moe.moe import moe
from torch_pagoda.runtime.ops.moe.quantized_moe import quantized_moe

from tiny_models import build_tiny_model


def graph_of(name: str):
    graph = aten_of_tiny_model(name)
    recognize_moe(graph)
    return graph


def targets(graph) -> list[object]:
    return [node.target for node in graph.graph.nodes]


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_experts_are_rounded_where_asked(name):
    graph = graph_of(name)
    count = targets(graph).count(moe)
    assert count and quantize_experts(graph).matches == 0
    graph.quantization = Quantization(4, 64, 8)
    record = quantize_experts(graph)
    assert (record.matches, targets(graph).count(quantized_moe), targets(graph).count(moe)) == (count, count, 0)
    assert len(graph.notes.packed) == 2 * count and not any(packed.stored for packed in graph.notes.packed)


def stored_experts(form: str, like: torch.Tensor, *, transposed: bool = False) -> StoredWeight:
    experts, outputs, inputs = like.shape
    if transposed:
        outputs, inputs = inputs, outputs
    whole = torch.stack([stored_weight(form, outputs, inputs, seed=e) for e in range(experts)])
    return whole.transpose(1, 2) if transposed else whole  # type: ignore[return-value]


def with_stored(graph, form: str, *, transposed: bool = False) -> None:
    for node in graph.graph.nodes:
        if node.target is moe:
            for weight in node.args[3:5]:
                made = stored_experts(form, graph.constants[weight.name], transposed=transposed)
                graph.constants[weight.name] = nn.Parameter(made, requires_grad=False)


def test_stored_experts_are_read_as_they_are():
    graph = graph_of("qwen3_moe")
    with_stored(graph, "int4/g32/f16+z")
    assert quantize_experts(graph).matches == 2
    assert all(packed.stored and packed.quantization.zeros for packed in graph.notes.packed)


@pytest.mark.parametrize(
    ("form", "transposed", "reason"),
    [
        ("e4m3/g24/f32", False, "no kernel for groups of 24"),
        ("int4/g8/f16", False, "no kernel for groups of 8"),
        ("int4/g32/f16+order", False, "their inputs are stored in a permuted order"),
        ("int4/g32/f16", True, "their scales are per group of outputs"),
    ],
)
def test_those_that_no_kernel_reads_stay(form, transposed, reason):
    graph = graph_of("qwen3_moe")
    if form.endswith("order"):
        for node in graph.graph.nodes:
            if node.target is moe:
                for weight in node.args[3:5]:
                    experts, outputs, inputs = graph.constants[weight.name].shape
                    one = stored_weight(form, outputs, inputs)
                    graph.constants[weight.name] = torch.stack([one] * experts)
    else:
        with_stored(graph, form, transposed=transposed)
    record = quantize_experts(graph)
    assert {rejection.reason for rejection in record.rejections} == {reason} and not record.matches


@pytest.mark.parametrize("quantization", ["int8", "int4-weight-only"])
def test_a_model_with_rounded_experts_is_verified(quantization):
    model = build_tiny_model("qwen3_moe").bfloat16()
    program = build_program(model, CompileOptions(codegen="none", quantization=quantization), owns_weights=True)
    assert program.report.verdict is not None and program.report.verdict.ok
    (record,) = (record for record in program.report.passes if record.name == "quantize_experts")
    assert record.matches == 2
    packed = [given for given in program._args if isinstance(given, torch.Tensor) and given.dtype is torch.uint8]
    assert sum(given.dim() == 2 for given in packed) == 4
