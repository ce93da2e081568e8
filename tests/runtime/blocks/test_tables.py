from __future__ import annotations

import pytest

from torch_pagoda.runtime.blocks import NULL_BLOCK, BlockGroup, BlockManager, BlockTables, CacheCopy, OutOfBlocks

from toy_blocks import make


def test_blocks_come_in_order_and_tables_grow() -> None:
    blocks = make()
    assert blocks.allocate("a", 5, 0) == [[0, 1]]
    assert blocks.allocate("a", 8, 5) == [[]]
    assert blocks.allocate("a", 9, 8) == [[2]]
    assert blocks.allocate("a", 3, 2) == [[]]
    assert blocks.table("a") == [0, 1, 2]
    assert (blocks.num_tokens("a"), blocks.num_available_blocks, blocks.num_used_blocks) == (9, 5, 3)
    assert blocks.take_changes() == ([], [], set())
    blocks.check()


def test_freed_blocks_are_reused_first_and_in_their_old_order() -> None:
    blocks = make(100)
    blocks.allocate("a", 12, 0)
    blocks.allocate("b", 4, 0)
    blocks.free("a")
    assert blocks.allocate("c", 12, 0) == [[0, 1, 2]]
    blocks.check()


def test_the_last_block_can_be_taken_and_no_more() -> None:
    blocks = make(3)
    assert blocks.allocate("a", 12, 0) == [[0, 1, 2]]
    with pytest.raises(OutOfBlocks, match=r"'b' needs \[1\] more blocks.*\[0\] of \[3\] are available"):
        blocks.allocate("b", 1, 0)
    assert "b" not in blocks
    with pytest.raises(OutOfBlocks):
        blocks.allocate("a", 13, 12)
    assert blocks.num_tokens("a") == 12
    blocks.check()


def test_questions() -> None:
    blocks = make(4)
    blocks.allocate("a", 6, 0)
    assert [blocks.num_blocks_to_allocate("a", n, 5) for n in (6, 8, 9, 17)] == [[0], [0], [1], [3]]
    assert [blocks.num_blocks_to_allocate("new", n, 0) for n in (1, 4, 5)] == [[1], [1], [2]]
    assert (blocks.num_tokens_that_fit("a", 6), blocks.num_tokens_that_fit("new", 0)) == (16, 8)
    assert blocks.capacity == 16 and blocks.can_take([2]) and not blocks.can_take([3])


@pytest.mark.parametrize(
    ("groups", "capacity"),
    [
        ([BlockGroup(4), BlockGroup(3)], 12),
        ([BlockGroup(4), BlockGroup(4, window=9)], 16),  # four blocks hold any window of nine tokens
        ([BlockGroup(4, window=12)], None),
        ([BlockGroup(3, window=12)], 12),
        ([BlockGroup(2, is_state=True)], None),
        ([BlockGroup(5), BlockGroup(2, is_state=True)], 20),
    ],
)
def test_capacity(groups: list[BlockGroup], capacity: int | None) -> None:
    assert BlockTables(groups, 4).capacity == capacity


