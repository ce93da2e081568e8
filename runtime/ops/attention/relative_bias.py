"""A bias of attention scores per query and distance back to a key."""

from __future__ import annotations

import torch


def scores_of_relative_bias(
    relative_bias: torch.Tensor, query_positions: torch.Tensor, num_keys: int, dtype: torch.dtype
) -> torch.Tensor:
    """What the bias adds to the scores, ``[1, H, n, num_keys]``.

    For query i and key j that is ``relative_bias[0, h, i, i - j]`` where ``0 <= i - j < E``, else 0.

    Args:
        relative_bias: ``[1, H, n, E]``.
        query_positions: ``[n]`` int64.
        num_keys: keys, at positions from 0 on.
        dtype: of the result.
    """
    extent = relative_bias.shape[3]
    distance = query_positions[:, None] - torch.arange(num_keys, device=query_positions.device)
    index = distance.clamp(0, extent - 1).expand(*relative_bias.shape[:2], -1, -1)
    found = relative_bias.to(dtype).gather(3, index)
    return found.masked_fill((distance < 0) | (distance >= extent), 0.0)


def check_relative_bias(relative_bias: torch.Tensor | None, batch: int, heads: int, tokens: int) -> None:
    """Raise ``ValueError`` unless ``relative_bias`` is None or ``[1, heads, tokens, E]``, floating point, for a batch
    of one."""
    if relative_bias is None:
        return
    shape = relative_bias.shape
    if batch != 1 or relative_bias.dim() != 4 or shape[:3] != (1, heads, tokens) or not shape[3]:
        raise ValueError(
            f"relative_bias has shape {tuple(shape)}; make it [1, {heads}, {tokens}, E], for a batch of one"
        )
    if not relative_bias.dtype.is_floating_point:
        raise ValueError(f"relative_bias has dtype {relative_bias.dtype}; make it float32")
