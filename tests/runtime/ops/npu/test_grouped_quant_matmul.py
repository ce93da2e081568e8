"""Groups of rows by matrices of 8 and 4 bits: the formulas in float64, exact sums, and mistakes that show."""

from __future__ import annotations

import pytest
import torch

import torch_pagoda.runtime.ops.npu  # noqa: F401  registers the operators
from torch_pagoda.runtime.ops.npu.int4 import pack_int4
from torch_pagoda.runtime.ops.npu.limits.moe import MAX_INT4_INPUTS
from torch_pagoda.runtime.ops.npu.numerics import bits_of_float, float_of_bits

npu = torch.ops.npu

COUNTS = torch.tensor([2, 0, 5])
GROUP = torch.tensor([0, 0, 2, 2, 2, 2, 2])
GIVEN = {"split_item": 3, "group_type": 0, "group_list_type": 1, "group_list": COUNTS}
BF16, FP16, FP32 = 15, 5, 6


def numbers(low, high, *shape, seed=0):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)


def products(rows, matrices):
    """Of each row with its group's matrix, float64."""
    return torch.einsum("mk,mkn->mn", rows.double(), matrices.double()[GROUP])


def by_4_bits(inputs=40, outputs=16):
    """Rows, numbers from -8 to 7, scales, the sums that the operator adds, and scales of rows."""
    rows, weight = numbers(-128, 128, 7, inputs), numbers(-8, 8, 3, inputs, outputs, seed=1)
    scale = (torch.rand(3, outputs) + 0.5) / 64
    sums = (8 * weight.double().sum(1) * scale.double()).float()
    return rows, weight, scale, sums, torch.rand(7) + 0.5


def multiply(rows, packed, scale, sums, of_rows, code=FP32):
    more = {"scale": [scale], "bias": [sums], "per_token_scale": [of_rows], "output_dtype": code}
    (found,) = npu.npu_grouped_matmul([rows], [packed], **more, **GIVEN)
    return found


@pytest.mark.parametrize(("code", "rtol"), [(FP32, 1e-5), (BF16, 2**-8), (FP16, 2**-10)])
def test_int8_by_4_bits_in_float64(code, rtol):
    rows, weight, scale, sums, of_rows = by_4_bits()
    found = multiply(rows, pack_int4(weight), bits_of_float(scale)[:, None], sums, of_rows, code)
    exact = products(rows, weight) * scale.double()[GROUP] * of_rows.double()[:, None]
    assert found.shape == (7, 16)
    torch.testing.assert_close(found.double(), exact, rtol=rtol, atol=1e-3)


