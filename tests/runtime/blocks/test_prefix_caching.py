from __future__ import annotations

from torch_pagoda.runtime.blocks import NULL_BLOCK, BlockGroup, BlockManager, CacheCopy

from toy_blocks import compute, hashes_of, make


def test_content_is_found_after_it_is_committed_also_when_its_sequence_is_gone() -> None:
    blocks = make(caching=True)
    hashes = hashes_of(range(13))
    blocks.allocate("a", 13, 0)
    assert blocks.find_prefix(hashes).num_blocks == 0
    blocks.commit("a", hashes, 7)
    assert blocks.find_prefix(hashes)[:2] == (1, [0])
    blocks.commit("a", hashes, 13)
    assert blocks.find_prefix(hashes)[:2] == (3, [0])
    blocks.free("a")
    assert blocks.find_prefix(hashes)[:2] == (3, [3])
    assert (blocks.stats()["blocks_cached"], blocks.stats()["blocks_free"]) == (3, 5)
    blocks.take_prefix("b", hashes, 3)
    assert (blocks.table("b"), blocks.num_tokens("b")) == ([0, 1, 2], 12)
    blocks.check()


def test_other_salts_and_other_beginnings_find_nothing() -> None:
    blocks = make(caching=True)
    compute(blocks, "a", range(12))
    assert blocks.find_prefix(hashes_of(range(12), salt="x")).num_blocks == 0
    assert blocks.find_prefix(hashes_of([9, *range(1, 12)])).num_blocks == 0
    assert blocks.find_prefix(hashes_of([*range(8), 9, 9, 9, 9])).num_blocks == 2


def test_without_prefix_caching_nothing_is_kept() -> None:
    blocks = make()
    hashes = compute(blocks, "a", range(8))
    assert blocks.find_prefix(hashes).num_blocks == 0
    blocks.free("a")
    assert blocks.stats()["blocks_cached"] == 0


def test_the_end_of_a_chain_is_evicted_before_its_beginning_and_the_older_chain_first() -> None:
    blocks = make(6, caching=True)
    old = compute(blocks, "a", range(12))
    new = compute(blocks, "b", range(50, 62))
    blocks.free("a")
    blocks.free("b")
    found = []
    for i in range(6):
        blocks.allocate(f"x{i}", 1, 0)
        found.append((blocks.find_prefix(old).num_blocks, blocks.find_prefix(new).num_blocks))
    assert found == [(2, 3), (1, 3), (0, 3), (0, 2), (0, 1), (0, 0)]
    assert blocks.stats()["evictions"] == 6


def test_what_is_rewritten_is_not_found_any_more() -> None:
    blocks = make(caching=True)
    hashes = compute(blocks, "a", range(12))
    blocks.allocate("a", 9, 5)
    assert blocks.find_prefix(hashes).num_blocks == 1
    blocks.check()


def test_who_shares_a_found_block_does_not_lose_it_when_another_rewrites() -> None:
    blocks = make(caching=True)
    hashes = compute(blocks, "a", range(8))
    blocks.take_prefix("b", hashes, 2)
    blocks.allocate("a", 8, 5)
    assert blocks.find_prefix(hashes).num_blocks == 2 and blocks.table("b") == [0, 1]
    assert blocks.take_changes()[0] == [CacheCopy("move", 0, 1, 2)]


def test_a_window_needs_only_the_blocks_that_it_sees() -> None:
    blocks = make(8, window=6, caching=True)
    hashes = compute(blocks, "a", range(20))
    blocks.remove_skipped_blocks("a", 20)  # sees 15 … 20
    assert blocks.table("a") == [NULL_BLOCK, NULL_BLOCK, NULL_BLOCK, 3, 4]
    blocks.allocate("x", 12, 0)  # takes the free blocks first
    for block in (0, 1, 2):
        if blocks.pools[0].is_cached(block):
            blocks.pools[0].take_these([block])
            blocks.pools[0].release(block)
    assert blocks.find_prefix(hashes).num_blocks == 5
    blocks.take_prefix("b", hashes, 5)
    assert blocks.table("b") == [NULL_BLOCK, NULL_BLOCK, NULL_BLOCK, 3, 4]
    assert blocks.find_prefix(hashes[:4]).num_blocks == 0, "tokens from 11 on are needed, their block is gone"
    blocks.check()


def test_every_group_must_have_its_part_of_a_prefix() -> None:
    blocks = BlockManager([BlockGroup(9), BlockGroup(9, window=6)], 4, enable_prefix_caching=True)
    hashes = compute(blocks, "a", range(20))
    windowed = blocks.pools[1]
    windowed.forget(4)
    assert blocks.find_prefix(hashes).num_blocks == 4
    windowed.forget(2)  # the token after four blocks sees tokens from 11 on
    assert blocks.find_prefix(hashes).num_blocks == 2
    blocks.pools[0].forget(1)
    assert blocks.find_prefix(hashes).num_blocks == 1


def test_after_new_weights_nothing_old_is_found_again() -> None:
    """Neither from running sequences, nor from their forks, nor from those that were swapped out."""
    blocks = make(24, host=8, caching=True)
    running, away = compute(blocks, "run", range(8)), compute(blocks, "away", range(50, 58))
    assert blocks.swap_out("away", 8, overlapped=False)
    blocks.forget_prefixes()
    blocks.fork("run", "fork", 8)
    blocks.swap_in("away", overlapped=False)
    blocks.finish_copies()
    for name, hashes in [("run", running), ("fork", running), ("away", away)]:
        blocks.commit(name, hashes, 8)
        assert blocks.swap_out(name, 8, overlapped=False)
        blocks.swap_in(name, overlapped=False)
        blocks.finish_copies()
        blocks.commit(name, hashes, 8)
        assert blocks.find_prefix(hashes).num_blocks == 0
    compute(blocks, "new", range(8))
    assert blocks.find_prefix(running).num_blocks == 2
    blocks.check()
