from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torch_pagoda.runtime.blocks import BlockPool
from torch_pagoda.runtime.blocks.moves import moves_for_run, moves_to_front

STATES = st.lists(st.sampled_from("ucf"), min_size=1, max_size=14)


def pool_of(states: list[str] | str) -> BlockPool:
    """One block for each letter: used, cached or free."""
    pool = BlockPool(len(states))
    pool.take(len(states))
    for block, state in enumerate(states):
        if state == "c":
            pool.commit(block, bytes([block]))
        if state != "u":
            pool.release(block)
    return pool


def states_of(pool: BlockPool) -> str:
    return "".join(
        "u" if pool.is_held(block) else "c" if pool.is_cached(block) else "f" for block in range(pool.num_blocks)
    )


def test_used_blocks_take_free_places_first_and_cached_ones_what_is_left() -> None:
    assert moves_to_front(pool_of("fucfuc"), 3) == {4: 0}
    assert moves_to_front(pool_of("fuffcu"), 4) == {5: 0, 4: 2}
    assert moves_to_front(pool_of("cufuu"), 3) == {3: 2, 4: 0}
    assert moves_to_front(pool_of("uuff"), 2) == {}


@given(STATES, st.integers(0, 14))
def test_behind_the_size_nothing_is_used_afterwards(states: list[str], size: int) -> None:
    pool = pool_of(states)
    used, cached = pool.num_used, pool.num_cached
    size = max(used, min(size, len(states)))
    moves = moves_to_front(pool, size)
    pool.move(moves)
    result = states_of(pool)
    assert "u" not in result[size:] and result.count("u") == used
    assert set(moves).isdisjoint(moves.values())
    if size >= used + cached:
        assert "c" not in result[size:] and result.count("c") == cached and pool.evictions == 0
    assert result.count("c") >= min(cached, size - used)


@given(STATES, st.integers(1, 14))
def test_a_run_is_made_with_the_fewest_moves_wherever_one_is_possible(states: list[str], count: int) -> None:
    pool = pool_of(states)
    available = pool.num_available
    moves = moves_for_run(pool, count)
    windows = [states[i : i + count].count("u") for i in range(len(states) - count + 1)]
    assert len(moves) == (min(windows) if available >= count else 0)
    spared = states.count("f")
    pool.move(moves)
    assert (pool.take_run(count) is not None) == (available >= count)
    if available >= count:
        assert pool.evictions <= max(0, count + len(moves) - spared) + min(count, states.count("c"))
