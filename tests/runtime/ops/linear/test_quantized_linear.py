"""pagoda::quantized_linear: how weights are rounded and stored, and the kernel against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from quantized_oracle import rounded_rows_linear
from stored_weights import stored_weight
from torch.nn import functional as F

from torch_pagoda.runtime.ops.linear import quantized_weight
from torch_pagoda.runtime.ops.linear.quantized_linear import (
    quantized_linear,
    quantized_linear_cpu,
    quantized_linear_reference,
)
from torch_pagoda.runtime.ops.linear.quantized_weight import (
    Quantization,
    pack_stored,
    pack_weight,
    packed_bytes,
    quantize_weight,
    restored_weight,
    round_weight,
    scheme_of,
    unpack_weight,
)

SCHEMES = [
    Quantization(bits, group_size, input_bits)
    for bits, group_size in ((8, 0), (8, 128), (4, 64), (4, 128), (4, 0), (4, 32), (8, 32), (4, 16))
    for input_bits in (8, 16)
]
ROUNDED = [scheme for scheme in SCHEMES if scheme.input_bits == 8]


def names(scheme):
    return f"w{scheme.bits}a{scheme.input_bits}-g{scheme.group_size}"


def call(operator, x, weight, bias, outputs, scheme):
    return operator(x, weight, bias, outputs, scheme.bits, scheme.group_size, scheme.input_bits)


def stored_error(weight, scheme):
    """Root mean square of what rounding changes, relative to that of the weights."""
    packed = quantize_weight(weight, scheme)
    restored = restored_weight(*unpack_weight(packed, *weight.shape, scheme), scheme)
    return ((restored - weight.float()).square().mean() / weight.float().square().mean()).sqrt().item()


@pytest.mark.parametrize("scheme", ROUNDED, ids=names)
@pytest.mark.parametrize("shape", [(64, 64), (100, 200), (1, 1), (17, 576), (130, 129)])
def test_a_packed_weight_is_unpacked_to_the_same(shape, scheme):
    whole, scales = round_weight(torch.randn(shape), scheme)
    packed = pack_weight(whole, scales, scheme)
    assert packed.shape == (packed_bytes(*shape, scheme),)
    found, found_scales = unpack_weight(packed, *shape, scheme)
    assert torch.equal(found, whole) and torch.equal(found_scales, scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scheme", ROUNDED, ids=names)
@pytest.mark.parametrize("transposed", [False, True])
def test_the_kernel_rounds_as_the_reference_does(scheme, dtype, transposed):
    weight = torch.randn(200, 100).to(dtype).T if transposed else torch.randn(100, 200).to(dtype)
    whole, scales = round_weight(weight, scheme)
    found, found_scales = unpack_weight(quantize_weight(weight, scheme), 100, 200, scheme)
    # Few differ: numbers half way between two, and of 4 bits groups that two places serve equally well.
    assert ((found_scales / scales - 1).abs() > 1e-5).float().mean() < 0.03
    assert (found != whole).float().mean() < 0.01
    assert (found.int() - whole.int()).abs().max() <= 1
    errors = [
        (restored_weight(*each, scheme) - weight.float()).square().sum()
        for each in ((found, found_scales), (whole, scales))
    ]
    torch.testing.assert_close(errors[0], errors[1], rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("bits", "group_size", "limit"), [(8, 0, 0.009), (8, 128, 0.007), (4, 64, 0.09), (4, 128, 0.1), (4, 0, 0.13)]
)
def test_rounding_loses_little_of_normal_weights(bits, group_size, limit):
    assert stored_error(torch.randn(64, 1024), Quantization(bits, group_size, 8)) < limit


def test_four_bits_lose_less_than_the_largest_entry_at_the_edge_does():
    weight = torch.randn(64, 1024)
    scale = weight.view(64, 8, 128).abs().amax(-1, keepdim=True) / 7
    plain = ((weight.view(64, 8, 128) / scale).round() * scale).view(64, 1024)
    error = ((plain - weight).square().mean() / weight.square().mean()).sqrt().item()
    assert stored_error(weight, Quantization(4, 128, 8)) < 0.95 * error


@pytest.mark.parametrize("scheme", ROUNDED, ids=names)
def test_zeros_stay_zero_and_bad_numbers_stay_bad(scheme):
    weight = torch.randn(5, 256)
    weight[0] = 0
    weight[1, 3] = float("nan")
    weight[2, 250] = float("inf")
    weight[3] = 1e-38
    restored = restored_weight(*unpack_weight(quantize_weight(weight, scheme), 5, 256, scheme), scheme)
    assert (restored[0] == 0).all() and (restored[3] == 0).all()
    assert restored[1, :16].isnan().all() and restored[2, -16:].isnan().all()
    assert restored[4].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES, ids=names)
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 16, 33, 100])
@pytest.mark.parametrize("shape", [(64, 64), (200, 100), (70, 576)])
def test_the_kernel_equals_the_reference(rows, shape, scheme, dtype):
    outputs, inputs = shape
    x, bias = torch.randn(rows, inputs).to(dtype), torch.randn(outputs).to(dtype)
    packed = quantize_weight(torch.randn(outputs, inputs) / inputs**0.5, scheme)
    found = call(quantized_linear_cpu, x, packed, bias, outputs, scheme)
    expected = call(quantized_linear_reference, x, packed, bias, outputs, scheme)
    assert (found.dtype, found.shape, found.is_contiguous()) == (dtype, expected.shape, True)
    # Sums in float32, in another order; the result is rounded once. The terms' magnitudes add up to about
    # 0.6 * sqrt(inputs), of which both sums lose a few units in the last place.
    epsilon = torch.finfo(dtype).eps if dtype != torch.float32 else 2e-6
    torch.testing.assert_close(found, expected, rtol=epsilon, atol=2e-7 * inputs**0.5)


@pytest.mark.parametrize("scheme", SCHEMES, ids=names)
def test_a_row_does_not_depend_on_its_batch_mates(scheme):
    x = torch.randn(70, 576).bfloat16()
    packed = quantize_weight(torch.randn(100, 576), scheme)
    together = call(quantized_linear_cpu, x, packed, None, 100, scheme)
    for rows in (1, 3, 6, 7, 20, 40):
        apart = [call(quantized_linear_cpu, part, packed, None, 100, scheme) for part in x.split(rows)]
        assert torch.equal(torch.cat(apart), together)


@pytest.mark.parametrize(
    "form",
    [
        *("int4/g128/f16+z", "int4/g32/bf16+z+order", "int8/g32/f32+z", "int4/g64/f16+order", "e2m1/g32/bf16"),
        *("affine4/g32/f32", "affine8/g32/f32", "affine4/g16/f32+order", "affine8/g16/f32", "int8/g16/f32"),
    ],
)
@pytest.mark.parametrize(("outputs", "inputs"), [(70, 576), (64, 1024), (130, 100)])
def test_zeros_and_order_of_stored_weights(form, outputs, inputs):
    """Against the dense weight in float64, and row by row against the whole batch."""
    weight = stored_weight(form, outputs, inputs).to(torch.float32)
    packed, given = pack_stored(weight), (outputs, *scheme_of(weight.form).arguments(weight.order))
    x = torch.randn(40, inputs)
    found = quantized_linear_cpu(x, packed, None, *given)
    expected = F.linear(x.double(), weight.dense().double())
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    reference = quantized_linear_reference(x, packed, None, *given)
    torch.testing.assert_close(found, reference, rtol=2e-6, atol=2e-6 * float(expected.abs().max()))
    for rows in (1, 3, 6, 7, 20):
        apart = [quantized_linear_cpu(part, packed, None, *given) for part in x.split(rows)]
        assert torch.equal(torch.cat(apart), found)


@pytest.mark.parametrize("form", ["int4/g256/f32/x8", "int4/g128/f32/x8", "int4/g32/f16+z/x8", "int8/g128/bf16/x8"])
@pytest.mark.parametrize(("outputs", "inputs"), [(70, 4096), (130, 576)])
def test_inputs_of_8_bits_have_one_scale_for_a_row(form, outputs, inputs):
    """However many groups a weight has: against the formula in float64, and row by row against the whole batch."""
    weight = stored_weight(form, outputs, inputs).to(torch.float32)
    scheme = scheme_of(weight.form, None)
    assert scheme.whole_rows and scheme.input_bits == 8
    packed, given = pack_stored(weight), (outputs, *scheme.arguments())
    x = torch.randn(40, inputs) * torch.logspace(-2, 1, inputs)  # so that groups by themselves had other scales
    found = quantized_linear_cpu(x, packed, None, *given)
    expected = rounded_rows_linear(x.double(), weight.dense(), None)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    reference = quantized_linear_reference(x, packed, None, *given)
    assert (reference - expected).abs().max() < 1e-5 * expected.abs().max()
    for rows in (1, 3, 6, 7, 20):
        apart = [quantized_linear_cpu(part, packed, None, *given) for part in x.split(rows)]
        assert torch.equal(torch.cat(apart), found)
    of_groups = quantized_linear_cpu(x, packed, None, *given[:-3])
    assert (of_groups - expected).abs().max() > 1e-3 * expected.abs().max(), "a scale for each group: other numbers"


def test_a_bad_input_spoils_its_whole_row():
    weight = stored_weight("int4/g128/f32/x8", 64, 512).to(torch.float32)
    given = (64, *scheme_of(weight.form, None).arguments())
    x = torch.randn(9, 512)
    expected = quantized_linear_cpu(x, pack_stored(weight), None, *given)
    x[3, 500], x[5] = float("nan"), 0
    found = quantized_linear_cpu(x, pack_stored(weight), None, *given)
    assert found[3].isnan().all() and (found[5] == 0).all()
    kept = [row for row in range(9) if row not in (3, 5)]
    assert torch.equal(found[kept], expected[kept])


@pytest.mark.parametrize("form", ["int4/g128/f16+z", "int4/g32/bf16"])
def test_a_layout_that_is_read_otherwise_shows(form):
    """Mutants of what the kernel is told: no zeros, another group size, no order."""
    weight = stored_weight(form, 64, 512).to(torch.float32)
    scheme = scheme_of(weight.form)
    for wrong in (Quantization(4, 128 if scheme.group_size == 32 else 64, 16), Quantization(8, 0, 16, True)):
        with pytest.raises(ValueError, match=r"has \d+ bytes"):
            quantized_linear_cpu(torch.randn(2, 512), pack_stored(weight), None, 64, *wrong.arguments())
    order = torch.arange(511, -1, -1).to(torch.int32)
    ordered = weight.replaced(form=replace(weight.form, ordered=True), order=order)
    x, given = torch.randn(2, 512), (pack_stored(ordered), None, 64)
    forwards = quantized_linear_cpu(x, *given, *scheme.arguments())
    backwards = quantized_linear_cpu(x, *given, *scheme.arguments(ordered.order))
    assert not torch.allclose(forwards, backwards, rtol=0.1)
    torch.testing.assert_close(backwards, quantized_linear_cpu(x.flip(1), *given, *scheme.arguments()))


def test_an_order_that_does_not_fit_is_refused():
    weight = stored_weight("int4/g64/f16", 64, 128)
    for order in (torch.arange(128), torch.arange(64).to(torch.int32)):
        with pytest.raises(ValueError, match="order is"):
            quantized_linear_cpu(torch.randn(2, 128), pack_stored(weight), None, 64, 4, 64, 16, False, order)


@pytest.mark.parametrize("scheme", [SCHEMES[0], SCHEMES[6], SCHEMES[7]], ids=names)
def test_rows_may_be_strided_and_batched(scheme):
    packed = quantize_weight(torch.randn(48, 128), scheme)
    wide = torch.randn(2, 9, 300)
    for x in (wide[..., :128], wide[..., 1:257:2], wide[:, :, 100:228].transpose(0, 1), torch.randn(128)):
        found = call(quantized_linear_cpu, x, packed, None, 48, scheme)
        assert torch.equal(found, call(quantized_linear_cpu, x.contiguous(), packed, None, 48, scheme))
        assert found.shape == (*x.shape[:-1], 48)
    assert call(quantized_linear_cpu, torch.randn(0, 128), packed, None, 48, scheme).shape == (0, 48)


@pytest.mark.parametrize("scheme", SCHEMES, ids=names)
def test_rounding_bounds_the_error_against_the_plain_linear(scheme):
    x, weight = torch.randn(64, 1024), torch.randn(96, 1024)
    found = call(quantized_linear_cpu, x, quantize_weight(weight, scheme), None, 96, scheme)
    plain = F.linear(x, weight)
    error = ((found - plain).square().mean() / plain.square().mean()).sqrt().item()
    # Errors of weights and inputs are independent, and as large in the sum as in each of them.
    of_weights = stored_error(weight, scheme)
    of_inputs = 0.0075 if scheme.input_bits == 8 else 0.0
    assert 0.5 * of_weights < error < 1.2 * (of_weights**2 + of_inputs**2) ** 0.5


@pytest.mark.parametrize("scheme", SCHEMES[:2], ids=names)
def test_bad_inputs_spoil_their_own_row_only(scheme):
    packed = quantize_weight(torch.randn(64, 64), scheme)
    x = torch.randn(40, 64)
    expected = call(quantized_linear_cpu, x, packed, None, 64, scheme)
    x[3, 5], x[20, 0], x[39] = float("nan"), float("inf"), 0
    found = call(quantized_linear_cpu, x, packed, None, 64, scheme)
    assert found[3].isnan().all() and found[20].isnan().all() and (found[39] == 0).all()
    kept = [row for row in range(39) if row not in (3, 20)]
    assert torch.equal(found[kept], expected[kept])


def test_weights_that_are_not_rounded_yet_are_rounded_in_passing():
    scheme = SCHEMES[4]
    x, weight = torch.randn(3, 200), torch.randn(40, 200)
    found = call(quantized_linear, x, weight, None, 40, scheme)
    torch.testing.assert_close(found, call(quantized_linear, x, quantize_weight(weight, scheme), None, 40, scheme))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, 0, 8), "bits=3"),
        ((8, 48, 8), "group_size=48"),
        ((8, -64, 8), "group_size=-64"),
        ((4, 0, 4), "input_bits=4"),
        ((4, 128, 16, False, "int", None, True), "whole_rows=True is for inputs of 8 bits"),
        ((4, 0, 8, False, "int", None, True), "weights in groups"),
    ],
)
def test_bad_schemes_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Quantization(*arguments)


@pytest.mark.parametrize("operator", [quantized_linear_reference, quantized_linear_cpu])
def test_a_packed_weight_of_another_size_is_refused(operator):
    scheme = SCHEMES[0]
    packed = quantize_weight(torch.randn(64, 128), scheme)
    with pytest.raises(ValueError, match=r"\[64, 64\] at 8 bits, group_size=0, has 4352 bytes"):
        call(operator, torch.randn(2, 64), packed, None, 64, scheme)


def test_without_kernels_the_reference_runs(monkeypatch):
    scheme = SCHEMES[4]
    weight, x = torch.randn(40, 200), torch.randn(3, 200)
    expected = call(quantized_linear_cpu, x, quantize_weight(weight, scheme), None, 40, scheme)
    monkeypatch.setattr(quantized_weight, "kernel_function", lambda name: None)
    monkeypatch.setattr("torch_pagoda.runtime.ops.linear.quantized_linear.kernel_function", lambda name: None)
    found = call(quantized_linear_cpu, x, quantize_weight(weight, scheme), None, 40, scheme)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
