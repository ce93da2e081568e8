"""`npu::npu_quant_matmul`: a product of int8 matrices with their scales.

Source: op-plugin, doc `torch_npu-npu_quant_matmul.md`.
"""

from __future__ import annotations

import torch

from .numerics import DTYPES_BY_CODE, float_of_bits, refuse_given, rounded_to_int8
from .registration import Operator

MAX_QUANT_DIM = 65535
"""The largest last dim of both inputs."""
_FLOAT_RESULTS = (torch.bfloat16, torch.float16, torch.float32)


def npu_quant_matmul(
    x1: torch.Tensor,
    x2: torch.Tensor,
    scale: torch.Tensor,
    *,
    offset: torch.Tensor | None = None,
    pertoken_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    output_dtype: int | None = None,
    **others: object,
) -> torch.Tensor:
    """``(x1 @ x2 [+ bias]) · scale [· pertoken_scale] [+ bias or offset]``: sums of int8 products, exact in int32,
    then float32, rounded once.

    Args:
        x1: int8 ``[..., M, K]``.
        x2: int8 ``[K, N]``, or the transposed view of ``[N, K]``.
        scale: fp32 or bf16 ``[N]`` or ``[1]``; bf16 for a bf16 result only. int64 that holds the bits of fp32, for an
            fp16 result without ``pertoken_scale``.
        offset: fp32 ``[N]`` or ``[1]``, for an int8 result.
        pertoken_scale: fp32 ``[M]``.
        bias: ``[N]``, int32: added to the sums; else behind the scales: fp32, or of the result's dtype.
        output_dtype: 15 bf16, 5 fp16, 3 int32 (the sums), 6 fp32 (to compare); None and 1 are int8.

    Returns:
        ``[..., M, N]``.

    Raises:
        ValueError: shapes, dtypes or sizes that do not fit.
        NotImplementedError: int4 in int32, groups, other result dtypes.
    """
    refuse_given("npu_quant_matmul", **others)
    result = torch.int8 if output_dtype is None else DTYPES_BY_CODE.get(output_dtype)
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
        raise NotImplementedError(f"x1 is {x1.dtype} and x2 {x2.dtype}; the CPU kernel takes int8")
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


def _quant_matmul_fake(
    x1: torch.Tensor, x2: torch.Tensor, scale: torch.Tensor, *, output_dtype: int | None = None, **_: object
) -> torch.Tensor:
    dtype = torch.int8 if output_dtype is None else DTYPES_BY_CODE[output_dtype]
    return x1.new_empty((*x1.shape[:-1], x2.shape[-1]), dtype=dtype)


OPERATORS = (Operator("npu_quant_matmul", npu_quant_matmul, _quant_matmul_fake),)
