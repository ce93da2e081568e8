"""Shared parts of the norm operators: the call of their C++ kernel, checks of arguments, norms of sums."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import torch

from ..native import FLOAT_CODES, kernel_function
from ..registration import Facts, like_input

NORM = Facts(over="rows", invariant=True, kind="norm", spelled_out=True)
"""The facts of norms that can be spelled out for an NPU."""

# Field for field the struct NormArguments of csrc/norm.cpp.
_ARGUMENTS = struct.Struct("=23q2d")


def run_norm(
    input: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    is_layer_norm: bool,
    eps: float,
    weight_offset: float,
    round_before_scale: bool,
) -> tuple[torch.Tensor, ...] | None:
    """The norm of ``input + residual`` and that sum, or that of ``input`` alone; None where the kernel does not run.

    Shapes and dtypes are as the operators' references say and have been checked.
    """
    code = FLOAT_CODES.get(input.dtype)
    kernel = kernel_function("pagoda_norm")
    if kernel is None or code is None:
        return None
    if weight is not None and bias is not None and weight.dtype is not bias.dtype:
        weight, bias = weight.float(), bias.float()
    result = torch.empty_like(input, memory_format=torch.contiguous_format)
    total = None if residual is None else torch.empty_like(result)
    sizes, input, strides, residual, residual_strides = in_rows(input, residual)
    parameter_code = code
    if weight is not None:
        weight = weight.contiguous()
        parameter_code = FLOAT_CODES[weight.dtype]
    if bias is not None:
        bias = bias.contiguous()
        parameter_code = FLOAT_CODES[bias.dtype]
    kernel(
        _ARGUMENTS.pack(
            input.data_ptr(),
            *strides,
            0 if residual is None else residual.data_ptr(),
            *residual_strides,
            0 if weight is None else weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            result.data_ptr(),
            0 if total is None else total.data_ptr(),
            code,
            parameter_code,
            *sizes,
            is_layer_norm,
            round_before_scale,
            torch.get_num_threads(),
            eps,
            weight_offset,
        )
    )
    return (result,) if total is None else (result, total)


def in_rows(
    first: torch.Tensor, second: torch.Tensor | None
) -> tuple[tuple[int, ...], torch.Tensor, tuple[int, ...], torch.Tensor | None, tuple[int, ...]]:
    """Describe one or two tensors of one shape as the kernels read them: three dims of rows and the last dim.

    More dims of rows become one, which may take a copy.

    Args:
        first: ``[..., D]``.
        second: of the same shape, or None.

    Returns:
        The four sizes; ``first``, or its copy; its four strides, in elements; ``second``, or its copy; its strides,
        which are those of ``first`` where it is None.
    """
    if first.is_contiguous() and (second is None or second.is_contiguous()):
        dim = first.shape[-1]
        strides: tuple[int, ...] = (0, 0, dim, 1)
        return (1, 1, first.numel() // dim if dim else 0, dim), first, strides, second, strides
    if first.dim() > 4:
        first = first.flatten(0, -2)
        second = None if second is None else second.flatten(0, -2)
    strides = (0, 0, 0, *first.stride())[-4:]
    second_strides = strides if second is None else (0, 0, 0, *second.stride())[-4:]
    return (1, 1, 1, *first.shape)[-4:], first, strides, second, second_strides


def norm_of_sum(
    norm: Callable[..., torch.Tensor], input: torch.Tensor, residual: torch.Tensor, *parameters: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """``norm(sum, *parameters)`` and ``sum = input + residual``, both contiguous."""
    check_residual(input, residual)
    total = (input + residual).contiguous()
    return norm(total, *parameters), total


def check_residual(input: torch.Tensor, residual: torch.Tensor | None) -> None:
    """Raise ``ValueError`` unless ``residual`` is None or has the shape and the dtype of ``input``."""
    if residual is not None and (residual.shape != input.shape or residual.dtype is not input.dtype):
        raise ValueError(
            f"residual has shape {tuple(residual.shape)} and dtype {residual.dtype}, input {tuple(input.shape)} and "
            f"{input.dtype}; expand or convert one of them"
        )


def check_parameter(
    name: str, parameter: torch.Tensor | None, input: torch.Tensor, *, or_float32: bool = True, beside: str = "input"
) -> None:
    """Raise ``ValueError`` unless ``parameter`` is None or ``[D]``, in a dtype that goes with ``input``.

    Args:
        name: in the message.
        parameter: weight or bias.
        input: ``[..., D]``; its dtype goes with itself.
        or_float32: so does float32.
        beside: what ``input`` is called in the message.
    """
    if parameter is None:
        return
    if parameter.dim() != 1 or parameter.numel() != input.shape[-1]:
        raise ValueError(
            f"{name} has shape {tuple(parameter.shape)}; it must have one entry for each of the {input.shape[-1]} "
            f"elements of {beside}'s last dim"
        )
    if parameter.dtype is not input.dtype and not (or_float32 and parameter.dtype is torch.float32):
        other = "torch.float32" if or_float32 else "to torch.float32 with round_before_scale=False"
        raise ValueError(
            f"{name} has dtype {parameter.dtype} and {beside} {input.dtype}; convert it to {input.dtype} or {other}"
        )


def fake_norm_and_sum(input: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    """The fake of the operators that add a residual first."""
    return like_input(input), like_input(input)
