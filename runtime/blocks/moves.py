"""The moves that defragment a pool."""

from __future__ import annotations

from .pool import BlockPool


def moves_to_front(pool: BlockPool, size: int) -> dict[int, int]:
    """Return source → target of the moves after which no used block has an id of ``size`` or above.

    Used blocks go to free ids, and to the ids of cached blocks when free ones run out; cached blocks go to the
    remaining free ids. O(``num_blocks``).
    """
    used = [block for block in range(size, pool.num_blocks) if pool.is_held(block)]
    cached = [block for block in range(size, pool.num_blocks) if pool.is_cached(block)]
    free = [block for block in range(size) if pool.is_free(block)]
    victims = [block for block in range(size) if pool.is_cached(block)] if len(used) > len(free) else []
    return dict(zip([*used, *cached], [*free, *victims[: len(used) - len(free)]], strict=False))


def moves_for_run(pool: BlockPool, count: int) -> dict[int, int]:
    """Return source → target of the fewest moves that leave ``count`` neighboring blocks without a holder; empty if
    that is impossible. O(``num_blocks``)."""
    if count > pool.num_free + pool.num_cached:
        return {}
    held = [pool.is_held(block) for block in range(pool.num_blocks)]
    inside = sum(held[:count])
    fewest, at = inside, 0
    for start in range(1, pool.num_blocks - count + 1):
        inside += held[start + count - 1] - held[start - 1]
        if inside < fewest:
            fewest, at = inside, start
    outside = [b for b in range(pool.num_blocks) if not held[b] and not at <= b < at + count]
    outside.sort(key=pool.is_cached)  # free ones first, so that as little as possible is evicted
    return dict(zip([b for b in range(at, at + count) if held[b]], outside, strict=False))