def in_groups(inputs=4096, outputs=16):
    """As ``by_4_bits`` with 256 inputs that share a scale, and the matrices that the numbers mean."""
    rows, weight = numbers(-128, 128, 7, inputs), numbers(-8, 8, 3, inputs, outputs, seed=1)
    scale = (torch.rand(3, inputs // 256, outputs) + 0.5) / 64
    meant = weight.double() * scale.double().repeat_interleave(256, 1)
    return rows, weight, scale, (8 * meant.sum(1)).float(), torch.rand(7) + 0.5, meant


@pytest.mark.parametrize("inputs", [512, 4096])
def test_int8_by_4_bits_in_groups_in_float64(inputs):
    rows, weight, scale, sums, of_rows, meant = in_groups(inputs)
    found = multiply(rows, pack_int4(weight), bits_of_float(scale), sums, of_rows)
    exact = products(rows, meant) * of_rows.double()[:, None]
    assert (found - exact).abs().max() < 2e-6 * exact.abs().max()
    other = multiply(rows, pack_int4(weight), bits_of_float(scale.roll(1, 1)), sums, of_rows)
    assert (other - exact).abs().max() > 0.01 * exact.abs().max(), "scales of other groups"


def test_groups_of_other_sizes_are_refused():
    rows, weight, scale, sums, of_rows, _ = in_groups(512)
    with pytest.raises(ValueError, match="4 groups of 512 inputs; beside rows of int8 256 share a scale"):
        multiply(rows, pack_int4(weight), bits_of_float(scale.repeat_interleave(2, 1)), sums, of_rows)
    rows, weight, scale, sums, of_rows = by_4_bits(300)
    with pytest.raises(ValueError, match="2 groups of 300 inputs"):
        multiply(rows, pack_int4(weight), bits_of_float(torch.ones(3, 2, 16)), sums, of_rows)


@pytest.mark.parametrize(
    "mistake", ["no sums", "sums of others", "sign of the sums", "halves", "along the inputs", "rows"]
)
def test_mistakes_beside_4_bits_show(mistake):
    rows, weight, scale, sums, of_rows = by_4_bits(inputs=16)
    packed, bits = pack_int4(weight), bits_of_float(scale)[:, None]
    right = multiply(rows, packed, bits, sums, of_rows)
    exchanged = pack_int4(weight.unflatten(2, (-1, 2)).flip(3).flatten(2))
    wrong = {
        "no sums": lambda: multiply(rows, packed, bits, torch.zeros_like(sums), of_rows),
        "sums of others": lambda: multiply(rows, packed, bits, sums.roll(1, 0), of_rows),
        "sign of the sums": lambda: multiply(rows, packed, bits, -sums, of_rows),
        "halves": lambda: multiply(rows, exchanged, bits, sums, of_rows),
        "along the inputs": lambda: multiply(rows, pack_int4(weight.mT), bits, sums, of_rows),
        "rows": lambda: multiply(rows, packed, bits, sums, of_rows.roll(1)),
    }[mistake]()
    assert ((right - wrong).abs() > 0.01 * right.abs()).float().mean() > 0.8


def test_sums_of_4_bits_are_exact_at_the_largest_size():
    inputs = MAX_INT4_INPUTS
    rows = torch.full((7, inputs), -128, dtype=torch.int8)
    weight = torch.full((3, inputs, 8), -8, dtype=torch.int8)
    rows[:, 0] = -127
    unit, none = bits_of_float(torch.ones(3, 8))[:, None], torch.zeros(3, 8)
    found = multiply(rows, pack_int4(weight), unit, none, torch.ones(7))
    assert (found == 136 * 8 * (inputs - 1) + 135 * 8).all()


def test_bits_of_float32_in_int64():
    table = torch.randn(3, 1, 5)
    kept = bits_of_float(table)
    assert kept.dtype is torch.int64 and torch.equal(float_of_bits(kept), table)
    assert (kept >= 0).all() and (kept < 1 << 32).all(), "nothing above the lower half"
    assert kept[0, 0, 0] == table[0, 0, 0].view(torch.int32).item() % (1 << 32)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bias": None}, "bias is not the sums of the weights"),
        ({"bias": [torch.zeros(3, 16, dtype=torch.int32)]}, "a bias of torch.int32; torch.float32"),
        ({"scale": [torch.ones(3, 1, 16)]}, "scale is torch.float32"),
        ({"scale": [bits_of_float(torch.ones(3, 16))]}, r"scale is torch.int64 \(3, 16\)"),
        ({"per_token_scale": [torch.ones(3)]}, r"per_token_scale is torch.float32 \(3,\)"),
    ],
)
def test_what_does_not_fit_beside_4_bits(change, words):
    rows, weight, scale, sums, of_rows = by_4_bits()
    given = {"scale": [bits_of_float(scale)[:, None]], "bias": [sums], "per_token_scale": [of_rows], **change}
    with pytest.raises(ValueError, match=words):
        npu.npu_grouped_matmul([rows], [pack_int4(weight)], output_dtype=BF16, **given, **GIVEN)


FORMS = {"int8": (8, 0), "int4": (4, 0), "int4 in groups": (4, 5)}


def rounded(form, dtype=torch.float32):
    """Rows of floats, integers, and scales and offsets of outputs or groups."""
    bits, groups = FORMS[form]
    top = 1 << (bits - 1)
    weight = numbers(-top, top - 1, 3, 40, 16, seed=2)
    sizes = (3, groups, 16) if groups else (3, 16)
    scale, offset = torch.rand(sizes) + 0.5, torch.randint(-7, 8, sizes).float()
    return torch.randn(7, 40).to(dtype), weight, scale.to(dtype), offset.to(dtype)


