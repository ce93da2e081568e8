"""npu_quant_matmul: exact sums, scales where they belong, and what the documents forbid."""

from __future__ import annotations

import pytest
import torch

import torch_pagoda.runtime.ops.npu  # noqa: F401  registers the operators
from torch_pagoda.runtime.ops.npu.int4 import pack_int4, unpack_int4
from torch_pagoda.runtime.ops.npu.limits.quantized import INT4_INPUTS_BELOW
from torch_pagoda.runtime.ops.npu.numerics import bits_of_float

npu = torch.ops.npu

BF16, FP16, INT32, FP32 = 15, 5, 3, 6


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)


def call(rows: int = 5, inputs: int = 70, outputs: int = 9) -> tuple[torch.Tensor, ...]:
    """Two matrices, a scale for each output, and one for each row."""
    return numbers(rows, inputs), numbers(inputs, outputs, seed=1), torch.rand(outputs) + 0.5, torch.rand(rows) + 0.5


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias_dtype", [None, torch.int32, torch.float32, torch.bfloat16])
def test_the_formula_in_float64(scale_dtype, bias_dtype):
    x, w, scale, rows = call()
    scale = scale.to(scale_dtype)
    bias = None if bias_dtype is None else (torch.randn(9) * 1000).to(bias_dtype)
    found = npu.npu_quant_matmul(x, w, scale, pertoken_scale=rows, bias=bias, output_dtype=BF16)
    sums = x.double() @ w.double()
    if bias_dtype is torch.int32:
        sums = sums + bias.double()
    exact = sums * scale.double() * rows.double()[:, None]
    if bias is not None and bias_dtype is not torch.int32:
        exact = exact + bias.double()
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-30)
    wide = (
        npu.npu_quant_matmul(
            x, w, scale.float(), pertoken_scale=rows, bias=None if bias is None else bias, output_dtype=FP32
        )
        if bias_dtype is not torch.bfloat16
        else None
    )
    if wide is not None:
        torch.testing.assert_close(wide.double(), exact, rtol=1e-6, atol=1e-3)


@pytest.mark.parametrize("mutant", ["scales of rows", "row of another", "scales along the inputs"])
def test_scales_in_another_place_give_other_numbers(mutant):
    x, w, scale, rows = call(rows=9, inputs=9, outputs=9)
    right = npu.npu_quant_matmul(x, w, scale, pertoken_scale=rows, output_dtype=FP32)
    wrong = {
        "scales of rows": lambda: npu.npu_quant_matmul(x, w, rows, pertoken_scale=scale, output_dtype=FP32),
        "row of another": lambda: npu.npu_quant_matmul(x, w, scale, pertoken_scale=rows.roll(1), output_dtype=FP32),
        "scales along the inputs": lambda: ((x.float() * scale) @ w.float()) * rows[:, None],
    }[mutant]()
    assert ((right - wrong).abs() > 0.01 * right.abs()).float().mean() > 0.8


def test_sums_are_exact_where_float32_is_not():
    inputs = 65535
    x, w = torch.full((1, inputs), 127, dtype=torch.int8), torch.full((inputs, 1), -127, dtype=torch.int8)
    x[0, 0] = 126
    sums = npu.npu_quant_matmul(x, w, torch.ones(1), output_dtype=INT32)
    assert sums.item() == -127 * 127 * (inputs - 1) - 126 * 127 and sums.dtype is torch.int32


def test_transposed_views_and_batches():
    x, w, scale, rows = call()
    plain = npu.npu_quant_matmul(x, w, scale, pertoken_scale=rows, output_dtype=FP16)
    view = npu.npu_quant_matmul(x, w.t().contiguous().t(), scale, pertoken_scale=rows, output_dtype=FP16)
    assert torch.equal(plain, view)
    stacked = npu.npu_quant_matmul(x[None], w, scale, pertoken_scale=rows[None], output_dtype=FP16)
    assert torch.equal(stacked[0], plain)


def test_scales_of_fp16_are_the_bits_of_float32():
    x, w, scale, _ = call()
    scale = scale / 1000
    bias = torch.arange(-4, 5, dtype=torch.int32) * 100
    bits = scale.view(torch.int32).long()
    found = npu.npu_quant_matmul(x, w, bits, bias=bias, output_dtype=FP16)
    exact = (x.double() @ w.double() + bias.double()) * scale.double()
    torch.testing.assert_close(found.double(), exact, rtol=2**-11, atol=1e-6)


def test_without_a_dtype_the_result_is_int8():
    x, w, scale, _ = call()
    found = npu.npu_quant_matmul(x, w, scale / 1000, offset=torch.full((1,), 3.0))
    exact = ((x.double() @ w.double()) * (scale / 1000).double() + 3).round().clamp(-128, 127)
    assert found.dtype is torch.int8 and (found.double() - exact).abs().max() <= 1


