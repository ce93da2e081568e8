"""`npu::` rotary position embedding: npu_rotary_mul and npu_interleave_rope.

Source: op-plugin, docs `torch_npu-npu_rotary_mul.md` and `…-npu_interleave_rope.md`. npu_apply_rotary_pos_emb is left
out: on a device it writes into its arguments, which its schema denies.
"""

from __future__ import annotations

import torch

from .numerics import stored_like, widened
from .registration import Operator

MAX_ROTARY_DIM = 896
"""Dims of a head are below it in npu_rotary_mul."""
INTERLEAVED_DIM = 64
"""Dims of a head in npu_interleave_rope."""


def rotated_half(x: torch.Tensor) -> torch.Tensor:
    """``[-x₂, x₁]`` of the halves ``x₁``, ``x₂`` of the last dim."""
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def deinterleaved(x: torch.Tensor) -> torch.Tensor:
    """The even places of the last dim, then the odd ones."""
    return torch.cat([x[..., ::2], x[..., 1::2]], -1)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``x · cos + rotated_half(x) · sin``; ``x`` in the dtype to compute in."""
    return x * widened(cos) + rotated_half(x) * widened(sin)


def npu_rotary_mul(
    input: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor, rotary_mode: str, rotate: torch.Tensor | None
) -> torch.Tensor:
    """``input · r1 + rot(input) · r2``.

    The GE converter of A2 and A3 drops ``rotary_mode`` unless ``rotate`` is given; an eager call honours it, and so
    does this kernel.

    Args:
        input: 3 or 4 dims, the last one even.
        r1, r2: cos and sin; the rank, last dim and dtype of ``input``, 1 or the size of ``input`` elsewhere. (An
            eager call converts other dtypes, a graph does not.)
        rotary_mode: "half": ``rot`` is :func:`rotated_half`. "interleave": neighbours ``(x₀, x₁)`` become
            ``(-x₁, x₀)``.
        rotate: ``[D, D]``; ``rot(input) = input @ rotate``, whatever the mode is.

    Returns:
        The shape and dtype of ``input``, contiguous.

    Raises:
        ValueError: shapes or dtypes that do not fit.
        NotImplementedError: the modes of the 950 only.
    """
    if input.dim() not in (3, 4) or input.shape[-1] % 2:
        raise ValueError(f"input has shape {tuple(input.shape)}; it must have 3 or 4 dims, the last one even")
    if input.shape[-1] >= MAX_ROTARY_DIM:
        raise ValueError(f"input has heads of {input.shape[-1]} dims; they must be below {MAX_ROTARY_DIM}")
    for name, table in (("r1", r1), ("r2", r2)):
        _check_table(name, table, input)
    wide = widened(input)
    if rotate is not None:
        if rotate.shape != (input.shape[-1],) * 2:
            raise ValueError(f"rotate has shape {tuple(rotate.shape)}; it must be square, {input.shape[-1]} a side")
        turned = wide @ rotate.to(wide.dtype)
    elif rotary_mode == "half":
        turned = rotated_half(wide)
    else:
        turned = torch.stack([-wide[..., 1::2], wide[..., ::2]], -1).flatten(-2)
    return (wide * widened(r1) + turned * widened(r2)).to(input.dtype).contiguous()


def npu_interleave_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``q · cos + rotated_half(q) · sin`` with ``q = deinterleaved(x)``: the result stays in halves.

    Args:
        x: ``[B, N, S, 64]``; a device takes fp16 and bf16 only.
        cos, sin: ``[B, 1, S or 1, D]``, the dtype of ``x``.

    Returns:
        The shape, dtype and strides of ``x``.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    if x.dim() != 4 or x.shape[-1] != INTERLEAVED_DIM:
        raise ValueError(f"x has shape {tuple(x.shape)}; it must be [B, N, S, {INTERLEAVED_DIM}]")
    for name, table in (("cos", cos), ("sin", sin)):
        _check_table(name, table, x)
        if table.shape[1] != 1:
            raise ValueError(f"{name} has shape {tuple(table.shape)}; its second dim must be 1")
    halves = deinterleaved(widened(x))
    return stored_like(rotated(halves, cos, sin), x)


def _check_table(name: str, table: torch.Tensor, input: torch.Tensor) -> None:
    fits = table.dim() == input.dim() and table.shape[-1] == input.shape[-1] and table.dtype is input.dtype
    if not fits or any(size not in (1, full) for size, full in zip(table.shape, input.shape, strict=True)):
        raise ValueError(
            f"{name} has shape {tuple(table.shape)} and dtype {table.dtype}; it must have dtype {input.dtype} and, "
            f"but for dims of size 1, shape {tuple(input.shape)}"
        )


def _rotary_mul_fake(input: torch.Tensor) -> torch.Tensor:
    return input.new_empty(input.shape)


def _interleave_rope_fake(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


OPERATORS = (
    Operator("npu_rotary_mul", npu_rotary_mul, _rotary_mul_fake, takes={"rotary_mode": ("half", "interleave")}),
    Operator("npu_interleave_rope", npu_interleave_rope, _interleave_rope_fake),
)
