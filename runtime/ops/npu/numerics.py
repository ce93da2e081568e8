"""Precision and layout rules that the CPU kernels of the `npu::` operators share."""

from __future__ import annotations

import torch

# The numbers that torch_npu's `int dtype` arguments take (op-plugin, TORCH_DTYPE_ENUM_VALUE_TO_SCALAR_TYPE_MAP);
# quantized types are stored in the plain integers of their width.
DTYPES_BY_CODE = {
    0: torch.uint8,
    1: torch.int8,
    2: torch.int16,
    3: torch.int32,
    4: torch.int64,
    5: torch.float16,
    6: torch.float32,
    7: torch.float64,
    11: torch.bool,
    12: torch.int8,
    13: torch.uint8,
    14: torch.int32,
    15: torch.bfloat16,
}


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` in the dtype that a kernel computes in: fp64 as it is, everything else in fp32."""
    return tensor if tensor.dtype is torch.float64 else tensor.float()


def nz_width(dtype: torch.dtype) -> int:
    """Elements of a row in one column of FRACTAL_NZ: 32 bytes of int8, fp16 or bf16.

    A cache that is checked in fp32 or fp64 keeps the shape that it has on the device, so 16.
    """
    return 32 if dtype is torch.int8 else 16


def stored_like(value: torch.Tensor, model: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A fresh tensor with the elements of ``value`` and the strides of ``torch.empty_like(model)``.

    Args:
        value: of the shape of ``model``. May be an argument of the operator: what is returned never shares memory.
        model: whose strides and, without ``dtype``, whose dtype the result has.
    """
    return torch.empty_like(model, dtype=dtype).copy_(value)


def rounded_to_int8(value: torch.Tensor) -> torch.Tensor:
    """``value`` rounded half to even and clamped to int8."""
    return value.round().clamp(-128, 127).to(torch.int8)


def bits_of_float(table: torch.Tensor) -> torch.Tensor:
    """int64 that holds the bits of float32 in its lower half, and zeros above them."""
    return table.float().contiguous().view(torch.int32).to(torch.int64).bitwise_and(0xFFFFFFFF)


def float_of_bits(table: torch.Tensor) -> torch.Tensor:
    """The float32 whose bits an int64 holds in its lower half."""
    halves = table.contiguous().view(torch.int32)
    return halves[..., ::2].contiguous().view(torch.float32)
