"""A pool of blocks that grows under load and shrinks when idle, in chunks, between two limits."""

from __future__ import annotations

from .pool import BlockPool

_CHUNKS = 16
"""Number of steps in which a pool grows from nothing to its upper limit."""


class ElasticPool(BlockPool):
    """A pool that grows when no block is available, before any request is preempted.

    Args:
        min_blocks: lower limit of its size.
        max_blocks: upper limit of its size.
        patience: number of steps with two unused chunks after which the pool may shrink by one chunk.
    """

    def __init__(self, min_blocks: int, max_blocks: int, patience: int = 64) -> None:
        if not 1 <= min_blocks <= max_blocks:
            raise ValueError(f"min_blocks={min_blocks} is not between 1 and max_blocks={max_blocks}; lower it")
        super().__init__(min_blocks)
        self.min_blocks, self.max_blocks, self.patience = min_blocks, max_blocks, patience
        self.chunk = max(1, -(-max_blocks // _CHUNKS))
        self._looks = 0

    @property
    def num_available(self) -> int:
        return super().num_available + self.max_blocks - self.num_blocks

    def take(self, count: int) -> list[int]:
        missing = count - super().num_available
        if 0 < missing <= self.max_blocks - self.num_blocks:
            self.resize(min(self.max_blocks, self.num_blocks + -(-missing // self.chunk) * self.chunk))
        return super().take(count)

    def size_for_load(self) -> int:
        """Return the number of blocks to have, fewer after ``patience`` steps of low use; call once per step."""
        smaller = max(self.min_blocks, self.num_blocks - self.chunk)
        self._looks = self._looks + 1 if self.num_used + self.chunk <= smaller < self.num_blocks else 0
        if self._looks < self.patience:
            return self.num_blocks
        self._looks = 0
        return smaller
