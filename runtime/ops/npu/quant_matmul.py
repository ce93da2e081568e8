"""`npu::npu_quant_matmul`: a product of int8 and a matrix of 8 or 4 bits with their scales.

Source: op-plugin, doc `torch_npu-npu_quant_matmul.md`; of int8 by 4 bits CANN, `aclnnQuantMatmulV5.md` (K-G).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .int4 import PER_INT32, unpack_int4
from .numerics import DTYPES_BY_CODE, float_of_bits, rounded_to_int8
from .registration import Operator

_TAKEN_OFF = 8
"""From rows of int8 in front of 4 bits: their halves are read as numbers around 0."""
_FLOAT_RESULTS = (torch.bfloat16, torch.float16, torch.float32)


def npu_quant_matmul(
    x1: torch.Tensor,
    x2: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    pertoken_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    output_dtype: int | None,
    group_sizes: Sequence[int] | None,
) -> torch.Tensor:
    """``(x1 @ x2 [+ bias]) · scale [· pertoken_scale] [+ bias or offset]``: sums of int8 products, exact in int32,
    then float32, rounded once.

    Args:
        x1: int8 ``[..., M, K]``.
        x2: int8 ``[K, N]``, or the transposed view of ``[N, K]``. Or int32 ``[K, N / 8]`` of 4 bits (see ``int4``),
            256 inputs of which share a scale: ``((x1 - 8) @ (x2 · scale) + offset) · pertoken_scale``. There x1 is
            ``[M, K]``, ``scale`` int64 ``[K / 256, N]`` that holds the bits of fp32, ``pertoken_scale`` fp32
            ``[M, 1]``, and ``offset`` fp32 ``[N]``; right is 8 times the sum of each output's weights, which the
            operator takes off. The result is bf16 or fp16 (fp32 to compare), and there is no bias.
        scale: fp32 or bf16 ``[N]`` or ``[1]``; bf16 for a bf16 result only. int64 that holds the bits of fp32, for an
            fp16 result without ``pertoken_scale``.
        offset: fp32 ``[N]`` or ``[1]``, for an int8 result.
        pertoken_scale: fp32 ``[M]``.
        bias: ``[N]``, int32: added to the sums; else behind the scales: fp32, or of the result's dtype.
        output_dtype: 15 bf16, 5 fp16, 3 int32 (the sums), 6 fp32 (to compare); None and 1 are int8.
        group_sizes: ``[0, 0, 256]`` for 4 bits: without it the operator takes no scales of groups. Else None.

    Returns:
        ``[..., M, N]``.

    Raises:
        ValueError: shapes, dtypes or sizes that do not fit.
        NotImplementedError: int4 by int4, groups of other sizes, other result dtypes.
    """
    by_4_bits = x1.dtype is torch.int8 and x2.dtype is torch.int32
    if not by_4_bits and group_sizes is not None:
        raise NotImplementedError(f"group_sizes is {group_sizes}; the CPU kernel takes it beside 4 bits alone")
    result = torch.int8 if output_dtype is None else DTYPES_BY_CODE.get(output_dtype)
    if result not in (*_FLOAT_RESULTS, *(() if by_4_bits else (torch.int32, torch.int8))):
        raise NotImplementedError(f"output_dtype is {result}; the CPU kernel makes bf16, fp16, fp32, int32 and int8")
    if by_4_bits:
        assert offset is not None and pertoken_scale is not None
        value = product_of_groups(x1, unpack_int4(x2), float_of_bits(scale)) + offset
        return (value * pertoken_scale).to(result)
    sums = whole_product(x1, x2)
    if bias is not None and bias.dtype is torch.int32:
        sums = sums + bias
    if result is torch.int32:
        return sums
    value = sums.float() * (float_of_bits(scale) if scale.dtype is torch.int64 else scale.float())
    if pertoken_scale is not None:
        value = value * pertoken_scale[..., None]
    if bias is not None and bias.dtype is not torch.int32:
        value = value + bias.float()
    if offset is not None:
        value = value + offset.float()
    return rounded_to_int8(value) if result is torch.int8 else value.to(result)


def whole_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x @ weight`` of int8 matrices as int32, exact for up to 65535 terms: float64 holds every sum of them."""
    return (x.double() @ weight.double()).to(torch.int32)


def product_of_groups(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``(x - 8) @ (weight · scales)`` as products of int8 by 4 bits compute it.

    Args:
        x: int8 ``[M, K]``.
        weight: int8 ``[K, N]``, from -8 to 7.
        scales: fp32 ``[groups, N]``, of equal parts of K.

    Returns:
        fp32 ``[M, N]``: sums of a group are exact, groups are added in their order.
    """
    size = len(weight) // len(scales)
    lowered = x.to(torch.int16) - _TAKEN_OFF
    found = scales.new_zeros(len(x), weight.shape[1])
    for group, table in enumerate(scales):
        at = slice(group * size, (group + 1) * size)
        found += whole_product(lowered[:, at], weight[at]).float() * table
    return found


def _quant_matmul_fake(x1: torch.Tensor, x2: torch.Tensor, output_dtype: int | None) -> torch.Tensor:
    dtype = torch.int8 if output_dtype is None else DTYPES_BY_CODE[output_dtype]
    outputs = x2.shape[-1] * (PER_INT32 if x2.dtype is torch.int32 else 1)
    return x1.new_empty((*x1.shape[:-1], outputs), dtype=dtype)


OPERATORS = (Operator("npu_quant_matmul", npu_quant_matmul, _quant_matmul_fake, lacks={"x1": [torch.int32]}),)
