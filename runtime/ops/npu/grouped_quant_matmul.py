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
from .quant_matmul import product_of_groups, whole_product

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
        NotImplementedError: results of int8 or int32.
    """
    if result not in _RESULTS:
        raise NotImplementedError(f"output_dtype is {result}; the CPU kernel makes bf16, fp16 and fp32 of int8")
    assert scale is not None and per_token_scale is not None
    (scales,), (of_rows,) = scale, per_token_scale
    found = torch.full((len(rows), matrices.sizes[2]), torch.nan)
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
) -> torch.Tensor:
    """Products of rows of floats and rounded matrices, in fp32, rounded once; see ``npu_grouped_matmul``."""
    assert scale is not None and offset is not None
    (scales,), (offsets,) = scale, offset
    groups, outputs = scales.shape[1] if scales.dim() == 3 else 1, scales.shape[-1]
    wide = widened(rows)
    found = wide.new_full((len(rows), outputs), torch.nan)
    for group, at, matrix in matrices.groups():
        numbers = matrix.to(wide.dtype).unflatten(0, (groups, -1))
        of_outputs, added = (table[group].to(wide.dtype).view(-1, 1, outputs) for table in (scales, offsets))
        found[at] = wide[at] @ ((numbers + added) * of_outputs).flatten(0, 1)
        if bias is not None:
            found[at] += bias[0][group]
    return found.to(rows.dtype)
