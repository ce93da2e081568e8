from __future__ import annotations

import pytest

from torch_pagoda.runtime.blocks import CacheCopy, OutOfBlocks

from simulated_engine import Prefixes, SimulatedCache
from toy_blocks import compute, make


@pytest.mark.parametrize("overlapped", [True, False])
def test_swapping_keeps_content(overlapped: bool) -> None:
    blocks = make(4, host=4)
    cache, prefixes = SimulatedCache(blocks), Prefixes()
    names = prefixes.extended([], range(10), "")
    blocks.allocate("a", 10, 0)
    cache.write(blocks.tables("a"), names, 0)
    assert blocks.swap_out("a", 10, overlapped=overlapped)
    assert (blocks.num_available_blocks, blocks.is_swapped("a")) == (1 if overlapped else 4, True)
    copies, overlapped_copies, _ = blocks.take_changes()
    assert len(overlapped_copies if overlapped else copies) == 3 and not (copies if overlapped else overlapped_copies)
    cache.copy([*copies, *overlapped_copies])
    blocks.finish_copies()
    blocks.allocate("other", 16, 0)
    cache.write(blocks.tables("other"), prefixes.extended([], range(50, 66), ""), 0)
    with pytest.raises(OutOfBlocks, match=r"'a' needs \[3\] blocks to return"):
        blocks.swap_in("a", overlapped=overlapped)
    blocks.free("other")
    assert blocks.swap_in("a", overlapped=overlapped) == 10 == blocks.num_tokens("a")
    assert blocks.stats()["host_blocks_used"] == 3, "not overwritten before it is read"
    copies, overlapped_copies, _ = blocks.take_changes()
    cache.copy([*copies, *overlapped_copies])
    cache.read(blocks.tables("a"), names, 0)
    blocks.finish_copies()
    assert blocks.stats()["host_blocks_used"] == 0
    blocks.check()


def test_only_what_is_copied_is_held_until_the_copies_are_done() -> None:
    blocks = make(8, host=8, caching=True)
    hashes = compute(blocks, "a", range(8))
    blocks.take_prefix("b", hashes, 2)
    blocks.allocate("b", 12, 8)
    blocks.swap_out("a", 8, overlapped=True)
    blocks.finish_copies()
    blocks.take_changes()
    blocks.swap_out("b", 12, overlapped=True)
    assert len(blocks.take_changes()[1]) == 1 and blocks.num_used_blocks == 1
    blocks.check()


def test_a_sequence_comes_back_to_what_is_still_cached() -> None:
    blocks = make(8, host=8, caching=True)
    compute(blocks, "a", range(10))
    blocks.swap_out("a", 10, overlapped=False)
    blocks.take_changes()
    blocks.swap_in("a", overlapped=False)
    assert blocks.take_changes()[0] == [CacheCopy("in", 0, 2, blocks.table("a")[2])]
    assert blocks.table("a")[:2] == [0, 1]


def test_planned_tokens_stay_behind() -> None:
    blocks = make(8, host=8)
    blocks.allocate("a", 5, 0)
    blocks.allocate("a", 20, 5)
    blocks.swap_out("a", 5, overlapped=False)
    assert len(blocks.take_changes()[0]) == 2
    assert blocks.swap_in("a", overlapped=False) == 5 and len(blocks.table("a")) == 2


def test_copies_beside_can_be_made_first() -> None:
    blocks = make(2, host=2)
    blocks.allocate("a", 8, 0)
    blocks.swap_out("a", 8, overlapped=True)
    assert blocks.copies.overlapped and blocks.num_available_blocks == 0
    blocks.copy_before_step()
    assert not blocks.copies.overlapped and blocks.num_available_blocks == 2
    copies, overlapped, _ = blocks.take_changes()
    assert len(copies) == 2 and not overlapped


def test_freeing_while_copies_are_under_way_keeps_what_they_need() -> None:
    blocks = make(2, host=2)
    blocks.allocate("a", 8, 0)
    blocks.swap_out("a", 8, overlapped=True)
    blocks.take_changes()
    blocks.free("a")
    assert blocks.num_available_blocks == 0 and blocks.stats()["host_blocks_used"] == 2
    blocks.finish_copies()
    assert blocks.num_available_blocks == 2 and blocks.stats()["host_blocks_used"] == 0
    blocks.check()


