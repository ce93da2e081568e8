"""Products that are rounded for an NPU: what matches, what stays and why, fusions and their near misses."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from npu_calls import illegal_calls
from quantized_graphs import ROUNDED_LLAMA, TARGET, plain_reference, program_of, quantized, record_of, row_errors_of

from torch_pagoda.passes.graph.provenance import decoder_layers, launches_work, operator_name
from torch_pagoda.passes.lower.npu.call import Call
from torch_pagoda.passes.lower.npu.quantized.fuse_quantization import fuse_npu_quantization
from torch_pagoda.passes.lower.npu.quantized.quantized_linears import quantize_npu_linears
from torch_pagoda.runtime.npu_target import NpuTarget
from torch_pagoda.runtime.ops.npu.limits import violations

npu = torch.ops.npu


def layer(traced, index):
    """Operators of a decoder layer that launch work, but for those that take the asked rows."""
    nodes = decoder_layers(traced.graph).nodes(index)
    names = [operator_name(node).removeprefix("npu.npu_") for node in nodes if launches_work(node)]
    return Counter(name for name in names if name != "aten.index_select")


def test_a_llama_layer_is_eleven_launches():
    _, traced, report = quantized("llama")
    assert record_of(report, "quantize_npu_linears").matches == 2 * 4 + 1
    found = layer(traced, 1)
    assert found == ROUNDED_LLAMA
    assert found.total() == 11
    # Nothing is added in front of the first norm, and no operator rounds behind a plain one.
    assert layer(traced, 0).total() == 12
    assert illegal_calls(traced, TARGET) == []


def test_without_fusions_a_layer_is_fifteen_launches():
    _, traced, report = quantized("llama", opt_level=1)
    assert "fuse_npu_quantization" not in [record.name for record in report.passes]
    found = layer(traced, 1)
    assert found["quant_matmul"] == 7 and found["dynamic_quant"] == 4, "products of the same rows round them once"
    assert found["npu_linear"] == 0


def test_weights_are_neither_cast_nor_turned_in_the_graph():
    _, traced, _ = quantized("qwen2")
    made = {name for inputs in traced.notes.quantized for name in inputs.made}
    assert len(made) == 2 * 9
    for node in traced.placeholders:
        if node.name in made:
            assert {operator_name(user) for user in node.users} == {"npu.npu_quant_matmul"}
    for node in traced.graph.nodes:
        if node.target is npu.npu_quant_matmul.default:
            assert node.args[1].meta["example_value"].is_contiguous()
            assert node.kwargs["output_dtype"] == 6 and "pertoken_scale" in node.kwargs


def test_matrices_that_are_stored_by_inputs_are_rounded_too():
    _, traced, report = quantized("gpt2")
    assert record_of(report, "quantize_npu_linears").matches == 9
    assert sum(inputs.turned for inputs in traced.notes.quantized) == 8
    assert not [n for n in traced.graph.nodes if n.target in (torch.ops.aten.addmm.default, npu.npu_linear.default)]


def test_routers_stay_and_so_do_norms_that_they_read():
    _, traced, report = quantized("qwen3_moe")
    reasons = Counter(rejection.reason for rejection in record_of(report, "quantize_npu_linears").rejections)
    assert reasons == {"it is a router": 2}
    gates = [n for n in traced.graph.nodes if n.target is npu.npu_linear.default]
    assert len(gates) == 2
    norms = Counter(operator_name(n) for n in traced.graph.nodes if "add_rms_norm" in operator_name(n))
    assert norms["npu.npu_add_rms_norm"] == 2, "of the experts"


def test_a_router_beside_a_shared_expert_keeps_the_norm():
    _, traced, report = quantized("deepseek_v3")
    reasons = {rejection.reason for rejection in record_of(report, "fuse_npu_quantization").rejections}
    assert reasons == {"something else reads the norm, too"}
    assert illegal_calls(traced, TARGET) == []


def test_applied_twice_they_change_nothing():
    _, traced, _ = quantized("llama")
    copy = traced.copy()
    before = [(node.op, str(node.target), len(node.args)) for node in copy.graph.nodes]
    assert quantize_npu_linears(copy).matches == 0 and fuse_npu_quantization(copy).matches == 0
    assert [(node.op, str(node.target), len(node.args)) for node in copy.graph.nodes] == before


def test_a_chip_without_npu_linear_multiplies_int8_too():
    _, traced, report = quantized("qwen2", soc="Ascend950PR")
    assert record_of(report, "quantize_npu_linears").matches == 9
    assert not [n for n in traced.graph.nodes if n.target is torch.ops.aten.linear.default]
    assert illegal_calls(traced, traced.npu) == []
    errors = row_errors_of(program_of(traced), plain_reference("qwen2", soc="Ascend950PR"))
    assert errors.median() < 0.3


def test_a_head_of_many_tokens_stays_with_the_reason():
    _, traced, report = quantized("llama", vocab_size=65536, num_hidden_layers=1)
    (rejection,) = record_of(report, "quantize_npu_linears").rejections
    assert "the last dim of x2 is 65536; at most 65535" in rejection.reason
    route = next(r for r in record_of(report, "quantize_npu_linears").routes if not r.chosen)
    assert route.module == "lm_head" and route.refused
    assert len([n for n in traced.graph.nodes if n.target is npu.npu_linear.default]) == 1
    assert len(traced.notes.quantized) == 4 and illegal_calls(traced, TARGET) == []


def test_nothing_is_rounded_unless_asked_for():
    _, traced, report = quantized("llama", quantization=None)
    assert record_of(report, "quantize_npu_linears").matches == 0 and traced.notes.quantized == []


# Legal calls of each operator, changed to illegal ones.

A2, GE = NpuTarget(), "ge"
HALF = torch.zeros(5, 64, dtype=torch.bfloat16)
INT8 = torch.zeros(5, 64, dtype=torch.int8)


def quant_matmul(**change):
    given = {
        "x1": INT8,
        "x2": torch.zeros(64, 16, dtype=torch.int8),
        "scale": torch.ones(16),
        "pertoken_scale": torch.ones(5),
        "bias": None,
        "output_dtype": 15,
        **change,
    }
    return npu.npu_quant_matmul.default, given


def swiglu(**change):
    given = {"x": torch.zeros(5, 256, dtype=torch.bfloat16), "activate_left": True, "quant_mode": 1, **change}
    return npu.npu_dequant_swiglu_quant.default, given


def norm(**change):
    given = {"x1": HALF, "x2": HALF, "gamma": HALF[0], "output_mask": [True, False], **change}
    return npu.npu_add_rms_norm_dynamic_quant.default, given


def rounding(**change):
    return npu.npu_dynamic_quant.default, {"input": HALF, **change}


def reasons(call, target=A2):
    overload, given = call
    return "; ".join(violations(Call.make(overload, target, **given)))


def quantize(**change):
    given = {"scales": torch.ones(1), "zero_points": torch.ones(1, dtype=torch.int32), "dtype": 12, "axis": -1}
    return npu.npu_quantize.default, {"input": HALF, **given, **change}


def norm_by_scales(half=False, **change):
    """A norm of bfloat16, or of float16, that rounds by scales."""
    dtype, of_offset = (torch.float16, torch.int32) if half else (torch.bfloat16, torch.bfloat16)
    given = {"x1": HALF.to(dtype), "x2": HALF.to(dtype), "gamma": torch.ones(64).to(dtype)}
    given["scales1"] = torch.ones(64, dtype=torch.float32 if half else dtype)
    return npu.npu_add_rms_norm_quant.default, {**given, "zero_points1": torch.ones(64).to(of_offset), **change}


BITS = torch.ones(16, dtype=torch.int64)
WIDE = torch.empty(64, 65536, dtype=torch.int8)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (quant_matmul(), ""),
        (quant_matmul(scale=torch.ones(16).bfloat16(), bias=torch.ones(16).bfloat16()), ""),
        (quant_matmul(output_dtype=5, bias=torch.ones(16)), ""),
        (quant_matmul(output_dtype=5, bias=torch.ones(16).half()), ""),
        (quant_matmul(x2=torch.zeros(16, 64, dtype=torch.int8).t()), ""),
        (quant_matmul(output_dtype=None), "output_dtype is None, int8; bfloat16 (15) or float16 (5)"),
        (quant_matmul(output_dtype=6), "output_dtype is 6, torch.float32"),
        (quant_matmul(output_dtype=5, scale=torch.ones(16).bfloat16()), "scale is torch.bfloat16 beside a result"),
        (quant_matmul(pertoken_scale=None), ""),
        (quant_matmul(pertoken_scale=None, bias=torch.ones(16, dtype=torch.int32)), ""),
        (quant_matmul(pertoken_scale=None, bias=torch.ones(16)), ""),
        (
            quant_matmul(pertoken_scale=None, output_dtype=5),
            "scale is torch.float32 beside a result of torch.float16",
        ),
        (quant_matmul(pertoken_scale=None, output_dtype=5, scale=BITS), ""),
        (quant_matmul(pertoken_scale=None, scale=BITS), "scale is torch.int64 beside a result of torch.bfloat16"),
        (quant_matmul(output_dtype=5, scale=BITS), "scale is torch.int64 beside a result of torch.float16"),
        (
            quant_matmul(pertoken_scale=None, output_dtype=5, scale=BITS, bias=torch.ones(16).half()),
            "bias is torch.float16; torch.int32 beside a result of torch.float16 without",
        ),
        (quantize(), ""),
        (quantize(zero_points=None), ""),
        (quantize(scales=torch.ones(64)), ""),
        (quantize(div_mode=False), "div_mode must be True"),
        (quantize(dtype=1), "dtype qint8 (12)"),
        (quantize(scales=torch.ones(5)), "scales is (5,)"),
        (quantize(scales=torch.ones(1, 1)), "scales has 2 dims"),
        (quantize(scales=torch.ones(1).half()), "scales is torch.float16"),
        (quantize(zero_points=torch.ones(1)), "zero_points is torch.float32"),
        (quant_matmul(pertoken_scale=torch.ones(5).bfloat16()), "pertoken_scale is torch.bfloat16"),
        (quant_matmul(pertoken_scale=torch.ones(16)), "pertoken_scale is (16,) beside x1 (5, 64)"),
        (quant_matmul(scale=torch.ones(64)), "scale is (64,) beside x1 (5, 64) and x2 (64, 16)"),
        (quant_matmul(output_dtype=5, bias=torch.ones(16).bfloat16()), "bias is torch.bfloat16"),
        (quant_matmul(bias=torch.ones(16).half()), "bias is torch.float16"),
        (quant_matmul(offset=torch.ones(16)), "offset is for results of int8"),
        (quant_matmul(x2=WIDE, scale=torch.ones(1)), "the last dim of x2 is 65536; at most 65535"),
        (quant_matmul(x2=WIDE[:, :65535], scale=torch.ones(1)), "x2 is neither contiguous nor the transposed view"),
        (quant_matmul(x2=WIDE[:, :8].contiguous()[:32]), "x1 is (5, 64) and x2 (32, 8)"),
        (quant_matmul(x1=HALF), "x1 is torch.bfloat16"),
        (swiglu(), ""),
        (swiglu(x=torch.zeros(5, 250, dtype=torch.float16)), ""),
        (swiglu(activate_left=False), "activate_left must be True"),
        (swiglu(quant_mode=0), "quant_mode 1"),
        (swiglu(x=torch.zeros(5, 3, 8, dtype=torch.bfloat16)), "x has 3 dims"),
        (swiglu(x=torch.zeros(5, 8, dtype=torch.int32)), "weight_scale and activation_scale are needed"),
        (swiglu(activation_scale=torch.ones(5, 1)), "activation_scale is for sums of torch.int32"),
        (swiglu(group_index=torch.ones(2, dtype=torch.int64)), ""),
        (swiglu(group_index=torch.ones(2, dtype=torch.int32)), "group_index is torch.int32"),
        (
            swiglu(group_index=torch.ones(2, dtype=torch.int64), x=torch.zeros(5, 192, dtype=torch.bfloat16)),
            "results of 96 with group_index",
        ),
        (
            swiglu(group_index=torch.ones(2, dtype=torch.int64), x=torch.zeros(1, 2 * 10496, dtype=torch.bfloat16)),
            "",
        ),
        (
            swiglu(group_index=torch.ones(2, dtype=torch.int64), x=torch.zeros(1, 2 * 10560, dtype=torch.bfloat16)),
            "results of 10560 with group_index",
        ),
        (norm(), ""),
        (norm(output_mask=None), "output_mask is None"),
        (norm(output_mask=[True, True]), "output_mask is [True, True]"),
        (norm(smooth_scale1=HALF[0]), "smooth_scale1 is given"),
        (norm(gamma=HALF[0].float()), "dtypes differ"),
        (norm(x1=HALF.float(), x2=HALF.float(), gamma=HALF[0].float()), "x1 is torch.float32"),
        (rounding(), ""),
        (rounding(input=HALF.float()), "input is torch.float32"),
        (rounding(input=HALF[0]), "input has 1 dims"),
        (rounding(quant_mode="pertensor"), "quant_mode must be 'pertoken'"),
        (rounding(dst_type=16), "dst_type int8"),
    ],
)
def test_limits(call, words):
    found = reasons(call)
    assert (words in found) if words else found == ""


@pytest.mark.parametrize(
    ("soc", "call", "words"),
    [
        ("Ascend910_9382", quant_matmul(), ""),
        ("Ascend950PR", quant_matmul(), ""),
        ("Ascend310P3", quant_matmul(output_dtype=5), "takes no pertoken_scale"),
        ("Ascend310P3", quant_matmul(output_dtype=5, pertoken_scale=None, scale=BITS), "turned ones only"),
        ("Ascend950PR", quantize(), "Ascend950PR does not run it"),
        ("Ascend950PR", swiglu(), "Ascend950PR does not run it"),
        ("Ascend310P3", rounding(input=HALF.half()), "Ascend310P3 does not run it"),
    ],
)
def test_limits_of_chips(soc, call, words):
    found = reasons(call, NpuTarget(soc))
    assert (words in found) if words else found == ""


SMALL = {name: torch.ones(5, 16).half() for name in ("x1", "x2")} | {"gamma": torch.ones(16).half()}


@pytest.mark.parametrize(
    ("soc", "call", "words"),
    [
        ("Ascend910B3", norm_by_scales(), ""),
        ("Ascend910B3", norm_by_scales(half=True), ""),
        ("Ascend910_9382", norm_by_scales(zero_points1=None), ""),
        ("Ascend310P3", norm_by_scales(half=True), ""),
        ("Ascend310P3", norm_by_scales(half=True, **SMALL, scales1=torch.ones(16), zero_points1=None), "at least 32"),
        ("Ascend950PR", norm_by_scales(), "Ascend950PR does not run it"),
        ("Ascend910B3", norm_by_scales(scales1=torch.ones(64), zero_points1=torch.ones(64).int()), ""),
        ("Ascend910_9382", norm_by_scales(scales1=torch.ones(64), zero_points1=None), ""),
        (
            "Ascend910B3",
            norm_by_scales(scales1=torch.ones(64)),
            "scales1 and zero_points1 are torch.float32 and torch.bfloat16; float32 and int32, or bfloat16 both",
        ),
        ("Ascend910B3", norm_by_scales(zero_points1=torch.ones(64).int()), "torch.bfloat16 and torch.int32; float32"),
        (
            "Ascend910B3",
            norm_by_scales(half=True, scales1=torch.ones(64).bfloat16(), zero_points1=None),
            "torch.bfloat16 and None; float32 and int32 beside torch.float16",
        ),
        ("Ascend910B3", norm_by_scales(scales1=torch.ones(1).bfloat16()), "scales1 is (1,); (64,)"),
        ("Ascend910B3", norm_by_scales(beta=torch.ones(64).bfloat16()), "beta is given"),
        ("Ascend910B3", norm_by_scales(scales2=torch.ones(64).bfloat16()), "scales2 is given"),
        ("Ascend910B3", norm_by_scales(div_mode=False), "axis must be -1, div_mode True, dst_type int8"),
        ("Ascend910B3", norm_by_scales(gamma=torch.ones(64)), "dtypes differ"),
    ],
)
def test_limits_of_norms_that_round_by_scales(soc, call, words):
    found = reasons(call, NpuTarget(soc))
    assert (words in found) if words else found == ""
