"""npu_linear and npu.npu_transpose_batchmatmul against plain products."""

from __future__ import annotations

import pytest
import torch

import torch_pagoda.runtime.ops.npu  # noqa: F401  registers the operators

npu = torch.ops.npu

BATCH, ROWS, FEATURES, COLUMNS = 3, 5, 16, 32
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_linear(dtype, bias, assert_close):
    x, weight = torch.randn(ROWS, FEATURES).to(dtype), torch.randn(COLUMNS, FEATURES).to(dtype)
    shift = torch.randn(COLUMNS).to(dtype) if bias else None
    expected = x.double() @ weight.double().t() + (shift.double() if shift is not None else 0)
    assert_close(npu.npu_linear(x, weight, shift), expected.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows_first", [False, True])
@pytest.mark.parametrize("strided", [False, True])
def test_batched_product_with_turns(dtype, rows_first, strided, assert_close):
    x, weight = torch.randn(BATCH, ROWS, FEATURES).to(dtype), torch.randn(BATCH, FEATURES, COLUMNS).to(dtype)
    expected = torch.stack([a.double() @ b.double() for a, b in zip(x, weight, strict=True)], 1)
    given = x.transpose(0, 1) if rows_first else x
    if not strided:
        given = given.contiguous()
    else:
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    turn = {"perm_x1": [1, 0, 2]} if rows_first else {}
    found = npu.npu_transpose_batchmatmul(given, weight, **turn)
    assert found.is_contiguous()
    assert_close(found, expected.to(dtype))  # [rows, batch, columns]


def test_a_result_in_parts():
    x, weight = torch.randn(BATCH, ROWS, FEATURES), torch.randn(BATCH, FEATURES, COLUMNS)
    whole = npu.npu_transpose_batchmatmul(x, weight)
    parts = npu.npu_transpose_batchmatmul(x, weight, batch_split_factor=2)
    assert torch.equal(parts, whole.flatten(1).view(ROWS, 2, -1).transpose(0, 1))
    with pytest.raises(ValueError, match="batch_split_factor=5 does not divide 3 \\* 32"):
        npu.npu_transpose_batchmatmul(x, weight, batch_split_factor=5)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"weight": torch.zeros(8, 16).half()}, "dtypes differ: input torch.float32, weight torch.float16"),
        ({"bias": torch.zeros(8).half()}, "dtypes differ.* bias torch.float16"),
        ({"bias": torch.zeros(7)}, r"bias \(7,\) do not fit input \[M, K\], weight \[N, K\], bias \[N\]"),
        ({"input": torch.zeros(5, 16).int(), "weight": torch.zeros(8, 16).int()}, "input is torch.int32"),
        ({"input": torch.zeros(5, 8)}, r"input \(5, 8\), weight \(8, 16\)"),
    ],
)
def test_linear_refuses(changes, match):
    arguments = {"input": torch.zeros(5, 16), "weight": torch.zeros(8, 16), "bias": torch.zeros(8)}
    torch.ops.npu.npu_linear(**arguments)
    with pytest.raises(ValueError, match=match):
        torch.ops.npu.npu_linear(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"perm_x1": [2, 1, 0]}, "perm_x1"),
        ({"perm_x2": [0, 2, 1]}, "perm_x2"),
        ({"perm_y": [0, 1, 2]}, "perm_y"),
        ({"perm_x1": [1, 0, 2]}, r"turned by \[1, 0, 2\], and weight"),
        ({"input": torch.zeros(ROWS, FEATURES)}, "input has 2 dims"),
        ({"weight": torch.zeros(BATCH, FEATURES, COLUMNS).half()}, "dtypes differ"),
        ({"weight": torch.zeros(BATCH, FEATURES + 1, COLUMNS)}, r"and weight \(3, 17, 32\)"),
        ({"input": torch.zeros(BATCH, ROWS, 8), "weight": torch.zeros(BATCH, 8, COLUMNS)}, "multiples of 16"),
        ({"weight": torch.zeros(BATCH, FEATURES, 24)}, "multiples of 16"),
        ({"weight": torch.zeros(BATCH, FEATURES, 65536)}, "at most 65535"),
        (
            {"input": torch.zeros(1, 4096, 16), "weight": torch.zeros(4096, 16, 16), "perm_x1": [1, 0, 2]},
            r"row of the input has 4096 \* 16 entries",
        ),
    ],
)
def test_refusals(changes, match):
    arguments = {"input": torch.zeros(BATCH, ROWS, FEATURES), "weight": torch.zeros(BATCH, FEATURES, COLUMNS)}
    npu.npu_transpose_batchmatmul(**arguments)
    with pytest.raises(ValueError, match=match):
        npu.npu_transpose_batchmatmul(**{**arguments, **changes})
    for unknown in ("bias", "scale"):
        with pytest.raises(NotImplementedError, match=unknown):
            npu.npu_transpose_batchmatmul(**arguments, **{unknown: torch.ones(1)})
