"""Host memory for the keys and values of preempted sequences: the sequences and their blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .copies import CacheCopy
from .pool import NULL_BLOCK, BlockPool


@dataclass(slots=True)
class _Swapped:
    num_tokens: int
    tables: list[list[int]]  # ids of host blocks, per group
    is_stale: bool  # its content no longer follows from its tokens


class SwapSpace:
    """Sequences in host memory. Blocks with the same content are stored once; a released block keeps its content
    until it is reused, so that a sequence that is soon swapped out again is not copied again.

    Args:
        num_blocks: blocks for each group of layers; 0 if nothing can be swapped out.

    Attributes:
        lent: blocks of each group that somebody else reads or writes, in a thread of his own.
    """

    def __init__(self, num_blocks: Sequence[int]) -> None:
        self.num_blocks = list(num_blocks)
        # A pool has at least one block; nothing is ever taken from a pool that must not be used.
        self.pools = [BlockPool(max(1, count)) for count in num_blocks]
        self.lent: list[set[int]] = [set() for _ in num_blocks]
        self._swapped: dict[str, _Swapped] = {}
        self._num_out = 0
        self._num_in = 0

    def reset(self) -> None:
        """Forget all sequences and content; what is lent stays so."""
        for pool, lent in zip(self.pools, self.lent, strict=True):
            pool.reset()
            pool.take_these(lent)
        self._swapped.clear()

    def lend(self, group: int) -> int | None:
        """Return a block without another holder until ``give_back``; None if none is available."""
        pool = self.pools[group]
        if not self.num_blocks[group] or not pool.num_available:
            return None
        (block,) = pool.take(1)
        self.lent[group].add(block)
        return block

    def give_back(self, group: int, block: int, content: bytes | None = None) -> None:
        """Release a block that was lent.

        Args:
            group: index of its group.
            block: it.
            content: hash of what it holds now; None: nothing that anybody may read.
        """
        self.lent[group].remove(block)
        if content is not None:
            self.pools[group].commit(block, content)
        self.pools[group].release(block)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._swapped

    def __iter__(self) -> Iterator[str]:
        return iter(self._swapped)

    def num_tokens(self, request_id: str) -> int:
        """Return the number of the sequence's tokens in host memory."""
        return self._swapped[request_id].num_tokens

    def tables(self, request_id: str) -> list[list[int]]:
        """Return the sequence's tables of host blocks; not a copy."""
        return self._swapped[request_id].tables

    def is_stale(self, request_id: str) -> bool:
        """Return True if other sequences must not find this sequence's content."""
        return self._swapped[request_id].is_stale

    def mark_stale(self) -> None:
        """Hide all present content from other sequences for good."""
        for swapped in self._swapped.values():
            swapped.is_stale = True

    def store(
        self, request_id: str, tables: list[list[int]], device: list[BlockPool], num_tokens: int, *, is_stale: bool
    ) -> list[CacheCopy] | None:
        """Store a sequence.

        Args:
            request_id: a new id.
            tables: tables of the device blocks that hold its first ``num_tokens`` tokens.
            device: the pools of these blocks.
            num_tokens: number of tokens to store.
            is_stale: other sequences must not find its content.

        Returns:
            Copies to make, or None if there is no room; then nothing was changed.
        """
        found = [self._found(g, table, device[g]) for g, table in enumerate(tables)]
        for g, (table, there) in enumerate(zip(tables, found, strict=True)):
            pool = self.pools[g]
            missing = sum(block != NULL_BLOCK for block in table) - len(there)
            revived = sum(not pool.is_held(block) for block in there.values())
            if missing > (pool.num_available - revived if self.num_blocks[g] else 0):
                return None
        copies: list[CacheCopy] = []
        stored: list[list[int]] = []
        for g, (table, there) in enumerate(zip(tables, found, strict=True)):
            pool = self.pools[g]
            for block in there.values():
                pool.retain(block)
            own = []
            for block in table:
                target = NULL_BLOCK if block == NULL_BLOCK else there.get(block)
                if target is None:
                    (target,) = pool.take(1)
                    content = device[g].hash_of(block)
                    if content is not None:
                        pool.commit(target, content)
                    copies.append(CacheCopy("out", g, block, target))
                own.append(target)
            stored.append(own)
        self._num_out += len(copies)
        self._swapped[request_id] = _Swapped(num_tokens, stored, is_stale)
        return copies

    def load(
        self, request_id: str, device: list[BlockPool], *, may_share: bool
    ) -> tuple[int, list[list[int]], list[CacheCopy], list[tuple[BlockPool, int]]]:
        """Return a sequence to the device; its blocks are taken from the device's pools, which must have enough.

        Args:
            request_id: a stored sequence.
            device: the pools that it returns to.
            may_share: do not copy content that the device still holds.

        Returns:
            The number of tokens that return, their tables, copies to make, and blocks to release when these are done.
        """
        swapped = self._swapped[request_id]
        copies: list[CacheCopy] = []
        tables: list[list[int]] = []
        for g, (pool, own) in enumerate(zip(device, swapped.tables, strict=True)):
            # First the blocks that are there, so that none of them is evicted for the rest.
            there: dict[int, int] = {}
            for stored in own if may_share else ():
                content = None if stored == NULL_BLOCK else self.pools[g].hash_of(stored)
                block = None if content is None else pool.lookup(content)
                if block is not None:
                    pool.retain(block)
                    there[stored] = block
            table = []
            for stored in own:
                target = NULL_BLOCK if stored == NULL_BLOCK else there.get(stored)
                if target is None:
                    (target,) = pool.take(1)
                    copies.append(CacheCopy("in", g, stored, target))
                table.append(target)
            tables.append(table)
        self._num_in += len(copies)
        return swapped.num_tokens, tables, copies, self.forget(request_id)

    def forget(self, request_id: str) -> list[tuple[BlockPool, int]]:
        """Remove the sequence; returns the blocks to release once no copy needs them."""
        swapped = self._swapped.pop(request_id)
        return [
            (pool, block)
            for pool, table in zip(self.pools, swapped.tables, strict=True)
            for block in table
            if block != NULL_BLOCK
        ]

    def stats(self) -> dict[str, int | float]:
        """Return statistics of all groups together."""
        return {
            "blocks_swapped_out": self._num_out,
            "blocks_swapped_in": self._num_in,
            "host_blocks_total": sum(self.num_blocks),
            "host_blocks_used": sum(pool.num_used for pool in self.pools),
        }

    def _found(self, group: int, table: list[int], device: BlockPool) -> dict[int, int]:
        """Return device block → host block with the same content."""
        there = {}
        for block in table:
            content = None if block == NULL_BLOCK else device.hash_of(block)
            stored = None if content is None else self.pools[group].lookup(content)
            if stored is not None:
                there[block] = stored
        return there
