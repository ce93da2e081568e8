"""npu_grouped_matmul_swiglu_quant_v2: exact sums, scales where they belong, the gate on the left, one rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from torch_pagoda.runtime.ops.npu.int4 import pack_int4
from torch_pagoda.runtime.ops.npu.numerics import bits_of_float

npu = torch.ops.npu

COUNTS = [4, 0, 7]


def numbers(*shape: int, most: int = 128, seed: int = 0) -> torch.Tensor:
    return torch.randint(-most, most, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)


def call(bits: int = 8, inputs: int = 48, outputs: int = 64, **change: Any) -> dict[str, Any]:
    """Rows of three experts, the second of which has none."""
    generator = torch.Generator().manual_seed(1)
    weight = numbers(3, inputs, outputs, most=128 if bits == 8 else 8, seed=2)
    scale = (torch.rand(3, outputs, generator=generator) + 0.5) / 20000
    given: dict[str, Any] = {
        "x": numbers(11, inputs, seed=3),
        "weight": [weight],
        "weight_scale": [scale],
        "x_scale": torch.rand(11, generator=generator) + 0.5,
        "group_list": torch.tensor(COUNTS),
        "group_list_type": 1,
    }
    if bits == 4:
        sums = 8 * weight.sum(1, dtype=torch.int32) * scale
        given |= {"weight": [pack_int4(weight)], "weight_scale": [bits_of_float(scale)]}
        given |= {"weight_assist_matrix": [sums.float()]}
    return {**given, **change}


def exact(bits: int = 8, *, gate_on_the_right: bool = False) -> torch.Tensor:
    """The activation in float64."""
    given, plain = call(bits), call(8)
    weight = numbers(3, 48, 64, most=128 if bits == 8 else 8, seed=2).double()
    of_row = torch.repeat_interleave(torch.arange(3), torch.tensor(COUNTS))
    whole = torch.einsum("mk,mkn->mn", given["x"].double(), weight[of_row])
    whole = whole * plain["weight_scale"][0].double()[of_row] * given["x_scale"].double()[:, None]
    left, right = whole.chunk(2, -1)
    return F.silu(right) * left if gate_on_the_right else F.silu(left) * right


def dequantized(found: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return found[0].double() * found[1].double()[:, None]


@pytest.mark.parametrize("bits", [8, 4])
def test_the_formula_in_float64(bits: int) -> None:
    found, wanted = npu.npu_grouped_matmul_swiglu_quant_v2(**call(bits)), exact(bits)
    assert found[0].dtype is torch.int8 and found[1].dtype is torch.float32 and found[1].shape == (11,)
    torch.testing.assert_close(found[1].double(), wanted.abs().amax(-1) / 127, rtol=1e-5, atol=0)
    assert ((dequantized(found) - wanted).abs() <= 0.5001 * found[1].double()[:, None]).all()
    other = exact(bits, gate_on_the_right=True)
    off = (dequantized(found) - other).abs() > 0.6 * found[1].double()[:, None]
    assert off.any(-1).double().mean() > 0.5


@pytest.mark.parametrize("bits", [8, 4])
def test_it_is_the_product_and_the_activation_without_their_rounding(bits: int) -> None:
    """In float32 the two operators that it stands for give the same numbers."""
    given = call(bits)
    scale = given["weight_scale"][0]
    (whole,) = npu.npu_grouped_matmul(
        [given["x"]],
        given["weight"],
        scale=[scale[:, None] if bits == 4 else scale],
        per_token_scale=[given["x_scale"]],
        bias=given.get("weight_assist_matrix"),
        group_list=given["group_list"],
        group_list_type=1,
        split_item=3,
        group_type=0,
        output_dtype=6,
    )
    expected = npu.npu_dequant_swiglu_quant(whole, activate_left=True, quant_mode=1)
    for found, wanted in zip(npu.npu_grouped_matmul_swiglu_quant_v2(**given), expected, strict=True):
        assert torch.equal(found, wanted)
    rounded_before = npu.npu_dequant_swiglu_quant(whole.bfloat16(), activate_left=True, quant_mode=1)
    assert not torch.equal(rounded_before[0], expected[0]), "16 bits between them are other numbers"


def test_scales_of_groups() -> None:
    """The product in float64, activated and rounded once, of groups of 256."""
    given = call(4, inputs=1024)
    scale = (torch.rand(3, 4, 64, generator=torch.Generator().manual_seed(5)) + 0.5) / 20000
    weight = numbers(3, 1024, 64, most=8, seed=2)
    meant = weight.double() * scale.double().repeat_interleave(256, 1)
    sums = {"weight_assist_matrix": [(8 * meant.sum(1)).float()]}
    given |= {"weight_scale": [bits_of_float(scale)], "dequant_mode": 1, **sums}
    of_row = torch.repeat_interleave(torch.arange(3), torch.tensor(COUNTS))
    whole = torch.einsum("mk,mkn->mn", given["x"].double(), meant[of_row]) * given["x_scale"].double()[:, None]
    left, right = whole.chunk(2, -1)
    wanted = F.silu(left) * right
    found = npu.npu_grouped_matmul_swiglu_quant_v2(**given)
    torch.testing.assert_close(found[1].double(), wanted.abs().amax(-1) / 127, rtol=1e-5, atol=0)
    assert ((dequantized(found) - wanted).abs() <= 0.501 * found[1].double()[:, None]).all()
    other = npu.npu_grouped_matmul_swiglu_quant_v2(**{**given, "weight_scale": [bits_of_float(scale.roll(1, 1))]})
    assert ((dequantized(other) - wanted).abs() > 0.6 * found[1].double()[:, None]).any()
    with pytest.raises(ValueError, match="dequant_mode is 0; 1 where groups of 4 bits have scales"):
        npu.npu_grouped_matmul_swiglu_quant_v2(**{**given, "dequant_mode": 0})


def test_ends_and_counts_and_dtypes_of_scales() -> None:
    plain = npu.npu_grouped_matmul_swiglu_quant_v2(**call())
    ends = npu.npu_grouped_matmul_swiglu_quant_v2(**call(group_list=torch.tensor([4, 4, 11]), group_list_type=0))
    assert all(torch.equal(a, b) for a, b in zip(plain, ends, strict=True))
    for dtype in (torch.float16, torch.bfloat16):
        scale = call()["weight_scale"][0].to(dtype)
        narrow = npu.npu_grouped_matmul_swiglu_quant_v2(**call(weight_scale=[scale]))
        wide = npu.npu_grouped_matmul_swiglu_quant_v2(**call(weight_scale=[scale.float()]))
        assert all(torch.equal(a, b) for a, b in zip(narrow, wide, strict=True))


@pytest.mark.parametrize(
    "change",
    [
        {"weight_scale": [call()["weight_scale"][0].roll(1, 0)]},
        {"x_scale": call()["x_scale"].roll(1)},
        {"group_list": torch.tensor([0, 4, 7])},
        {"weight": [call()["weight"][0].roll(32, -1)]},
    ],
    ids=["scales of another expert", "scales of other rows", "rows of another expert", "gate and up exchanged"],
)
def test_mistakes_are_other_numbers(change: dict[str, Any]) -> None:
    wrong, wanted = dequantized(npu.npu_grouped_matmul_swiglu_quant_v2(**call(**change))), exact()
    assert ((wrong - wanted).abs() > 0.02 * wanted.abs()).double().mean() > 0.5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight_scale": [torch.ones(3, 32)]}, "weight_scale is torch.float32"),
        ({"weight_scale": [torch.ones(3, 64, dtype=torch.int64)]}, "weight_scale is torch.int64"),
        ({"x": torch.zeros(11, 48)}, "x is torch.float32"),
        ({"x_scale": torch.ones(3)}, r"x_scale \(3,\)"),
        ({"group_list": torch.tensor([4, 0, 8])}, "within the 11 rows"),
        ({"x": numbers(11, 47)}, r"x is \(11, 47\)"),
        ({"weight_assist_matrix": [torch.ones(3, 64)]}, "weight_assist_matrix is for matrices of 4 bits"),
        ({"weight": [numbers(3, 48, 63)], "weight_scale": [torch.ones(3, 63)]}, r"3 matrices of \(48, 63\)"),
        ({"weight": [numbers(3, 48, 64)] * 2}, "weight holds 2 tensors"),
        ({"dequant_mode": 1}, "dequant_mode is 1; 1 where groups of 4 bits"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        npu.npu_grouped_matmul_swiglu_quant_v2(**call(**change))


def test_more_outputs_than_it_takes() -> None:
    wide = {"weight": [numbers(3, 48, 10242)], "weight_scale": [torch.ones(3, 10242)]}
    with pytest.raises(ValueError, match=r"3 matrices of \(48, 10242\); .* 10240 outputs"):
        npu.npu_grouped_matmul_swiglu_quant_v2(**call(**wide))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dequant_mode": 2}, "dequant_mode"),
        ({"quant_dtype": 23}, "quant_dtype"),
        ({"bias": torch.ones(3, 64)}, "bias"),
        ({"smooth_scale": torch.ones(3)}, "smooth_scale"),
        ({"x": torch.zeros(11, 48).to(torch.float8_e4m3fn)}, "no x of torch.float8_e4m3fn"),
    ],
)
def test_what_has_no_kernel(change: dict[str, Any], words: str) -> None:
    with pytest.raises(NotImplementedError, match=words):
        npu.npu_grouped_matmul_swiglu_quant_v2(**call(**change))
