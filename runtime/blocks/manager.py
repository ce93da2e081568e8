"""The block manager: block tables with prefix caching, swapping and defragmentation, without tensors."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from . import host_prefix, state_slots
from .copies import CacheCopy
from .groups import BlockGroup, SequenceBlocks
from .inspection import check, stats
from .moves import moves_to_front
from .pool import NULL_BLOCK, OutOfBlocks
from .prefix import Prefix, find_prefix
from .swap_space import SwapSpace
from .tables import BlockTables


class BlockManager(BlockTables):
    """Block tables that share the content of other sequences, on the device and in host memory.

    Full blocks are published under the hash of their content and found by sequences that begin with the same tokens,
    until they are evicted (prefix caching). A preempted sequence may wait in host memory (swapping), which also holds
    blocks on their way from and to a store.

    Costs are those of ``BlockTables``, except that ``defragment``, ``resize``, ``stats`` and ``check`` are
    O(``num_blocks``).

    Args:
        groups, block_size: as for ``BlockTables``.
        enable_prefix_caching: keep the content of freed blocks and find it again by its hash.

    Attributes:
        swap_space: the blocks in host memory.
        num_prefix_queries: tokens looked up in the cache so far.
        num_prefix_hits: how many of these were there.

    Raises:
        ValueError: a size is below 1, or a group of states is not the last.
    """

    def __init__(self, groups: Sequence[BlockGroup], block_size: int, *, enable_prefix_caching: bool = False) -> None:
        self.swap_space = SwapSpace([group.num_host_blocks for group in groups])
        super().__init__(groups, block_size, swapped=self.swap_space)
        self.enable_prefix_caching = enable_prefix_caching
        self.num_prefix_queries = self.num_prefix_hits = 0
        self._arriving: list[tuple[str, Sequence[bytes]]] = []  # sequences whose copies from the host are under way

    def reset(self) -> None:
        """Free all blocks and forget all content, whatever state an interrupted operation left behind."""
        super().reset()
        self.swap_space.reset()
        self._arriving = []

    def free(self, request_id: str) -> None:
        """Drop the sequence, wherever it is; blocks without another holder become free, or cached if their content
        has a hash.

        Raises:
            ValueError: the sequence holds nothing.
        """
        if request_id in self.swap_space:
            # Blocks that are being copied out must not be reused before the copy is done.
            self.copies.in_flight += self.swap_space.forget(request_id)
        else:
            super().free(request_id)

    def find_prefix(self, hashes: Sequence[bytes]) -> Prefix:
        """Return the cached prefix of a sequence whose full blocks have these hashes."""
        known = hashes if self.enable_prefix_caching else ()
        return find_prefix(self.groups, self.pools, known, self.block_size)

    def num_blocks_to_admit(self, prefix: Prefix, num_tokens: int, chunk: int) -> list[int]:
        """Return, for each group, the blocks that must be available for a new sequence of ``num_tokens`` tokens.

        Args:
            prefix: the result of ``find_prefix`` for it.
            num_tokens: prompt and output.
            chunk: most tokens in one step; a group with a window holds at most these and the window at once.
        """
        counts = []
        for g, group in enumerate(self.groups):
            if group.is_state:
                # The slot that it continues from, if any, and the slot that it writes.
                counts.append(1 + prefix.revived[g])
                continue
            length = group.length(num_tokens, self.block_size)
            found = prefix.num_blocks - group.first_seen(prefix.num_blocks, self.block_size)
            if group.window:
                length = min(length - prefix.num_blocks + found, -(-(group.window + chunk) // self.block_size) + 1)
            counts.append(max(0, length - found) + prefix.revived[g])
        return counts

    def take_prefix(self, request_id: str, hashes: Sequence[bytes], num_blocks: int) -> None:
        """Start a sequence on the blocks that ``find_prefix`` found."""
        if request_id in self.sequences or request_id in self.swap_space:
            raise ValueError(f"request_id={request_id!r} already holds blocks; free it or use another id")
        if not 1 <= num_blocks <= len(hashes):
            raise ValueError(f"num_blocks={num_blocks} is not in 1..{len(hashes)}, the number of hashes")
        tables, num_null = [], []
        for group, pool in zip(self.groups, self.pools, strict=True):
            first = group.first_seen(num_blocks, self.block_size)
            table = [] if group.is_state else [NULL_BLOCK] * first
            for content in hashes[first:num_blocks]:
                block = pool.lookup(content)
                assert block is not None, "find_prefix ran in the same step"
                pool.retain(block)
                table.append(block)
            tables.append(table)
            num_null.append(0 if group.is_state else first)
        num_tokens = num_blocks * self.block_size
        self.sequences[request_id] = SequenceBlocks(num_tokens, tables, num_null, num_blocks, state_tokens=num_tokens)

    def find_prefix_with_host(self, hashes: Sequence[bytes]) -> int:
        """Return the number of leading blocks that ``take_prefix_with_host`` can start a sequence on."""
        return host_prefix.find(self.groups, self.pools, self.swap_space.pools, hashes, self.block_size)

    def prefix_with_host(self, hashes: Sequence[bytes], num_blocks: int) -> Prefix:
        """Return these leading blocks as a prefix of which those in host memory, too, have yet to be taken."""
        taken = []
        for group, pool in zip(self.groups, self.pools, strict=True):
            seen = hashes[group.first_seen(num_blocks, self.block_size) : num_blocks]
            here = [content for content in seen if pool.lookup(content) is not None]
            taken.append(pool.num_unheld(here) + len(seen) - len(here))
        return Prefix(num_blocks, taken, num_blocks)

    def take_prefix_with_host(
        self, request_id: str, hashes: Sequence[bytes], num_blocks: int, *, overlapped: bool
    ) -> None:
        """Start a sequence on blocks that are on the device or in host memory; it is readable once the copies are
        done.

        Args:
            request_id: a new id.
            hashes: hashes of the sequence's full blocks.
            num_blocks: the result of ``find_prefix_with_host``, or less.
            overlapped: copy while the step runs instead of before it.
        """
        tables, num_null = [], []
        for g, group in enumerate(self.groups):
            first = group.first_seen(num_blocks, self.block_size)
            table, copies, held = host_prefix.take(
                g, self.pools[g], self.swap_space.pools[g], hashes[first:num_blocks]
            )
            tables.append(table if group.is_state else [NULL_BLOCK] * first + table)
            num_null.append(0 if group.is_state else first)
            self.copies.in_flight += held
            self.copies.plan(copies, overlapped=overlapped)
        num_tokens = num_blocks * self.block_size
        self.sequences[request_id] = SequenceBlocks(num_tokens, tables, num_null, state_tokens=num_tokens)
        self._arriving.append((request_id, hashes[:num_blocks]))

    def count_prefix(self, num_tokens: int, num_hits: int) -> None:
        """Record for the statistics that a sequence of ``num_tokens`` tokens found ``num_hits`` of them cached."""
        self.num_prefix_queries += num_tokens
        self.num_prefix_hits += num_hits

    def commit(self, request_id: str, hashes: Sequence[bytes], num_tokens: int) -> None:
        """Publish the full blocks of the first ``num_tokens`` tokens, which are computed, under these hashes."""
        if not self.enable_prefix_caching:
            return
        sequence = self.sequence(request_id)
        if sequence.is_stale:
            return
        end = min(num_tokens // self.block_size, len(hashes))
        for i in range(sequence.num_committed, end):
            for pool, table in zip(self.token_pools, sequence.tables, strict=False):
                if table[i] != NULL_BLOCK:
                    pool.commit(table[i], hashes[i])
        sequence.num_committed = max(sequence.num_committed, end)

    def can_keep_state(self, request_id: str, start: int, value: int) -> bool:
        """Return True if there is room for a snapshot of that value after the sequence's step from ``start`` on."""
        pool, sequence = self.pools[-1], self.sequences.get(request_id)
        return pool.num_available_for(value) > state_slots.num_to_take(pool, sequence, start)

    def keep_state(self, request_id: str, content: bytes, value: int) -> bool:
        """Publish the sequence's present state under the hash of the full block that ends with it. The next step
        leaves that slot unchanged and writes another one.

        Args:
            request_id: the sequence; its last step has ended at the end of a block.
            content: the block's hash.
            value: snapshots of the lowest value are evicted first.

        Returns:
            True if it was kept; False if only more valuable snapshots could make room, or if there is one already.
        """
        sequence, pool = self.sequence(request_id), self.pools[-1]
        if sequence.state_tokens < 1 or sequence.state_tokens % self.block_size:
            covered = sequence.state_tokens
            raise ValueError(f"the state of {request_id!r} covers {covered} tokens, not a multiple of block_size")
        slot = sequence.tables[-1][0]
        if sequence.is_stale or pool.lookup(content) is not None or pool.num_available_for(value) < 1:
            return False
        pool.commit(slot, content, value)
        return True

    def forget_prefixes(self) -> None:
        """Drop all cached content; required when the model's weights change."""
        for pool in (*self.pools, *self.swap_space.pools):
            pool.forget_all()
        for sequence in self.sequences.values():
            sequence.is_stale = True
        self.swap_space.mark_stale()

    def swap_out(self, request_id: str, num_tokens: int, *, overlapped: bool) -> bool:
        """Move the sequence's first ``num_tokens`` tokens to host memory.

        Args:
            request_id: the sequence; it holds blocks and does not run in this step.
            num_tokens: number of computed tokens, >= 1.
            overlapped: copy while the step runs; the blocks are available only after ``finish_copies``. Otherwise
                copy before the step, and all blocks are available at once.

        Returns:
            True if there was room; otherwise nothing was changed.
        """
        sequence = self.sequence(request_id)
        tables = self.leading(sequence, num_tokens)
        copies = self.swap_space.store(request_id, tables, self.pools, num_tokens, is_stale=sequence.is_stale)
        if copies is None:
            return False
        self.copies.plan(copies, overlapped=overlapped)
        if overlapped:
            for copy in copies:
                self.pools[copy.group].retain(copy.source)
                self.copies.in_flight.append((self.pools[copy.group], copy.source))
        super().free(request_id)
        return True

    def is_swapped(self, request_id: str) -> bool:
        """Return True if the sequence's keys and values are in host memory."""
        return request_id in self.swap_space

    def num_blocks_to_swap_in(self, request_id: str) -> list[int]:
        """Return, for each group, the most blocks that bringing the sequence back takes."""
        return [sum(block != NULL_BLOCK for block in table) for table in self.swap_space.tables(request_id)]

    def swap_in(self, request_id: str, *, overlapped: bool) -> int:
        """Bring the sequence's tokens back; its blocks are readable once the copies are done.

        Args:
            request_id: a swapped-out sequence.
            overlapped: copy while the step runs instead of before it.

        Returns:
            The number of tokens that its tables hold.

        Raises:
            OutOfBlocks: too few blocks are available; nothing was changed.
        """
        needed = self.num_blocks_to_swap_in(request_id)
        if not self.can_take(needed):
            raise OutOfBlocks(
                f"request_id={request_id!r} needs {needed} blocks to return; free another request first"
            )
        is_stale = self.swap_space.is_stale(request_id)
        num_tokens, tables, copies, stored = self.swap_space.load(
            request_id, self.pools, may_share=self.enable_prefix_caching
        )
        # The host's blocks must not be rewritten before they are read.
        self.copies.in_flight += stored
        self.copies.plan(copies, overlapped=overlapped)
        num_null = [next((i for i, block in enumerate(table) if block != NULL_BLOCK), len(table)) for table in tables]
        self.sequences[request_id] = SequenceBlocks(
            num_tokens, tables, num_null, is_stale=is_stale, state_tokens=num_tokens
        )
        return num_tokens

    def copy_to_host(self, group: int, content: bytes) -> int | None:
        """Plan to copy a block to host memory while the step runs.

        Returns:
            The host block, which is lent; None if there is none, or the device does not have the content.
        """
        pool = self.pools[group]
        block = pool.lookup(content)
        target = None if block is None else self.swap_space.lend(group)
        if block is None or target is None:
            return None
        pool.retain(block)
        self.copies.in_flight.append((pool, block))
        self.copies.overlapped.append(CacheCopy("out", group, block, target))
        return target

    def copy_before_step(self) -> None:
        """Make the overlapped copies before the step instead, so that their blocks are available at once."""
        before, overlapped = self.copies.take()
        self.copies.plan([*before, *overlapped], overlapped=False)
        self.finish_copies()

    def finish_copies(self) -> None:
        """Release what the copies of the last step needed, now that they are done."""
        self.copies.finish()
        arrived, self._arriving = self._arriving, []
        for request_id, hashes in arrived:
            if request_id in self.sequences:
                self.commit(request_id, hashes, len(hashes) * self.block_size)

    def defragment(self) -> int:
        """Move used and cached blocks to the lowest ids, rewrite the tables, and return the number of moved blocks.

        Nothing moves while copies of the last step may be running, between ``take_changes`` and ``finish_copies``,
        nor while blocks of ended sequences are held.
        """
        if not self.may_move:
            return 0
        plans = [moves_to_front(pool, pool.num_used + pool.num_cached) for pool in self.pools]
        for g, moves in enumerate(plans):
            self.move(g, moves)
        return sum(map(len, plans))

    def resize(self, num_blocks: Sequence[int]) -> list[int]:
        """Grow or shrink each group's pool; used blocks move to lower ids and are never dropped.

        Returns:
            The new sizes. A pool never shrinks below its used blocks, nor while copies may be running or blocks are
            held.
        """
        for g, (pool, size) in enumerate(zip(self.pools, num_blocks, strict=True)):
            if size < pool.num_blocks:
                if not self.may_move:
                    continue
                size = max(size, pool.num_used, 1)
                self.move(g, moves_to_front(pool, size))
            pool.resize(size)
        return [pool.num_blocks for pool in self.pools]

    def fit_to_load(self) -> None:
        """Shrink pools that have been too large for a while; call once per step."""
        sizes = [pool.size_for_load() for pool in self.pools]
        if sizes != [pool.num_blocks for pool in self.pools]:
            self.resize(sizes)

    def stats(self) -> dict[str, int | float]:
        """Return statistics of all groups together, see ``inspection.stats``."""
        return stats(self)

    def leaks(self, owners: Collection[str]) -> list[str]:
        """Return the ids that hold blocks but are not in ``owners``."""
        return sorted({*self.sequences, *self.swap_space} - set(owners))

    def check(self) -> None:
        """Verify every invariant, in O(blocks + table entries).

        Raises:
            RuntimeError: an invariant is broken; the message names it.
        """
        check(self)
