"""`pagoda::rms_norm` and `pagoda::add_rms_norm`: root-mean-square norms, alone and after a residual addition."""

from __future__ import annotations

from typing import Any

import torch

from ..registration import like_input, register_operator
from .norm_kernel import NORM, check_parameter, check_residual, fake_norm_and_sum, norm_of_sum, run_norm

aten = torch.ops.aten

_SCHEMA = "rms_norm(Tensor input, Tensor? weight, float eps, float weight_offset, bool round_before_scale) -> Tensor"
_ADD_SCHEMA = (
    "add_rms_norm(Tensor input, Tensor residual, Tensor? weight, float eps, float weight_offset, "
    "bool round_before_scale) -> (Tensor, Tensor)"
)


def rms_norm_reference(
    input: torch.Tensor, weight: torch.Tensor | None, eps: float, weight_offset: float, round_before_scale: bool
) -> torch.Tensor:
    """``input * rsqrt(mean(input², -1) + eps) * (weight + weight_offset)``, normalized in fp32.

    Zhang & Sennrich 2019.

    Args:
        input: ``[..., D]`` fp32, bf16 or fp16 (fp64 runs here, in fp64). Any strides.
        weight: ``[D]`` in the dtype of ``input``, or fp32 without ``round_before_scale``; None: no scale at all.
        eps: added to the mean square.
        weight_offset: added to ``weight``: 1 for Gemma, which stores its scales less one.
        round_before_scale: True: the normalized value is rounded to the dtype of ``input`` and then multiplied in
            that dtype (transformers' ``LlamaRMSNorm``). False: scaled in fp32, rounded once (``F.rms_norm``, Gemma).

    Returns:
        ``[..., D]`` in the dtype of ``input``, contiguous.

    Raises:
        ValueError: a weight of another length or dtype.
    """
    check_parameter("weight", weight, input, or_float32=not round_before_scale)
    wide = input.to(torch.float64 if input.dtype is torch.float64 else torch.float32)
    normed = wide * aten.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if round_before_scale:
        normed = normed.to(input.dtype)
    if weight is not None:
        scale = weight.to(normed.dtype)
        normed = normed * (scale + weight_offset if weight_offset else scale)
    return normed.to(input.dtype).contiguous()


def add_rms_norm_reference(input: torch.Tensor, residual: torch.Tensor, *parameters: Any) -> tuple[torch.Tensor, ...]:
    """``sum = input + residual``, rounded to their dtype; ``(rms_norm(sum), sum)``.

    Args:
        input: ``[..., D]``, as in :func:`rms_norm_reference`, like the parameters behind the residual.
        residual: the shape and dtype of ``input``. Any strides.
        parameters: weight, eps, weight_offset, round_before_scale.

    Returns:
        The norm and the sum, both contiguous.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    return norm_of_sum(rms_norm_reference, input, residual, *parameters)


def rms_norm_cpu(input: torch.Tensor, *parameters: Any) -> torch.Tensor:
    """:func:`rms_norm_reference` by the C++ kernel, for CPU tensors; what it cannot take goes to the reference."""
    found = _run(input, None, *parameters)
    return rms_norm_reference(input, *parameters) if found is None else found[0]


def add_rms_norm_cpu(input: torch.Tensor, residual: torch.Tensor, *parameters: Any) -> tuple[torch.Tensor, ...]:
    """:func:`add_rms_norm_reference` by the C++ kernel, for CPU tensors, like :func:`rms_norm_cpu`."""
    found = _run(input, residual, *parameters)
    return add_rms_norm_reference(input, residual, *parameters) if found is None else found


def _run(
    input: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    round_before_scale: bool,
) -> tuple[torch.Tensor, ...] | None:
    check_residual(input, residual)
    check_parameter("weight", weight, input, or_float32=not round_before_scale)
    return run_norm(input, residual, weight, None, False, eps, weight_offset, round_before_scale)


rms_norm = register_operator(_SCHEMA, NORM, fake=like_input, reference=rms_norm_reference, cpu=rms_norm_cpu)
add_rms_norm = register_operator(
    _ADD_SCHEMA, NORM, fake=fake_norm_and_sum, reference=add_rms_norm_reference, cpu=add_rms_norm_cpu
)
