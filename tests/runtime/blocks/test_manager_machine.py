"""Random operations on a block manager: invariants after each, and every token read is the sequence's own."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from torch_pagoda.runtime.blocks import BlockGroup, BlockManager, OutOfBlocks, chain_start, extend_chain, inspection

from simulated_engine import TIMES, Prefixes, SimulatedCache

BLOCK_SIZE = 3
INDEX = st.integers(0, 40)
STEM = [1, 2, 3, 4, 5, 6, 7, 8, 9]
GROUPS = {
    "full": [BlockGroup(12, num_host_blocks=12)],
    "no host": [BlockGroup(12)],
    "window": [BlockGroup(9, window=5, num_host_blocks=6)],
    "hybrid": [BlockGroup(14, num_host_blocks=6), BlockGroup(9, window=7, num_host_blocks=12)],
    "two windows": [BlockGroup(9, window=2, num_host_blocks=6), BlockGroup(10, window=10, num_host_blocks=12)],
    "state": [BlockGroup(12, num_host_blocks=9), BlockGroup(3, is_state=True, num_host_blocks=2)],
    "snapshots": [BlockGroup(12, num_host_blocks=9), BlockGroup(8, is_state=True, num_host_blocks=2)],
    "state and window": [BlockGroup(8, window=4, num_host_blocks=9), BlockGroup(4, is_state=True, num_host_blocks=2)],
}


@dataclass(eq=False)
class Sequence:
    """What the user of the manager knows of a sequence."""

    request_id: str
    tokens: list[int]
    salt: str
    names: list[int] = field(default_factory=list)  # of the computed tokens
    hashes: list[bytes] = field(default_factory=list)
    planned: int = 0  # tokens that the next step computes
    is_arriving: bool = False


class BlockManagerMachine(RuleBasedStateMachine):
    """Operations are collected until a step is run; what copies need is let go when the next one is planned."""

    @initialize(groups=st.sampled_from(sorted(GROUPS)), caching=st.booleans())
    def start(self, groups: str, caching: bool) -> None:
        self.manager = BlockManager(GROUPS[groups], BLOCK_SIZE, enable_prefix_caching=caching)
        self.cache = SimulatedCache(self.manager)
        self.prefixes = Prefixes()
        self.sequences: list[Sequence] = []
        self.late: list = []
        self.in_flight = False
        self.count = 0

    def new(self, tokens: list[int], salt: str) -> Sequence:
        self.count += 1
        sequence = Sequence(f"s{self.count}", tokens, salt)
        self.sequences.append(sequence)
        return sequence

    def plan(self) -> None:
        """The copies of the last step are done before the next one is planned."""
        if self.in_flight:
            self.cache.copy(self.late)
            self.late = []
            self.manager.finish_copies()
            self.in_flight = False
            for sequence in self.sequences:
                sequence.is_arriving = False

    def on_device(self) -> list[Sequence]:
        return [s for s in self.sequences if s.request_id in self.manager]

    @rule(
        stem=st.integers(0, len(STEM)),
        rest=st.lists(st.integers(0, 1), max_size=6),
        salt=st.sampled_from(["", "", "pepper"]),
    )
    def begin(self, stem: int, rest: list[int], salt: str) -> None:
        self.plan()
        sequence = self.new([*STEM[:stem], *rest, 0], salt)
        extend_chain(sequence.hashes, sequence.tokens, 0, BLOCK_SIZE, chain_start(salt))
        usable = sequence.hashes[: (len(sequence.tokens) - 1) // BLOCK_SIZE]
        found = self.manager.find_prefix(usable)
        assert 0 <= found.num_blocks <= (len(usable) if self.manager.enable_prefix_caching else 0)
        if found.num_blocks:
            available = [pool.num_available for pool in self.manager.pools]
            self.manager.take_prefix(sequence.request_id, usable, found.num_blocks)
            assert [a - p.num_available for a, p in zip(available, self.manager.pools, strict=True)] == found.revived
            known = sequence.tokens[: found.num_blocks * BLOCK_SIZE]
            sequence.names = self.prefixes.extended([], known, salt)

    @precondition(lambda self: self.sequences)
    @rule(which=INDEX, count=st.integers(1, 9), in_one_run=st.booleans())
    def write(self, which: int, count: int, in_one_run: bool) -> None:
        self.plan()
        sequence = self.sequences[which % len(self.sequences)]
        name, start, manager = sequence.request_id, len(sequence.names), self.manager
        if sequence.is_arriving or sequence.planned or manager.is_swapped(name):
            return
        end = start + count
        sequence.tokens += [(start + i) % 2 for i in range(end - len(sequence.tokens))]
        if name in manager:
            manager.remove_skipped_blocks(name, start)
        lacking = manager.num_blocks_to_allocate(name, end, start)
        fits = manager.can_take(lacking)
        assert fits == (manager.num_tokens_that_fit(name, start) >= end)
        if not fits:
            before = [s.request_id in manager and manager.tables(s.request_id) for s in self.sequences]
            with pytest.raises(OutOfBlocks, match=name):
                manager.allocate(name, end, start, in_one_run=in_one_run)
            assert before == [s.request_id in manager and manager.tables(s.request_id) for s in self.sequences]
            return
        available = [pool.num_available for pool in manager.pools]
        others = {b for s in self.on_device() if s is not sequence for b in manager.table(s.request_id)}
        added = manager.allocate(name, end, start, in_one_run=in_one_run)
        assert [a - p.num_available for a, p in zip(available, manager.pools, strict=True)] == lacking
        for table, new in zip(manager.tables(name), added, strict=True):
            assert table[len(table) - len(new) :] == new
        if not in_one_run:
            assert others.isdisjoint(added[0])
        sequence.planned = count

    @rule(
        overlapped=st.sampled_from(TIMES),
        fails=st.sampled_from([False, False, False, True]),
        keep=st.sampled_from([None, 1, 2]),
    )
    def step(self, overlapped: str, fails: bool, keep: int | None = None) -> None:
        self.plan()
        copies, overlapped_copies, _ = self.manager.take_changes()
        self.in_flight = True
        self.cache.copy(copies)
        self.cache.give_back_dropped_blocks()
        if overlapped == "before":
            self.cache.copy(overlapped_copies)
        running = [s for s in self.sequences if s.planned]
        starts = {s: len(s.names) for s in running}
        for sequence in running:
            start, end = starts[sequence], starts[sequence] + sequence.planned
            sequence.planned = 0
            if fails:
                continue
            tables = self.manager.tables(sequence.request_id)
            if start:
                self.cache.read(tables, sequence.names, start)
            sequence.names = self.prefixes.extended(sequence.names, sequence.tokens[start:end], sequence.salt)
            self.cache.write(tables, sequence.names, start)
        if self.manager.has_state:
            self.step_of_states(running, starts, fails)
        for sequence in running:
            self.cache.read(self.manager.tables(sequence.request_id), sequence.names, starts[sequence])
            if not fails and self.manager.has_state:
                self.manager.end_step(sequence.request_id, len(sequence.names))
        if overlapped == "after":
            self.cache.copy(overlapped_copies)
        elif overlapped == "late":
            self.late = overlapped_copies
        for sequence in self.on_device():
            if not (sequence.is_arriving and self.late):
                tables = self.manager.tables(sequence.request_id)
                self.cache.read(tables, sequence.names, len(sequence.names))
                if self.manager.has_state and sequence.names:
                    assert self.cache.state_is(tables[-1][0], sequence.names[-1])
        for sequence in running:
            extend_chain(
                sequence.hashes,
                sequence.tokens[len(sequence.hashes) * BLOCK_SIZE :],
                len(sequence.hashes) * BLOCK_SIZE,
                BLOCK_SIZE,
                chain_start(sequence.salt),
            )
            self.manager.commit(sequence.request_id, sequence.hashes, len(sequence.names))
            if fails or not self.manager.has_state or not self.manager.enable_prefix_caching:
                continue
            if keep is not None and sequence.names and not len(sequence.names) % BLOCK_SIZE:
                content = sequence.hashes[len(sequence.names) // BLOCK_SIZE - 1]
                kept = self.manager.keep_state(sequence.request_id, content, keep)
                assert (
                    not kept
                    or self.manager.pools[-1].lookup(content) == self.manager.tables(sequence.request_id)[-1][0]
                )

    def step_of_states(self, running: list[Sequence], starts: dict[Sequence, int], fails: bool) -> None:
        """Whoever writes over the state that it goes on from must begin anew when the step fails."""
        steps = []
        for sequence in running:
            read, write = self.manager.slots_of_step(sequence.request_id, starts[sequence])
            steps.append((read, write, [] if fails else sequence.names, starts[sequence]))
            if fails and read == write:
                with pytest.raises(ValueError, match="half-written"):
                    self.manager.allocate(sequence.request_id, starts[sequence] + 1, starts[sequence])
                self.manager.restart(sequence.request_id)
                sequence.names = []
        self.cache.write_states(steps)

    @precondition(lambda self: self.sequences)
    @rule(which=INDEX, cut=st.integers(0, 12))
    def fork(self, which: int, cut: int) -> None:
        parent = self.sequences[which % len(self.sequences)]
        groups = self.manager.groups
        movable = all(not group.is_state and not group.window for group in groups)
        length = len(parent.names) - (cut if movable else 0)
        if length < 1 or parent.planned or parent.request_id not in self.manager:
            return
        child = self.new(parent.tokens[:length], parent.salt)
        self.manager.fork(parent.request_id, child.request_id, length)
        child.names = parent.names[:length]
        child.hashes = parent.hashes[: length // BLOCK_SIZE]
        child.is_arriving = parent.is_arriving

    @precondition(lambda self: self.sequences)
    @rule(which=INDEX)
    def free(self, which: int) -> None:
        sequence = self.sequences.pop(which % len(self.sequences))
        name, manager = sequence.request_id, self.manager
        if name in manager or manager.is_swapped(name):
            manager.free(name)
        assert name not in manager and not manager.is_swapped(name)
        with pytest.raises(ValueError, match="holds no blocks"):
            manager.free(name)

    @precondition(lambda self: self.sequences)
    @rule(which=INDEX)
    def rewind(self, which: int) -> None:
        sequence = self.sequences[which % len(self.sequences)]
        if sequence.request_id in self.manager and not sequence.planned and not sequence.is_arriving:
            self.manager.restart(sequence.request_id)
            sequence.names = []

    @precondition(lambda self: self.sequences)
    @rule(which=INDEX, overlapped=st.booleans())
    def swap_out(self, which: int, overlapped: bool) -> None:
        self.plan()
        sequence = self.sequences[which % len(self.sequences)]
        name, manager = sequence.request_id, self.manager
        if name not in manager or sequence.is_arriving or not sequence.names:
            return
        tables = manager.tables(name)
        if manager.swap_out(name, len(sequence.names), overlapped=overlapped):
            assert manager.is_swapped(name) and name not in manager
            sequence.planned = 0
        else:
            assert manager.tables(name) == tables and not manager.is_swapped(name)

    @precondition(lambda self: any(self.manager.is_swapped(s.request_id) for s in self.sequences))
    @rule(which=INDEX, overlapped=st.booleans())
    def swap_in(self, which: int, overlapped: bool) -> None:
        self.plan()
        manager = self.manager
        swapped = [s for s in self.sequences if manager.is_swapped(s.request_id)]
        sequence = swapped[which % len(swapped)]
        if manager.copies.overlapped and not overlapped:
            self.copy_before_step()
        if manager.can_take(manager.num_blocks_to_swap_in(sequence.request_id)):
            assert manager.swap_in(sequence.request_id, overlapped=overlapped) == len(sequence.names)
            sequence.is_arriving = overlapped
        else:
            with pytest.raises(OutOfBlocks):
                manager.swap_in(sequence.request_id, overlapped=overlapped)
            assert manager.is_swapped(sequence.request_id)

    @rule()
    def copy_before_step(self) -> None:
        self.plan()
        self.manager.copy_before_step()
        for sequence in self.sequences:
            sequence.is_arriving = False

    @rule()
    def defragment(self) -> None:
        moves = self.manager.defragment()
        if self.manager.copies.in_flight or self.manager.copies.overlapped:
            assert not moves
            return
        for pool in self.manager.pools:
            end = pool.num_used + pool.num_cached
            assert all(pool.is_free(block) for block in range(end, pool.num_blocks))

    @rule(data=st.data())
    def resize(self, data: st.DataObject) -> None:
        manager = self.manager
        before = [pool.num_blocks for pool in manager.pools]
        wanted = [data.draw(st.integers(1, group.num_blocks)) for group in manager.groups]
        used = [pool.num_used for pool in manager.pools]
        may_shrink = not manager.copies.in_flight and not manager.copies.overlapped
        sizes = manager.resize(wanted)
        for was, want, need, size in zip(before, wanted, used, sizes, strict=True):
            assert size == (max(want, need) if want > was or may_shrink else was)
        assert [pool.num_blocks for pool in manager.pools] == sizes

    @rule()
    def change_weights(self) -> None:
        self.manager.forget_prefixes()
        self.prefixes.weights += 1
        assert all(pool.num_cached == 0 for pool in self.manager.pools)

    @rule()
    def reset(self) -> None:
        self.manager.reset()
        self.sequences.clear()
        self.late, self.in_flight = [], False
        assert self.manager.num_available_blocks == self.manager.num_blocks

    @invariant()
    def is_sound(self) -> None:
        if not hasattr(self, "manager"):
            return
        manager = self.manager
        manager.check()
        for pool in (*manager.pools, *manager.swap_space.pools):
            assert pool.num_used + pool.num_cached + pool.num_free == pool.num_blocks
            assert pool.num_available == pool.num_free + pool.num_cached and pool.peak_used >= pool.num_used
        stats = manager.stats()
        assert stats["blocks_used"] + stats["blocks_cached"] + stats["blocks_free"] == stats["blocks_total"]
        assert inspection._filled(manager) == inspection._filled_block_by_block(manager)
        assert 0 <= stats["internal_fragmentation"] < 1 and 0 <= stats["utilization"] <= 1
        assert not manager.leaks([s.request_id for s in self.sequences])

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.step("late", False)
        self.step("after", False)
        while self.sequences:
            self.free(0)
        self.plan()
        assert self.manager.num_used_blocks == self.manager.stats()["host_blocks_used"] == 0


TestBlockManagerMachine = BlockManagerMachine.TestCase
TestBlockManagerMachine.settings = settings(
    max_examples=120, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.slow
class TestLongBlockManagerMachine(BlockManagerMachine.TestCase):  # type: ignore[name-defined, misc]
    """At least 100,000 steps."""

    settings = settings(
        max_examples=2500, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
    )
