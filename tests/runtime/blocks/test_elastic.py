"""A pool that follows the load between two limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_pagoda.runtime.blocks import BlockGroup, BlockManager, OutOfBlocks
from torch_pagoda.runtime.blocks.elastic import ElasticPool


def test_it_grows_by_chunks_before_it_runs_out() -> None:
    pool = ElasticPool(4, 64)
    assert (pool.num_blocks, pool.num_available, pool.chunk) == (4, 64, 4)
    pool.take(4)
    assert pool.num_blocks == 4
    pool.take(1)
    assert (pool.num_blocks, pool.num_available) == (8, 59)
    pool.take(50)
    assert pool.num_blocks == 56 and pool.num_used == 55
    with pytest.raises(OutOfBlocks):
        pool.take(10)
    pool.take(9)
    assert (pool.num_blocks, pool.num_available) == (64, 0)


def test_it_shrinks_only_after_a_while_of_little_use() -> None:
    pool = ElasticPool(4, 64, patience=3)
    blocks = pool.take(40)
    for block in blocks[10:]:
        pool.release(block)
    sizes = []
    for _ in range(30):
        size = pool.size_for_load()
        if size < pool.num_blocks:
            pool.resize(size)
        sizes.append(pool.num_blocks)
    # A chunk every third step, down to one that is free beside the used ones.
    assert sizes[:7] == [40, 40, 36, 36, 36, 32, 32]
    assert sizes[-1] == 16
    pool.take(20)
    assert pool.size_for_load() == pool.num_blocks, "the count begins anew under load"


@pytest.mark.parametrize("limits", [(0, 4), (5, 4)])
def test_limits_that_make_no_sense_are_refused(limits: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"min_blocks={limits[0]} is not between 1 and max_blocks=4"):
        ElasticPool(*limits)


@given(st.lists(st.tuples(st.sampled_from("afs"), st.integers(1, 60)), max_size=60))
def test_no_live_block_is_ever_dropped(operations: list[tuple[str, int]]) -> None:
    manager = BlockManager([BlockGroup(32, min_blocks=2)], 4)
    (pool,) = manager.pools
    assert isinstance(pool, ElasticPool)
    pool.patience = 2
    live: list[str] = []
    for i, (what, size) in enumerate(operations):
        if what == "a":
            before = {name: manager.num_tokens(name) for name in live}
            try:
                manager.allocate(str(i), size, 0)
            except OutOfBlocks:
                assert pool.num_used + -(-size // 4) > 32
            else:
                live.append(str(i))
            assert before == {name: manager.num_tokens(name) for name in before}
        elif what == "f" and live:
            manager.free(live.pop(size % len(live)))
        else:
            for _ in range(3):
                manager.finish_copies()
                manager.fit_to_load()
        manager.check()
        assert 2 <= pool.num_blocks <= 32
        for name in live:
            assert all(0 <= block < pool.num_blocks for block in manager.table(name))
