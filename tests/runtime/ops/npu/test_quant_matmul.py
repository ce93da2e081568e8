"""npu_quant_matmul: exact sums, scales where they belong, and what the documents forbid."""

from __future__ import annotations

import pytest
import torch

from torch_pagoda.runtime.ops.npu.quant_matmul import npu_quant_matmul

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
    found = npu_quant_matmul(x, w, scale, pertoken_scale=rows, bias=bias, output_dtype=BF16)
    sums = x.double() @ w.double()
    if bias_dtype is torch.int32:
        sums = sums + bias.double()
    exact = sums * scale.double() * rows.double()[:, None]
    if bias is not None and bias_dtype is not torch.int32:
        exact = exact + bias.double()
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-30)
    wide = (
        npu_quant_matmul(
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
    right = npu_quant_matmul(x, w, scale, pertoken_scale=rows, output_dtype=FP32)
    wrong = {
        "scales of rows": lambda: npu_quant_matmul(x, w, rows, pertoken_scale=scale, output_dtype=FP32),
        "row of another": lambda: npu_quant_matmul(x, w, scale, pertoken_scale=rows.roll(1), output_dtype=FP32),
        "scales along the inputs": lambda: ((x.float() * scale) @ w.float()) * rows[:, None],
    }[mutant]()
    assert ((right - wrong).abs() > 0.01 * right.abs()).float().mean() > 0.8


def test_sums_are_exact_where_float32_is_not():
    inputs = 65535
    x, w = torch.full((1, inputs), 127, dtype=torch.int8), torch.full((inputs, 1), -127, dtype=torch.int8)
    x[0, 0] = 126
    sums = npu_quant_matmul(x, w, torch.ones(1), output_dtype=INT32)
    assert sums.item() == -127 * 127 * (inputs - 1) - 126 * 127 and sums.dtype is torch.int32


def test_transposed_views_and_batches():
    x, w, scale, rows = call()
    plain = npu_quant_matmul(x, w, scale, pertoken_scale=rows, output_dtype=FP16)
    view = npu_quant_matmul(x, w.t().contiguous().t(), scale, pertoken_scale=rows, output_dtype=FP16)
    assert torch.equal(plain, view)
    stacked = npu_quant_matmul(x[None], w, scale, pertoken_scale=rows[None], output_dtype=FP16)
    assert torch.equal(stacked[0], plain)


def test_scales_of_fp16_are_the_bits_of_float32():
    x, w, scale, _ = call()
    scale = scale / 1000
    bias = torch.arange(-4, 5, dtype=torch.int32) * 100
    bits = scale.view(torch.int32).long()
    found = npu_quant_matmul(x, w, bits, bias=bias, output_dtype=FP16)
    exact = (x.double() @ w.double() + bias.double()) * scale.double()
    torch.testing.assert_close(found.double(), exact, rtol=2**-11, atol=1e-6)


def test_without_a_dtype_the_result_is_int8():
    x, w, scale, _ = call()
    found = npu_quant_matmul(x, w, scale / 1000, offset=torch.full((1,), 3.0))
    exact = ((x.double() @ w.double()) * (scale / 1000).double() + 3).round().clamp(-128, 127)
    assert found.dtype is torch.int8 and (found.double() - exact).abs().max() <= 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scale": torch.rand(9).bfloat16(), "output_dtype": FP16}, "scale is bfloat16 and the result torch.float16"),
        ({"scale": torch.rand(70)}, r"scale is torch.float32 \(70,\)"),
        ({"pertoken_scale": torch.rand(9)}, r"pertoken_scale is torch.float32 \(9,\)"),
        ({"pertoken_scale": torch.rand(5).bfloat16()}, "pertoken_scale is torch.bfloat16"),
        ({"bias": torch.rand(9).bfloat16(), "output_dtype": FP16}, "bias is torch.bfloat16"),
        ({"scale": torch.ones(9, dtype=torch.int64)}, "it is for fp16 without pertoken_scale"),
        ({"scale": torch.ones(9, dtype=torch.int64), "output_dtype": FP16}, "it is for fp16 without pertoken_scale"),
        ({"bias": torch.rand(5)}, r"bias is torch.float32 \(5,\)"),
        ({"x2": numbers(9, 70)}, r"x1 \(5, 70\) and x2 \(9, 70\)"),
        ({"x2": numbers(70, 65536), "scale": torch.rand(1)}, "last dims above 65535"),
    ],
)
def test_what_does_not_fit_is_refused(change, words):
    x, w, scale, rows = call()
    given = {"x1": x, "x2": w, "scale": scale, "pertoken_scale": rows, "output_dtype": BF16, **change}
    with pytest.raises(ValueError, match=words):
        npu_quant_matmul(**given)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x1": torch.zeros(5, 9, dtype=torch.int32)}, "takes int8"),
        ({"group_sizes": [1, 1, 32]}, "group_sizes"),
        ({"output_dtype": 7}, "output_dtype is torch.float64"),
    ],
)
def test_what_has_no_kernel_is_refused(change, words):
    x, w, scale, rows = call()
    given = {"x1": x, "x2": w, "scale": scale, "pertoken_scale": rows, "output_dtype": BF16, **change}
    with pytest.raises(NotImplementedError, match=words):
        npu_quant_matmul(**given)
