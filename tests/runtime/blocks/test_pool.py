from __future__ import annotations

from collections.abc import Callable

import pytest

from torch_pagoda.runtime.blocks import BlockPool, OutOfBlocks


def cached_pool(num_blocks: int, order: list[int]) -> BlockPool:
    """All blocks contain something; they were let go in that order."""
    pool = BlockPool(num_blocks)
    for block in pool.take(num_blocks):
        pool.commit(block, bytes([block]))
    for block in order:
        pool.release(block)
    return pool


def test_blocks_come_in_order_and_the_last_freed_comes_first() -> None:
    pool = BlockPool(6)
    assert pool.take(4) == [0, 1, 2, 3]
    pool.release(1)
    pool.release(3)
    assert pool.take(3) == [3, 1, 4]
    pool.check([1, 1, 1, 1, 1, 0])


def test_the_last_block_can_be_taken_and_no_more() -> None:
    pool = BlockPool(3)
    pool.take(3)
    with pytest.raises(OutOfBlocks, match="1 blocks are needed, 0 of 3 are available"):
        pool.take(1)
    pool.check([1, 1, 1])


def test_the_block_that_was_let_go_the_longest_ago_is_evicted() -> None:
    pool = cached_pool(4, [2, 0, 3, 1])
    assert (pool.num_free, pool.num_cached, pool.evictions) == (0, 4, 0)
    pool.retain(0)  # whoever is used again goes to the end
    pool.release(0)
    assert [pool.take(1)[0] for _ in range(4)] == [2, 3, 1, 0]
    assert pool.evictions == 4
    assert all(pool.lookup(bytes([block])) is None for block in range(4))


def test_free_blocks_are_taken_before_cached_ones() -> None:
    pool = BlockPool(3)
    for block in pool.take(3):
        if block != 1:
            pool.commit(block, bytes([block]))
        pool.release(block)
    assert (pool.num_free, pool.num_cached) == (1, 2)
    assert pool.take(1) == [1] and pool.evictions == 0
    assert pool.take(1) == [0] and pool.evictions == 1


def test_a_shared_block_stays_until_its_last_holder_lets_go() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.retain(block)
    pool.release(block)
    assert pool.is_held(block) and pool.refs(block) == 1
    pool.release(block)
    assert pool.is_free(block)
    with pytest.raises(ValueError, match="released twice"):
        pool.release(block)


def test_a_hash_leads_to_the_first_block_that_had_it() -> None:
    pool = BlockPool(3)
    a, b, c = pool.take(3)
    pool.commit(a, b"x")
    pool.commit(b, b"x")
    pool.commit(a, b"y")  # it has a name already
    assert pool.lookup(b"x") == a and pool.lookup(b"y") is None and pool.hash_of(b) is None
    pool.release(b)
    assert pool.is_free(b)
    pool.forget(a)
    assert pool.lookup(b"x") is None
    pool.release(a)
    assert pool.is_free(a)
    pool.forget(c)  # contains nothing: nothing happens
    pool.check([0, 0, 1])


def test_forgetting_everything_frees_what_is_cached_and_keeps_what_is_used() -> None:
    pool = cached_pool(3, [0, 1])
    pool.forget_all()
    assert (pool.num_used, pool.num_cached, pool.num_free) == (1, 0, 2)
    assert pool.lookup(b"\2") is None
    pool.release(2)
    assert pool.is_free(2)
    pool.check([0, 0, 0])


def test_runs() -> None:
    pool = BlockPool(8)
    pool.take(8)
    for block in (0, 2, 3, 5, 6, 7):
        pool.release(block)
    assert pool.take_run(4) is None
    assert pool.take_run(3) == [5, 6, 7]
    assert pool.take_run(2) == [2, 3]
    assert pool.take_run(1) == [0]
    pool.check([1] * 8)


def test_a_run_may_evict() -> None:
    pool = cached_pool(4, [3, 2])
    assert pool.take_run(2) == [2, 3] and pool.evictions == 2


