"""Experts that are rounded for an NPU: the chain of operators, what stays and why, limits."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from lowered_models import lowered
from npu_calls import illegal_calls
from quantized_graphs import TARGET, nodes_of, quantized, record_of, stored

from torch_pagoda.compiler.costs.flops import flops, is_int8_product
from torch_pagoda.compiler.costs.traffic import Step, moved
from torch_pagoda.compiler.targets.npu.weights.weights import plan_weights, prepare_weights
from torch_pagoda.passes.graph.fx_nodes import value
from torch_pagoda.passes.graph.provenance import decoder_layers, launches_work, operator_name
from torch_pagoda.passes.graph.traced import TracedGraph
from torch_pagoda.passes.lower.npu.call import Call
from torch_pagoda.passes.lower.npu.experts.fuse_experts import fuse_npu_experts
from torch_pagoda.passes.lower.npu.experts.quantized_experts import quantize_npu_experts
from torch_pagoda.runtime.npu_target import NpuTarget
from torch_pagoda.runtime.ops.linear.quantized_weight import Quantization
from torch_pagoda.runtime.ops.npu.limits import violations

npu = torch.ops.npu
EXPERTS = (
    "moe_init_routing_v2",
    "grouped_matmul",
    "dequant_swiglu_quant",
    "moe_finalize_routing",
    "dynamic_quant",
    "swiglu",
    "grouped_matmul_swiglu_quant_v2",
)
FUSED = npu.npu_grouped_matmul_swiglu_quant_v2


def test_experts_are_four_launches_beside_routing():
    _, traced, report = quantized("qwen3_moe")
    assert record_of(report, "fuse_npu_experts").matches == 2
    assert record_of(report, "quantize_npu_experts").matches == 4
    nodes = decoder_layers(traced.graph).nodes(1)
    found = Counter(operator_name(node).removeprefix("npu.npu_") for node in nodes if launches_work(node))
    assert [found[name] for name in EXPERTS] == [1, 1, 0, 1, 1, 0, 1]  # o_proj's rounding
    assert illegal_calls(traced, TARGET) == []


def test_the_counts_and_scales_are_those_of_the_routing():
    _, traced, _ = quantized("qwen3_moe", moe_intermediate_size=128)
    for routing in nodes_of(traced, npu.npu_moe_init_routing_v2):
        experts = routing.kwargs["expert_num"]
        assert routing.kwargs["quant_mode"] == 1 and routing.kwargs["active_expert_range"] == [0, experts]
        items = {user.args[1]: user for user in routing.users}
        assert items.keys() == {0, 1, 2, 3}
        (up,) = items[0].users
        assert up.target is FUSED.default and up.args[3] is items[3] and up.args[4] is items[2]
        assert up.kwargs == {"group_list_type": 1}
        (scale,) = up.args[2]
        assert scale.op == up.args[1][0].op == "placeholder" and value(scale).dtype is torch.float32
        results = {user.args[1]: user for user in up.users}
        (down,) = results[0].users
        assert down.target is npu.npu_grouped_matmul.default and down.kwargs["per_token_scale"] == [results[1]]
        assert down.kwargs["output_dtype"] == 6 and down.kwargs["group_list_type"] == 1


def test_scales_of_the_fused_product_are_float32():
    _, traced, _ = quantized("qwen3_moe", dtype=torch.bfloat16)
    dtypes = {i.scales: i.scale_dtype for i in traced.notes.quantized}
    for node in nodes_of(traced, FUSED):
        assert dtypes[node.args[2][0].name] is value(node.args[2][0]).dtype is torch.float32
    for node in nodes_of(traced, npu.npu_grouped_matmul):
        assert dtypes[node.kwargs["scale"][0].name] is torch.bfloat16


def five_launches(traced, report, reason):
    """The product and its activation apart, for that reason."""
    record = record_of(report, "fuse_npu_experts")
    assert record.matches == 0 and not nodes_of(traced, FUSED)
    assert {rejection.reason for rejection in record.rejections} == {reason}
    assert len(nodes_of(traced, npu.npu_grouped_matmul)) == 4
    assert illegal_calls(traced, traced.npu) == []


def test_matrices_that_fit_no_tiles_stay_apart():
    _, traced, report = quantized("qwen3_moe", moe_intermediate_size=72)
    sizes = "matrices of (512, 144), no multiples of (16, 32): they must be in FRACTAL_NZ"
    five_launches(traced, report, f"npu_grouped_matmul_swiglu_quant_v2: {sizes}")


def test_more_gates_and_ups_than_it_takes_stay_apart():
    _, traced, report = quantized("qwen3_moe", moe_intermediate_size=5152, num_experts=2, num_experts_per_tok=1)
    sizes = "2 matrices of (512, 10304); at most 1024 of 65535 inputs and 10240 outputs"
    five_launches(traced, report, f"npu_grouped_matmul_swiglu_quant_v2: {sizes}")


def test_at_level_1_they_stay_apart():
    _, traced, report = quantized("qwen3_moe", opt_level=1)
    assert all(record.name != "fuse_npu_experts" for record in report.passes) and not nodes_of(traced, FUSED)


def test_matrices_of_4_bits_are_fused_where_graphs_are_captured():
    _, traced, report = stored("qwen3_moe", "slim-w4a8-experts")
    reason = "npu_grouped_matmul_swiglu_quant_v2: torchair's converter does not turn int32 into 4 bits"
    five_launches(traced, report, reason)
    _, captured, report = stored("qwen3_moe", "slim-w4a8-experts", graph_mode="aclgraph")
    assert record_of(report, "fuse_npu_experts").matches == 2 and illegal_calls(captured, captured.npu) == []
    for node in nodes_of(captured, FUSED):
        (weight,), (scale,), (sums,) = node.args[1], node.args[2], node.kwargs["weight_assist_matrix"]
        assert value(weight).dtype is torch.int32 and value(scale).dtype is torch.int64
        experts, _, packed = value(weight).shape
        assert value(scale).shape == value(sums).shape == (experts, 8 * packed)


def test_on_950_activations_are_fused_that_are_apart_otherwise():
    _, traced, report = quantized("qwen3_moe", soc="Ascend950PR")
    assert record_of(report, "fuse_npu_experts").matches == 2 and illegal_calls(traced, traced.npu) == []
    assert not nodes_of(traced, npu.npu_dequant_swiglu_quant)
    copy = traced.copy()
    prepare_weights(copy, fractal_nz=True, release=False)
    plans = {plan.name: plan for plan in plan_weights(copy)}
    found = [plans[node.args[1][0].name] for node in nodes_of(copy, FUSED)]
    assert [(p.fractal_nz, p.demanded, p.reason) for p in found] == [(False, False, "this chip reads it in rows")] * 2


def test_matrices_of_the_fused_product_have_to_be_in_nz():
    _, traced, _ = quantized("qwen3_moe")
    copy = traced.copy()
    prepare_weights(copy, fractal_nz=False, release=False)
    plans = {plan.name: plan for plan in plan_weights(copy)}
    for node in nodes_of(copy, FUSED):
        plan = plans[node.args[1][0].name]
        assert plan.fractal_nz and plan.demanded and not plan.reason


def test_what_else_reads_a_product_or_its_matrices_keeps_them_apart():
    _, traced, _ = quantized("qwen3_moe", moe_intermediate_size=72)
    for what in ("product", "matrices"):
        copy = traced.copy()
        (node, _) = nodes_of(copy, npu.npu_dequant_swiglu_quant)
        product = node.args[0].args[0]
        with copy.before(node):
            extra = node.args[0] if what == "product" else product.args[1][0]
            copy.call(torch.ops.aten.neg.default, extra)
        record = fuse_npu_experts(copy)
        first, second = (rejection.reason for rejection in record.rejections)
        assert f"something else reads the {what}, too" in first and "no multiples of (16, 32)" in second


def test_sizes_that_the_grouped_activation_does_not_take_go_without_groups():
    _, traced, _ = quantized("qwen3_moe", moe_intermediate_size=72)
    found = nodes_of(traced, npu.npu_dequant_swiglu_quant)
    assert len(found) == 2 and all("group_index" not in node.kwargs for node in found)
    assert illegal_calls(traced, TARGET) == []


def test_experts_with_biases_stay_with_the_reason():
    _, traced, report = quantized("gpt_oss")
    record = record_of(report, "quantize_npu_experts")
    assert record.matches == 0
    reasons = {rejection.reason for rejection in record.rejections}
    assert reasons == {"a bias of torch.float32; torch.int32 beside torch.int8"}
    routings = nodes_of(traced, npu.npu_moe_init_routing_v2)
    assert routings and all(node.kwargs["quant_mode"] == -1 for node in routings)
    assert nodes_of(traced, npu.npu_quant_matmul) and illegal_calls(traced, TARGET) == []


@pytest.mark.parametrize(
    ("name", "why", "more"),
    [
        ("ct-w8a8-dynamic-asym", "weights with zeros of their own; beside rows of int8 there is none", ""),
        (
            "ct-w8a8-g32",
            "8 bits in groups of 32; beside rows of int8 an output has one scale",
            "matrices of torch.int8 have scales for outputs alone, not for groups",
        ),
    ],
)
def test_experts_that_were_made_for_rows_of_int8_say_why_they_have_none(name, why, more):
    """``more``: why they are products of floats then."""
    _, _, report = stored("qwen3_moe", name, moe_intermediate_size=64)
    record = record_of(report, "quantize_npu_experts")
    assert (record.matches, len(record.rejections)) == ((0, 4) if more else (4, 0))
    reasons = ("npu.npu_grouped_matmul", why), ("npu.npu_grouped_matmul", more)
    assert {route.refused for route in record.routes} == {reasons if more else reasons[:1]}
    assert all(rejection.reason == f"{why}; {more}" for rejection in record.rejections)
    assert {route.module.rpartition(".")[2] for route in record.routes} == {"experts"}
    _, _, asked = stored("qwen3_moe", name, input_bits=16, moe_intermediate_size=64)
    said = {reason for route in record_of(asked, "quantize_npu_experts").routes for _, reason in route.refused}
    assert said == ({more} if more else set()), "nobody asks why"


@pytest.mark.parametrize("quantization", ["int8-weight-only", "int4-weight-only"])
def test_experts_whose_inputs_keep_16_bits_are_five_launches(quantization):
    _, traced, report = quantized("qwen3_moe", quantization)
    assert record_of(report, "quantize_npu_experts").matches == 4
    nodes = decoder_layers(traced.graph).nodes(1)
    found = Counter(operator_name(node).removeprefix("npu.npu_") for node in nodes if launches_work(node))
    assert [found[name] for name in EXPERTS] == [1, 2, 0, 1, 0, 1, 0]
    assert illegal_calls(traced, TARGET) == []
    for routing in nodes_of(traced, npu.npu_moe_init_routing_v2):
        assert routing.kwargs["quant_mode"] == -1
    for node in nodes_of(traced, npu.npu_grouped_matmul):
        (scale,), (offset,) = node.kwargs["antiquant_scale"], node.kwargs["antiquant_offset"]
        assert {n.op for n in (scale, offset, node.args[1][0])} == {"placeholder"}, "made when linked"
        assert "scale" not in node.kwargs
    made = [i for i in traced.notes.quantized if traced.placeholder(i.source).meta["example_value"].dim() == 3]
    bits = 4 if quantization.startswith("int4") else 8
    assert {(i.quantization.bits, bool(i.offsets), i.sums) for i in made} == {(bits, True, "")}


def test_groups_of_experts_have_scales_of_their_own():
    _, traced, _ = quantized("qwen3_moe", "int4-weight-only", moe_intermediate_size=256)
    shapes = {
        tuple(node.kwargs["antiquant_scale"][0].meta["example_value"].shape)
        for node in nodes_of(traced, npu.npu_grouped_matmul)
    }
    assert shapes == {(8, 4, 512), (8, 2, 512)}
    assert illegal_calls(traced, TARGET) == []


def test_groups_that_do_not_divide_their_inputs_stay_floats():
    """The operator gets no size of groups: it would split 192 inputs with two scales in the middle."""
    _, _, report = quantized("qwen3_moe", "int4-weight-only", moe_intermediate_size=192)
    record = record_of(report, "quantize_npu_experts")
    reasons = {rejection.reason.partition(",")[0] for rejection in record.rejections}
    assert record.matches == 2 and reasons == {"groups of 128 do not divide 192 inputs"}


def test_biases_stay_beside_rounded_matrices():
    _, traced, report = quantized("gpt_oss", "int4-weight-only", dtype=torch.bfloat16)
    assert record_of(report, "quantize_npu_experts").matches == 4
    biases = [node.kwargs["bias"][0] for node in nodes_of(traced, npu.npu_grouped_matmul)]
    assert {bias.meta["example_value"].dtype for bias in biases} == {torch.float32}
    assert illegal_calls(traced, NpuTarget(block_size=16)) == []


def changed(change) -> tuple[TracedGraph, list[str]]:
    """A lowered graph of experts after ``change`` and the pass, and why products stayed."""
    traced = lowered("qwen3_moe")[1].copy()
    traced.quantization = Quantization(8, 0, 8)
    change(traced)
    record = quantize_npu_experts(traced)
    return traced, [rejection.reason for rejection in record.rejections]


def test_rows_that_something_else_reads_stay():
    def read(traced):
        for routing in nodes_of(traced, npu.npu_moe_init_routing_v2):
            rows = next(user for user in routing.users if user.args[1] == 0)
            last = traced.output
            with traced.before(last):
                more = traced.call(torch.ops.aten.relu.default, rows)
            last.args = ((*last.args[0], more),)

    traced, reasons = changed(read)
    assert reasons == ["something else reads the rows, too"] * 2
    assert all(node.kwargs["quant_mode"] == -1 for node in nodes_of(traced, npu.npu_moe_init_routing_v2))


def test_experts_that_do_not_get_all_rows_stay():
    def cut(traced):
        for routing in nodes_of(traced, npu.npu_moe_init_routing_v2):
            routing.kwargs = {**routing.kwargs, "active_num": 3}

    _, reasons = changed(cut)
    assert reasons == ["some rows belong to no expert"] * 2


def grouped(**change):
    given = {
        "x": [torch.zeros(5, 64, dtype=torch.int8)],
        "weight": [torch.zeros(3, 64, 16, dtype=torch.int8)],
        "scale": [torch.ones(3, 16).bfloat16()],
        "per_token_scale": [torch.ones(5)],
        "group_list": torch.zeros(3, dtype=torch.int64),
        "split_item": 3,
        "group_type": 0,
        "group_list_type": 1,
        "output_dtype": 15,
        **change,
    }
    return npu.npu_grouped_matmul.default, given


def routed(**change):
    given = {
        "x": torch.zeros(5, 64, dtype=torch.bfloat16),
        "expert_idx": torch.zeros(5, 2, dtype=torch.int32),
        "expert_num": 3,
        "expert_tokens_num_type": 1,
        "expert_tokens_num_flag": True,
        "quant_mode": 1,
        "active_expert_range": [0, 3],
        **change,
    }
    return npu.npu_moe_init_routing_v2.default, given


def by_4_bits(**change):
    """Rows of int8 beside matrices of 4 bits."""
    return grouped(
        **{
            "weight": [torch.zeros(3, 64, 2, dtype=torch.int32)],
            "scale": [torch.ones(3, 1, 16, dtype=torch.int64)],
            "bias": [torch.ones(3, 16)],
            **change,
        }
    )


HALF = torch.ones(3, 16).bfloat16()


def by_weights(**change):
    """Rows of bf16 beside matrices of 8 bits."""
    given = {
        "x": [torch.zeros(5, 64).bfloat16()],
        "weight": [torch.zeros(3, 64, 16, dtype=torch.int8)],
        "antiquant_scale": [HALF],
        "antiquant_offset": [HALF],
        "group_list": torch.zeros(3, dtype=torch.int64),
        "split_item": 3,
        "group_type": 0,
        "group_list_type": 1,
        **change,
    }
    return npu.npu_grouped_matmul.default, given


def in_groups(groups, **change):
    """Rows of bf16 beside matrices of 4 bits, with so many groups of 64 inputs."""
    table = torch.ones(3, groups, 16).bfloat16()
    packed = torch.zeros(3, 64, 2, dtype=torch.int32)
    return by_weights(**{"weight": [packed], "antiquant_scale": [table], "antiquant_offset": [table], **change})


MANY = torch.empty(1025, 64, 16, dtype=torch.int8)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (grouped(), ""),
        (grouped(output_dtype=5, scale=[torch.ones(3, 16)]), ""),
        (grouped(bias=[torch.ones(3, 16, dtype=torch.int32)]), ""),
        (grouped(bias=[torch.ones(3, 16)]), "a bias of torch.float32; torch.int32"),
        (grouped(output_dtype=None), "output_dtype is None, int8"),
        (grouped(output_dtype=3), "output_dtype is 3, torch.int32"),
        (grouped(scale=[torch.ones(3, 16)]), "scale is torch.float32 (3, 16); torch.bfloat16"),
        (grouped(output_dtype=5), "scale is torch.bfloat16 (3, 16); torch.float32"),
        (grouped(scale=[torch.ones(3, 64).bfloat16()]), "scale is torch.bfloat16 (3, 64)"),
        (grouped(scale=None), "scale and per_token_scale are needed"),
        (grouped(per_token_scale=None), "scale and per_token_scale are needed"),
        (grouped(per_token_scale=[torch.ones(3)]), "per_token_scale is torch.float32 (3,)"),
        (grouped(x=[torch.zeros(5, 64).bfloat16()]), "antiquant_scale and antiquant_offset are needed"),
        (by_4_bits(), ""),
        (by_4_bits(output_dtype=5), ""),
        (by_4_bits(bias=None), "bias is not the sums of the weights"),
        (by_4_bits(bias=[torch.ones(3, 16, dtype=torch.int32)]), "a bias of torch.int32; torch.float32"),
        (by_4_bits(scale=[torch.ones(3, 1, 16)]), "scale is torch.float32 (3, 1, 16); torch.int64 (3, 1, 16)"),
        (by_4_bits(scale=[torch.ones(3, 16, dtype=torch.int64)]), "scale is torch.int64 (3, 16); torch.int64 (3, 1"),
        (by_4_bits(group_list_type=0), "group_list_type must be 1 beside matrices of 4 bits"),
        (by_4_bits(weight=[torch.zeros(3, 2, 64, dtype=torch.int32).mT]), "not contiguous"),
        (
            by_4_bits(
                x=[torch.zeros(5, 18440, dtype=torch.int8)], weight=[torch.empty(3, 18440, 2, dtype=torch.int32)]
            ),
            "18440 inputs; at most 18432",
        ),
        (by_weights(), ""),
        (by_weights(bias=[torch.ones(3, 16)]), ""),
        (by_weights(bias=[HALF]), "a bias of torch.bfloat16; torch.float32 beside torch.bfloat16"),
        (by_weights(antiquant_offset=None), "antiquant_scale and antiquant_offset are needed"),
        (by_weights(antiquant_scale=[HALF.float()]), "antiquant_scale is torch.float32"),
        (by_weights(antiquant_scale=[HALF[:, :8]]), "antiquant_scale is (3, 8) and antiquant_offset (3, 16)"),
        (by_weights(output_dtype=5), "output_dtype is 5; that of the rows"),
        (in_groups(2), ""),
        (in_groups(3), "3 groups do not divide 64 inputs"),
        (in_groups(2, weight=[torch.zeros(3, 64, 16, dtype=torch.int8)]), "scales for outputs alone, not for groups"),
        (in_groups(2, weight=[torch.zeros(3, 2, 64, dtype=torch.int32).mT]), "not contiguous"),
        (grouped(weight=[torch.zeros(3, 64, 16).bfloat16()]), "rows of torch.int8 and matrices of torch.bfloat16"),
        (
            grouped(
                weight=[MANY],
                scale=[torch.ones(1025, 16).bfloat16()],
                group_list=torch.zeros(1025, dtype=torch.int64),
            ),
            "1025 groups; at most 1024",
        ),
        (routed(), ""),
        (routed(quant_mode=0), "quant_mode is 0; -1 or 1"),
        (routed(scale=torch.ones(3, 64)), "scale and offset are not given with quant_mode 1"),
    ],
)
def test_limits(call, words):
    overload, given = call
    found = "; ".join(violations(Call.make(overload, NpuTarget(), **given)))
    assert (words in found) if words else found == ""


@pytest.mark.parametrize(
    ("target", "call", "words"),
    [
        (NpuTarget("Ascend950PR"), by_weights(), ""),
        (NpuTarget("Ascend950PR"), by_4_bits(), ""),
        (NpuTarget("Ascend950PR"), in_groups(2), "no GE graph of this chip takes scales of groups"),
        (NpuTarget("Ascend950PR", graph_mode="aclgraph"), in_groups(2), ""),
        (NpuTarget("Ascend950PR", graph_mode="aclgraph"), in_groups(4), "groups of 16; this chip takes 32, 64"),
        (NpuTarget("Ascend910_9382"), in_groups(4), ""),
    ],
)
def test_limits_of_chips(target, call, words):
    overload, given = call
    found = "; ".join(violations(Call.make(overload, target, **given)))
    assert (words in found) if words else found == ""


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            by_weights(**{n: [torch.ones(3, 16).half()] for n in ("antiquant_scale", "antiquant_offset")}),
            "no rounded",
        ),
        (grouped(output_dtype=5, scale=[torch.ones(3, 16)]), "this chip multiplies no int8 in groups"),
        (routed(x=torch.zeros(5, 64).half(), expert_tokens_num_type=0), "this chip rounds no rows"),
    ],
)
def test_limits_of_the_inference_chip(call, words):
    overload, given = call
    if given["x"][0].dtype is torch.bfloat16:
        given = {**given, "x": [given["x"][0].half()]}
    assert words in "; ".join(violations(Call.make(overload, NpuTarget("Ascend310P3"), **given)))


def test_the_fused_product_counts_as_the_one_that_it_stands_for():
    model, traced, _ = quantized("qwen3_moe")
    step, k = Step(tokens=3, context=10, rows=1), model.config.num_experts_per_tok
    node, _ = nodes_of(traced, FUSED)  # that of the last layer is for the asked rows alone
    experts, inputs, outputs = value(node.args[1][0]).shape
    assert is_int8_product(node) and flops(traced, [node], step) == 2 * 3 * k * inputs * outputs
    read = moved(traced, [node], step).weights
    assert read >= min(experts, 3 * k) * inputs * outputs
    assert read < 1.1 * min(experts, 3 * k) * (inputs + 16) * outputs
