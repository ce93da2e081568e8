"""The blocks of a cache that a sliding window touches, for attention that reads whole blocks from their first on.

A window of W tokens ends with its sequence and may begin anywhere in a block. What the block holds in front of it is
of the same sequence, so it is numbers, and a mask hides it; blocks before that one may have gone to other sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

WINDOW_LENS = "window_lens"
"""What the name of a field of ``StepMetadata`` with ``window_lens`` begins with; tokens per block and of the window
follow."""


def window_lens(seq_lens: Sequence[int], window: int, block_size: int) -> list[int]:
    """Tokens of each sequence from the first one of the first block that its window touches.

    Args:
        seq_lens: tokens of each sequence.
        window: the last tokens that are seen.
        block_size: tokens per block.
    """
    return [length - max(0, length - window) // block_size * block_size for length in seq_lens]


def window_blocks(
    block_table: torch.Tensor, seq_lens: torch.Tensor, window: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The part of each block table that the window touches, and which tokens there the window has passed.

    Args:
        block_table: ``[S, W]`` int32.
        seq_lens: ``[S]`` int32, at least 1; no entry behind a sequence's last block is read.
        window, block_size: as for ``window_lens``.

    Returns:
        ``[S, B]`` int32, the blocks from the first one that the window touches, as many as it can touch; where a
        sequence has fewer its last one is repeated.
        ``[S, 1, 1, B * block_size]`` bool, true for tokens of these blocks in front of the window.
    """
    count, device = -(-(window - 1) // block_size) + 1, seq_lens.device
    start = (seq_lens - window).clamp(min=0)
    first, last = (torch.div(at, block_size, rounding_mode="floor") for at in (start, seq_lens - 1))
    columns = torch.minimum(first[:, None] + torch.arange(count, dtype=torch.int32, device=device), last[:, None])
    passed = torch.arange(count * block_size, dtype=torch.int32, device=device) < (start % block_size)[:, None]
    return block_table.gather(1, columns.long()), passed[:, None, None]
