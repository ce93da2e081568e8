"""`npu::` activations: npu_swiglu, npu_geglu, npu_gelu, npu_gelu_mul, npu_silu, npu_fast_gelu, npu_clipped_swiglu.

Source: op-plugin, the documents of these names (`torch_npu-npu_clipped_swiglu.md` and so on); npu_geglu after CANN's
GeGluV2. All take fp16, bf16 and fp32 (fp64), and round once at the end.
"""

from __future__ import annotations

import torch

from .numerics import stored_like, widened
from .registration import Operator

aten = torch.ops.aten


def npu_swiglu(input: torch.Tensor, dim: int) -> torch.Tensor:
    """``silu(a) · b``, ``a`` and ``b`` being the first and second half of ``input`` along ``dim``; contiguous."""
    first, second = _halves(input, dim)
    return (aten.silu(first) * second).to(input.dtype).contiguous()


def npu_geglu(
    input: torch.Tensor, dim: int, approximate: int, activate_left: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """``gelu(b) · a`` of the halves ``a``, ``b`` along ``dim``, and ``gelu(b)`` itself.

    Args:
        input: an even size along ``dim``.
        approximate: 1: the tanh form, 0: the exact one.
        activate_left: the GELU goes over ``a`` instead.

    Returns:
        Both contiguous, half the size of ``input`` along ``dim``.
    """
    left, right = _halves(input, dim)
    if not activate_left:
        left, right = right, left
    activated = aten.gelu(left, approximate="tanh" if approximate else "none")
    return (activated * right).to(input.dtype).contiguous(), activated.to(input.dtype).contiguous()


def npu_gelu(input: torch.Tensor, approximate: str) -> torch.Tensor:
    """GELU, exact ("none") or with tanh ("tanh"); the shape and strides of ``input``."""
    return stored_like(aten.gelu(widened(input), approximate=approximate), input)


def npu_gelu_mul(input: torch.Tensor, approximate: str) -> torch.Tensor:
    """``gelu(a) · b`` of the first and second half of the last dim; contiguous."""
    first, second = _halves(input, -1)
    return (aten.gelu(first, approximate=approximate) * second).to(input.dtype).contiguous()


def npu_silu(input: torch.Tensor) -> torch.Tensor:
    """``x · σ(x)``; the shape and strides of ``input``."""
    return stored_like(aten.silu(widened(input)), input)


def npu_fast_gelu(input: torch.Tensor) -> torch.Tensor:
    """``x / (1 + exp(-1.702 x))``, the A2 and A3 form; the shape and strides of ``input``."""
    wide = widened(input)
    return stored_like(wide * torch.sigmoid(1.702 * wide), input)


def npu_clipped_swiglu(
    x: torch.Tensor,
    group_index: torch.Tensor | None,
    dim: int,
    alpha: float,
    limit: float,
    bias: float,
    interleaved: bool,
) -> torch.Tensor:
    """``a · σ(alpha · a) · (b + bias)`` with ``a = min(a, limit)`` and ``b`` clamped to ``±limit`` (GPT-OSS).

    Args:
        x: 2 dims or more, even along ``dim``. The dims from ``dim`` on are taken as one axis, those before it as
            another one, the rows.
        group_index: int64, rows of each group: only the first ``Σ group_index`` rows are computed, the others are 0
            here and undefined on a device.
        interleaved: ``a`` and ``b`` are the even and the odd elements of that axis, else its first and second half.

    Returns:
        Half the size of ``x`` along ``dim``, contiguous.
    """
    axis = dim % x.dim()
    shape = [*x.shape]
    shape[axis] //= 2
    rows = widened(x).reshape(*((-1, x.shape[axis:].numel()) if axis else (1, x.numel())))
    used = len(rows)
    if group_index is not None:
        used = min(int(group_index.sum()), used)
    gate, linear = (rows[:, ::2], rows[:, 1::2]) if interleaved else rows.chunk(2, -1)
    gate, linear = gate.clamp(max=limit), linear.clamp(-limit, limit)
    result = gate * torch.sigmoid(alpha * gate) * (linear + bias)
    result[used:] = 0
    return result.reshape(shape).to(x.dtype).contiguous()


def _halves(input: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = widened(input).chunk(2, dim)
    return first, second


def _half_fake(input: torch.Tensor, dim: int) -> torch.Tensor:
    shape = [*input.shape]
    shape[dim] = shape[dim] // 2
    return input.new_empty(shape)


def _geglu_fake(input: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    return _half_fake(input, dim), _half_fake(input, dim)


def _gelu_mul_fake(input: torch.Tensor) -> torch.Tensor:
    return _half_fake(input, -1)


def _clipped_swiglu_fake(x: torch.Tensor, dim: int) -> torch.Tensor:
    return _half_fake(x, dim)


def _elementwise_fake(input: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(input)


OPERATORS = (
    Operator("npu_swiglu", npu_swiglu, _half_fake),
    Operator("npu_geglu", npu_geglu, _geglu_fake),
    Operator("npu_gelu", npu_gelu, _elementwise_fake),
    Operator("npu_gelu_mul", npu_gelu_mul, _gelu_mul_fake),
    Operator("npu_silu", npu_silu, _elementwise_fake),
    Operator("npu_fast_gelu", npu_fast_gelu, _elementwise_fake),
    Operator("npu_clipped_swiglu", npu_clipped_swiglu, _clipped_swiglu_fake),
)
