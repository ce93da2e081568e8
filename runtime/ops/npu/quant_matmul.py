"""`npu::npu_quant_matmul`: a product of int8 and a matrix of 8 or 4 bits with their scales.

Source: op-plugin, doc `torch_npu-npu_quant_matmul.md`; of int8 by 4 bits CANN, `aclnnQuantMatmulV5.md` (K-G).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .int4 import PER_INT32, unpack_int4
from .numerics import DTYPES_BY_CODE, float_of_bits, rounded_to_int8
from .registration import Operator

MAX_QUANT_DIM = 65535
"""The largest last dim of both inputs."""
INT4_GROUP = 256
"""Inputs that share a scale of 4 bits beside rows of int8."""
INT4_INPUTS_BELOW = 29576
"""Of K there."""
INT4_GROUP_SIZES = (0, 0, INT4_GROUP)
"""``group_sizes`` there: along M, N and K, 0 where none is said."""
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
        group_sizes: ``[0, 0, 256]`` beside 4 bits: without it the operator takes no scales of groups. Else None.

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
    if by_4_bits:
        if group_sizes is None or tuple(group_sizes) != INT4_GROUP_SIZES:
            raise ValueError(f"group_sizes is {group_sizes}; {list(INT4_GROUP_SIZES)} is needed beside 4 bits")
        return _multiply_int4(x1, x2, scale, offset, pertoken_scale, bias, result)
    _check_quant_matmul(x1, x2, scale, pertoken_scale, bias, result)
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


def _multiply_int4(
    x1: torch.Tensor,
    x2: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    pertoken_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    result: torch.dtype | None,
) -> torch.Tensor:
    if result not in _FLOAT_RESULTS:
        raise NotImplementedError(f"output_dtype is {result}; the CPU kernel makes bf16, fp16 and fp32 of 4 bits")
    if x1.dim() != 2 or x2.dim() != 2 or x1.shape[1] != x2.shape[0] or not x2.is_contiguous():
        raise ValueError(f"x1 {tuple(x1.shape)} and x2 {tuple(x2.shape)} must be [M, K] and [K, N / 8] without gaps")
    rows, inputs, outputs = len(x1), len(x2), x2.shape[1] * PER_INT32
    if inputs % INT4_GROUP or inputs >= INT4_INPUTS_BELOW:
        raise ValueError(f"x2 has {inputs} inputs; a multiple of {INT4_GROUP} below {INT4_INPUTS_BELOW} is needed")
    if bias is not None:
        raise ValueError("bias is given; beside 4 bits there is none")
    wanted = {
        "scale": (scale, torch.int64, (inputs // INT4_GROUP, outputs)),
        "offset": (offset, torch.float32, (outputs,)),
        "pertoken_scale": (pertoken_scale, torch.float32, (rows, 1)),
    }
    for name, (given, dtype, sizes) in wanted.items():
        if given is None or given.dtype is not dtype or given.shape != sizes:
            found = None if given is None else f"{given.dtype} {tuple(given.shape)}"
            raise ValueError(f"{name} is {found}; {dtype} {sizes} is needed beside 4 bits")
    assert offset is not None and pertoken_scale is not None
    value = product_of_groups(x1, unpack_int4(x2), float_of_bits(scale)) + offset
    return (value * pertoken_scale).to(result)


def _check_quant_matmul(
    x1: torch.Tensor,
    x2: torch.Tensor,
    scale: torch.Tensor,
    pertoken_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    result: torch.dtype | None,
) -> None:
    if result not in (*_FLOAT_RESULTS, torch.int32, torch.int8):
        raise NotImplementedError(f"output_dtype is {result}; the CPU kernel makes bf16, fp16, fp32, int32 and int8")
    if x1.dtype is not torch.int8 or x2.dtype is not torch.int8:
        raise NotImplementedError(f"x1 is {x1.dtype} and x2 {x2.dtype}; the CPU kernel takes int8 by 8 or 4 bits")
    if x1.dim() < 2 or x2.dim() != 2 or x1.shape[-1] != x2.shape[0]:
        raise ValueError(f"x1 {tuple(x1.shape)} and x2 {tuple(x2.shape)} must be [..., M, K] and [K, N]")
    outputs = x2.shape[1]
    if max(x1.shape[-1], outputs) > MAX_QUANT_DIM:
        raise ValueError(f"x1 {tuple(x1.shape)} and x2 {tuple(x2.shape)} have last dims above {MAX_QUANT_DIM}")
    if scale.dtype is torch.int64 and (result is not torch.float16 or pertoken_scale is not None):
        raise ValueError(f"scale is int64 and the result {result}; it is for fp16 without pertoken_scale")
    if scale.dtype not in (torch.float32, torch.bfloat16, torch.int64) or scale.shape not in ((1,), (outputs,)):
        raise ValueError(f"scale is {scale.dtype} {tuple(scale.shape)}; fp32 or bf16 [{outputs}] or [1] is needed")
    if scale.dtype is torch.bfloat16 and result not in (torch.bfloat16, torch.int32):
        raise ValueError(f"scale is bfloat16 and the result {result}; give it in float32")
    if pertoken_scale is not None and (
        pertoken_scale.dtype is not torch.float32 or pertoken_scale.shape != x1.shape[:-1]
    ):
        raise ValueError(
            f"pertoken_scale is {pertoken_scale.dtype} {tuple(pertoken_scale.shape)}; fp32 {tuple(x1.shape[:-1])} is "
            "needed"
        )
    if bias is not None and (bias.shape != (outputs,) or bias.dtype not in (torch.int32, torch.float32, result)):
        raise ValueError(
            f"bias is {bias.dtype} {tuple(bias.shape)}; [{outputs}] of int32, float32 or {result} is needed"
        )


def _quant_matmul_fake(x1: torch.Tensor, x2: torch.Tensor, output_dtype: int | None) -> torch.Tensor:
    dtype = torch.int8 if output_dtype is None else DTYPES_BY_CODE[output_dtype]
    outputs = x2.shape[-1] * (PER_INT32 if x2.dtype is torch.int32 else 1)
    return x1.new_empty((*x1.shape[:-1], outputs), dtype=dtype)


OPERATORS = (Operator("npu_quant_matmul", npu_quant_matmul, _quant_matmul_fake),)