def test_a_run_is_found_or_made() -> None:
    blocks = make(8)
    for name in "abcdefgh":
        blocks.allocate(name, 1, 0)
    for name in "aceg":
        blocks.free(name)
    assert blocks.allocate("x", 5, 0, in_one_run=False) == [[6, 4]]
    blocks.free("x")
    (run,) = blocks.allocate("run", 12, 0, in_one_run=True)
    assert run == list(range(run[0], run[0] + 3))
    copies, _, rewritten = blocks.take_changes()
    assert len(copies) == len(rewritten) == 1 and copies[0].source in run and copies[0].target not in run
    blocks.check()


def test_a_free_run_is_taken_without_moves() -> None:
    blocks = make(8)
    blocks.allocate("a", 1, 0)
    blocks.allocate("b", 4, 0)
    blocks.free("a")
    assert blocks.allocate("run", 12, 0, in_one_run=True) == [[2, 3, 4]]
    assert blocks.take_changes() == ([], [], set())


def test_nothing_moves_while_copies_may_be_under_way() -> None:
    blocks = make(8, host=4)
    for name in "abcdefgh":
        blocks.allocate(name, 1, 0)
    blocks.swap_out("b", 1, overlapped=True)
    for name in "aceg":
        blocks.free(name)
    assert blocks.defragment() == 0 and blocks.resize([4]) == [8]
    (scattered,) = blocks.allocate("x", 12, 0, in_one_run=True)
    assert max(scattered) - min(scattered) > 2
    assert blocks.resize([9]) == [9], "growing disturbs nobody"
    blocks.finish_copies()
    blocks.check()


def test_defragmenting_compacts_and_keeps_content() -> None:
    blocks = make(12, caching=True)
    cache, prefixes = SimulatedCache(blocks), Prefixes()
    names: dict[str, list[int]] = {}
    hashes = {}
    for i, name in enumerate("abcdef"):
        tokens = range(100 * i, 100 * i + 7)
        names[name] = prefixes.extended([], tokens, "")
        hashes[name] = compute(blocks, name, tokens)
        cache.write(blocks.tables(name), names[name], 0)
    for name in "ace":
        blocks.free(name)
    assert blocks.stats()["blocks_cached"] == 3
    moved = blocks.defragment()
    copies, _, rewritten = blocks.take_changes()
    cache.copy(copies)
    assert moved == len(copies) == blocks.stats()["blocks_moved"] > 0 and rewritten <= set("bdf")
    pool = blocks.pools[0]
    assert all(pool.is_free(block) for block in range(9, 12))
    for name in "bdf":
        cache.read(blocks.tables(name), names[name], 0)
    for name in "ace":
        assert blocks.find_prefix(hashes[name]).num_blocks == 1
        blocks.take_prefix(name, hashes[name], 1)
        cache.read(blocks.tables(name), names[name][:4], 0)
    assert blocks.defragment() == 0
    blocks.check()


def test_resizing_never_drops_a_live_block() -> None:
    blocks = make(10)
    cache, prefixes = SimulatedCache(blocks), Prefixes()
    for i in range(5):
        blocks.allocate(f"s{i}", 8, 0)
        cache.write(blocks.tables(f"s{i}"), prefixes.extended([], range(10 * i, 10 * i + 8), ""), 0)
    for i in (0, 2):
        blocks.free(f"s{i}")
    assert blocks.resize([1]) == [6]
    cache.copy(blocks.take_changes()[0])
    cache.give_back_dropped_blocks()
    for i in (1, 3, 4):
        cache.read(blocks.tables(f"s{i}"), prefixes.extended([], range(10 * i, 10 * i + 8), ""), 0)
    assert blocks.resize([16]) == [16] and blocks.capacity == 64
    assert blocks.allocate("new", 40, 0) == [list(range(6, 16))]
    blocks.check()


def test_moving_many_cached_blocks_takes_one_pass() -> None:
    """Quadratic work would be 36 million steps here."""
    count = 12_000
    blocks = make(count, 1, caching=True)
    compute(blocks, "a", list(range(count)))
    blocks.free("a")
    for block in range(count // 2):
        blocks.pools[0].take_these([block])
        blocks.pools[0].release(block)
    order = list(blocks.pools[0]._cached)
    assert blocks.defragment() == count // 2
    moves = {copy.source: copy.target for copy in blocks.take_changes()[0]}
    assert list(blocks.pools[0]._cached) == [moves.get(block, block) for block in order]
