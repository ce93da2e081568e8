"""Weights of 8 and 4 bits whose inputs keep 16, for an NPU: launches, groups, heads, limits."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from npu_calls import illegal_calls
from quantized_graphs import TARGET, quantized

from torch_pagoda.passes.graph.provenance import decoder_layers, launches_work, operator_name
from torch_pagoda.passes.lower.npu.call import Call
from torch_pagoda.runtime.npu_target import NpuTarget
from torch_pagoda.runtime.ops.npu.limits import violations

npu = torch.ops.npu


@pytest.mark.parametrize("quantization", ["int8-weight-only", "int4-weight-only"])
def test_a_llama_layer_is_ten_launches(quantization):
    _, traced, _ = quantized("llama", quantization)
    nodes = decoder_layers(traced.graph).nodes(1)
    found = Counter(operator_name(node).removeprefix("npu.npu_") for node in nodes if launches_work(node))
    found.pop("aten.index_select", None)
    assert found["weight_quant_batchmatmul"] == 4 and found.total() == 10, found
    assert illegal_calls(traced, TARGET) == []


def test_heads_of_4_bit_models_keep_8():
    _, traced, _ = quantized("llama", "int4-weight-only")
    by_bits = Counter((i.quantization.bits, i.quantization.group_size) for i in traced.notes.quantized)
    # The second products have 128 inputs, all of which share a scale.
    assert by_bits == {(4, 128): 6, (4, 0): 2, (8, 0): 1}


def test_biases_beside_bf16_are_widened_once_linked():
    _, traced, _ = quantized("qwen2", "int4-weight-only", dtype=torch.bfloat16)
    assert len(traced.notes.widened) == 2
    for node in traced.graph.nodes:
        if node.target is npu.npu_weight_quant_batchmatmul.default and node.args[6] is not None:
            assert node.args[6].op == "placeholder" and node.args[6].meta["example_value"].dtype is torch.float32
    assert illegal_calls(traced, NpuTarget(block_size=16)) == []


def call(**change):
    given = {
        "x": torch.zeros(5, 128, dtype=torch.bfloat16),
        "weight": torch.zeros(128, 2, dtype=torch.int32),
        "antiquant_scale": torch.ones(4, 16).bfloat16(),
        "antiquant_offset": torch.ones(4, 16).bfloat16(),
        "bias": torch.ones(16),
        "antiquant_group_size": 32,
        **change,
    }
    return npu.npu_weight_quant_batchmatmul.default, given


ROW = {"antiquant_scale": torch.ones(16).bfloat16(), "antiquant_offset": None, "antiquant_group_size": 0}
INT8 = torch.zeros(128, 16, dtype=torch.int8)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (call(), ""),
        (call(**ROW), ""),
        (call(weight=INT8), ""),
        (call(weight=INT8.t().contiguous().t(), **ROW), ""),
        (call(antiquant_scale=torch.ones(4, 16).half()), "dtypes differ"),
        (call(antiquant_scale=torch.ones(16).bfloat16()), "antiquant_scale is (16,); (4, 16)"),
        (call(antiquant_offset=torch.ones(16).bfloat16()), "antiquant_offset is (16,); (4, 16)"),
        (call(bias=torch.ones(16).bfloat16()), "bias is torch.bfloat16 (16,); torch.float32 (16,)"),
        (call(antiquant_group_size=128), "groups of 128 of 128 inputs"),
        (call(antiquant_group_size=48), "groups of 48 of 128 inputs; a multiple of 32"),
        (call(weight=torch.zeros(2, 128, dtype=torch.int32).t()), "not contiguous"),
        (call(weight=torch.empty(128, 8192, dtype=torch.int32)), "the weight is (128, 65536)"),
        (call(weight=INT8[:64]), "x is (5, 128) and weight (64, 16)"),
        (call(quant_scale=torch.ones(16)), "quant_scale is given"),
        (call(inner_precise=1), "inner_precise is 1"),
        (call(x=torch.zeros(5, 128)), "x is torch.float32"),
    ],
)
def test_limits(given, words):
    overload, arguments = given
    found = "; ".join(violations(Call.make(overload, NpuTarget(), **arguments)))
    assert (words in found) if words else found == ""


@pytest.mark.parametrize(
    ("soc", "given", "words"),
    [
        ("Ascend310P3", {"weight": INT8}, ""),
        ("Ascend310P3", {}, "this chip reads no weights of 4 bits"),
        ("Ascend950PR", {}, "Ascend950PR does not run it"),
    ],
)
def test_limits_of_chips(soc, given, words):
    half = {
        name: torch.ones(shape).half()
        for name, shape in (
            ("x", (5, 128)),
            ("antiquant_scale", (4, 16)),
            ("antiquant_offset", (4, 16)),
            ("bias", (16,)),
        )
    }
    overload, arguments = call(**half, **given)
    found = "; ".join(violations(Call.make(overload, NpuTarget(soc), **arguments)))
    assert (words in found) if words else found == ""
