"""`pagoda::rms_norm` and `pagoda::add_rms_norm`: root-mean-square norms, alone and after a residual addition."""

from __future__ import annotations

import torch

from .norm_kernel import check_length, check_residual, fake_norm_and_sum, run_norm
from .registration import like_input, register_operator

_SCHEMA = "rms_norm(Tensor input, Tensor? weight, float eps, float weight_offset, bool round_before_scale) -> Tensor"
_ADD_SCHEMA = (
    "add_rms_norm(Tensor input, Tensor residual, Tensor? weight, float eps, float weight_offset, "
    "bool round_before_scale) -> (Tensor, Tensor)"
)


def rms_norm_reference(
    input: torch.Tensor, weight: torch.Tensor | None, eps: float, weight_offset: float, round_before_scale: bool
) -> torch.Tensor:
    """``input * rsqrt(mean(input², -1) + eps) * (weight + weight_offset)``, normalised in fp32.

    Zhang & Sennrich 2019.

    Args:
        input: ``[..., D]`` fp32, bf16 or fp16 (fp64 runs here, in fp64). Any strides.
        weight: ``[D]`` in the dtype of ``input``, or fp32 without ``round_before_scale``; None: no scale at all.
        eps: added to the mean square.
        weight_offset: added to ``weight``: 1 for Gemma, which stores its scales less one.
        round_before_scale: True: the normalised value is rounded to the dtype of ``input`` and then multiplied in
            that dtype (transformers' ``LlamaRMSNorm``). False: scaled in fp32, rounded once (``F.rms_norm``, Gemma).

    Returns:
        ``[..., D]`` in the dtype of ``input``, contiguous.

    Raises:
        ValueError: a weight of another length or dtype.
    """
    _check_weight(input, weight, round_before_scale)
    wide = input.to(torch.float64 if input.dtype is torch.float64 else torch.float32)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if round_before_scale:
        normed = normed.to(input.dtype)
    if weight is not None:
        scale = weight.to(normed.dtype)
        normed = normed * (scale + weight_offset if weight_offset else scale)
    return normed.to(input.dtype).contiguous()


def add_rms_norm_reference(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    round_before_scale: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``sum = input + residual``, rounded to their dtype; ``(rms_norm(sum), sum)``.

    Args:
        input: ``[..., D]``, as in :func:`rms_norm_reference`, like the other arguments.
        residual: the shape and dtype of ``input``. Any strides.

    Returns:
        The norm and the sum, both contiguous.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    check_residual(input, residual)
    total = (input + residual).contiguous()
    return rms_norm_reference(total, weight, eps, weight_offset, round_before_scale), total


def _check_weight(input: torch.Tensor, weight: torch.Tensor | None, round_before_scale: bool) -> None:
    if weight is None:
        return
    check_length("weight", weight, input)
    if weight.dtype is not input.dtype and (round_before_scale or weight.dtype is not torch.float32):
        raise ValueError(
            f"weight has dtype {weight.dtype} and input {input.dtype}; convert it to {input.dtype}, or to "
            "torch.float32 with round_before_scale=False"
        )


def rms_norm_cpu(
    input: torch.Tensor, weight: torch.Tensor | None, eps: float, weight_offset: float, round_before_scale: bool
) -> torch.Tensor:
    """:func:`rms_norm_reference` by the C++ kernel, for CPU tensors; what it cannot take goes to the reference."""
    _check_weight(input, weight, round_before_scale)
    results = run_norm(input, None, weight, None, False, eps, weight_offset, round_before_scale)
    if results is None:
        return rms_norm_reference(input, weight, eps, weight_offset, round_before_scale)
    return results[0]


def add_rms_norm_cpu(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    round_before_scale: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`add_rms_norm_reference` by the C++ kernel, for CPU tensors, like :func:`rms_norm_cpu`."""
    check_residual(input, residual)
    _check_weight(input, weight, round_before_scale)
    results = run_norm(input, residual, weight, None, False, eps, weight_offset, round_before_scale)
    if results is None or results[1] is None:
        return add_rms_norm_reference(input, residual, weight, eps, weight_offset, round_before_scale)
    return results[0], results[1]


rms_norm = register_operator(_SCHEMA, fake=like_input, reference=rms_norm_reference, cpu=rms_norm_cpu)
add_rms_norm = register_operator(
    _ADD_SCHEMA, fake=fake_norm_and_sum, reference=add_rms_norm_reference, cpu=add_rms_norm_cpu
)