@pytest.mark.parametrize("window", range(1, 14))
def test_a_window_fits_in_the_blocks_that_promise_any_length(window: int) -> None:
    blocks = make(-(-window // 4) + 1, window=window)
    assert blocks.capacity is None
    for position in range(60):
        if position:
            blocks.remove_skipped_blocks("a", position)
        blocks.allocate("a", position + 1, position)
        blocks.check()


def test_what_left_the_window_is_let_go() -> None:
    blocks = make(8, window=6)
    blocks.allocate("a", 16, 0)
    for position, gone in [(8, 0), (9, 1), (12, 1), (13, 2), (10, 2)]:
        blocks.remove_skipped_blocks("a", position)
        assert blocks.table("a") == [NULL_BLOCK] * gone + [0, 1, 2, 3][gone:]
        blocks.check()
    assert blocks.num_used_blocks == 2
    blocks.free("a")
    assert blocks.num_available_blocks == 8


def test_groups_without_a_window_keep_everything() -> None:
    blocks = BlockManager([BlockGroup(4), BlockGroup(4, window=4), BlockGroup(2, is_state=True)], 4)
    assert blocks.allocate("a", 16, 0) == [[0, 1, 2, 3], [0, 1, 2, 3], [0]]
    blocks.remove_skipped_blocks("a", 15)
    assert blocks.tables("a") == [[0, 1, 2, 3], [NULL_BLOCK, NULL_BLOCK, NULL_BLOCK, 3], [0]]
    assert blocks.num_tokens_that_fit("b", 0) == 0, "the first group has nothing left"
    blocks.check()


def test_forks_share_until_one_writes_and_exactly_the_partly_filled_block_is_copied() -> None:
    blocks = make()
    blocks.allocate("a", 10, 0)
    blocks.fork("a", "b", 10)
    assert blocks.table("b") == blocks.table("a") == [0, 1, 2] and blocks.num_used_blocks == 3
    assert blocks.num_blocks_to_allocate("b", 11, 10) == [1] and blocks.num_tokens_that_fit("b", 10) == 28
    assert blocks.allocate("b", 11, 10) == [[]]
    assert (blocks.table("a"), blocks.table("b")) == ([0, 1, 2], [0, 1, 3])
    assert blocks.take_changes() == ([CacheCopy("move", 0, 2, 3)], [], {"b"})
    assert blocks.allocate("a", 11, 10) == [[]], "now it is alone"
    assert blocks.take_changes() == ([], [], set()) and blocks.stats()["copies_on_write"] == 1
    blocks.free("a")
    assert blocks.num_used_blocks == 3
    blocks.check()


def test_full_blocks_are_never_copied() -> None:
    blocks = make()
    blocks.allocate("a", 8, 0)
    blocks.fork("a", "b", 8)
    assert blocks.allocate("a", 9, 8) == [[2]] and blocks.allocate("b", 9, 8) == [[3]]
    assert blocks.take_changes()[0] == []
    blocks.check()


def test_a_fork_may_begin_in_the_middle() -> None:
    blocks = make()
    blocks.allocate("a", 15, 0)
    blocks.fork("a", "b", 6)
    assert (blocks.table("b"), blocks.num_tokens("b")) == ([0, 1], 6)
    blocks.allocate("b", 9, 6)
    assert (blocks.table("b"), blocks.take_changes()[0]) == ([0, 4, 5], [CacheCopy("move", 0, 1, 4)])
    blocks.check()


def test_what_is_overwritten_from_its_beginning_is_replaced_without_a_copy() -> None:
    blocks = make()
    blocks.allocate("a", 8, 0)
    blocks.fork("a", "b", 8)
    blocks.allocate("b", 8, 0)
    assert (blocks.table("b"), blocks.take_changes()) == ([2, 3], ([], [], {"b"}))


def test_when_too_little_is_there_to_copy_nothing_can_be_written() -> None:
    blocks = make(3)
    blocks.allocate("a", 12, 0)
    blocks.fork("a", "b", 12)
    assert blocks.num_tokens_that_fit("b", 0) == 0 and blocks.num_tokens_that_fit("b", 5) == 5
    with pytest.raises(OutOfBlocks):
        blocks.allocate("b", 2, 0)
    assert blocks.table("b") == blocks.table("a")
    blocks.check()


def test_rewinding_keeps_the_blocks_unless_the_window_took_some() -> None:
    blocks = make(4, window=4)
    blocks.allocate("a", 16, 0)
    blocks.restart("a")
    assert blocks.table("a") == [0, 1, 2, 3]
    blocks.remove_skipped_blocks("a", 12)
    blocks.restart("a")
    blocks.check()
    assert (blocks.table("a"), blocks.num_used_blocks, "a" in blocks) == ([], 0, True)
    assert len(blocks.allocate("a", 5, 0)[0]) == 2
    assert "a" in blocks.take_changes()[2]
    blocks.check()


def test_a_fork_behind_the_window_is_refused() -> None:
    blocks = make(8, window=5)
    blocks.allocate("a", 24, 0)
    blocks.remove_skipped_blocks("a", 20)
    with pytest.raises(ValueError, match="num_tokens=8 is behind the window"):
        blocks.fork("a", "b", 8)
    blocks.fork("a", "b", 20)
    blocks.check()


def test_a_returned_table_is_a_copy() -> None:
    blocks = make()
    blocks.allocate("a", 4, 0)
    blocks.table("a").append(3)
    blocks.tables("a")[0].append(3)
    assert blocks.table("a") == [0]
