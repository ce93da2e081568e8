"""`npu::` quantization and storage formats: npu_dynamic_quant, npu_quantize, npu_format_cast.

Source: op-plugin, docs `torch_npu-npu_dynamic_quant.md`, `…-npu_quantize.md` and `…-npu_format_cast.md`.
"""

from __future__ import annotations

import torch

from .numerics import DTYPES_BY_CODE, stored_like, widened
from .registration import Operator

_QUINT4X2 = 16
_ND, _FRACTAL_NZ = 2, 29
_QUANTIZED = (torch.int8, torch.uint8, torch.int32)


def npu_dynamic_quant(input: torch.Tensor, smooth_scales: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int8 with a scale per row: ``scale = max|x| / 127``, ``q = rint(x / scale)``, ``x = input · smooth``.

    Args:
        input: 2 dims or more.
        smooth_scales: ``[input.shape[-1]]``.
        dst_type: None or 1: int8.

    Returns:
        int8 like ``input``, and fp32 scales of the shape ``input.shape[:-1]``. A row of zeros has scale 0. The
        device's kernel multiplies by ``127 / max|x|`` and returns its inverse (CANN's ops-nn, ``dynamic_quant.h``):
        its scales may differ in the last bits, and numbers halfway between two integers may become either.

    Raises:
        NotImplementedError: groups, other modes and dtypes.
    """
    wide = input.float()
    if smooth_scales is not None:
        wide = wide * smooth_scales.float()
    quantized, scale = rows_to_int8(wide)
    return stored_like(quantized, input, torch.int8), scale


def rows_to_int8(wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows ``[..., N]`` of fp32 in int8, and their scales ``[...]``, ``max / 127``; a row of zeros has scale 0.

    A row that holds an infinity or a NaN is stored as zeros, and its scale is none that brings it back.
    """
    scale = wide.abs().amax(-1, keepdim=True) / 127
    quantized = torch.where(scale > 0, wide / scale, 0.0).round().clamp(-128, 127).nan_to_num(0.0)
    return quantized.to(torch.int8), scale.squeeze(-1).contiguous()


def npu_quantize(
    input: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor | None, dtype: int, axis: int, div_mode: bool
) -> torch.Tensor:
    """``rint(input / scales + zero_points)``, or ``rint(input · scales + zero_points)`` without ``div_mode``.

    Args:
        scales: one entry, one for each index of ``axis``, or (without ``div_mode``) the rank of ``input`` with 1 in
            every dim but ``axis``.
        zero_points: the shape of ``scales``.
        dtype: 1 or 12 int8, 0 or 13 uint8, 3 or 14 int32.

    Returns:
        Clamped to the range of ``dtype``; the shape and strides of ``input``.

    Raises:
        ValueError: scales that do not fit.
        NotImplementedError: another dtype.
    """
    target = DTYPES_BY_CODE.get(dtype)
    if target not in _QUANTIZED:
        raise NotImplementedError(
            f"dtype is {dtype}; the CPU kernel of npu::npu_quantize makes int8, uint8 and int32"
        )
    wide = widened(input)
    spread = [1] * input.dim()
    spread[axis] = -1
    factor = _along(scales, "scales", input, axis, spread).to(wide.dtype)
    value = wide / factor if div_mode else wide * factor
    if zero_points is not None:
        value = value + _along(zero_points, "zero_points", input, axis, spread).to(wide.dtype)
    limits = torch.iinfo(target)
    # fp32 cannot hold the last int32 values; the conversion must see clamped ones.
    return stored_like(value.round().double().clamp(limits.min, limits.max), input, target)


def _along(values: torch.Tensor, name: str, input: torch.Tensor, axis: int, spread: list[int]) -> torch.Tensor:
    if values.numel() not in (1, input.shape[axis]):
        raise ValueError(
            f"{name} has shape {tuple(values.shape)}; it must have 1 entry or {input.shape[axis]}, the size of "
            f"input along axis {axis}"
        )
    return values.reshape(spread)


def npu_format_cast(input: torch.Tensor) -> torch.Tensor:
    """A copy of ``input``: a storage format changes no value, and CPU tensors have none.

    Args:
        acl_format: 2 ND or 29 FRACTAL_NZ. What is in FRACTAL_NZ must not be viewed, sliced or padded on a device.

    Returns:
        Contiguous.

    Raises:
        NotImplementedError: another format, or a dtype to convert to.
    """
    return input.clone(memory_format=torch.contiguous_format)


def _dynamic_quant_fake(
    input: torch.Tensor, dst_type: int | None, quant_mode: str
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = [*input.shape[:-2], input.shape[-1] if quant_mode == "perchannel" else input.shape[-2]]
    scale = input.new_empty([1] if quant_mode == "pertensor" else shape, dtype=torch.float32)
    if dst_type == _QUINT4X2:
        return input.new_empty((*shape, input.shape[-1] // 8), dtype=torch.int32), scale
    return torch.empty_like(input, dtype=torch.int8), scale


def _quantize_fake(input: torch.Tensor, dtype: int) -> torch.Tensor:
    if dtype == _QUINT4X2:
        return input.new_empty((*input.shape[:-1], input.shape[-1] // 8), dtype=torch.int32)
    target = DTYPES_BY_CODE.get(dtype, torch.int8)
    return torch.empty_like(input, dtype=target if target in _QUANTIZED else torch.int8)


def _format_cast_fake(input: torch.Tensor) -> torch.Tensor:
    return input.new_empty(input.shape)


OPERATORS = (
    Operator("npu_dynamic_quant", npu_dynamic_quant, _dynamic_quant_fake, takes={"dst_type": (None, 1)}),
    Operator("npu_quantize", npu_quantize, _quantize_fake),
    Operator("npu_format_cast", npu_format_cast, _format_cast_fake, takes={"acl_format": (_ND, _FRACTAL_NZ)}),
)
