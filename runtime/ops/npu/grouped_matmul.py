"""`npu::npu_grouped_matmul`: one product for the rows of each expert.

Source: op-plugin, doc `torch_npu-npu_grouped_matmul.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from .grouped_quant_matmul import RoundedMatrices, multiply_int8, multiply_rounded
from .int4 import PER_INT32
from .numerics import DTYPES_BY_CODE, widened
from .registration import Operator

_WHOLE = (torch.int8, torch.int32)
"""Dtypes of matrices of integers; int32 holds eight of 4 bits (see ``int4``)."""


def npu_grouped_matmul(
    x: Sequence[torch.Tensor],
    weight: Sequence[torch.Tensor],
    bias: Sequence[torch.Tensor] | None,
    scale: Sequence[torch.Tensor] | None,
    per_token_scale: Sequence[torch.Tensor] | None,
    antiquant_scale: Sequence[torch.Tensor] | None,
    antiquant_offset: Sequence[torch.Tensor] | None,
    group_list: torch.Tensor | None,
    group_type: int | None,
    group_list_type: int | None,
    output_dtype: int | None,
) -> list[torch.Tensor]:
    """``x[rows of group g] @ weight[g] + bias[g]`` for every group of rows.

    Args:
        x: one tensor ``[M, K]``; fp16, bf16, fp32 or int8.
        weight: one tensor ``[E, K, N]`` or E tensors ``[K, N]``, the dtype of ``x``, or integers (see ``scale``
            and ``antiquant_scale``); transposed views of floats and int8 are fine.
        bias: one ``[E, N]`` or E tensors ``[N]``; fp32 for bf16, else the dtype of ``x``. For int8 by int8 it is
            int32, added to the sums, which are exact. For int8 by 4 bits it is fp32, must be given, and makes up for
            what the operator subtracts: ``((x - 8) @ w · scale + bias) · per_token_scale``; right is 8 times the sum
            of an output's weights, times its scale.
        scale: for int8 inputs and matrices, one ``[E, N]``: bf16 for results of bf16, else fp32. For int8 inputs and
            matrices of 4 bits (int32 ``[E, K, N / 8]``, see ``int4``), one int64 ``[E, 1, N]``, or
            ``[E, K / 256, N]`` where 256 inputs share one, that holds the bits of fp32.
        per_token_scale: for int8 inputs, one fp32 ``[M]``.
        antiquant_scale: for fp16 or bf16 inputs (fp32 to compare) and matrices of 8 or 4 bits, one of the dtype of
            ``x``: ``[E, N]``, or ``[E, groups, N]`` of 4 bits, with groups that divide K.
        antiquant_offset: likewise, of the same shape: ``(w + offset) · scale`` is the matrix. Must be given.
        group_list: int64 ``[E]``: where each group ends (``group_list_type`` 0), or its rows (1). The rows
            behind the last group are not computed.
        split_item: 2 or 3 (one result).
        group_type: 0 (groups of rows).
        output_dtype: 5 fp16, 15 bf16, 6 fp32; None: the dtype of ``x``.

    Returns:
        One tensor ``[M, N]``, accumulated in fp32; rows of no group are NaN here, and on a device what its memory
        held (ops-transformer, ``aclnnGroupedMatmulV4.md``, groupListOptional).

    Raises:
        ValueError: shapes, dtypes or groups that do not fit.
        NotImplementedError: several inputs or results, groups along K, other quantizations, activations.
    """
    rows = _only_input(x, weight, group_type, (scale, per_token_scale), (antiquant_scale, antiquant_offset))
    is_int8 = rows.dtype is torch.int8
    whole = is_int8 or weight[0].dtype in _WHOLE
    if whole:
        rounded = RoundedMatrices(weight[0], group_ends(group_list, group_list_type, len(weight[0]), len(rows)))
        dtype = rows.dtype if not output_dtype else DTYPES_BY_CODE.get(output_dtype)
        if is_int8:
            return [multiply_int8(rows, rounded, scale, per_token_scale, bias, dtype)]
        return [multiply_rounded(rows, rounded, antiquant_scale, antiquant_offset, bias)]
    matrices = list(weight[0]) if len(weight) == 1 and weight[0].dim() == 3 else list(weight)
    if rows.dim() != 2 or any(w.dim() != 2 or w.shape != (rows.shape[1], matrices[0].shape[1]) for w in matrices):
        raise ValueError(
            f"x has shape {tuple(rows.shape)} and weight {[tuple(w.shape) for w in weight]}; they must be [M, K] and "
            "[E, K, N] or E times [K, N]"
        )
    biases = None
    if bias is not None:
        biases = list(bias[0]) if len(bias) == 1 and bias[0].dim() == 2 else list(bias)
        wanted = torch.float32 if rows.dtype is torch.bfloat16 else rows.dtype
        if len(biases) != len(matrices) or any(
            b.shape != matrices[0].shape[1:] or b.dtype is not wanted for b in biases
        ):
            raise ValueError(
                f"bias has shapes {[tuple(b.shape) for b in bias]} and dtype {bias[0].dtype}; it must be {wanted}, "
                f"{matrices[0].shape[1]} entries for each of {len(matrices)} groups"
            )
    ends = group_ends(group_list, group_list_type, len(matrices), len(rows))
    wide = widened(rows)
    result = wide.new_full((len(rows), matrices[0].shape[1]), torch.nan)
    for group, (start, end) in enumerate(pairwise([0, *ends])):
        if start < end:
            result[start:end] = wide[start:end] @ widened(matrices[group])
            if biases is not None:
                result[start:end] += biases[group]
    return [result.to(rows.dtype if not output_dtype else DTYPES_BY_CODE[output_dtype])]


def group_ends(group_list: torch.Tensor | None, group_list_type: int | None, groups: int, rows: int) -> list[int]:
    """Where the rows of each group end.

    Raises:
        ValueError: the groups do not follow each other, or have more rows than there are.
    """
    if group_list is None or group_list.dtype is not torch.int64 or group_list.shape != (groups,):
        raise ValueError(
            f"group_list is {group_list}; it must be int64 with an entry for each of the {groups} groups"
        )
    ends = (group_list.cumsum(0) if group_list_type == 1 else group_list).tolist()
    if any(end < start for start, end in pairwise([0, *ends])) or ends[-1] > rows:
        raise ValueError(
            f"group_list is {group_list.tolist()} with group_list_type {group_list_type}; the groups must follow "
            f"each other within the {rows} rows of x"
        )
    return ends


def _only_input(
    x: Sequence[torch.Tensor],
    weight: Sequence[torch.Tensor],
    group_type: int | None,
    of_int8: tuple[object, object],
    of_floats: tuple[object, object],
) -> torch.Tensor:
    """The one tensor of ``x``, of a call that the CPU kernel can make.

    Args:
        of_int8: scale and per_token_scale.
        of_floats: antiquant_scale and antiquant_offset.

    Raises:
        ValueError: no ``group_type``, or no weight.
        NotImplementedError: a call of another kind.
    """
    if group_type is None:
        raise ValueError("group_type is None; with a group_list tensor it must be 0")
    if len(x) != 1:
        raise NotImplementedError(f"x holds {len(x)} tensors; the CPU kernel of npu::npu_grouped_matmul takes one")
    if not weight:
        raise ValueError("weight is an empty list; it must hold one [E, K, N] or E times [K, N]")
    rows = x[0]
    whole = weight[0].dtype in _WHOLE
    if of_int8 != (None, None) and rows.dtype is not torch.int8:
        raise NotImplementedError(f"x has dtype {rows.dtype}; scale and per_token_scale are for int8")
    if of_floats != (None, None) and (rows.dtype is torch.int8 or not whole):
        raise NotImplementedError("antiquant_scale and antiquant_offset are for floats by integers")
    takes = (*_WHOLE, rows.dtype) if rows.is_floating_point() else _WHOLE if rows.dtype is torch.int8 else ()
    if any(w.dtype not in takes for w in weight):
        raise NotImplementedError(
            f"x has dtype {rows.dtype} and weight {weight[0].dtype}; the CPU kernel multiplies floats of one dtype, "
            "and floats or int8 by int8 or, eight in an int32, 4 bits"
        )
    return rows


def _grouped_matmul_fake(
    x: Sequence[torch.Tensor],
    weight: Sequence[torch.Tensor],
    scale: Sequence[torch.Tensor] | None,
    per_token_scale: Sequence[torch.Tensor] | None,
    antiquant_scale: Sequence[torch.Tensor] | None,
    antiquant_offset: Sequence[torch.Tensor] | None,
    group_type: int | None,
    output_dtype: int | None,
) -> list[torch.Tensor]:
    rows = _only_input(x, weight, group_type, (scale, per_token_scale), (antiquant_scale, antiquant_offset))
    dtype = rows.dtype if not output_dtype else DTYPES_BY_CODE[output_dtype]
    outputs = weight[0].shape[-1] * (PER_INT32 if weight[0].dtype is torch.int32 else 1)
    return [rows.new_empty((rows.shape[0], outputs), dtype=dtype)]


OPERATORS = (
    Operator(
        "npu_grouped_matmul",
        npu_grouped_matmul,
        _grouped_matmul_fake,
        takes={"split_item": (2, 3), "group_type": (None, 0), "group_list_type": (0, 1)},
        ignores=["tuning_config"],
    ),
)
