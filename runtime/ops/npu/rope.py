"""`npu::` rotary position embedding: npu_rotary_mul, npu_interleave_rope and npu_apply_rotary_pos_emb.

Source: op-plugin, docs `torch_npu-npu_rotary_mul.md`, `…-npu_interleave_rope.md` and `…-apply_rotary_pos_emb.md`.
"""

from __future__ import annotations

import torch

from .numerics import stored_like, widened
from .registration import Operator


def rotated_half(x: torch.Tensor) -> torch.Tensor:
    """``[-x₂, x₁]`` of the halves ``x₁``, ``x₂`` of the last dim."""
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def deinterleaved(x: torch.Tensor) -> torch.Tensor:
    """Return the even elements of the last dim, then the odd ones."""
    return torch.cat([x[..., ::2], x[..., 1::2]], -1)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``x · cos + rotated_half(x) · sin``; ``x`` in the dtype to compute in."""
    return x * widened(cos) + rotated_half(x) * widened(sin)


def npu_rotary_mul(
    input: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor, rotary_mode: str, rotate: torch.Tensor | None
) -> torch.Tensor:
    """``input · r1 + rot(input) · r2``.

    The GE converter of A2 and A3 drops ``rotary_mode`` unless ``rotate`` is given; an eager call honors it, and so
    does this kernel.

    Args:
        input: 3 or 4 dims, the last one even.
        r1, r2: cos and sin; the rank, last dim and dtype of ``input``, 1 or the size of ``input`` elsewhere. (An
            eager call converts other dtypes, a graph does not.)
        rotary_mode: "half": ``rot`` is :func:`rotated_half`. "interleave": neighbors ``(x₀, x₁)`` become
            ``(-x₁, x₀)``.
        rotate: ``[D, D]``; ``rot(input) = input @ rotate``, whatever the mode is.

    Returns:
        The shape and dtype of ``input``, contiguous.

    Raises:
        ValueError: shapes or dtypes that do not fit.
        NotImplementedError: the modes of the 950 only.
    """
    wide = widened(input)
    if rotate is not None:
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
    halves = deinterleaved(widened(x))
    return stored_like(rotated(halves, cos, sin), x)


def npu_apply_rotary_pos_emb(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x · cos + rotated_half(x) · sin`` of both queries and keys.

    As on a device, the results are also written into ``query`` and ``key``, which the schema does not say.

    Args:
        query, key: ``[B, S, N, D]``, each with its own number of heads.
        cos, sin: ``[B, S, 1, D]``, the dtype of ``query``.

    Returns:
        The shapes and dtype of ``query`` and ``key``, contiguous.

    Raises:
        ValueError: shapes or dtypes that do not fit, a head of other sizes than 64 and 128.
        NotImplementedError: layouts and modes other than "BSND" and "half".
    """
    results = [rotated(widened(x), cos, sin).to(x.dtype).contiguous() for x in (query, key)]
    for x, result in zip((query, key), results, strict=True):
        x.copy_(result)
    return results[0], results[1]


def _rotary_mul_fake(input: torch.Tensor) -> torch.Tensor:
    return input.new_empty(input.shape)


def _interleave_rope_fake(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _apply_rotary_fake(query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape)


OPERATORS = (
    Operator("npu_rotary_mul", npu_rotary_mul, _rotary_mul_fake, takes={"rotary_mode": ("half", "interleave")}),
    Operator("npu_interleave_rope", npu_interleave_rope, _interleave_rope_fake),
    Operator("npu_apply_rotary_pos_emb", npu_apply_rotary_pos_emb, _apply_rotary_fake),
)
