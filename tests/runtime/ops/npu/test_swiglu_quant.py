"""npu_dequant_swiglu_quant: the half that is activated, sums of int32, groups and what lies behind them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import torch_pagoda.runtime.ops.npu  # noqa: F401  registers the operators

npu = torch.ops.npu


def exact(numbers: torch.Tensor, left: bool = True) -> torch.Tensor:
    a, b = numbers.double().chunk(2, -1)
    return F.silu(a) * b if left else F.silu(b) * a


def assert_means(found: tuple[torch.Tensor, torch.Tensor], expected: torch.Tensor) -> None:
    """Half a step from the formula, and the largest of each row on the last step."""
    numbers, scale = found
    assert numbers.dtype is torch.int8 and scale.dtype is torch.float32
    torch.testing.assert_close(scale.double(), expected.abs().amax(-1) / 127, rtol=1e-5, atol=0)
    off = (numbers.double() * scale.double()[:, None] - expected).abs()
    assert (off <= 0.5001 * scale.double()[:, None]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_formula_in_float64(dtype):
    x = (torch.randn(6, 64, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    assert_means(npu.npu_dequant_swiglu_quant(x, activate_left=True, quant_mode=1), exact(x))


def test_by_default_the_right_half_is_activated():
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)) * 3
    right = npu.npu_dequant_swiglu_quant(x, quant_mode=1)
    assert_means(right, exact(x, left=False))
    with pytest.raises(AssertionError):
        assert_means(right, exact(x))


def test_sums_are_scaled_by_weights_of_their_group_and_by_rows():
    generator = torch.Generator().manual_seed(0)
    sums = torch.randint(-9999, 9999, (7, 256), generator=generator, dtype=torch.int32)
    weights, rows = torch.rand(3, 256, generator=generator) / 999, torch.rand(7, 1, generator=generator)
    counts = torch.tensor([2, 0, 4])
    group = torch.tensor([0, 0, 2, 2, 2, 2])
    found = npu.npu_dequant_swiglu_quant(
        sums,
        weight_scale=weights,
        activation_scale=rows,
        group_index=counts,
        activate_left=True,
        quant_mode=1,
    )
    numbers = sums[:6].double() * weights.double()[group] * rows.double()[:6]
    assert_means((found[0][:6], found[1][:6]), exact(numbers))


def test_rows_behind_the_groups_are_no_numbers():
    x = torch.randn(5, 128)
    numbers, scale = npu.npu_dequant_swiglu_quant(
        x, group_index=torch.tensor([1, 2]), activate_left=True, quant_mode=1
    )
    assert_means((numbers[:3], scale[:3]), exact(x[:3]))
    assert scale[3:].isnan().all()


@pytest.mark.parametrize(("half", "legal"), [(10496, True), (10560, False), (10432, True), (96, False)])
def test_sizes_with_groups(half, legal):
    x, counts = torch.randn(2, 2 * half), torch.tensor([1, 1])
    given = {"activate_left": True, "quant_mode": 1}
    npu.npu_dequant_swiglu_quant(x, **given)
    if legal:
        npu.npu_dequant_swiglu_quant(x, group_index=counts, **given)
    else:
        with pytest.raises(ValueError, match="with group_index; a multiple of 64 up to 10496"):
            npu.npu_dequant_swiglu_quant(x, group_index=counts, **given)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"quant_mode": 0}, NotImplementedError, "quant_mode"),
        ({"swiglu_mode": 1}, NotImplementedError, "swiglu_mode"),
        ({"quant_scale": torch.ones(1, 32)}, NotImplementedError, "quant_scale"),
        ({"weight_scale": torch.ones(1, 64)}, ValueError, "weight_scale is for sums of torch.int32"),
        ({"x": torch.zeros(6, 128), "group_index": torch.tensor([9])}, ValueError, "6 at most in all"),
        ({"group_index": torch.tensor([1], dtype=torch.int32)}, ValueError, "int64"),
        ({"x": torch.zeros(6, 63)}, ValueError, "dim 1 of x is 63; it must be even"),
        ({"x": torch.zeros(6, 64, dtype=torch.int32)}, ValueError, "weight_scale and activation_scale are needed"),
    ],
)
def test_what_does_not_fit_is_refused(given, error, words):
    with pytest.raises(error, match=words):
        npu.npu_dequant_swiglu_quant(**{"x": torch.zeros(6, 64), "activate_left": True, "quant_mode": 1, **given})
