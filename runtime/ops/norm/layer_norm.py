"""`pagoda::layer_norm` and `pagoda::add_layer_norm`: layer norms, alone and after a residual addition."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from ..registration import like_input, register_operator
from .norm_kernel import NORM, check_parameter, check_residual, fake_norm_and_sum, norm_of_sum, run_norm

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
    check_parameter("weight", weight, input)
    check_parameter("bias", bias, input)
    dim = (input.shape[-1],)
    if weight is None or bias is None or weight.dtype is bias.dtype:
        return F.layer_norm(input, dim, weight, bias, eps).contiguous()
    return F.layer_norm(input.float(), dim, weight.float(), bias.float(), eps).to(input.dtype).contiguous()


def add_layer_norm_reference(
    input: torch.Tensor, residual: torch.Tensor, *parameters: Any
) -> tuple[torch.Tensor, ...]:
    """``sum = input + residual``, rounded to their dtype; ``(layer_norm(sum), sum)``.

    Args:
        input: ``[..., D]``, as in :func:`layer_norm_reference`, like the parameters behind the residual.
        residual: the shape and dtype of ``input``. Any strides.
        parameters: weight, bias, eps.

    Returns:
        The norm and the sum, both contiguous.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    return norm_of_sum(layer_norm_reference, input, residual, *parameters)


def layer_norm_cpu(input: torch.Tensor, *parameters: Any) -> torch.Tensor:
    """:func:`layer_norm_reference` by the C++ kernel, for CPU tensors; what it cannot take goes to the reference."""
    found = _run(input, None, *parameters)
    return layer_norm_reference(input, *parameters) if found is None else found[0]


def add_layer_norm_cpu(input: torch.Tensor, residual: torch.Tensor, *parameters: Any) -> tuple[torch.Tensor, ...]:
    """:func:`add_layer_norm_reference` by the C++ kernel, for CPU tensors, like :func:`layer_norm_cpu`."""
    found = _run(input, residual, *parameters)
    return add_layer_norm_reference(input, residual, *parameters) if found is None else found


def _run(
    input: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, ...] | None:
    check_residual(input, residual)
    check_parameter("weight", weight, input)
    check_parameter("bias", bias, input)
    return run_norm(input, residual, weight, bias, True, eps, 0.0, False)


layer_norm = register_operator(_SCHEMA, NORM, fake=like_input, reference=layer_norm_reference, cpu=layer_norm_cpu)
add_layer_norm = register_operator(
    _ADD_SCHEMA, NORM, fake=fake_norm_and_sum, reference=add_layer_norm_reference, cpu=add_layer_norm_cpu
)
