"""Looks up the prefix of a sequence that is already in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from .groups import BlockGroup
from .pool import BlockPool


class Prefix(NamedTuple):
    """The cached part of a sequence that is not running yet.

    Attributes:
        num_blocks: leading blocks that need no computation.
        revived: for each group, how many of them have no holder now: they count as available until they are taken.
        known_blocks: leading blocks with cached keys and values; more than ``num_blocks`` if there is no snapshot of
            the state after them.
    """

    num_blocks: int
    revived: list[int]
    known_blocks: int


class Contents(Protocol):
    """Blocks that are found by the hash of their content, such as those of a pool."""

    def lookup(self, content: bytes) -> int | None:
        """Return the block with that content, or None."""

    def num_known(self, contents: Sequence[bytes], most: int) -> int:
        """Return how many of the first ``most`` contents, counted from the first on, are there."""


def find_prefix(
    groups: Sequence[BlockGroup], pools: Sequence[BlockPool], hashes: Sequence[bytes], block_size: int
) -> Prefix:
    """Return the longest run of leading blocks that every group can continue from.

    Args:
        groups: groups of layers; a group of states is the last.
        pools: pool of each group.
        hashes: hashes of the sequence's full blocks.
        block_size: tokens per block.
    """
    count, known = longest_run(groups, pools, hashes, block_size)
    revived = []
    for group, pool in zip(groups, pools, strict=True):
        revived.append(pool.num_unheld(hashes[group.first_seen(count, block_size) : count]))
    return Prefix(count, revived, known)


def longest_run(
    groups: Sequence[BlockGroup], places: Sequence[Contents], hashes: Sequence[bytes], block_size: int
) -> tuple[int, int]:
    """Return ``Prefix.num_blocks`` and ``Prefix.known_blocks`` for what is in the places.

    A state is only valid at one token: there must be a snapshot after one of the blocks.

    Args:
        groups: groups of layers; a group of states is the last.
        places: where the blocks of each group are looked up.
        hashes: hashes of the sequence's full blocks.
        block_size: tokens per block.
    """
    states = places[-1] if groups[-1].is_state else None
    count = len(hashes)
    for group, pool in zip(groups, places, strict=True):
        if not group.window and not group.is_state:
            count = pool.num_known(hashes, count)
    windowed = [(group, pool) for group, pool in zip(groups, places, strict=True) if group.window]
    known = count = _seen_by_windows(windowed, hashes, count, block_size)
    while states is not None:
        while count and states.lookup(hashes[count - 1]) is None:
            count -= 1
        shorter = _seen_by_windows(windowed, hashes, count, block_size)
        if shorter == count:
            break
        count = shorter
    return count, known


def _seen_by_windows(
    windowed: Sequence[tuple[BlockGroup, Contents]], hashes: Sequence[bytes], count: int, block_size: int
) -> int:
    """Return the most leading blocks, up to ``count``, that all groups with a window can continue from.

    Such a group needs only the blocks before the end: the prefix is shortened until every group has its blocks.
    """
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
    return count
