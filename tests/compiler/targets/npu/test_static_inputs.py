"""Checkpoints that say how inputs are rounded, lowered for an NPU: the formula's numbers, exact sums, mistakes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from npu_calls import illegal_calls
from quantized_checkpoints import quantize_folder
from quantized_graphs import program_of, row_errors_of, stored
from quantized_oracle import given_inputs

from torch_pagoda.checkpoint.loading import load_model
from torch_pagoda.compiler.build import build_unpacked
from torch_pagoda.compiler.options import CompileOptions
from torch_pagoda.compiler.report import CompileReport
from torch_pagoda.compiler.targets.npu.weights import quantized_weights, weights
from torch_pagoda.compiler.targets.npu.weights.weights import prepare_weights
from torch_pagoda.compiler.verify.self_check import WEIGHT_TOLERANCE, reference_of_model
from torch_pagoda.passes import UnsupportedModel
from torch_pagoda.passes.graph.fx_nodes import value
from torch_pagoda.runtime.ops.linear.stored_weight import StoredWeight
from torch_pagoda.runtime.ops.linear.weight_format import InputScale

from legal_models import build_legal_model

npu = torch.ops.npu
NAMES = ("slim-w8a8-static", "ct-w8a8-static", "ct-w8a8-static-asym")
QUICK = "slim-w8a8-static"


def of(traced, operator):
    return [node for node in traced.graph.nodes if node.target is operator.default]


def given_of(model_type, name, tmp_path, **overrides):
    """Layer → scale and offset of its inputs, as the loaded weights have them."""
    build_legal_model(model_type, **overrides).save_pretrained(tmp_path)
    quantize_folder(tmp_path, name)
    loaded = load_model(str(tmp_path), torch.float32, False, torch.device("cpu"))
    weights_of = dict(loaded.named_parameters())
    return {
        key.removesuffix(".weight"): tuple(weight.input_scale)
        for key, weight in weights_of.items()
        if isinstance(weight, StoredWeight) and weight.input_scale is not None
    }


@pytest.fixture
def reference(tmp_path):
    """A function of a model and a format: what transformers says with such inputs."""

    def make(model_type, name):
        given = given_of(model_type, name, tmp_path)
        model = stored(model_type, name)[0]
        with given_inputs(model, given):
            return reference_of_model(model)

    return make


CASES = [
    ("llama", "slim-w8a8-static"),
    ("llama", "ct-w8a8-static"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("llama", "ct-w8a8-static-asym"),
            ("qwen2", "ct-w8a8-static"),
            ("qwen3_moe", "slim-w8a8-static"),
        )
    ),
]


@pytest.mark.parametrize(("model_type", "name"), CASES)
def test_the_logits_are_those_of_the_formula(model_type, name, reference):
    _, traced, report = stored(model_type, name)
    record = next(record for record in report.passes if record.name == "quantize_npu_linears")
    count = 4 if model_type == "qwen3_moe" else 8  # its experts have scales for each row
    assert record.matches == count and {r.reason for r in record.rejections} <= {"it is a router"}, record.rejections
    assert illegal_calls(traced, traced.npu) == []
    products = of(traced, npu.npu_quant_matmul)
    assert len(products) == count and all("pertoken_scale" not in node.kwargs for node in products)
    # Norms behind a sum round by themselves; experts have a router beside them.
    fused = 1 if model_type == "qwen3_moe" else 3
    assert len(of(traced, npu.npu_quantize)) == count - fused
    assert len(of(traced, npu.npu_add_rms_norm_quant)) == fused
    errors = row_errors_of(program_of(traced), reference(model_type, name))
    # A number that lies between two steps falls to either side by float32's rounding.
    assert errors.median() < 1e-5
    assert errors.quantile(0.6) < 1e-3 and errors.quantile(0.97) < 0.1


def test_roundings_are_shared_and_read_straight():
    _, traced, _ = stored("llama", QUICK)
    for node in of(traced, npu.npu_quantize):
        _, scale, offset, dtype, axis, divides = node.args
        assert (scale.op, offset.op, dtype, axis, divides) == ("placeholder", "placeholder", 12, -1, True)
        assert value(scale).dtype is torch.float32 and value(offset).dtype is torch.int32
    for node in of(traced, npu.npu_add_rms_norm_quant):
        gamma, scales, offsets = node.args[2:]
        assert (scales.op, offsets.op) == ("placeholder", "placeholder")
        assert value(scales).shape == value(offsets).shape == value(gamma).shape
    for node in of(traced, npu.npu_quant_matmul):
        bias = node.kwargs["bias"]
        assert bias.op == "placeholder" and value(bias).dtype is torch.int32
    _, plain, _ = stored("llama", "ct-w8a8-static")
    assert all(node.args[2] is None for node in of(plain, npu.npu_quantize)), "symmetric ones have no offset"
    assert all(node.args[4] is None for node in of(plain, npu.npu_add_rms_norm_quant))
    assert all(node.kwargs["bias"] is None for node in of(plain, npu.npu_quant_matmul))


@pytest.mark.parametrize(
    ("dtype", "code", "scales"),
    [(torch.bfloat16, 15, torch.float32), pytest.param(torch.float16, 5, torch.int64, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("name", ["ct-w8a8-static", pytest.param("ct-w8a8-static-asym", marks=pytest.mark.slow)])
def test_built_and_compared(dtype, code, scales, name, tmp_path):
    build_legal_model("qwen2", dtype=dtype).save_pretrained(tmp_path)
    quantize_folder(tmp_path, name)
    model = load_model(str(tmp_path), "auto", False, torch.device("cpu"))
    report = CompileReport("qwen2")
    options = CompileOptions(target="npu", codegen="none")
    traced = build_unpacked(model, options, report=report, owns_weights=True).traced
    assert report.verdict.ok and report.verdict.tolerance == WEIGHT_TOLERANCE[8]
    assert illegal_calls(traced, traced.npu) == []
    products = of(traced, npu.npu_quant_matmul)
    assert len(products) == 8 and {n.kwargs["output_dtype"] for n in products} == {code}
    biased = [n.kwargs["bias"] for n in products if n.kwargs["bias"] is not None]
    whole = scales is torch.int64 or name.endswith("asym")
    assert len(biased) == (8 if name.endswith("asym") else 2)
    assert {value(bias).dtype for bias in biased} == {torch.int32 if whole else dtype}
    assert {traced.constants[i.scales].dtype for i in traced.notes.quantized} == {scales}


def without_offset(tensors, inputs):
    tensors[inputs.whole_bias] = torch.zeros_like(tensors[inputs.whole_bias])


def half_a_step_more(tensors, inputs):
    tensors[inputs.whole_bias] = tensors[inputs.whole_bias] + 1


def scales_of_weights(tensors, inputs):
    tensors[inputs.scales] = tensors[inputs.scales] / inputs.quantization.input_scale.scale


def scales_of_others(tensors, inputs):
    tensors[inputs.scales] = tensors[inputs.scales].roll(1)


@pytest.mark.parametrize("mistake", [without_offset, half_a_step_more, scales_of_weights, scales_of_others])
def test_what_is_made_is_compared(mistake, monkeypatch):
    made = quantized_weights.make_inputs

    def wrongly(weight, inputs, bias=None):
        tensors = made(weight, inputs, bias)
        mistake(tensors, inputs)
        return tensors

    monkeypatch.setattr(weights, "make_inputs", wrongly)
    _, traced, _ = stored("llama", QUICK)
    with pytest.raises(UnsupportedModel, match=r"(is|are) wrong"):
        prepare_weights(traced.copy(), fractal_nz=False, release=False, check=True)


@pytest.mark.parametrize(
    ("name", "dtype", "kept"),
    [
        ("slim-w8a8-static", torch.bfloat16, torch.bfloat16),
        ("ct-w8a8-static", torch.bfloat16, torch.float32),
        pytest.param("ct-w8a8-static", torch.float16, torch.float32, marks=pytest.mark.slow),
    ],
)
def test_scales_that_are_no_bfloat16_stay_in_float32(name, dtype, kept):
    _, traced, report = stored("llama", name, dtype=dtype)
    record = next(record for record in report.passes if record.name == "fuse_npu_quantization")
    norms = of(traced, npu.npu_add_rms_norm_quant)
    assert len(norms) == record.matches == 3
    stated = {float(traced.constants[node.args[1].name]) for node in of(traced, npu.npu_quantize)}
    for node in norms:
        table = traced.constants[node.args[3].name]
        assert table.dtype is kept and (table == table[0]).all()
        assert len(table) == value(node.args[2]).shape[0] and float(table[0]) not in stated
    assert illegal_calls(traced, traced.npu) == []


def other_scale(traced, node):
    name = node.args[3].name
    traced.constants[name] = traced.constants[name] * 1.5


def no_offset(traced, node):
    node.args = (*node.args[:4], None)


@pytest.mark.parametrize("mistake", [other_scale, no_offset])
def test_mistakes_of_norms_that_round_are_no_rounding(mistake, reference):
    _, traced, _ = stored("llama", QUICK)
    wrong = traced.copy()
    for node in of(wrong, npu.npu_add_rms_norm_quant):
        mistake(wrong, node)
    assert row_errors_of(program_of(wrong), reference("llama", QUICK)).quantile(0.1) > 0.1


def other_offset(node):
    node.args = (*node.args[:2], None, *node.args[3:])


def times_the_scale(node):
    node.args = (*node.args[:5], False)


@pytest.mark.parametrize("mistake", [other_offset, times_the_scale])
def test_mistakes_are_no_rounding(mistake, reference):
    _, traced, _ = stored("llama", QUICK)
    wrong = traced.copy()
    for node in of(wrong, npu.npu_quantize):
        mistake(node)
    assert row_errors_of(program_of(wrong), reference("llama", QUICK)).quantile(0.1) > 0.1


def test_a_bias_beyond_int32_is_refused():
    _, traced, _ = stored("qwen2", "ct-w8a8-static-asym")
    inputs = next(i for i in traced.notes.quantized if i.bias)
    copy = traced.copy()
    for name in copy.notes.merged.get(inputs.bias, (inputs.bias,)):
        copy.constants[name] = torch.full_like(copy.constants[name], 1e12)
    with pytest.raises(UnsupportedModel, match="is not an int32 in steps of its scales; use input_bits=16"):
        prepare_weights(copy, fractal_nz=False, release=False)


def test_scales_that_vanish_beside_those_of_the_inputs_are_refused():
    _, traced, _ = stored("llama", QUICK)
    copy = traced.copy()
    copy.notes.quantized[:] = [
        replace(inputs, quantization=replace(inputs.quantization, input_scale=InputScale(2.0**-149)))
        for inputs in copy.notes.quantized
    ]
    with pytest.raises(UnsupportedModel, match="are 0 or infinite in float32; use input_bits=16"):
        prepare_weights(copy, fractal_nz=False, release=False)


def test_chips_without_the_operator_keep_floats():
    _, traced, report = stored("llama", QUICK, soc="Ascend950PR")
    record = next(record for record in report.passes if record.name == "quantize_npu_linears")
    reasons = {rejection.reason for rejection in record.rejections}
    assert record.matches == 0 and reasons == {"Ascend950PR does not run it"}
    assert illegal_calls(traced, traced.npu) == []
