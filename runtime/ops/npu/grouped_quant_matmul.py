"""Products of `npu::npu_grouped_matmul` with matrices of 8 or 4 bits: rows of int8, or of floats.

Source: op-plugin, doc `torch_npu-npu_grouped_matmul.md`; of int8 by 4 bits CANN, `aclnnGroupedMatmulV5.md`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from .int4 import PER_INT32, unpack_int4
from .numerics import float_of_bits, widened
from .quant_matmul import INT4_GROUP, product_of_groups, whole_product

MAX_INT4_INPUTS = 18432
"""Of K beside int8 rows and matrices of 4 bits."""
_RESULTS = (torch.bfloat16, torch.float16, torch.float32)


class RoundedMatrices(NamedTuple):
    """The matrices of groups.

    Attributes:
        weight: int8 ``[E, K, N]``, or int32 ``[E, K, N / 8]`` of 4 bits.
        ends: where the rows of each group end.
    """

    weight: torch.Tensor
    ends: list[int]

    @property
    def is_int4(self) -> bool:
        """Its numbers have 4 bits."""
        return self.weight.dtype is torch.int32

    @property
    def sizes(self) -> tuple[int, int, int]:
        """E, K and N."""
        experts, inputs, outputs = self.weight.shape
        return experts, inputs, outputs * (PER_INT32 if self.is_int4 else 1)

    def groups(self) -> Iterator[tuple[int, slice, torch.Tensor]]:
        """The groups that have rows: number, rows, and int8 ``[K, N]``."""
        for group, (start, end) in enumerate(pairwise([0, *self.ends])):
            if start < end:
                matrix = self.weight[group]
                yield group, slice(start, end), unpack_int4(matrix) if self.is_int4 else matrix


def multiply_int8(
    rows: torch.Tensor,
    matrices: RoundedMatrices,
    scale: Sequence[torch.Tensor] | None,
    per_token_scale: Sequence[torch.Tensor] | None,
    bias: Sequence[torch.Tensor] | None,
    result: torch.dtype | None,
) -> torch.Tensor:
    """Products of rows of int8: sums in int32, then fp32, rounded once. For the arguments see ``npu_grouped_matmul``.

    Raises:
        ValueError: shapes or dtypes that do not fit.
        NotImplementedError: results of int8 or int32, or no scales.
    """
    if result not in _RESULTS or scale is None or per_token_scale is None:
        raise NotImplementedError(
            f"output_dtype is {result}; the CPU kernel makes bf16, fp16 and fp32 of int8, with scale and "
            "per_token_scale"
        )
    (scales,), (of_rows,) = scale, per_token_scale
    experts, inputs, outputs = matrices.sizes
    sizes: tuple[int, ...] = (experts, outputs)
    if matrices.is_int4:
        in_groups = scales.dim() == 3 and scales.shape[1] != 1
        if in_groups and inputs % INT4_GROUP:
            raise ValueError(f"weight has {inputs} inputs; a multiple of {INT4_GROUP} has scales for groups")
        sizes = (experts, inputs // INT4_GROUP if in_groups else 1, outputs)
    wanted = torch.bfloat16 if result is torch.bfloat16 else torch.float32
    wanted = torch.int64 if matrices.is_int4 else wanted
    if scales.shape != sizes or scales.dtype is not wanted:
        raise ValueError(f"scale is {scales.dtype} {tuple(scales.shape)}; {wanted} {sizes} is needed")
    if of_rows.shape != rows.shape[:1] or of_rows.dtype is not torch.float32:
        raise ValueError(f"per_token_scale is {of_rows.dtype} {tuple(of_rows.shape)}; fp32 [{len(rows)}] is needed")
    of_bias = torch.float32 if matrices.is_int4 else torch.int32
    if bias is None and matrices.is_int4:
        raise ValueError("bias is None; beside 4 bits it is 8 times the sum of the weights of each output")
    if bias is not None and (bias[0].dtype is not of_bias or bias[0].shape != (experts, outputs)):
        raise ValueError(f"bias is {bias[0].dtype} {tuple(bias[0].shape)}; {of_bias} {(experts, outputs)} is needed")
    if matrices.is_int4 and inputs > MAX_INT4_INPUTS:
        raise ValueError(f"weight has {inputs} inputs; at most {MAX_INT4_INPUTS} beside 4 bits")
    found = torch.zeros(len(rows), outputs)
    for group, at, matrix in matrices.groups():
        if matrices.is_int4:
            assert bias is not None
            sums_of_groups = product_of_groups(rows[at], matrix, float_of_bits(scales[group]))
            found[at] = (sums_of_groups + bias[0][group]) * of_rows[at, None]
            continue
        sums = whole_product(rows[at], matrix)
        if bias is not None:
            sums = sums + bias[0][group]
        found[at] = sums.float() * scales[group].float() * of_rows[at, None]
    return found.to(result)


def multiply_rounded(
    rows: torch.Tensor,
    matrices: RoundedMatrices,
    scale: Sequence[torch.Tensor] | None,
    offset: Sequence[torch.Tensor] | None,
    bias: Sequence[torch.Tensor] | None,
    result: torch.dtype | None,
) -> torch.Tensor:
    """Products of rows of floats and rounded matrices, in fp32, rounded once; see ``npu_grouped_matmul``.

    Raises:
        ValueError: shapes, dtypes or groups that do not fit, or no scale or offset.
    """
    if scale is None or offset is None:
        raise ValueError("antiquant_scale and antiquant_offset are needed beside matrices of whole numbers")
    if result is not rows.dtype:
        raise ValueError(f"output_dtype is {result}; {rows.dtype}, that of x, is needed")
    (scales,), (offsets,) = scale, offset
    experts, inputs, outputs = matrices.sizes
    groups = scales.shape[1] if scales.dim() == 3 and matrices.is_int4 else 0
    sizes: tuple[int, ...] = (experts, groups, outputs) if groups else (experts, outputs)
    for name, given in (("antiquant_scale", scales), ("antiquant_offset", offsets)):
        if given.dtype is not rows.dtype or tuple(given.shape) != sizes:
            raise ValueError(f"{name} is {given.dtype} {tuple(given.shape)}; {rows.dtype} {sizes} is needed")
    if groups and inputs % groups:
        raise ValueError(f"antiquant_scale has {groups} groups, which do not divide {inputs} inputs")
    wanted = torch.float32 if rows.dtype is torch.bfloat16 else rows.dtype
    if bias is not None and (bias[0].dtype is not wanted or bias[0].shape != (experts, outputs)):
        raise ValueError(f"bias is {bias[0].dtype} {tuple(bias[0].shape)}; {wanted} {(experts, outputs)} is needed")
    wide = widened(rows)
    found = wide.new_zeros((len(rows), outputs))
    for group, at, matrix in matrices.groups():
        numbers = matrix.to(wide.dtype).unflatten(0, (groups or 1, -1))
        of_outputs, added = (table[group].to(wide.dtype).view(-1, 1, outputs) for table in (scales, offsets))
        found[at] = wide[at] @ ((numbers + added) * of_outputs).flatten(0, 1)
        if bias is not None:
            found[at] += bias[0][group]
    return found.to(rows.dtype)