def test_moves_keep_holders_content_and_the_order_of_eviction() -> None:
    pool = cached_pool(8, [6, 4, 7, 5])
    pool.retain(0)
    for block in (1, 2, 3):
        pool.forget(block)
        pool.release(block)
    pool.move({6: 1, 0: 2, 7: 3})
    assert pool.refs(2) == 2 and pool.refs(0) == 0 and pool.is_free(0)
    assert [pool.lookup(bytes([b])) for b in (6, 0, 7)] == [1, 2, 3]
    pool.check([0, 0, 2, 0, 0, 0, 0, 0])
    assert sorted(pool.take(3)) == [0, 6, 7] and pool.evictions == 0
    assert [pool.take(1)[0] for _ in range(4)] == [1, 4, 3, 5]


def test_a_move_onto_a_cached_block_evicts_it() -> None:
    pool = cached_pool(3, [0])
    pool.move({2: 0})
    assert pool.evictions == 1 and pool.lookup(b"\0") is None and pool.lookup(b"\2") == 0
    pool.check([1, 1, 0])


def test_a_pool_grows_and_shrinks_at_its_end() -> None:
    pool = cached_pool(4, [3, 2])
    pool.resize(6)
    assert pool.num_free == 2 and pool.take(1) == [4]
    with pytest.raises(ValueError, match=r"num_blocks=3 would drop used blocks \[4\]"):
        pool.resize(3)
    assert pool.num_blocks == 6
    pool.release(4)
    pool.resize(2)
    assert (pool.num_blocks, pool.num_used, pool.num_cached, pool.num_free) == (2, 2, 0, 0)
    assert pool.lookup(b"\2") is None
    pool.check([1, 1])
    pool.resize(3)
    assert pool.take(1) == [2]


def test_the_peak_counts_revived_blocks() -> None:
    pool = cached_pool(4, [0, 1, 2, 3])
    pool.reset()
    pool.peak_used = 0
    blocks = pool.take(2)
    for block in blocks:
        pool.commit(block, bytes([block]))
        pool.release(block)
    assert pool.peak_used == 2
    pool.take_run(3)
    assert pool.peak_used == 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda pool: pool.refs(4), "block=4 is not one of the pool's 4"),
        (lambda pool: pool.refs(-1), "block=-1"),
        (lambda pool: pool.retain(-1), "block=-1"),
        (lambda pool: pool.release(-1), "block=-1"),
        (lambda pool: pool.retain(3), "is free and has no content"),
        (lambda pool: pool.take_these([0]), "block=0 already has holders"),
        (lambda pool: pool.take_these([-1]), "block=-1"),
        (lambda pool: pool.move({3: 2}), "has no content to move"),
        (lambda pool: pool.move({-1: 2}), "block=-1"),
        (lambda pool: pool.move({0: 1}), "already has holders"),
        (lambda pool: pool.resize(0), "num_blocks=0"),
        (lambda pool: BlockPool(0), "num_blocks=0"),
    ],
)
def test_misuse_is_refused(call: Callable[[BlockPool], object], message: str) -> None:
    pool = BlockPool(4)
    pool.take(3)
    pool.release(2)
    with pytest.raises(ValueError, match=message):
        call(pool)
    pool.check([1, 1, 0, 0])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pool: pool._free.pop(5), "free and cached"),
        (lambda pool: pool._free.update({0: None}), "free and cached"),
        (lambda pool: pool._cached.update({5: None}), "free and cached"),
        (lambda pool: pool._refs.__setitem__(0, 2), r"reference counts differ.*\[0\]"),
        (lambda pool: pool._refs.pop(), "5 reference counts for 6 blocks"),
        (lambda pool: pool._block_of.update({b"a": 1}), "hashes and blocks do not match"),
        (lambda pool: pool._hash_of.pop(1), "hashes and blocks do not match"),
        (lambda pool: (pool._free.pop(5), pool._cached.update({5: None})), "a cached block has no hash"),
        (lambda pool: (pool._hash_of.update({5: b"f"}), pool._block_of.update({b"f": 5})), "a free one has"),
    ],
)
def test_check_notices_damage(damage: Callable[[BlockPool], object], message: str) -> None:
    pool = BlockPool(6)
    for block in pool.take(3):
        pool.commit(block, bytes([block]))
    pool.release(1)
    holders = [1, 0, 1, 0, 0, 0]
    pool.check(holders)
    damage(pool)
    with pytest.raises(RuntimeError, match=message):
        pool.check(holders)
