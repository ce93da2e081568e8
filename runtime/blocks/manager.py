"""Block tables with reference counts for the KV cache, in pure Python, without tensors."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from . import host_prefix, state_slots
from .elastic import ElasticPool
from .groups import BlockGroup, Counts, SequenceBlocks
from .inspection import check, stats
from .moves import CacheCopy, moves_for_run, moves_to_front
from .pool import NULL_BLOCK, BlockPool, OutOfBlocks
from .prefix import Prefix, find_prefix
from .swap_space import SwapSpace


class BlockManager:
    """Allocates the blocks of a paged KV cache (PagedAttention, arXiv 2309.06180, section 4).

    A sequence's *table* lists its blocks in order: token i is in block ``table[i // block_size]`` at offset
    ``i % block_size``. There is one table for each group of layers; all have the same length. A block may be in
    several tables: of forked sequences, and of sequences that begin with the same tokens (prefix caching). A shared
    block is never written: ``allocate`` replaces it with a copy. ``take_changes`` returns the copies to make since
    its last call.

    If the model has states, they are the last group. Its table is the one slot that the sequence continues from. A
    step writes states, from ``allocate`` to ``end_step``; ``slots_of_step`` returns the slots that it reads and
    writes.

    Every operation costs O(blocks that it adds or drops), never O(``num_blocks``), except ``defragment``, ``resize``,
    ``stats``, ``check`` and allocation in one run.

    Args:
        groups: at least one; a group of states must be the last.
        block_size: tokens per block.
        enable_prefix_caching: keep the content of freed blocks and find it again by its hash.

    Raises:
        ValueError: a size is below 1, or a group of states is not the last.
    """

    def __init__(self, groups: Sequence[BlockGroup], block_size: int, *, enable_prefix_caching: bool = False) -> None:
        if not groups:
            raise ValueError("groups=[] is empty; pass at least one group of layers")
        if block_size < 1:
            raise ValueError(f"block_size={block_size} is below 1; use 16 or another positive size")
        if any(group.is_state for group in groups[:-1]):
            raise ValueError(
                "a group of states is not the last of groups; put all states of a model into one group at the end"
            )
        self.groups = list(groups)
        self.has_state = groups[-1].is_state
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pools = [
            ElasticPool(group.min_blocks, group.num_blocks) if group.min_blocks else BlockPool(group.num_blocks)
            for group in groups
        ]
        self.token_pools = self.pools[:-1] if self.has_state else self.pools
        self.swap_space = SwapSpace([group.num_host_blocks for group in groups])
        self.sequences: dict[str, SequenceBlocks] = {}
        self._copies: list[CacheCopy] = []
        self._overlapped_copies: list[CacheCopy] = []
        self.in_flight: list[tuple[BlockPool, int]] = []  # until the copies of the last step are done
        self.held: list[tuple[BlockPool, int]] = []  # until a launched step is settled
        self._arriving: list[
            tuple[str, Sequence[bytes]]
        ] = []  # sequences with copies from the host, as ``in_flight``
        self._rewritten: set[str] = set()
        self.counts = Counts()

    def reset(self) -> None:
        """Free all blocks and forget all content, whatever state an interrupted operation left behind."""
        for pool in self.pools:
            pool.reset()
        self.swap_space.reset()
        self.sequences.clear()
        self._copies, self._overlapped_copies, self.in_flight, self.held = [], [], [], []
        self._arriving = []
        self._rewritten.clear()

    @property
    def num_blocks(self) -> int:
        """Number of blocks in all groups, without state slots."""
        return sum(pool.num_blocks for pool in self.token_pools)

    @property
    def num_available_blocks(self) -> int:
        """Number of blocks that can be allocated, free and cached ones, in all groups, without state slots."""
        return sum(pool.num_available for pool in self.token_pools)

    @property
    def num_used_blocks(self) -> int:
        """Number of blocks with a holder in all groups, without state slots."""
        return sum(pool.num_used for pool in self.token_pools)

    @property
    def num_cached_blocks(self) -> int:
        """Number of blocks without a holder whose content can be found again, in all groups, without state slots."""
        return sum(pool.num_cached for pool in self.token_pools)

    @property
    def capacity(self) -> int | None:
        """Tokens of the longest sequence that fits into the empty cache; None if any sequence fits."""
        most = [
            pool.max_blocks * self.block_size
            for group, pool in zip(self.groups, self.pools, strict=True)
            if not group.is_state and not (group.window and pool.max_blocks > -(-group.window // self.block_size))
        ]
        return min(most, default=None)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.sequences

    def table(self, request_id: str, group: int = 0) -> list[int]:
        """Return the sequence's block ids in order (a copy); ``NULL_BLOCK`` for blocks behind the window."""
        return list(self._sequence(request_id).tables[group])

    def tables(self, request_id: str) -> list[list[int]]:
        """Return the sequence's tables, one for each group (copies)."""
        return [list(table) for table in self._sequence(request_id).tables]

    def num_tokens(self, request_id: str) -> int:
        """Return the number of tokens that the sequence's table was made to hold, 0 if it has none."""
        sequence = self.sequences.get(request_id)
        return sequence.num_tokens if sequence is not None else 0

    def num_tokens_that_fit(self, request_id: str, start: int) -> int:
        """Return how many tokens the sequence could hold with every available block, if written from ``start`` on."""
        sequence = self.sequences.get(request_id)
        fitting = []
        for g, pool in enumerate(self.token_pools):
            table = sequence.tables[g] if sequence is not None else []
            spare = pool.num_available - self._shared_ahead(g, table, start)
            if spare < 0:
                fitting.append(start)  # a write needs all shared blocks replaced first
            else:
                fitting.append((len(table) + spare) * self.block_size)
        if self.has_state and state_slots.num_to_take(self.pools[-1], sequence, start) > self.pools[-1].num_available:
            fitting.append(start)
        return min(fitting, default=1 << 62)

    def num_blocks_to_allocate(self, request_id: str, num_tokens: int, start: int) -> list[int]:
        """Return, for each group, the number of blocks to take so that the table holds ``num_tokens`` and can be
        written from ``start`` on."""
        sequence = self.sequences.get(request_id)
        counts = []
        for g in range(len(self.token_pools)):
            table = sequence.tables[g] if sequence is not None else []
            counts.append(max(0, self._length(g, num_tokens) - len(table)) + self._shared_ahead(g, table, start))
        if self.has_state:
            counts.append(state_slots.num_to_take(self.pools[-1], sequence, start))
        return counts

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
            length, found = (
                self._length(g, num_tokens),
                prefix.num_blocks - group.first_seen(prefix.num_blocks, self.block_size),
            )
            if group.window:
                length = min(length - prefix.num_blocks + found, -(-(group.window + chunk) // self.block_size) + 1)
            counts.append(max(0, length - found) + prefix.revived[g])
        return counts

    def can_take(self, counts: Sequence[int], beside: int = 0) -> bool:
        """Return True if each group has that many blocks available, and ``beside`` more in groups that grow with the
        tokens."""
        return all(
            count + (0 if group.is_state else beside) <= pool.num_available
            for count, group, pool in zip(counts, self.groups, self.pools, strict=True)
        )

    def allocate(self, request_id: str, num_tokens: int, start: int, *, in_one_run: bool = False) -> list[list[int]]:
        """Make the sequence's tables hold ``num_tokens`` tokens, so that those from ``start`` on can be written.

        Shared blocks that are to be written are replaced by copies. This never shrinks a table. A state gets the slot
        that the step writes.

        Args:
            request_id: the sequence; a new one gets empty tables first.
            num_tokens: prompt and output, >= 1.
            start: tokens before it stay as they are.
            in_one_run: take neighboring blocks if a run of them is available, moving others out of the way if that
                helps.

        Returns:
            For each group, the block ids added to the end of its table, often none.

        Raises:
            OutOfBlocks: too few blocks are available; nothing was changed.
            ValueError: there is nothing to write, the sequence is swapped out, or it has no state of ``start``
                tokens.
        """
        if num_tokens < 1 or not 0 <= start < num_tokens:
            raise ValueError(f"num_tokens={num_tokens}, start={start} writes nothing; use start < num_tokens")
        needed = self.num_blocks_to_allocate(request_id, num_tokens, start)
        if not self.can_take(needed):
            available = [pool.num_available for pool in self.pools]
            raise OutOfBlocks(
                f"request_id={request_id!r} needs {needed} more blocks for num_tokens={num_tokens}, {available} of "
                f"{[pool.num_blocks for pool in self.pools]} are available; free another request first"
            )
        sequence = self.sequences.get(request_id)
        if sequence is None:
            if request_id in self.swap_space:
                raise ValueError(f"request_id={request_id!r} is swapped out; swap it in first")
            sequence = SequenceBlocks(0, [[] for _ in self.groups], [0] * len(self.groups))
        # First, because it raises if the sequence has no such state.
        slot = [state_slots.begin_step(self.pools[-1], sequence, start)] if self.has_state else []
        self.sequences[request_id] = sequence
        sequence.num_committed = min(sequence.num_committed, start // self.block_size)
        added = []
        for g, pool in enumerate(self.token_pools):
            table = sequence.tables[g]
            self._copy_on_write(request_id, g, table, start)
            count = self._length(g, num_tokens) - len(table)
            new = []
            if count > 0:
                run = self._contiguous_run(g, count) if in_one_run and count > 1 else None
                new = pool.take(count) if run is None else run
                table.extend(new)
            added.append(new)
        sequence.num_tokens = max(sequence.num_tokens, num_tokens)
        return added + slot

    def allocate_in_place(self, request_id: str, num_tokens: int, start: int) -> bool:
        """Allocate for the usual case of decoding: the tokens fit into blocks that only this sequence holds.

        Returns:
            True if they fit; otherwise nothing was changed.
        """
        sequence = self._sequence(request_id)
        size = self.block_size
        # Without the table of states, which is the last.
        for pool, table in zip(self.token_pools, sequence.tables, strict=False):
            if len(table) * size < num_tokens:
                return False
            if not all([pool.is_private(table[i]) for i in range(start // size, len(table))]):
                return False
        if self.has_state and not state_slots.begin_step_in_place(self.pools[-1], sequence, start):
            return False
        sequence.num_tokens = max(sequence.num_tokens, num_tokens)
        return True

    def room_for_drafts(self, request_id: str, beside: int) -> int:
        """Return how many tokens ``draft_in_place`` can make the sequence's tables hold.

        Args:
            request_id: the sequence; its step is allocated.
            beside: blocks of each group that must stay free.
        """
        sequence, size = self._sequence(request_id), self.block_size
        if self.has_state and not state_slots.can_begin_draft(self.pools[-1], sequence):
            return 0
        tables = zip(self.token_pools, sequence.tables, strict=False)
        return min([(len(table) + max(pool.num_free - beside, 0)) * size for pool, table in tables], default=1 << 62)

    def draft_in_place(self, request_id: str, num_tokens: int, start: int) -> list[list[int]] | None:
        """Make a sequence whose step is allocated hold more tokens, which may not come to stay.

        Only free blocks are taken: nothing cached is evicted, and nobody is preempted. A state is written to a slot
        of its own, so that the step can be taken back.

        Args:
            request_id: the sequence.
            num_tokens: number of tokens to hold.
            start: first token of the step.

        Returns:
            For each group, the block ids added to the end of its table; None if blocks or a slot are lacking:
            nothing was changed.
        """
        sequence = self._sequence(request_id)
        counts = [max(0, self._length(g, num_tokens) - len(sequence.tables[g])) for g in range(len(self.token_pools))]
        if any([count > pool.num_free for count, pool in zip(counts, self.token_pools, strict=True)]):
            return None
        if self.has_state and not state_slots.begin_draft(self.pools[-1], sequence, start):
            return None
        added = [pool.take(count) for count, pool in zip(counts, self.token_pools, strict=True)]
        for table, new in zip(sequence.tables, added, strict=False):
            table.extend(new)
        sequence.num_tokens = max(sequence.num_tokens, num_tokens)
        return [*added, []] if self.has_state else added

    def take_back_step(self, request_id: str) -> None:
        """Leave the sequence's state as it was before the step, which had drafts."""
        state_slots.drop_target(self.pools[-1], self._sequence(request_id))

    def slots_of_step(self, request_id: str, start: int) -> tuple[int, int]:
        """Return the slots that the step allocated from token ``start`` on reads and writes; the first is -1 if
        ``start`` is 0."""
        return state_slots.slots_of_step(self._sequence(request_id), start)

    def end_step(self, request_id: str, num_tokens: int) -> None:
        """Record that a step is computed: a sequence's state now covers ``num_tokens`` tokens (models with state)."""
        state_slots.end_step(self.pools[-1], self._sequence(request_id), num_tokens)

    def free(self, request_id: str) -> None:
        """Drop the sequence, wherever it is; blocks without another holder become free, or cached if their content
        has a hash.

        Raises:
            ValueError: the sequence holds nothing.
        """
        if request_id in self.swap_space:
            # Blocks that are being copied out must not be reused before the copy is done.
            self.in_flight += self.swap_space.forget(request_id)
        else:
            self._drop(request_id)

    def hold(self, request_id: str) -> None:
        """Keep the sequence's blocks from being reused, even if it is freed, until ``release_held``: a launched step
        may still read and write them."""
        sequence = self._sequence(request_id)
        blocks = [(pool, block) for pool, table in zip(self.pools, sequence.tables, strict=True) for block in table]
        if self.has_state:
            blocks.append((self.pools[-1], sequence.state_target))
        for pool, block in blocks:
            if block != NULL_BLOCK:
                pool.retain(block)
                self.held.append((pool, block))

    def release_held(self) -> None:
        """Release what ``hold`` kept, once the launched step is settled."""
        held, self.held = self.held, []
        for pool, block in held:
            pool.release(block)

    def fork(self, parent_id: str, child_id: str, num_tokens: int) -> None:
        """Give ``child_id`` tables with the blocks of the parent's first ``num_tokens`` tokens; nothing is copied
        until one of the two writes to a shared block.

        Raises:
            ValueError: the parent holds fewer tokens, its state covers more, the window has passed blocks that the
                child would see, or the child holds blocks.
        """
        parent = self._sequence(parent_id)
        if child_id in self.sequences or child_id in self.swap_space:
            raise ValueError(f"child_id={child_id!r} already holds blocks; free it or use another id")
        if not 1 <= num_tokens <= parent.num_tokens:
            raise ValueError(
                f"num_tokens={num_tokens} is not in 1..{parent.num_tokens}, the tokens of parent_id={parent_id!r}"
            )
        if self.has_state and num_tokens != parent.state_tokens:
            raise ValueError(
                f"num_tokens={num_tokens} differs from the {parent.state_tokens} tokens that the state of "
                f"parent_id={parent_id!r} covers; fork at the end of its state"
            )
        tables = [table[: self._length(g, num_tokens)] for g, table in enumerate(parent.tables)]
        for group, table in zip(self.groups, tables, strict=True):
            if group.window and NULL_BLOCK in table[max(0, num_tokens - group.window + 1) // self.block_size :]:
                raise ValueError(
                    f"num_tokens={num_tokens} is behind the window of parent_id={parent_id!r}; fork at its end"
                )
        for pool, table in zip(self.pools, tables, strict=True):
            for block in table:
                if block != NULL_BLOCK:
                    pool.retain(block)
        committed = min(parent.num_committed, num_tokens // self.block_size)
        self.sequences[child_id] = SequenceBlocks(
            num_tokens, tables, list(parent.num_null), committed, parent.is_stale, parent.state_tokens
        )

    def remove_skipped_blocks(self, request_id: str, position: int) -> None:
        """Free the blocks that no token from ``position`` on can see, in groups with a window."""
        sequence = self._sequence(request_id)
        for g, group in enumerate(self.groups):
            if not group.window:
                continue
            table, pool = sequence.tables[g], self.pools[g]
            end = min(max(0, position - group.window + 1) // self.block_size, len(table))
            for i in range(sequence.num_null[g], end):
                pool.release(table[i])
                table[i] = NULL_BLOCK
            sequence.num_null[g] = max(sequence.num_null[g], end)

    def restart(self, request_id: str) -> None:
        """Prepare to write the sequence from its first token on again.

        It keeps its blocks, unless a window has passed some of them: then it releases the others too.
        """
        sequence = self._sequence(request_id)
        if self.has_state:
            state_slots.drop_target(self.pools[-1], sequence)
            sequence.state_tokens = 0
        if not any(sequence.num_null):
            return
        for g, pool in enumerate(self.token_pools):
            for block in reversed(sequence.tables[g]):
                if block != NULL_BLOCK:
                    pool.release(block)
            sequence.tables[g] = []
        sequence.num_tokens = sequence.num_committed = 0
        sequence.num_null = [0] * len(self.groups)
        self._rewritten.add(request_id)

    def find_prefix(self, hashes: Sequence[bytes]) -> Prefix:
        """Return the cached prefix of a sequence whose full blocks have these hashes."""
        known = hashes if self.enable_prefix_caching else ()
        return find_prefix(self.groups, self.pools, known, self.block_size)

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
            self.in_flight += held
            if overlapped:
                self._overlapped_copies += copies
            else:
                self._copies += copies
        num_tokens = num_blocks * self.block_size
        self.sequences[request_id] = SequenceBlocks(num_tokens, tables, num_null, state_tokens=num_tokens)
        self._arriving.append((request_id, hashes[:num_blocks]))

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
        self.in_flight.append((pool, block))
        self._overlapped_copies.append(CacheCopy("out", group, block, target))
        return target

    def count_prefix(self, num_tokens: int, num_hits: int) -> None:
        """Record for the statistics that a sequence of ``num_tokens`` tokens found ``num_hits`` of them cached."""
        self.counts.prefix_queries += num_tokens
        self.counts.prefix_hits += num_hits

    def commit(self, request_id: str, hashes: Sequence[bytes], num_tokens: int) -> None:
        """Publish the full blocks of the first ``num_tokens`` tokens, which are computed, under these hashes."""
        if not self.enable_prefix_caching:
            return
        sequence = self._sequence(request_id)
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
        sequence, pool = self._sequence(request_id), self.pools[-1]
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
        sequence = self._sequence(request_id)
        tables = [table[: self._length(g, num_tokens)] for g, table in enumerate(sequence.tables)]
        copies = self.swap_space.store(request_id, tables, self.pools, num_tokens, is_stale=sequence.is_stale)
        if copies is None:
            return False
        if overlapped:
            self._overlapped_copies += copies
            for copy in copies:
                self.pools[copy.group].retain(copy.source)
                self.in_flight.append((self.pools[copy.group], copy.source))
        else:
            self._copies += copies
        self._drop(request_id)
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
        self.in_flight += stored
        if overlapped:
            self._overlapped_copies += copies
        else:
            self._copies += copies
        num_null = [next((i for i, block in enumerate(table) if block != NULL_BLOCK), len(table)) for table in tables]
        self.sequences[request_id] = SequenceBlocks(
            num_tokens, tables, num_null, is_stale=is_stale, state_tokens=num_tokens
        )
        return num_tokens

    @property
    def has_copies(self) -> bool:
        """True if copies are planned that are made before the step: what they write is not there yet."""
        return bool(self._copies)

    @property
    def has_overlapped_copies(self) -> bool:
        """True if there are copies to make while the step runs."""
        return bool(self._overlapped_copies)

    def copy_before_step(self) -> None:
        """Make the overlapped copies before the step instead, so that their blocks are available at once."""
        self._copies += self._overlapped_copies
        self._overlapped_copies = []
        self.finish_copies()

    def finish_copies(self) -> None:
        """Release what the copies of the last step needed, now that they are done."""
        held, self.in_flight = self.in_flight, []
        for pool, block in held:
            pool.release(block)
        arrived, self._arriving = self._arriving, []
        for request_id, hashes in arrived:
            if request_id in self.sequences:
                self.commit(request_id, hashes, len(hashes) * self.block_size)

    def defragment(self) -> int:
        """Move used and cached blocks to the lowest ids, rewrite the tables, and return the number of moved blocks.

        Nothing moves while copies of the last step may be running, between ``take_changes`` and ``finish_copies``,
        nor while blocks of ended sequences are held.
        """
        if not self._may_move:
            return 0
        plans = [moves_to_front(pool, pool.num_used + pool.num_cached) for pool in self.pools]
        for g, moves in enumerate(plans):
            self._move(g, moves)
        return sum(map(len, plans))

    def resize(self, num_blocks: Sequence[int]) -> list[int]:
        """Grow or shrink each group's pool; used blocks move to lower ids and are never dropped.

                Returns:
        The new sizes. A pool never shrinks below its used blocks, nor while copies may be running or blocks are
                    held.
        """
        for g, (pool, size) in enumerate(zip(self.pools, num_blocks, strict=True)):
            if size < pool.num_blocks:
                if not self._may_move:
                    continue
                size = max(size, pool.num_used, 1)
                self._move(g, moves_to_front(pool, size))
            pool.resize(size)
        return [pool.num_blocks for pool in self.pools]

    def fit_to_load(self) -> None:
        """Shrink pools that have been too large for a while; call once per step."""
        sizes = [pool.size_for_load() for pool in self.pools]
        if sizes != [pool.num_blocks for pool in self.pools]:
            self.resize(sizes)

    def take_changes(self) -> tuple[list[CacheCopy], list[CacheCopy], set[str]]:
        """Return the changes since the last call.

        Returns:
            Copies to make one after the other before the step, copies to make while it runs, and the sequences whose
            tables have changed entries.
        """
        drained = (self._copies, self._overlapped_copies, self._rewritten)
        self._copies, self._overlapped_copies, self._rewritten = [], [], set()
        return drained

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

    def _drop(self, request_id: str) -> None:
        sequence = self._sequence(request_id)
        del self.sequences[request_id]
        self._rewritten.discard(request_id)
        if self.has_state:
            state_slots.drop_target(self.pools[-1], sequence)
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            # Backwards: the end of a chain of hashes is useless without its beginning, so it is evicted first.
            for block in reversed(table):
                if block != NULL_BLOCK:
                    pool.release(block)

    def _length(self, group: int, num_tokens: int) -> int:
        return self.groups[group].length(num_tokens, self.block_size)

    def _shared_ahead(self, group: int, table: list[int], start: int) -> int:
        pool = self.pools[group]
        ahead = range(start // self.block_size, len(table))
        return sum(table[i] != NULL_BLOCK and pool.refs(table[i]) > 1 for i in ahead)

    def _copy_on_write(self, request_id: str, group: int, table: list[int], start: int) -> None:
        """Make the sequence the only holder of the blocks that it is about to write."""
        pool = self.pools[group]
        for i in range(start // self.block_size, len(table)):
            block = table[i]
            if block == NULL_BLOCK:
                continue
            if pool.refs(block) < 2:
                pool.forget(block)
                continue
            (table[i],) = pool.take(1)
            pool.release(block)
            self._rewritten.add(request_id)
            if start > i * self.block_size:
                self._copies.append(CacheCopy("move", group, block, table[i]))
                self.counts.copies_on_write += 1

    def _contiguous_run(self, group: int, count: int) -> list[int] | None:
        """Return neighboring blocks, after moving others out of the way if that makes a run."""
        pool = self.pools[group]
        run = pool.take_run(count)
        if run is None and self._may_move:
            self._move(group, moves_for_run(pool, count))
            run = pool.take_run(count)
        return run

    @property
    def _may_move(self) -> bool:
        return not (self.in_flight or self._overlapped_copies or self.held)

    def _move(self, group: int, moves: dict[int, int]) -> None:
        if not moves:
            return
        pool = self.pools[group]
        pool.move(moves)
        self._copies += [CacheCopy("move", group, source, target) for source, target in moves.items()]
        self.counts.moved += len(moves)
        for request_id, sequence in self.sequences.items():
            table = sequence.tables[group]
            if not moves.keys().isdisjoint(table):
                table[:] = [moves.get(block, block) for block in table]
                self._rewritten.add(request_id)
            if self.groups[group].is_state:
                sequence.state_target = moves.get(sequence.state_target, sequence.state_target)

    def _sequence(self, request_id: str) -> SequenceBlocks:
        sequence = self.sequences.get(request_id)
        if sequence is None:
            raise ValueError(f"request_id={request_id!r} holds no blocks; allocate some first")
        return sequence
