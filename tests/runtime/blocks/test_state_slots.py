"""Slots of states: nothing is copied, nothing is written that others go on from, nothing half-written is read."""

from __future__ import annotations

import pytest

from torch_pagoda.runtime.blocks import BlockGroup, BlockManager, OutOfBlocks
from torch_pagoda.runtime.blocks.state_slots import num_to_take


def make(num_slots: int = 3, **options: int) -> BlockManager:
    return BlockManager([BlockGroup(8), BlockGroup(num_slots, is_state=True, **options)], 4)


def step(blocks: BlockManager, name: str, num_tokens: int, start: int) -> tuple[int, int]:
    """Let a step compute tokens ``start`` to ``num_tokens - 1``; returns the slots that it reads and writes."""
    blocks.allocate(name, num_tokens, start)
    slots = blocks.slots_of_step(name, start)
    blocks.check()
    blocks.end_step(name, num_tokens)
    blocks.check()
    return slots


def test_a_sequence_begins_from_zeros_and_goes_on_where_its_state_is() -> None:
    blocks = make()
    assert step(blocks, "a", 3, 0) == (-1, 0)
    assert step(blocks, "a", 5, 3) == (0, 0)
    assert blocks.allocate_in_place("a", 6, 5) and blocks.slots_of_step("a", 5) == (0, 0)
    assert blocks.num_used_blocks == 2 and blocks.stats()["state_slots_used"] == 1


def test_forks_read_their_parents_slot_and_write_their_own_without_a_copy() -> None:
    blocks = make()
    step(blocks, "a", 6, 0)
    blocks.fork("a", "b", 6)
    assert not blocks.allocate_in_place("a", 7, 6)
    blocks.allocate("a", 7, 6)
    blocks.allocate("b", 7, 6)
    assert (blocks.slots_of_step("a", 6), blocks.slots_of_step("b", 6)) == ((0, 1), (0, 2))
    assert [copy for copy in blocks.take_changes()[0] if copy.group == 1] == []
    with pytest.raises(OutOfBlocks):
        blocks.allocate("c", 1, 0)
    blocks.end_step("a", 7)
    assert blocks.stats()["state_slots_free"] == 0, "b has not read it yet"
    blocks.end_step("b", 7)
    assert blocks.stats()["state_slots_free"] == 1
    assert step(blocks, "a", 8, 7) == (1, 1) and step(blocks, "b", 8, 7) == (2, 2)


def test_the_last_who_needs_a_state_writes_over_it() -> None:
    blocks = make()
    step(blocks, "a", 6, 0)
    blocks.fork("a", "b", 6)
    assert step(blocks, "b", 7, 6) == (0, 1)
    assert step(blocks, "a", 7, 6) == (0, 0)


def test_a_fork_must_be_where_the_state_is() -> None:
    blocks = make()
    step(blocks, "a", 6, 0)
    with pytest.raises(ValueError, match="num_tokens=5 differs from the 6 tokens"):
        blocks.fork("a", "b", 5)
    blocks.allocate_in_place("a", 7, 6)
    with pytest.raises(ValueError, match="differs from the -1 tokens"):
        blocks.fork("a", "b", 6)


@pytest.mark.parametrize("in_place", [False, True])
def test_what_an_interrupted_step_left_is_not_gone_on_from(in_place: bool) -> None:
    blocks = make()
    step(blocks, "a", 6, 0)
    if in_place:
        assert blocks.allocate_in_place("a", 7, 6)
    else:
        blocks.allocate("a", 9, 6)
    assert not blocks.allocate_in_place("a", 7, 6)
    with pytest.raises(ValueError, match="needs the state of 6 tokens, the sequence has a half-written state"):
        blocks.allocate("a", 7, 6)
    blocks.restart("a")
    with pytest.raises(ValueError, match="differs from the 0 tokens"):
        blocks.fork("a", "b", 6)
    assert step(blocks, "a", 7, 0) == (-1, 0)


def test_a_step_that_kept_what_it_read_can_be_made_again() -> None:
    blocks = make()
    step(blocks, "a", 6, 0)
    blocks.fork("a", "b", 6)
    for _ in range(2):
        blocks.allocate("b", 7, 6)
        assert blocks.slots_of_step("b", 6) == (0, 1)
    blocks.restart("b")
    assert blocks.stats()["state_slots_used"] == 1
    assert step(blocks, "b", 7, 0) == (-1, 1), "the slot that a needs is left alone"
    assert step(blocks, "a", 7, 6) == (0, 0)


