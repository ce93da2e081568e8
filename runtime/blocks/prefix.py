"""The prefix of a sequence that the cache holds already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .groups import BlockGroup
from .pool import BlockPool


class Prefix(NamedTuple):
    """The part that the cache holds of a sequence that is not running yet.

    Attributes:
        num_blocks: leading blocks that need not be computed.
        revived: for each group, how many of them nobody uses now: they count as available until they are taken.
    """

    num_blocks: int
    revived: list[int]


def find_prefix(
    groups: Sequence[BlockGroup], pools: Sequence[BlockPool], hashes: Sequence[bytes], block_size: int
) -> Prefix:
    """The longest run of leading blocks that every group can continue from.

    Args:
        groups: of layers.
        pools: of each group.
        hashes: of the sequence's full blocks.
        block_size: tokens per block.
    """
    count = len(hashes)
    for group, pool in zip(groups, pools, strict=True):
        if not group.window:
            count = pool.num_known(hashes, count)
    # A group with a window needs the blocks in front of the end alone: shorten until all have theirs.
    windowed = [(group, pool) for group, pool in zip(groups, pools, strict=True) if group.window]
    while windowed:
        ends = [
            i
            for group, pool in windowed
            for i in range(group.first_seen(count, block_size), count)
            if pool.lookup(hashes[i]) is None
        ]
        if not ends:
            break
        count = min(ends)
    revived = []
    for group, pool in zip(groups, pools, strict=True):
        revived.append(pool.num_unheld(hashes[group.first_seen(count, block_size) : count]))
    return Prefix(count, revived)
