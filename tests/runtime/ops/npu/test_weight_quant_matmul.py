"""npu_weight_quant_batchmatmul: offsets, groups, the order of 4-bit numbers, and what the documents forbid."""

from __future__ import annotations

import pytest
import torch

import torch_pagoda.runtime.ops.npu  # noqa: F401  registers the operators
from torch_pagoda.runtime.ops.npu.int4 import pack_int4, unpack_int4

npu = torch.ops.npu

M, K, N = 3, 96, 16


def parts(bits: int, group: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Inputs, integers, scales and offsets."""
    generator = torch.Generator().manual_seed(0)
    most = 1 << (bits - 1)
    shape = (-(-K // group), N) if group else (N,)
    return (
        torch.randn(M, K, generator=generator).to(dtype),
        torch.randint(-most, most, (K, N), generator=generator, dtype=torch.int8),
        (torch.rand(shape, generator=generator) + 0.5).to(dtype),
        torch.randint(-most, most, shape, generator=generator).to(dtype),
    )


def spread(table: torch.Tensor, group: int) -> torch.Tensor:
    return table.double().repeat_interleave(group, 0)[:K] if group else table.double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group", [0, 32, 64])
@pytest.mark.parametrize("more", ["", "offsets", "bias"])
def test_the_formula_in_float64(dtype, bits, group, more):
    x, numbers, scale, offset = parts(bits, group, dtype)
    bias = torch.randn(N).to(torch.float32 if dtype is torch.bfloat16 else dtype) if more == "bias" else None
    offset = offset if more == "offsets" else None
    weight = pack_int4(numbers) if bits == 4 else numbers
    found = npu.npu_weight_quant_batchmatmul(x, weight, scale, offset, None, None, bias, group)
    dense = numbers.double() if offset is None else numbers.double() + spread(offset, group)
    exact = x.double() @ (dense * spread(scale, group))
    exact = exact if bias is None else exact + bias.double()
    assert found.dtype is dtype
    eps = {torch.bfloat16: 2**-8, torch.float16: 2**-10, torch.float32: 1e-5}[dtype]
    assert ((found.double() - exact).abs() <= eps * exact.abs() + eps * exact.abs().max() / 8).all()


def test_offsets_are_added_and_not_taken_away():
    x, numbers, scale, offset = parts(4, 32, torch.float32)
    added = npu.npu_weight_quant_batchmatmul(x, pack_int4(numbers), scale, offset, None, None, None, 32)
    taken = npu.npu_weight_quant_batchmatmul(x, pack_int4(numbers), scale, -offset, None, None, None, 32)
    assert not torch.allclose(added, taken, rtol=0.1)
    # A code u with zero z is u - 8 with offset 8 - z.
    codes, zeros = numbers.long() + 8, 8 - offset.long()
    dense = (codes - zeros.repeat_interleave(32, 0)) * scale.repeat_interleave(32, 0)
    torch.testing.assert_close(added, x @ dense.float(), rtol=1e-4, atol=1e-3)


def test_the_first_of_eight_outputs_lies_in_the_lowest_bits():
    packed = pack_int4(torch.tensor([[1, -1, 2, -8, 7, 0, 3, -2]]))
    assert packed.tolist() == [[(0xE30782F1 ^ (1 << 31)) - (1 << 31)]] and packed.dtype is torch.int32
    numbers = torch.randint(-8, 8, (5, 24), generator=torch.Generator().manual_seed(0))
    assert torch.equal(unpack_int4(pack_int4(numbers)).long(), numbers)
    # Packed along the inputs it is another matrix.
    x, whole, scale, _ = parts(4, 0, torch.float32)
    right = npu.npu_weight_quant_batchmatmul(x, pack_int4(whole), scale)
    other = pack_int4(whole.t().contiguous()).t().contiguous().reshape(K, N // 8)
    assert not torch.allclose(right, npu.npu_weight_quant_batchmatmul(x, other, scale), rtol=0.1)


@pytest.mark.parametrize(
    ("numbers", "words"), [(torch.zeros(2, 12), "multiple of 8"), (torch.full((1, 8), 8), "-8 to 7")]
)
def test_numbers_that_do_not_pack(numbers, words):
    with pytest.raises(ValueError, match=words):
        pack_int4(numbers)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"antiquant_scale": torch.ones(3, N)}, "dtypes differ: x torch.bfloat16, antiquant_scale torch.float32"),
        ({"antiquant_scale": torch.ones(N, 3).bfloat16()}, r"antiquant_scale is \(16, 3\)"),
        ({"antiquant_offset": torch.ones(N).bfloat16()}, r"antiquant_offset is \(16,\)"),
        ({"weight": torch.zeros(K, N)}, "weight is torch.float32"),
        ({"bias": torch.ones(N).bfloat16()}, "bias is torch.bfloat16"),
        ({"antiquant_group_size": 24}, "groups of 24 of 96 inputs; a multiple of 32"),
        ({"antiquant_group_size": 96}, "groups of 96 of 96 inputs"),
        ({"weight": torch.zeros(K + 1, N, dtype=torch.int8)}, r"x is \(3, 96\) and weight \(97, 16\)"),
        ({"weight": torch.zeros(N, K // 8, dtype=torch.int32).t()}, "not contiguous"),
    ],
)
def test_what_does_not_fit_is_refused(change, words):
    x, numbers, scale, _ = parts(8, 32, torch.bfloat16)
    given = {"x": x, "weight": numbers, "antiquant_scale": scale, "antiquant_group_size": 32, **change}
    with pytest.raises(ValueError, match=words):
        npu.npu_weight_quant_batchmatmul(**given)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"quant_scale": torch.ones(N)}, "quant_scale"),
        ({"inner_precise": 1}, "inner_precise"),
        ({"antiquant_scale": torch.ones(N, dtype=torch.int64)}, "no antiquant_scale of torch.int64"),
    ],
)
def test_what_has_no_kernel_is_refused(change, words):
    x, numbers, scale, _ = parts(8, 0, torch.bfloat16)
    with pytest.raises(NotImplementedError, match=words):
        npu.npu_weight_quant_batchmatmul(**{"x": x, "weight": numbers, "antiquant_scale": scale, **change})