def test_a_state_of_another_moment_is_refused() -> None:
    blocks = make()
    step(blocks, "a", 6, 0)
    with pytest.raises(ValueError, match="start=5 needs the state of 5 tokens, the sequence has one of 6"):
        blocks.allocate("a", 8, 5)
    with pytest.raises(ValueError, match="start=2 needs the state of 2 tokens"):
        blocks.allocate("new", 4, 2)
    assert "new" not in blocks
    blocks.check()


def test_a_sequence_that_began_anew_has_no_state_until_its_step_ends() -> None:
    blocks = make()
    step(blocks, "a", 6, 0)
    blocks.allocate("a", 3, 0)
    with pytest.raises(ValueError, match="start=1 needs the state of 1 tokens, the sequence has one of 0"):
        blocks.allocate("a", 4, 1)
    assert step(blocks, "a", 3, 0) == (-1, 0)


def test_a_preempted_fork_gives_its_slots_back() -> None:
    blocks = make()
    step(blocks, "a", 6, 0)
    blocks.fork("a", "b", 6)
    blocks.allocate("b", 7, 6)
    blocks.free("b")
    blocks.check()
    assert blocks.stats()["state_slots_used"] == 1 and step(blocks, "a", 7, 6) == (0, 0)


def test_the_state_that_is_swapped_is_that_of_the_computed_tokens() -> None:
    blocks = BlockManager([BlockGroup(8, num_host_blocks=8), BlockGroup(3, is_state=True, num_host_blocks=1)], 4)
    step(blocks, "a", 6, 0)
    blocks.fork("a", "b", 6)
    blocks.allocate("b", 7, 6)
    assert blocks.slots_of_step("b", 6) == (0, 1)
    blocks.take_changes()
    assert blocks.swap_out("b", 6, overlapped=False)
    assert [copy for copy in blocks.take_changes()[0] if copy.group == 1] == [("out", 1, 0, 0)]
    assert not blocks.swap_out("a", 6, overlapped=False), "the host has one slot"
    blocks.swap_in("b", overlapped=False)
    assert [copy for copy in blocks.take_changes()[0] if copy.group == 1] == [("in", 1, 0, 1)]
    assert step(blocks, "b", 7, 6) == (1, 1)


def test_slots_move_with_what_is_read_and_what_is_to_be_written() -> None:
    blocks = make(4)
    step(blocks, "a", 3, 0)
    step(blocks, "b", 6, 0)
    blocks.fork("b", "c", 6)
    blocks.allocate("c", 7, 6)
    assert blocks.slots_of_step("c", 6) == (1, 2)
    blocks.free("a")
    blocks.defragment()
    blocks.check()
    read, write = blocks.slots_of_step("c", 6)
    assert {read, write} == {0, 1} and blocks.tables("b")[1] == [read]


def test_a_snapshot_is_left_where_there_is_room_and_else_written_over() -> None:
    blocks = BlockManager([BlockGroup(8), BlockGroup(2, is_state=True)], 4, enable_prefix_caching=True)
    step(blocks, "a", 4, 0)
    assert blocks.keep_state("a", b"four", 1) and step(blocks, "a", 5, 4) == (0, 1)
    assert blocks.pools[1].lookup(b"four") == 0
    step(blocks, "a", 8, 5)
    assert blocks.keep_state("a", b"eight", 1)
    step(blocks, "b", 1, 0)
    assert blocks.pools[1].lookup(b"four") is None, "evicted"
    assert step(blocks, "a", 9, 8) == (1, 1)
    assert blocks.pools[1].lookup(b"eight") is None


def test_only_the_last_group_has_states() -> None:
    with pytest.raises(ValueError, match="a group of states is not the last"):
        BlockManager([BlockGroup(2, is_state=True), BlockGroup(5)], 4)


def test_slots_that_a_step_takes_are_counted_before() -> None:
    blocks = make()
    pool = blocks.pools[-1]

    def taken(name: str, start: int) -> int:
        return num_to_take(pool, blocks.sequences.get(name), start)

    assert taken("a", 0) == 1
    step(blocks, "a", 6, 0)
    assert taken("a", 6) == 0
    blocks.fork("a", "b", 6)
    assert taken("a", 6) == taken("b", 6) == 1
