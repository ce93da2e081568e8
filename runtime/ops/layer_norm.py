"""`pagoda::layer_norm` and `pagoda::add_layer_norm`: layer norms, alone and after a residual addition."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from .norm_kernel import check_length, check_residual, fake_norm_and_sum, run_norm
from .registration import like_input, register_operator

_SCHEMA = "layer_norm(Tensor input, Tensor? weight, Tensor? bias, float eps) -> Tensor"
_ADD_SCHEMA = (
    "add_layer_norm(Tensor input, Tensor residual, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor)"
)


def layer_norm_reference(
    input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """``F.layer_norm`` over the last dim: statistics, scale and shift in fp32, rounded once (Ba et al. 2016).

    Args:
        input: ``[..., D]`` fp32, bf16 or fp16 (fp64 runs here, in fp64). Any strides.
        weight: ``[D]`` in the dtype of ``input`` or fp32, or None.
        bias: the same; each may be there without the other.
        eps: added to the variance.

    Returns:
        ``[..., D]`` in the dtype of ``input``, contiguous.

    Raises:
        ValueError: a weight or bias of another length or dtype.
    """
    _check_parameter("weight", weight, input)
    _check_parameter("bias", bias, input)
    dim = (input.shape[-1],)
    if weight is None or bias is None or weight.dtype is bias.dtype:
        return F.layer_norm(input, dim, weight, bias, eps).contiguous()
    return F.layer_norm(input.float(), dim, weight.float(), bias.float(), eps).to(input.dtype).contiguous()


def add_layer_norm_reference(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``sum = input + residual``, rounded to their dtype; ``(layer_norm(sum), sum)``.

    Args:
        input: ``[..., D]``, as in :func:`layer_norm_reference`, like the other arguments.
        residual: the shape and dtype of ``input``. Any strides.

    Returns:
        The norm and the sum, both contiguous.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    check_residual(input, residual)
    total = (input + residual).contiguous()
    return layer_norm_reference(total, weight, bias, eps), total


def _check_parameter(name: str, parameter: torch.Tensor | None, input: torch.Tensor) -> None:
    if parameter is None:
        return
    check_length(name, parameter, input)
    if parameter.dtype is not input.dtype and parameter.dtype is not torch.float32:
        raise ValueError(
            f"{name} has dtype {parameter.dtype} and input {input.dtype}; "
            f"convert it to {input.dtype} or torch.float32"
        )


def layer_norm_cpu(
    input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """:func:`layer_norm_reference` by the C++ kernel, for CPU tensors; what it cannot take goes to the reference."""
    _check_parameter("weight", weight, input)
    _check_parameter("bias", bias, input)
    results = run_norm(input, None, weight, bias, True, eps, 0.0, False)
    return layer_norm_reference(input, weight, bias, eps) if results is None else results[0]


def add_layer_norm_cpu(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`add_layer_norm_reference` by the C++ kernel, for CPU tensors, like :func:`layer_norm_cpu`."""
    check_residual(input, residual)
    _check_parameter("weight", weight, input)
    _check_parameter("bias", bias, input)
    results = run_norm(input, residual, weight, bias, True, eps, 0.0, False)
    if results is None or results[1] is None:
        return add_layer_norm_reference(input, residual, weight, bias, eps)
    return results[0], results[1]


layer_norm = register_operator(_SCHEMA, fake=like_input, reference=layer_norm_reference, cpu=layer_norm_cpu)
add_layer_norm = register_operator(
    _ADD_SCHEMA, fake=fake_norm_and_sum, reference=add_layer_norm_reference, cpu=add_layer_norm_cpu
)
