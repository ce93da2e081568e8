"""W4A8 in groups on an NPU: the formula's numbers, real sizes, what linking makes, and mistakes that it finds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from quantized_graphs import program_of, row_errors_of, stored
from quantized_oracle import inputs_of_8_bits, rounded_rows_linear
from stored_weights import stored_weight

from torch_pagoda.compiler.targets.npu.weights.quantized_weights import check_inputs, make_inputs
from torch_pagoda.compiler.targets.npu.weights.weights import prepare_weights
from torch_pagoda.compiler.verify.self_check import check, reference_of_model
from torch_pagoda.passes import UnsupportedModel
from torch_pagoda.passes.graph.fx_nodes import value
from torch_pagoda.passes.graph.notes import QuantizedInputs
from torch_pagoda.passes.lower.npu.quantized.quantized_inputs import QuantizedInputsOf
from torch_pagoda.runtime.ops.linear.quantized_weight import Quantization, scheme_of
from torch_pagoda.runtime.ops.npu.int4 import pack_int4, unpack_int4
from torch_pagoda.runtime.ops.npu.numerics import bits_of_float, float_of_bits

npu = torch.ops.npu
SIZES = {"llama": {"intermediate_size": 512}, "qwen3_moe": {"moe_intermediate_size": 512}}


@pytest.mark.parametrize(
    ("model_type", "graph_mode"),
    [
        ("llama", "aclgraph"),
        ("qwen3_moe", "aclgraph"),
        pytest.param("qwen3_moe", "ge", marks=pytest.mark.slow),
    ],
)
def test_groups_of_256_are_what_the_formula_says(model_type, graph_mode):
    model, traced, _ = stored(model_type, "slim-w4a8-g256", graph_mode=graph_mode, **SIZES[model_type])
    made = [inputs for inputs in traced.notes.quantized if inputs.sums]
    assert made and {inputs.quantization for inputs in made} == {Quantization(4, 256, 8, whole_rows=True)}
    with inputs_of_8_bits(model):
        reference = reference_of_model(model)
    program = program_of(traced)
    if graph_mode == "aclgraph":
        errors = row_errors_of(program, reference)
        # A number that lies between two steps falls to either side by float32's rounding.
        assert errors.median() < 1e-5 and errors.quantile(0.6) < 1e-3 and errors.quantile(0.97) < 0.1
    assert check(program, reference_of_model(model), weight_bits=8).ok


@pytest.mark.parametrize(
    ("model_type", "name", "graph_mode"),
    [
        ("llama", "slim-w4a8-g256", "ge"),
        pytest.param("llama", "slim-w4a8-g128", "aclgraph", marks=pytest.mark.slow),
        ("qwen3_moe", "slim-w4a8-g128", "aclgraph"),
    ],
)
def test_forms_without_a_product_keep_16_bits(model_type, name, graph_mode):
    model, traced, _ = stored(model_type, name, graph_mode=graph_mode, **SIZES[model_type])
    assert not any(inputs.sums for inputs in traced.notes.quantized)
    assert row_errors_of(program_of(traced), reference_of_model(model)).max() < 1e-3


def inputs_of(bits=8, group=256, dtype=torch.int64, sums="sums"):
    scheme = scheme_of(stored_weight(f"int4/g{group}/f32/x8").form, None if bits == 8 else 16)
    return QuantizedInputs("weight", "numbers", "scales", "", scheme, dtype, stored=True, sums=sums)


def test_a_layer_of_4096_inputs():
    """Scales of float32 are rounded to 19 bits, ties to even, and the sums are those of what the chip reads."""
    weight, inputs = stored_weight("int4/g256/f32/x8", 128, 4096).to(torch.float32), inputs_of()
    made = make_inputs(weight, inputs)
    check_inputs(weight, inputs, made)
    assert made["numbers"].shape == (4096, 16) and made["scales"].shape == (16, 128) and made["sums"].shape == (128,)
    scales = float_of_bits(made["scales"])
    assert (made["scales"] & 0x1FFF == 0).all() and (made["scales"] >> 32 == 0).all()
    off = (scales / weight.scales.t() - 1).abs()
    assert 2**-13 < off.max() <= 2**-11, "to the nearest"
    x = torch.randn(9, 4096)
    whole, of_rows = npu.npu_dynamic_quant(x)
    found = npu.npu_quant_matmul(
        whole,
        made["numbers"],
        made["scales"],
        offset=made["sums"],
        pertoken_scale=of_rows[:, None],
        output_dtype=6,
        group_sizes=[0, 0, 256],
    )
    kept = weight.replaced(scales=scales.t().contiguous())
    exact = rounded_rows_linear(x.double(), kept.dense(), None)
    assert (found - exact).abs().max() < 1e-5 * exact.abs().max()
    stated = rounded_rows_linear(x.double(), weight.dense(), None)
    assert (found - stated).abs().max() < 1e-3 * stated.abs().max()


def test_ties_go_to_even_and_19_bits_are_kept():
    weight = stored_weight("int4/g256/f32/x8", 8, 512).to(torch.float32)
    step = 2.0**-10
    given = torch.tensor([1.0, 1 + step, 1 + step / 2, 1 + 1.5 * step, -1 - 1.5 * step, 1 + 0.51 * step, 2.0, 0.5])
    made = make_inputs(weight.replaced(scales=given[:, None].expand(8, 2).contiguous()), inputs_of())
    expected = [1.0, 1 + step, 1.0, 1 + 2 * step, -1 - 2 * step, 1 + step, 2.0, 0.5]
    assert float_of_bits(made["scales"])[0].tolist() == expected


def no_sums(made):
    made["sums"].zero_()


def sums_of_others(made):
    made["sums"] = made["sums"].roll(1)


def other_groups(made):
    made["scales"] = made["scales"].roll(1, 0)


def exchanged_halves(made):
    made["numbers"] = pack_int4(unpack_int4(made["numbers"]).unflatten(1, (-1, 2)).flip(2).flatten(1))


@pytest.mark.parametrize("mistake", [no_sums, sums_of_others, other_groups, exchanged_halves])
def test_mistakes_are_found(mistake):
    weight, inputs = stored_weight("int4/g256/f32/x8", 128, 1024).to(torch.float32), inputs_of()
    made = make_inputs(weight, inputs)
    mistake(made)
    with pytest.raises(UnsupportedModel, match="are wrong"):
        check_inputs(weight, inputs, made)


def test_scales_that_are_cut_instead_of_rounded_are_found():
    """The sums are those of the cut ones."""
    weight, inputs = stored_weight("int4/g256/f32/x8", 128, 1024).to(torch.float32), inputs_of()
    cut = float_of_bits(bits_of_float(weight.scales) & ~0x1FFF)
    made = make_inputs(weight.replaced(scales=cut), inputs)
    assert torch.equal(float_of_bits(made["scales"]), cut.t())
    with pytest.raises(UnsupportedModel, match="entries of the weight 'weight' are wrong"):
        check_inputs(weight, inputs, made)


def test_a_form_that_something_reads_stays_beside_another():
    """A weight of two products, the second of which takes no rows of int8."""
    _, traced, _ = stored.__wrapped__("llama", "slim-w4a8-g256", graph_mode="aclgraph", **SIZES["llama"])
    known = next(inputs for inputs in traced.notes.quantized if inputs.sums)
    weight, forms = traced.placeholder(known.source), QuantizedInputsOf(traced)
    with traced.before(traced.output):
        first = forms.of(weight, known.quantization, torch.int64, sums=True)
        for read in (first.numbers, first.scales, first.sums):
            traced.call(torch.ops.aten.neg.default, read)
        forms.forget(weight)
        wide = replace(known.quantization, input_bits=16, whole_rows=False)
        second = forms.of(weight, wide, torch.bfloat16)
        for read in (second.numbers, second.scales):
            traced.call(torch.ops.aten.neg.default, read)
    assert value(first.scales).dtype is torch.int64 and value(second.scales).dtype is torch.bfloat16
    assert second.offsets is None and second.sums is None
    forms.close()
    prepare_weights(traced, fractal_nz=False, release=True, check=True)
    made = traced.constants
    assert torch.equal(made[first.numbers.name], made[second.numbers.name])
    assert torch.equal(float_of_bits(made[first.scales.name]).bfloat16(), made[second.scales.name])


def test_scales_that_19_bits_do_not_hold():
    weight = stored_weight("int4/g256/f32/x8", 8, 512).to(torch.float32)
    for bad in (torch.finfo(torch.float32).max, 1e-42):
        with pytest.raises(UnsupportedModel, match="0 or infinite in 19 bits; use input_bits=16"):
            make_inputs(weight.replaced(scales=torch.full((8, 2), bad)), inputs_of())


def test_scales_of_16_bits_inputs_stay_what_they_are():
    weight = stored_weight("int4/g128/f32/x8", 64, 4096).to(torch.float32)
    inputs = replace(inputs_of(16, 128, torch.float32, sums=""), offsets="")
    made = make_inputs(weight, inputs)
    check_inputs(weight, inputs, made)
    assert made["scales"].shape == (32, 64) and torch.equal(made["scales"], weight.scales.t())
