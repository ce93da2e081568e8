from __future__ import annotations

from collections.abc import Callable

import pytest

from torch_pagoda.runtime.blocks import BlockGroup, BlockManager

from toy_blocks import compute, make


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda b: b.free("x"), "'x' holds no blocks"),
        (lambda b: b.table("x"), "'x' holds no blocks"),
        (lambda b: b.fork("x", "y", 1), "'x' holds no blocks"),
        (lambda b: b.remove_skipped_blocks("x", 1), "'x' holds no blocks"),
        (lambda b: b.restart("x"), "'x' holds no blocks"),
        (lambda b: b.swap_out("x", 1, overlapped=False), "'x' holds no blocks"),
        (lambda b: b.commit("x", [], 1), "'x' holds no blocks"),
        (lambda b: b.fork("a", "a", 1), "'a' already holds blocks"),
        (lambda b: b.fork("a", "s", 1), "'s' already holds blocks"),
        (lambda b: b.fork("a", "y", 0), "num_tokens=0"),
        (lambda b: b.fork("a", "y", 7), r"num_tokens=7 is not in 1\.\.6"),
        (lambda b: b.take_prefix("a", [b"x"], 1), "'a' already holds blocks"),
        (lambda b: b.take_prefix("y", [b"x"], 0), "num_blocks=0"),
        (lambda b: b.take_prefix("y", [b"x"], 2), "num_blocks=2"),
        (lambda b: b.allocate("s", 9, 8), "'s' is swapped out"),
        (lambda b: b.allocate("a", 0, 0), "num_tokens=0"),
        (lambda b: b.allocate("a", 6, 6), "writes nothing"),
        (lambda b: b.allocate("a", 6, -1), "start=-1"),
        (lambda b: BlockManager([], 4), "groups"),
        (lambda b: BlockManager([BlockGroup(4)], 0), "block_size=0"),
        (lambda b: BlockManager([BlockGroup(0)], 4), "below 1|not between"),
    ],
)
def test_misuse_is_refused_and_changes_nothing(call: Callable[[BlockManager], object], message: str) -> None:
    blocks = make(8, host=4, caching=True)
    blocks.allocate("a", 6, 0)
    blocks.allocate("s", 4, 0)
    blocks.swap_out("s", 4, overlapped=False)
    before = blocks.stats(), blocks.tables("a")
    with pytest.raises(ValueError, match=message):
        call(blocks)
    assert (blocks.stats(), blocks.tables("a")) == before
    blocks.check()


def test_stats() -> None:
    blocks = make(10, caching=True)
    assert blocks.stats()["internal_fragmentation"] == 0 and blocks.stats()["prefix_hit_rate"] == 0
    blocks.allocate("a", 6, 0)
    blocks.fork("a", "b", 6)
    blocks.allocate("c", 4, 0)
    blocks.fork("c", "d", 2)  # it sees half of a block that is full
    stats = blocks.stats()
    assert (stats["blocks_total"], stats["blocks_used"], stats["blocks_free"]) == (10, 3, 7)
    assert stats["utilization"] == pytest.approx(0.3)
    assert stats["internal_fragmentation"] == pytest.approx(2 / 12)
    blocks.count_prefix(30, 10)
    blocks.count_prefix(10, 0)
    assert blocks.stats()["prefix_hit_rate"] == pytest.approx(0.25)
    for name in "abcd":
        blocks.free(name)
    assert blocks.stats()["blocks_used_peak"] == 3


def test_leaks_are_named() -> None:
    blocks = make(host=4)
    for name in "cab":
        blocks.allocate(name, 1, 0)
    blocks.swap_out("c", 1, overlapped=False)
    assert blocks.leaks(["a"]) == ["b", "c"] and blocks.leaks("abcd") == []


def test_reset_frees_everything_whatever_was_broken() -> None:
    blocks = make(4, host=4, caching=True)
    hashes = compute(blocks, "a", range(8))
    blocks.allocate("b", 4, 0)
    blocks.swap_out("b", 4, overlapped=True)
    blocks.pools[0]._free.popitem()
    blocks.reset()
    assert blocks.num_available_blocks == 4 and "a" not in blocks and not blocks.is_swapped("b")
    assert blocks.find_prefix(hashes).num_blocks == 0 and blocks.take_changes() == ([], [], set())
    blocks.finish_copies()
    blocks.check()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda b: b.sequences["a"].tables[0].append(0), "has 3 blocks for 6 tokens"),
        (lambda b: b.sequences["a"].tables[0].__setitem__(1, 0), "twice"),
        (lambda b: b.sequences["a"].tables[0].__setitem__(1, 99), "contains block 99 of 8"),
        (lambda b: b.sequences["a"].tables[0].__setitem__(1, 5), "reference counts"),
        (lambda b: b.sequences["a"].tables[0].pop(), "has 1 blocks"),
        (lambda b: b.sequences["a"].num_null.__setitem__(0, 1), "left the window"),
        (lambda b: b.sequences.pop("a"), "reference counts"),
        (lambda b: b.sequences.update(s=b.sequences["a"]), "at once"),
        (lambda b: b.copies.in_flight.append((b.pools[0], 0)), "reference counts"),
        (lambda b: b.swap_space.tables("s")[0].__setitem__(0, 2), "reference counts"),
    ],
)
def test_check_notices_damage(damage: Callable[[BlockManager], object], message: str) -> None:
    blocks = make(8, host=4)
    blocks.allocate("a", 6, 0)
    blocks.allocate("s", 4, 0)
    blocks.swap_out("s", 4, overlapped=False)
    blocks.check()
    damage(blocks)
    with pytest.raises(RuntimeError, match=message):
        blocks.check()
