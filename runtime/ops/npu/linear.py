"""`npu::` matrix products: npu_linear and npu_transpose_batchmatmul.

Source: op-plugin, docs `torch_npu-npu_linear.md` and `torch_npu-npu_transpose_batchmatmul.md`, golden test
`test_npu_transpose_batchmatmul`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .numerics import widened
from .registration import Operator

aten = torch.ops.aten

_AS_STORED, _ROWS_FIRST = (0, 1, 2), (1, 0, 2)


def npu_linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``input @ weightᵀ + bias``.

    Args:
        input: ``[M, K]`` fp16, bf16 or fp32.
        weight: ``[N, K]`` in its dtype.
        bias: ``[N]`` or None.

    Returns:
        ``[M, N]`` in the dtype of ``input``.

    Raises:
        ValueError: tensors of another rank, sizes or dtypes that do not fit.
    """
    return aten.linear(input, weight, bias)


def _fake(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return input.new_empty(input.shape[0], weight.shape[0])


def npu_transpose_batchmatmul(
    input: torch.Tensor,
    weight: torch.Tensor,
    perm_x1: Sequence[int] | None,
    perm_x2: Sequence[int] | None,
    perm_y: Sequence[int] | None,
    batch_split_factor: int | None,
) -> torch.Tensor:
    """One matrix product for each entry of a batch, and the turns before and behind it, in one launch.

    ``y[m, b] = input[b, m] @ weight[b]``.

    Args:
        input: ``[B, M, K]``, or with ``perm_x1 = [1, 0, 2]`` ``[M, B, K]``; fp16, bf16 or fp32.
        weight: ``[B, K, N]`` in its dtype.
        perm_x1: [0, 1, 2] (the default) or [1, 0, 2].
        perm_x2: [0, 1, 2], the default.
        perm_y: [1, 0, 2], the default: the result has the rows first.
        batch_split_factor: f; a result ``[f, M, B·N/f]`` for f > 1. It divides ``B·N``.

    Returns:
        ``[M, B, N]`` in the dtype of ``input``.

    Raises:
        ValueError: tensors of another rank, sizes that do not fit, other permutations.
        NotImplementedError: a bias, a scale (whose result is int8).
    """
    rows = input.permute(_turn_of_input(perm_x1, perm_x2, perm_y))
    product = torch.bmm(widened(rows), widened(weight)).to(input.dtype).transpose(0, 1)
    parts = batch_split_factor or 1
    if parts > 1:
        product = product.reshape(len(product), parts, -1).transpose(0, 1)
    return product.contiguous()


def _turn_of_input(
    perm_x1: Sequence[int] | None, perm_x2: Sequence[int] | None, perm_y: Sequence[int] | None
) -> tuple[int, ...]:
    turn = tuple(perm_x1 or _AS_STORED)
    if turn not in (_AS_STORED, _ROWS_FIRST):
        raise ValueError(f"perm_x1={list(turn)} must be [0, 1, 2] or [1, 0, 2]")
    if tuple(perm_x2 or _AS_STORED) != _AS_STORED or tuple(perm_y or _ROWS_FIRST) != _ROWS_FIRST:
        raise ValueError(f"perm_x2={perm_x2} must be [0, 1, 2] and perm_y={perm_y} must be [1, 0, 2]")
    return turn


def _transpose_batchmatmul_fake(
    input: torch.Tensor,
    weight: torch.Tensor,
    perm_x1: Sequence[int] | None,
    perm_x2: Sequence[int] | None,
    perm_y: Sequence[int] | None,
    batch_split_factor: int | None,
) -> torch.Tensor:
    turn = _turn_of_input(perm_x1, perm_x2, perm_y)
    batch, rows = (input.shape[turn[i]] for i in (0, 1))
    parts = batch_split_factor or 1
    if parts > 1:
        return input.new_empty(parts, rows, batch * weight.shape[2] // parts)
    return input.new_empty(rows, batch, weight.shape[2])


OPERATORS = (
    Operator("npu_linear", npu_linear, _fake),
    Operator("npu_transpose_batchmatmul", npu_transpose_batchmatmul, _transpose_batchmatmul_fake),
)
