"""Quantization: scales, rounding half to even, ranges."""

from __future__ import annotations

import pytest
import torch

import torch_pagoda.runtime.ops.npu  # noqa: F401  registers the operators
from torch_pagoda.runtime.ops.attention.int8_rows import quantize_rows

npu = torch.ops.npu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("smooth", [False, True])
def test_dynamic_quant(dtype, smooth):
    x, factor = torch.randn(2, 5, 64).to(dtype), (torch.rand(64) + 0.5).to(dtype)
    quantized, scale = npu.npu_dynamic_quant(x, smooth_scales=factor if smooth else None)
    wide = x.double() * (factor.double() if smooth else 1)
    assert torch.allclose(scale.double(), wide.abs().amax(-1) / 127, rtol=1e-6) and scale.dtype is torch.float32
    assert quantized.abs().amax(-1).eq(127).all() and quantized.dtype is torch.int8
    error = (quantized.double() * scale.double()[..., None] - wide).abs()
    assert (error <= scale.double()[..., None] * 0.5001).all()


def test_a_row_of_zeros_stays_zero():
    quantized, scale = npu.npu_dynamic_quant(torch.zeros(2, 8).half())
    assert (quantized == 0).all() and (scale == 0).all()


def _as_the_device(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The arithmetic of CANN's kernel for A2 and A3, in float32."""
    factor = 127 / x.float().abs().amax(-1, keepdim=True)
    return (x.float() * factor).round().to(torch.int8), (1 / factor).squeeze(-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [64, 128, 576])
def test_dynamic_quant_is_the_formula_but_for_halves(dtype, size):
    x = (torch.randn(40, 8, size, generator=torch.Generator().manual_seed(size)) * 3).to(dtype)
    exact = x.double() * 127 / x.double().abs().amax(-1, keepdim=True)
    halfway = (exact.abs() % 1 - 0.5).abs() < 127 * 2**-22
    assert 0 < halfway.sum() < halfway.numel() / 50
    for quantized, scale in (npu.npu_dynamic_quant(x), _as_the_device(x)):
        assert torch.equal(quantized[~halfway].double(), exact.round()[~halfway])
        assert (quantized.double() - exact).abs().max() < 0.5 + 127 * 2**-22
        right = x.double().abs().amax(-1) / 127
        assert ((scale.double() - right) / right).abs().max() < 2**-22


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_keys_are_rounded_as_the_cache_of_a_cpu_rounds_them(dtype):
    rows = torch.randn(50, 4, 128).to(dtype)
    rows[0], rows[1, 0, 5] = 0.0, -0.0
    rows[2, 1, ::2], rows[2, 1, 1::2] = 0.5, 127.0  # halves
    for found, expected in zip(npu.npu_dynamic_quant(rows), quantize_rows(rows), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_what_is_no_number_spoils_its_row_alone(bad):
    rows = torch.randn(3, 2, 16).bfloat16()
    rows[1, 0, 3] = bad
    quantized, scale = npu.npu_dynamic_quant(rows)
    back = quantized.float() * scale[..., None]
    assert (quantized[1, 0] == 0).all() and back[1, 0].isnan().all()
    assert back.isnan().sum() == 16


def test_quantize_rounds_half_to_even_and_clamps():
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, 500.0, -500.0]])
    one = torch.ones(1)
    assert npu.npu_quantize(x, one, None, 1).tolist() == [[0, 2, 2, 0, 127, -128]]
    assert npu.npu_quantize(x, one, None, 12).dtype is torch.int8
    assert npu.npu_quantize(x, one, None, 13).tolist() == [[0, 2, 2, 0, 255, 0]]
    assert npu.npu_quantize(x * 1e9, one, None, 3).tolist()[0][4:] == [2**31 - 1, -(2**31)]


@pytest.mark.parametrize("div_mode", [True, False])
@pytest.mark.parametrize("axis", [1, -1])
def test_quantize_has_a_scale_per_channel(div_mode, axis):
    x = torch.randn(3, 4, 5)
    scales = torch.rand(x.shape[axis]) + 0.1
    zeros = torch.randint(-5, 5, scales.shape, dtype=torch.int32)
    shape = [1, -1, 1] if axis == 1 else [1, 1, -1]
    wide = scales.double().reshape(shape)
    wanted = (x.double() / wide if div_mode else x.double() * wide) + zeros.reshape(shape)
    quantized = npu.npu_quantize(x, scales, zeros, 1, axis, div_mode)
    assert (quantized.double() - wanted.round().clamp(-128, 127)).abs().max() == 0


def test_a_format_cast_copies():
    x = torch.randn(3, 4).half().t()
    cast = torch.ops.npu.npu_format_cast(x, 29)
    assert torch.equal(cast, x) and cast.is_contiguous() and cast.data_ptr() != x.data_ptr()


@pytest.mark.parametrize(
    "call, error, match",
    [
        (lambda x: npu.npu_dynamic_quant(x[0]), ValueError, "input has 1 dims"),
        (
            lambda x: npu.npu_dynamic_quant(x, smooth_scales=torch.ones(3)),
            ValueError,
            r"smooth_scales \(3,\) do not fit",
        ),
        (lambda x: npu.npu_dynamic_quant(x, group_index=torch.ones(1)), NotImplementedError, "group_index"),
        (lambda x: npu.npu_dynamic_quant(x, dst_type=16), NotImplementedError, "dst_type"),
        (lambda x: npu.npu_dynamic_quant(x, quant_mode="pertensor"), NotImplementedError, "quant_mode"),
        (lambda x: npu.npu_quantize(x, torch.ones(3), None, 1), ValueError, "scales has shape"),
        (lambda x: npu.npu_quantize(x, torch.ones(4), torch.ones(3).int(), 1), ValueError, "zero_points has shape"),
        (lambda x: npu.npu_quantize(x, torch.ones(4), None, 16), NotImplementedError, "dtype is 16"),
        (lambda x: npu.npu_format_cast(x, 3), NotImplementedError, "acl_format=3; it takes 2 or 29"),
        (lambda x: npu.npu_format_cast(x, 29, customize_dtype=1), NotImplementedError, "customize_dtype"),
    ],
)
def test_refusals(call, error, match):
    with pytest.raises(error, match=match):
        call(torch.randn(2, 4))
