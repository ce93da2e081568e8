"""Block tables of sequences, with reference counts, in pure Python, without tensors."""

from __future__ import annotations

from collections.abc import Container, Sequence

from . import state_slots
from .copies import CacheCopy, PlannedCopies
from .elastic import ElasticPool
from .groups import BlockGroup, SequenceBlocks
from .moves import moves_for_run
from .pool import NULL_BLOCK, BlockPool, OutOfBlocks


class BlockTables:
    """Allocates the blocks of a paged KV cache (PagedAttention, arXiv 2309.06180, section 4).

    A sequence's *table* lists its blocks in order: token i is in block ``table[i // block_size]`` at offset
    ``i % block_size``. There is one table for each group of layers; all have the same length. A block may be in
    several tables, such as those of forked sequences. A shared block is never written: ``allocate`` replaces it with
    a copy. ``take_changes`` returns the copies to make since its last call.

    If the model has states, they are the last group. Its table is the one slot that the sequence continues from. A
    step writes states, from ``allocate`` to ``end_step``; ``slots_of_step`` returns the slots that it reads and
    writes.

    Every operation costs O(blocks that it adds or drops), never O(``num_blocks``), except moves and allocation in one
    run.

    Args:
        groups: at least one; a group of states must be the last.
        block_size: tokens per block.
        swapped: the sequences that are swapped out; nothing can be allocated for them.

    Attributes:
        pools: pool of each group; ``token_pools``: without the pool of state slots.
        sequences: request id → the sequence's blocks.
        copies: copies to make, and the blocks that they need.
        held: blocks, each with its pool, that a launched step may use.
        num_copies_on_write, num_moved: blocks copied and moved so far.

    Raises:
        ValueError: a size is below 1, or a group of states is not the last.
    """

    def __init__(self, groups: Sequence[BlockGroup], block_size: int, *, swapped: Container[str] = ()) -> None:
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
        self.pools = [
            ElasticPool(group.min_blocks, group.num_blocks) if group.min_blocks else BlockPool(group.num_blocks)
            for group in groups
        ]
        self.token_pools = self.pools[:-1] if self.has_state else self.pools
        self.sequences: dict[str, SequenceBlocks] = {}
        self.copies = PlannedCopies()
        self.held: list[tuple[BlockPool, int]] = []
        self.num_copies_on_write = self.num_moved = 0
        self._swapped = swapped
        self._rewritten: set[str] = set()

    def reset(self) -> None:
        """Free all blocks and forget all content, whatever state an interrupted operation left behind."""
        for pool in self.pools:
            pool.reset()
        self.sequences.clear()
        self.copies, self.held = PlannedCopies(), []
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
        return list(self.sequence(request_id).tables[group])

    def tables(self, request_id: str) -> list[list[int]]:
        """Return the sequence's tables, one for each group (copies)."""
        return [list(table) for table in self.sequence(request_id).tables]

    def num_tokens(self, request_id: str) -> int:
        """Return the number of tokens that the sequence's table was made to hold, 0 if it has none."""
        sequence = self.sequences.get(request_id)
        return sequence.num_tokens if sequence is not None else 0

    def sequence(self, request_id: str) -> SequenceBlocks:
        """Return the sequence's record; raises ValueError if it holds no blocks."""
        sequence = self.sequences.get(request_id)
        if sequence is None:
            raise ValueError(f"request_id={request_id!r} holds no blocks; allocate some first")
        return sequence

    def leading(self, sequence: SequenceBlocks, num_tokens: int) -> list[list[int]]:
        """Return the part of the sequence's tables that holds its first ``num_tokens`` tokens (copies)."""
        return [table[: self._length(g, num_tokens)] for g, table in enumerate(sequence.tables)]

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
            if request_id in self._swapped:
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
        sequence = self.sequence(request_id)
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
        sequence, size = self.sequence(request_id), self.block_size
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
        sequence = self.sequence(request_id)
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
        state_slots.drop_target(self.pools[-1], self.sequence(request_id))

    def slots_of_step(self, request_id: str, start: int) -> tuple[int, int]:
        """Return the slots that the step allocated from token ``start`` on reads and writes; the first is -1 if
        ``start`` is 0."""
        return state_slots.slots_of_step(self.sequence(request_id), start)

    def end_step(self, request_id: str, num_tokens: int) -> None:
        """Record that a step is computed: a sequence's state now covers ``num_tokens`` tokens (models with state)."""
        state_slots.end_step(self.pools[-1], self.sequence(request_id), num_tokens)

    def free(self, request_id: str) -> None:
        """Drop the sequence; blocks without another holder become free, or cached if their content has a hash.

        Raises:
            ValueError: the sequence holds nothing.
        """
        sequence = self.sequence(request_id)
        del self.sequences[request_id]
        self._rewritten.discard(request_id)
        if self.has_state:
            state_slots.drop_target(self.pools[-1], sequence)
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            _release(pool, table)

    def hold(self, request_id: str) -> None:
        """Keep the sequence's blocks from being reused, even if it is freed, until ``release_held``: a launched step
        may still read and write them."""
        sequence = self.sequence(request_id)
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
        parent = self.sequence(parent_id)
        if child_id in self.sequences or child_id in self._swapped:
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
        tables = self.leading(parent, num_tokens)
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
        sequence = self.sequence(request_id)
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
        sequence = self.sequence(request_id)
        if self.has_state:
            state_slots.drop_target(self.pools[-1], sequence)
            sequence.state_tokens = 0
        if not any(sequence.num_null):
            return
        for g, pool in enumerate(self.token_pools):
            _release(pool, sequence.tables[g])
            sequence.tables[g] = []
        sequence.num_tokens = sequence.num_committed = 0
        sequence.num_null = [0] * len(self.groups)
        self._rewritten.add(request_id)

    @property
    def may_move(self) -> bool:
        """True if no block is held for a launched step or for copies, which know the blocks by their ids."""
        return not (self.copies.in_flight or self.copies.overlapped or self.held)

    def move(self, group: int, moves: dict[int, int]) -> None:
        """Move blocks, source → target, of a group and rewrite the tables; the targets must be available."""
        if not moves:
            return
        self.pools[group].move(moves)
        self.copies.before += [CacheCopy("move", group, source, target) for source, target in moves.items()]
        self.num_moved += len(moves)
        for request_id, sequence in self.sequences.items():
            table = sequence.tables[group]
            if not moves.keys().isdisjoint(table):
                table[:] = [moves.get(block, block) for block in table]
                self._rewritten.add(request_id)
            if self.groups[group].is_state:
                sequence.state_target = moves.get(sequence.state_target, sequence.state_target)

    def take_changes(self) -> tuple[list[CacheCopy], list[CacheCopy], set[str]]:
        """Return the changes since the last call.

        Returns:
            Copies to make one after the other before the step, copies to make while it runs, and the sequences whose
            tables have changed entries.
        """
        rewritten, self._rewritten = self._rewritten, set()
        return *self.copies.take(), rewritten

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
                self.copies.before.append(CacheCopy("move", group, block, table[i]))
                self.num_copies_on_write += 1

    def _contiguous_run(self, group: int, count: int) -> list[int] | None:
        """Return neighboring blocks, after moving others out of the way if that makes a run."""
        pool = self.pools[group]
        run = pool.take_run(count)
        if run is None and self.may_move:
            self.move(group, moves_for_run(pool, count))
            run = pool.take_run(count)
        return run


def _release(pool: BlockPool, table: Sequence[int]) -> None:
    """Release a table's blocks, the last one first: the end of a chain of hashes is useless without its beginning,
    so it is evicted first."""
    for block in reversed(table):
        if block != NULL_BLOCK:
            pool.release(block)