def by_4_bits(inputs: int = 4096, outputs: int = 24) -> dict[str, torch.Tensor | int]:
    """Rows, numbers from -8 to 7 in groups of 256, and what the operator adds for the 8 that it takes off rows."""
    generator = torch.Generator().manual_seed(2)
    weight = torch.randint(-8, 8, (inputs, outputs), generator=generator, dtype=torch.int8)
    scale = (torch.rand(inputs // 256, outputs, generator=generator) + 0.5) / 64
    meant = weight.double() * scale.double().repeat_interleave(256, 0)
    return {
        "x1": numbers(5, inputs),
        "x2": pack_int4(weight),
        "scale": bits_of_float(scale),
        "offset": (8 * meant.sum(0)).float(),
        "pertoken_scale": torch.rand(5, 1, generator=generator) + 0.5,
        "output_dtype": FP32,
        "group_sizes": [0, 0, 256],
        "meant": meant,
    }


@pytest.mark.parametrize(("code", "rtol"), [(FP32, 2e-6), (BF16, 2**-8), (FP16, 2**-11)])
@pytest.mark.parametrize("inputs", [256, 4096])
def test_4_bits_in_groups_in_float64(inputs, code, rtol):
    given = by_4_bits(inputs)
    meant = given.pop("meant")
    found = npu.npu_quant_matmul(**{**given, "output_dtype": code})
    exact = (given["x1"].double() @ meant) * given["pertoken_scale"].double()
    assert found.shape == exact.shape == (5, 24)
    assert ((found.double() - exact).abs() <= rtol * exact.abs().max()).all()


def test_sums_of_a_group_are_exact():
    """The most inputs, and the largest numbers: half precision holds no sum of a group."""
    inputs = INT4_INPUTS_BELOW // 256 * 256
    x, w = torch.full((1, inputs), -128, dtype=torch.int8), torch.full((inputs, 8), -8, dtype=torch.int8)
    x[0, ::2] = -127
    one = bits_of_float(torch.ones(inputs // 256, 8))
    given = {
        "offset": torch.zeros(8),
        "pertoken_scale": torch.ones(1, 1),
        "output_dtype": FP32,
        "group_sizes": [0, 0, 256],
    }
    found = npu.npu_quant_matmul(x, pack_int4(w), one, **given)
    assert (found == (136 + 135) * 8 * inputs // 2).all()


@pytest.mark.parametrize("mutant", ["no sums", "sign", "groups", "halves", "rows", "one scale"])
def test_mistakes_beside_4_bits_give_other_numbers(mutant):
    given = by_4_bits()
    del given["meant"]
    right = npu.npu_quant_matmul(**given)
    exchanged = unpack_int4(given["x2"]).unflatten(1, (-1, 2)).flip(2).flatten(1)
    change = {
        "no sums": {"offset": torch.zeros_like(given["offset"])},
        "sign": {"offset": -given["offset"]},
        "groups": {"scale": given["scale"].roll(1, 0)},
        "halves": {"x2": pack_int4(exchanged)},
        "rows": {"pertoken_scale": given["pertoken_scale"].roll(1)},
        "one scale": {"scale": given["scale"][:1].expand_as(given["scale"])},
    }[mutant]
    wrong = npu.npu_quant_matmul(**{**given, **change})
    assert ((right - wrong).abs() > 0.01 * right.abs()).float().mean() > 0.7


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scale": torch.ones(16, 24)}, r"scale is torch.float32 \(16, 24\); torch.int64 \(16, 24\)"),
        ({"scale": torch.ones(32, 24, dtype=torch.int64)}, r"scale is torch.int64 \(32, 24\)"),
        ({"offset": None}, "offset is None"),
        ({"offset": torch.ones(4096)}, r"offset is torch.float32 \(4096,\)"),
        ({"pertoken_scale": torch.ones(5)}, r"pertoken_scale is torch.float32 \(5,\)"),
        ({"bias": torch.ones(24)}, "there is no bias"),
        ({"group_sizes": None}, r"group_sizes is None; \[0, 0, 256\]"),
        ({"group_sizes": [1, 1, 256]}, r"group_sizes is \[1, 1, 256\]"),
        ({"x1": numbers(5, 4095)}, r"x1 is \(5, 4095\) and x2"),
        (
            {"x1": numbers(5, 128), "x2": torch.zeros(128, 3, dtype=torch.int32)},
            "a multiple of 256 inputs below 29576",
        ),
    ],
)
def test_what_does_not_fit_beside_4_bits(change, words):
    given = by_4_bits()
    del given["meant"]
    with pytest.raises(ValueError, match=words):
        npu.npu_quant_matmul(**{**given, **change})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"scale": torch.rand(9).bfloat16(), "output_dtype": FP16},
            "scale is torch.bfloat16 beside a result of torch.float16",
        ),
        ({"scale": torch.rand(70)}, r"scale is \(70,\)"),
        ({"pertoken_scale": torch.rand(9)}, r"pertoken_scale is \(9,\)"),
        ({"pertoken_scale": torch.rand(5).bfloat16()}, "pertoken_scale is torch.bfloat16"),
        ({"bias": torch.rand(9).bfloat16(), "output_dtype": FP16}, "bias is torch.bfloat16"),
        ({"scale": torch.ones(9, dtype=torch.int64)}, "scale is torch.int64 beside a result of torch.bfloat16"),
        ({"scale": torch.ones(9, dtype=torch.int64), "output_dtype": FP16}, "scale is torch.int64 beside"),
        ({"bias": torch.rand(5)}, r"bias is \(5,\)"),
        ({"x2": numbers(9, 70)}, r"x1 is \(5, 70\) and x2 \(9, 70\)"),
        ({"x2": numbers(70, 65536), "scale": torch.rand(1)}, "last dim of x2 is 65536"),
    ],
)
def test_what_does_not_fit_is_refused(change, words):
    x, w, scale, rows = call()
    given = {"x1": x, "x2": w, "scale": scale, "pertoken_scale": rows, "output_dtype": BF16, **change}
    with pytest.raises(ValueError, match=words):
        npu.npu_quant_matmul(**given)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x1": torch.zeros(5, 9, dtype=torch.int32)}, "takes no x1 of torch.int32"),
        ({"group_sizes": [1, 1, 32]}, "group_sizes"),
        ({"output_dtype": 7}, "output_dtype is torch.float64"),
    ],
)
def test_what_has_no_kernel_is_refused(change, words):
    x, w, scale, rows = call()
    given = {"x1": x, "x2": w, "scale": scale, "pertoken_scale": rows, "output_dtype": BF16, **change}
    with pytest.raises(NotImplementedError, match=words):
        npu.npu_quant_matmul(**given)
