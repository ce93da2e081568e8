"""Prefixes that lie partly on the device and partly in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .copies import CacheCopy
from .groups import BlockGroup
from .pool import NULL_BLOCK, BlockPool
from .prefix import longest_run


class _Either(NamedTuple):
    """Blocks of two pools."""

    device: BlockPool
    host: BlockPool

    def lookup(self, content: bytes) -> int | None:
        found = self.device.lookup(content)
        return self.host.lookup(content) if found is None else found

    def num_known(self, contents: Sequence[bytes], most: int) -> int:
        return next((i for i in range(most) if self.lookup(contents[i]) is None), most)


def find(
    groups: Sequence[BlockGroup],
    device: Sequence[BlockPool],
    host: Sequence[BlockPool],
    hashes: Sequence[bytes],
    block_size: int,
) -> int:
    """Return the most leading blocks that every group can continue from when those in host memory are copied.

    Args:
        groups: groups of layers; a group of states is the last.
        device: pool of each group.
        host: pool of each group in host memory.
        hashes: hashes of the sequence's full blocks.
        block_size: tokens per block.
    """
    if not any(pool.num_used or pool.num_cached for pool in host):
        return 0
    places = [_Either(*pools) for pools in zip(device, host, strict=True)]
    return longest_run(groups, places, hashes, block_size)[0]


def take(
    group: int, device: BlockPool, host: BlockPool, contents: Sequence[bytes]
) -> tuple[list[int], list[CacheCopy], list[tuple[BlockPool, int]]]:
    """Take device blocks for contents that are on the device or in host memory.

    Args:
        group: index of the group.
        device: its pool, with a block available for each content that is not held there.
        host: its pool in host memory.
        contents: hashes of blocks.

    Returns:
        The blocks, the copies to make, and the host blocks to release when these are done.
    """
    # First the blocks that are there, so that none of them is evicted for the rest.
    table = []
    for content in contents:
        block = device.lookup(content)
        if block is not None:
            device.retain(block)
        table.append(NULL_BLOCK if block is None else block)
    copies, held = [], []
    for i, content in enumerate(contents):
        if table[i] == NULL_BLOCK:
            source = host.lookup(content)
            assert source is not None, "find ran in the same step"
            host.retain(source)
            held.append((host, source))
            (table[i],) = device.take(1)
            copies.append(CacheCopy("in", group, source, table[i]))
    return table, copies, held
