"""`pagoda::gated_rms_norm`: a root-mean-square norm whose result, or whose input, a gate multiplies."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import torch

from ..native import FLOAT_CODES, kernel_function
from ..registration import Facts, register_operator
from .norm_kernel import check_parameter, in_rows

aten = torch.ops.aten

_SCHEMA = (
    "gated_rms_norm(Tensor input, Tensor gate, Tensor? weight, float eps, float weight_offset, "
    "bool round_before_scale, str activation, bool gate_first, int group_size) -> Tensor"
)
_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"silu": aten.silu, "sigmoid": aten.sigmoid}
GATES = tuple(_FUNCTIONS)
"""Activations of a gate."""
# Field for field the struct GatedNormArguments of csrc/gated_norm.cpp.
_ARGUMENTS = struct.Struct("=24q2d")


def gated_rms_norm_reference(
    input: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    round_before_scale: bool,
    activation: str,
    gate_first: bool,
    group_size: int,
) -> torch.Tensor:
    """``rms_norm(input) * act(gate)``, or ``rms_norm(input * act(gate))``, computed in fp32.

    The norm, ``x * rsqrt(mean(x²) + eps) * (weight + weight_offset)``, takes each group of neighbors by itself. The
    gate behind it is Gated DeltaNet's (Yang et al. 2024), the one in front of it Mamba-2's (Dao & Gu 2024).

    Args:
        input: ``[..., D]`` in the dtype of ``gate``, or fp32. Any strides.
        gate: ``[..., D]`` fp32, bf16 or fp16 (fp64 runs here, in fp64). Any strides; often part of a merged product.
        weight: ``[D]`` in the dtype of ``gate``, or fp32 without ``round_before_scale``; None: no scale at all.
        eps: added to the mean square.
        weight_offset: added to ``weight``.
        round_before_scale: True: the normalized value is rounded to the dtype of ``gate`` and multiplied by the
            weight in that dtype; a gate behind that multiplies in fp32 (transformers' ``Qwen3NextRMSNormGated``).
            False: rounded once, at the end (``KimiLinearRMSNormGated``).
        activation: "silu" or "sigmoid"; of the gate in fp32.
        gate_first: the gate multiplies the input, not the result.
        group_size: of neighbors that are normed together; divides D.

    Returns:
        ``[..., D]`` in the dtype of ``gate``, contiguous.

    Raises:
        ValueError: shapes, dtypes or groups that do not fit; an unknown activation.
    """
    _check(input, gate, weight, round_before_scale, activation, group_size)
    wide = torch.float64 if gate.dtype is torch.float64 else torch.float32
    opened = _FUNCTIONS[activation](gate.to(wide))
    x = input.to(wide)
    if gate_first:
        x = x * opened
    groups = x.unflatten(-1, (x.shape[-1] // group_size, group_size))
    normed = (groups * aten.rsqrt(groups.pow(2).mean(-1, keepdim=True) + eps)).flatten(-2)
    if round_before_scale:
        normed = normed.to(gate.dtype)
    if weight is not None:
        scale = weight.to(normed.dtype)
        normed = normed * (scale + weight_offset if weight_offset else scale)
    if not gate_first:
        normed = normed * opened
    return normed.to(gate.dtype).contiguous()


def gated_rms_norm_cpu(
    input: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor | None, *parameters: Any
) -> torch.Tensor:
    """:func:`gated_rms_norm_reference` by the C++ kernel, for CPU tensors; else the reference."""
    kernel = kernel_function("pagoda_gated_norm")
    codes = (FLOAT_CODES.get(input.dtype), FLOAT_CODES.get(gate.dtype))
    if kernel is None or None in codes:
        return gated_rms_norm_reference(input, gate, weight, *parameters)
    eps, weight_offset, round_before_scale, activation, gate_first, group_size = parameters
    _check(input, gate, weight, round_before_scale, activation, group_size)
    result = torch.empty_like(gate, memory_format=torch.contiguous_format)
    sizes, gate, gate_strides, rows, input_strides = in_rows(gate, input)
    assert rows is not None
    if weight is not None:
        weight = weight.contiguous()
    kernel(
        _ARGUMENTS.pack(
            rows.data_ptr(),
            *input_strides,
            gate.data_ptr(),
            *gate_strides,
            0 if weight is None else weight.data_ptr(),
            result.data_ptr(),
            *codes,
            0 if weight is None else FLOAT_CODES[weight.dtype],
            *sizes,
            group_size,
            activation == "silu",
            gate_first,
            round_before_scale,
            torch.get_num_threads(),
            eps,
            weight_offset,
        )
    )
    return result


def _check(
    input: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    round_before_scale: bool,
    activation: str,
    group_size: int,
) -> None:
    if activation not in _FUNCTIONS:
        raise ValueError(f"activation is {activation!r}; it must be one of {', '.join(GATES)}")
    if input.shape != gate.shape or input.dtype not in (gate.dtype, torch.float32):
        raise ValueError(
            f"input has shape {tuple(input.shape)} and dtype {input.dtype}, gate {tuple(gate.shape)} and "
            f"{gate.dtype}; expand or convert one of them, input may be torch.float32"
        )
    check_parameter("weight", weight, gate, beside="gate", or_float32=not round_before_scale)
    if group_size < 1 or gate.shape[-1] % group_size:
        raise ValueError(f"group_size is {group_size}; it must divide the {gate.shape[-1]} elements of the last dim")


def _like_gate(input: torch.Tensor, gate: torch.Tensor, *_: object) -> torch.Tensor:
    return gate.new_empty(gate.shape)


gated_rms_norm = register_operator(
    _SCHEMA,
    Facts(over="rows", invariant=True, kind="norm", spelled_out=False),
    fake=_like_gate,
    reference=gated_rms_norm_reference,
    cpu=gated_rms_norm_cpu,
)
