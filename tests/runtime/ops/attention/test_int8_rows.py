"""Rows in int8 with a scale each: how far they may be off, and what is not a number."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from torch_pagoda.runtime.ops.attention.int8_rows import check_scales, dequantize_rows, quantize_rows

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 10**6),
    st.integers(1, 70),
    st.floats(-30, 30),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_no_element_is_off_by_more_than_half_a_scale(seed, dim, exponent, dtype):
    generator = torch.Generator().manual_seed(seed)
    rows = (torch.randn(5, 3, dim, generator=generator) ** 3 * 10.0**exponent).to(dtype)
    stored, scale = quantize_rows(rows)
    assert stored.dtype == torch.int8 and scale.shape == (5, 3) and scale.dtype == torch.float32
    # What is too small for a scale is zeros, and what is left out of its rows is less than that.
    kept = rows.float().abs().amax(-1) / 127 >= torch.finfo(torch.float32).tiny
    assert stored.abs().amax(-1).eq(torch.where(kept, 127, 0)).all() and stored.min() >= -127
    assert torch.equal(scale == 0, ~kept)
    stored, scale, rows = stored[kept], scale[kept], rows[kept]
    error = (stored.double() * scale.double()[..., None] - rows.double()).abs()
    assert (error <= scale.double()[..., None] * (0.5 + 1e-5)).all()  # the quotient is rounded to float32 first


def test_what_int8_holds_comes_back():
    rows = torch.arange(-127, 128).float() * 0.25
    stored, scale = quantize_rows(rows)
    assert torch.equal(dequantize_rows(stored, scale, torch.float32), rows)
    again, same = quantize_rows(dequantize_rows(stored, scale, torch.float32))
    assert torch.equal(again, stored) and torch.equal(same, scale)


def test_halves_are_rounded_to_even():
    stored, scale = quantize_rows(torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5]))
    assert scale == 1 and stored.tolist() == [127, 0, 2, 2, 0, -2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tiny", [0.0, -0.0, 1e-45, 1e-38, 1e-37])
def test_zeros_are_exact(dtype, tiny):
    stored, scale = quantize_rows(torch.full((2, 8), tiny, dtype=dtype))
    assert scale.tolist() == [0, 0] and not stored.any()
    assert dequantize_rows(stored, scale, dtype).eq(0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_spoils_its_row_alone(bad):
    rows = torch.randn(3, 8)
    rows[1, 5] = bad
    back = dequantize_rows(*quantize_rows(rows), torch.float32)
    assert back[1].isnan().all() and back[[0, 2]].isfinite().all()


def test_scales_belong_to_int8():
    caches = torch.zeros(3, 4, 2, 8, dtype=torch.int8)
    scale = torch.zeros(3, 4, 2)
    check_scales(caches, scale, scale)
    check_scales(caches.float(), None, None)
    with pytest.raises(ValueError, match=r"key_scale is None; caches of torch\.int8 need"):
        check_scales(caches, None, scale)
    with pytest.raises(ValueError, match=r"value_scale is \(3, 4\) torch.float32"):
        check_scales(caches, scale, scale[..., 0])
    with pytest.raises(ValueError, match=r"key_scale is .* torch\.float16"):
        check_scales(caches, scale.half(), scale)
    with pytest.raises(ValueError, match=r"value_scale is for caches of torch\.int8, not torch\.float32; omit it"):
        check_scales(caches.float(), None, scale)
