"""Rows of int8 with one float32 scale each: the format of a head's key or value in an int8 KV cache."""

from __future__ import annotations

import torch

aten = torch.ops.aten

_LARGEST = 127.0
_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row in int8, symmetric around 0: ``rows ≈ stored · scale`` with ``scale = max|row| / 127``.

    ``stored = round(row / scale)``, ties to even, all in float32, so no element is off by more than half a scale. A
    row whose scale is not a normal float32 (max|row| below 1.5e-36; zeros among them) is stored as zeros with scale
    0. A row that holds a NaN or an infinity is stored as zeros with scale NaN: all of it comes back as NaN.

    Args:
        rows: ``[..., D]``, any floating-point dtype.

    Returns:
        ``[..., D]`` int8 and ``[...]`` float32.
    """
    numbers = rows.float()
    # Operators that torchair converts; whether a device's maximum passes on a NaN is not relied on.
    largest = numbers.abs().max(-1).values
    finite = (numbers - numbers).sum(-1) == 0
    scale = largest / _LARGEST
    usable = finite & (scale >= _SMALLEST_NORMAL)
    divisor = aten.where(usable, scale, 1.0)
    whole = (numbers / divisor[..., None]).round().clamp(-_LARGEST, _LARGEST)
    stored = aten.where(usable[..., None], whole, 0.0).to(torch.int8)
    return stored, aten.where(finite, aten.where(usable, scale, 0.0), torch.nan)


def dequantize_rows(stored: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The rows that ``quantize_rows`` stored.

    Args:
        stored: ``[..., D]`` int8.
        scale: ``[...]`` float32.
        dtype: of the result; products are rounded to it from float32.
    """
    return (stored.float() * scale[..., None]).to(dtype)


def check_scales(key_cache: torch.Tensor, key_scale: torch.Tensor | None, value_scale: torch.Tensor | None) -> None:
    """Raise ``ValueError`` unless int8 caches, and only they, come with scales ``[num_blocks, block_size, Hk]``."""
    for name, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
        if key_cache.dtype != torch.int8:
            if scale is not None:
                raise ValueError(f"{name} is for caches of torch.int8, not {key_cache.dtype}; omit it")
        elif scale is None or scale.dtype != torch.float32 or scale.shape != key_cache.shape[:3]:
            found = None if scale is None else f"{tuple(scale.shape)} {scale.dtype}"
            raise ValueError(
                f"{name} is {found}; caches of torch.int8 need {tuple(key_cache.shape[:3])} torch.float32"
            )