def meant(weight, scale, offset):
    """float64 ``[E, K, N]``."""
    parts = weight.double().unflatten(1, (scale.shape[1] if scale.dim() == 3 else 1, -1))
    tables = [table.double().reshape(3, -1, 1, 16) for table in (offset, scale)]
    return ((parts + tables[0]) * tables[1]).flatten(1, 2)


def multiply_floats(rows, weight, scale, offset, **more):
    packed = pack_int4(weight) if int(weight.max()) < 8 and int(weight.min()) >= -8 else weight
    (found,) = npu.npu_grouped_matmul(
        [rows], [packed], antiquant_scale=[scale], antiquant_offset=[offset], **more, **GIVEN
    )
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-8), (torch.float16, 2**-10)])
def test_floats_by_rounded_matrices_in_float64(form, dtype, rtol):
    rows, weight, scale, offset = rounded(form, dtype)
    bias = torch.randn(3, 16).to(torch.float32 if dtype is torch.bfloat16 else dtype)
    found = multiply_floats(rows, weight, scale, offset, bias=[bias])
    exact = products(rows, meant(weight, scale, offset)) + bias.double()[GROUP]
    assert found.dtype is dtype
    torch.testing.assert_close(found.double(), exact, rtol=rtol, atol=2e-3 * float(exact.abs().max()) * 256 * rtol)


@pytest.mark.parametrize("mistake", ["sign of the offsets", "no offsets", "scales of other experts", "groups"])
def test_mistakes_of_rounded_matrices_show(mistake):
    rows, weight, scale, offset = rounded("int4 in groups")
    right = multiply_floats(rows, weight, scale, offset)
    wrong = {
        "sign of the offsets": lambda: multiply_floats(rows, weight, scale, -offset),
        "no offsets": lambda: multiply_floats(rows, weight, scale, 0 * offset),
        "scales of other experts": lambda: multiply_floats(rows, weight, scale.roll(1, 0), offset),
        "groups": lambda: multiply_floats(rows, weight, scale.roll(1, 1), offset.roll(1, 1)),
    }[mistake]()
    assert ((right - wrong).abs() > 0.01 * right.abs()).float().mean() > 0.8


@pytest.mark.parametrize(
    ("form", "change", "words"),
    [
        ("int8", {"antiquant_offset": None}, "antiquant_scale and antiquant_offset are needed"),
        ("int8", {"antiquant_scale": [torch.ones(3, 5, 16)]}, r"antiquant_scale is \(3, 5, 16\)"),
        ("int4", {"antiquant_offset": [torch.ones(3, 16).half()]}, "antiquant_offset torch.float16"),
        ("int4", {"bias": [torch.ones(3, 16).half()]}, "a bias of torch.float16"),
        ("int4", {"output_dtype": BF16}, "output_dtype is 15"),
        (
            "int4",
            {"antiquant_scale": [torch.ones(3, 7, 16)], "antiquant_offset": [torch.ones(3, 7, 16)]},
            "7 groups do not divide 40 inputs",
        ),
    ],
)
def test_what_does_not_fit_beside_rounded_matrices(form, change, words):
    rows, weight, scale, offset = rounded(form)
    given = {"antiquant_scale": [scale], "antiquant_offset": [offset], **change}
    with pytest.raises(ValueError, match=words):
        npu.npu_grouped_matmul([rows], [weight if form == "int8" else pack_int4(weight)], **given, **GIVEN)


@pytest.mark.parametrize("bits", [8, 4])
def test_traced_results_have_their_outputs(bits):
    weight = torch.empty(3, 40, 16, dtype=torch.int8) if bits == 8 else torch.empty(3, 40, 2, dtype=torch.int32)
    with torch._subclasses.FakeTensorMode() as mode:
        rows, table = torch.empty(7, 40), [torch.empty(3, 16)]
        given = {**GIVEN, "group_list": mode.from_tensor(COUNTS)}
        (found,) = torch.ops.npu.npu_grouped_matmul(
            [rows], [mode.from_tensor(weight)], antiquant_scale=table, antiquant_offset=table, **given
        )
    assert found.shape == (7, 16) and found.dtype is torch.float32
