"""W4A8 in groups for an NPU: which form each chip and each graph mode gets, the launches, and the limits."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from npu_calls import illegal_calls
from quantized_graphs import ROUNDED_LLAMA, nodes_of, stored

from torch_pagoda.passes.graph.fx_nodes import value
from torch_pagoda.passes.graph.provenance import decoder_layers, launches_work, operator_name
from torch_pagoda.passes.lower.npu.call import Call
from torch_pagoda.runtime.npu_target import NpuTarget
from torch_pagoda.runtime.ops.npu.limits import violations

npu = torch.ops.npu
SIZES = {"moe_intermediate_size": 512}
"""So that both products of experts have two groups of 256 inputs."""


def graph_of(model_type, name, graph_mode, **overrides):
    """The lowered graph, and what the passes and the sites say of products that are not taken."""
    _, traced, report = stored(model_type, name, graph_mode=graph_mode, **overrides)
    assert illegal_calls(traced, traced.npu) == []
    records = {record.name: record for record in report.passes}
    return traced, records


def layer(traced):
    """Launches of the second decoder layer, but for those of ATen: rows that are asked for, and copies."""
    nodes = decoder_layers(traced.graph).nodes(1)
    names = [operator_name(node) for node in nodes if launches_work(node)]
    return Counter(name.removeprefix("npu.npu_") for name in names if name.startswith("npu."))


def refused(record):
    """Of the routes of a pass: operators with the reasons why they were not taken."""
    return {(name.removeprefix("npu.npu_"), why) for route in record.routes for name, why in route.refused}


def test_linears_in_captured_graphs_multiply_int8_by_4_bits():
    traced, records = graph_of("llama", "slim-w4a8-g256", "aclgraph", intermediate_size=512)
    assert records["quantize_npu_linears"].matches == 8 and not records["quantize_npu_linears"].rejections
    in_ge = {"apply_rotary_pos_emb": 1}  # captured graphs rotate queries and keys one by one
    assert layer(traced) + Counter(in_ge) == Counter(ROUNDED_LLAMA) + Counter({"rotary_mul": 2})
    for node in nodes_of(traced, npu.npu_quant_matmul):
        _, weight, scale = node.args
        inputs, outputs = value(weight).shape[0], 8 * value(weight).shape[1]
        assert value(weight).dtype is torch.int32 and value(scale).dtype is torch.int64
        assert value(scale).shape == (inputs // 256, outputs) and value(node.kwargs["offset"]).shape == (outputs,)
        assert value(node.kwargs["pertoken_scale"]).dim() == 2 and node.kwargs["group_sizes"] == [0, 0, 256]
        assert {n.op for n in (weight, scale, node.kwargs["offset"])} == {"placeholder"}, "made when linked"


@pytest.mark.parametrize(
    ("name", "graph_mode", "why"),
    [
        ("slim-w4a8-g256", "ge", "QuantBatchMatmulV3 of it, with int32 for 4 bits and without group_sizes"),
        ("slim-w4a8-g128", "aclgraph", "beside matrices of 4 bits in groups of 256"),
    ],
)
def test_linears_that_have_no_such_form_keep_16_bits(name, graph_mode, why):
    traced, records = graph_of("llama", name, graph_mode, intermediate_size=512)
    record = records["quantize_npu_linears"]
    assert record.matches == 8 and not nodes_of(traced, npu.npu_quant_matmul)
    assert any(operator == "quant_matmul" and why in reason for operator, reason in refused(record)), refused(record)
    assert {route.chosen for route in record.routes if route.refused} == {("npu.npu_weight_quant_batchmatmul",)}
    size = int(name.rpartition("g")[2])
    for node in nodes_of(traced, npu.npu_weight_quant_batchmatmul):
        assert node.args[7] == size and not nodes_of(traced, npu.npu_dynamic_quant)
    assert layer(traced).total() == (10 if graph_mode == "ge" else 11)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("ct-w8a8-groups", "8 bits in groups of 64; beside rows of int8 an output has one scale"),
        ("slim-w4a8", "4 bits with one scale for each output; beside rows of int8 groups of 256 have one"),
    ],
)
def test_forms_that_keep_16_bits_say_why(name, why):
    traced, records = graph_of("llama", name, "aclgraph", intermediate_size=512)
    record = records["quantize_npu_linears"]
    assert record.matches and not nodes_of(traced, npu.npu_quant_matmul)
    assert refused(record) == {("quant_matmul", why)}
    _, asked, report = stored("llama", name, graph_mode="aclgraph", input_bits=16, intermediate_size=512)
    assert not refused(next(record for record in report.passes if record.name == "quantize_npu_linears"))
    assert nodes_of(asked, npu.npu_weight_quant_batchmatmul)


def test_a_bias_keeps_16_bits():
    traced, records = graph_of("qwen2", "slim-w4a8-g256", "aclgraph", intermediate_size=512)
    assert ("quant_matmul", "there is no bias beside matrices of 4 bits") in refused(records["quantize_npu_linears"])
    found = layer(traced)
    assert found["weight_quant_batchmatmul"] == 1 and found["quant_matmul"] == 3


@pytest.mark.parametrize(("graph_mode", "fused"), [("ge", 0), ("aclgraph", 1)])
def test_experts_in_groups_of_256(graph_mode, fused):
    traced, records = graph_of("qwen3_moe", "slim-w4a8-g256", graph_mode, **SIZES)
    assert records["quantize_npu_experts"].matches == 4 and not records["quantize_npu_experts"].rejections
    assert records["fuse_npu_experts"].matches == 2 * fused
    found = layer(traced)
    experts = ("moe_init_routing_v2", "grouped_matmul", "grouped_matmul_swiglu_quant_v2", "dequant_swiglu_quant")
    assert [found[name] for name in experts] == [1, 2 - fused, fused, 1 - fused]
    for node in nodes_of(traced, npu.npu_grouped_matmul):
        (scale,), (sums,), (weight,) = node.kwargs["scale"], node.kwargs["bias"], node.args[1]
        count, inputs, packed = value(weight).shape
        assert value(scale).shape == (count, inputs // 256, 8 * packed) and value(scale).dtype is torch.int64
        assert value(sums).shape == (count, 8 * packed)
    for node in nodes_of(traced, npu.npu_grouped_matmul_swiglu_quant_v2):
        (scale,) = node.args[2]
        assert node.kwargs["dequant_mode"] == 1 and scale.op == "placeholder" and value(scale).dim() == 3


def test_experts_in_groups_of_128_keep_16_bits():
    traced, records = graph_of("qwen3_moe", "slim-w4a8-g128", "aclgraph", **SIZES)
    record = records["quantize_npu_experts"]
    assert record.matches == 4
    reasons = {why for operator, why in refused(record) if operator == "grouped_matmul"}
    assert reasons == {"4 groups of 512 inputs; beside rows of int8 256 share a scale"}
    for node in nodes_of(traced, npu.npu_grouped_matmul):
        assert value(node.kwargs["antiquant_scale"][0]).shape[1] == 4 and "scale" not in node.kwargs
    assert all(node.kwargs["quant_mode"] == -1 for node in nodes_of(traced, npu.npu_moe_init_routing_v2))
    assert not any(inputs.sums for inputs in traced.notes.quantized)


def test_16_bits_are_kept_on_request():
    _, traced, _ = stored("llama", "slim-w4a8-g256", graph_mode="aclgraph", input_bits=16, intermediate_size=512)
    assert not nodes_of(traced, npu.npu_quant_matmul) and nodes_of(traced, npu.npu_weight_quant_batchmatmul)


def linear(**change):
    """Five rows of int8 by 4 bits, with two groups of 256 inputs."""
    given = {
        "x1": torch.zeros(5, 512, dtype=torch.int8),
        "x2": torch.zeros(512, 2, dtype=torch.int32),
        "scale": torch.ones(2, 16, dtype=torch.int64),
        "offset": torch.ones(16),
        "pertoken_scale": torch.ones(5, 1),
        "output_dtype": 15,
        "group_sizes": [0, 0, 256],
        **change,
    }
    return npu.npu_quant_matmul.default, given


def experts(groups, **change):
    """Rows of int8 by matrices of 4 bits of 512 inputs, with so many groups."""
    given = {
        "x": [torch.zeros(5, 512, dtype=torch.int8)],
        "weight": [torch.zeros(3, 512, 2, dtype=torch.int32)],
        "scale": [torch.ones(3, groups, 16, dtype=torch.int64)],
        "bias": [torch.ones(3, 16)],
        "per_token_scale": [torch.ones(5)],
        "group_list": torch.zeros(3, dtype=torch.int64),
        "split_item": 3,
        "group_type": 0,
        "group_list_type": 1,
        "output_dtype": 15,
        **change,
    }
    return npu.npu_grouped_matmul.default, given


def gated(groups, mode, **change):
    given = {
        "x": torch.zeros(5, 512, dtype=torch.int8),
        "weight": [torch.zeros(3, 512, 2, dtype=torch.int32)],
        "weight_scale": [torch.ones((3, groups, 16) if groups else (3, 16), dtype=torch.int64)],
        "x_scale": torch.ones(5),
        "group_list": torch.zeros(3, dtype=torch.int64),
        "weight_assist_matrix": [torch.ones(3, 16)],
        "dequant_mode": mode,
        "dequant_dtype": 6,
        "quant_dtype": 1,
        "group_list_type": 1,
        **change,
    }
    return npu.npu_grouped_matmul_swiglu_quant_v2.default, given


CAPTURED = NpuTarget(graph_mode="aclgraph")


@pytest.mark.parametrize(
    ("target", "call", "words"),
    [
        (CAPTURED, linear(), ""),
        (CAPTURED, linear(output_dtype=5), ""),
        (NpuTarget("Ascend910_9382", graph_mode="aclgraph"), linear(), ""),
        (NpuTarget("Ascend950PR", graph_mode="aclgraph"), linear(), "this chip multiplies no int8 by 4 bits"),
        (NpuTarget(), linear(), "torchair makes QuantBatchMatmulV3 of it"),
        (CAPTURED, linear(output_dtype=None), "output_dtype is None"),
        (CAPTURED, linear(offset=None), "offset is None; torch.float32 (16,)"),
        (
            CAPTURED,
            linear(scale=torch.ones(4, 16, dtype=torch.int64)),
            "scale is torch.int64 (4, 16); torch.int64 (2",
        ),
        (CAPTURED, linear(scale=torch.ones(2, 16)), "scale is torch.float32 (2, 16); torch.int64 (2, 16)"),
        (
            CAPTURED,
            linear(pertoken_scale=torch.ones(5)),
            "pertoken_scale is torch.float32 (5,); torch.float32 (5, 1)",
        ),
        (CAPTURED, linear(bias=torch.ones(16)), "there is no bias beside matrices of 4 bits"),
        (CAPTURED, linear(group_sizes=None), "group_sizes is None; [0, 0, 256] beside matrices of 4 bits"),
        (CAPTURED, linear(group_sizes=[1, 1, 256]), "group_sizes is [1, 1, 256]; [0, 0, 256] beside"),
        (CAPTURED, linear(x2=torch.zeros(2, 512, dtype=torch.int32).t()), "without gaps"),
        (
            CAPTURED,
            linear(x1=torch.zeros(5, 500, dtype=torch.int8), x2=torch.zeros(500, 2, dtype=torch.int32)),
            "a matrix of (500, 16); a multiple of 256 inputs below 29576",
        ),
        (
            CAPTURED,
            linear(x1=torch.zeros(5, 29696, dtype=torch.int8), x2=torch.zeros(29696, 2, dtype=torch.int32)),
            "a matrix of (29696, 16); a multiple of 256 inputs below 29576",
        ),
        (NpuTarget(), experts(2), ""),
        (CAPTURED, experts(2), ""),
        (NpuTarget(), experts(4), "4 groups of 512 inputs; beside rows of int8 256 share a scale"),
        (NpuTarget("Ascend950PR"), experts(2), "this chip takes no scales of groups beside rows of int8"),
        (CAPTURED, gated(2, 1), ""),
        (CAPTURED, gated(0, 0), ""),
        (CAPTURED, gated(2, 0), "dequant_mode is 0; 1 where groups of 4 bits have scales, else 0"),
        (CAPTURED, gated(4, 1), "weight_scale is torch.int64 (3, 4, 16)"),
        (CAPTURED, gated(0, 1), "dequant_mode is 1; 1 where groups of 4 bits have scales, else 0"),
        (NpuTarget("Ascend950PR", graph_mode="aclgraph"), gated(2, 1), "this chip takes no matrices of 4 bits"),
    ],
)
def test_limits(target, call, words):
    overload, given = call
    found = "; ".join(violations(Call.make(overload, target, **given)))
    assert (words in found) if words else found == ""
