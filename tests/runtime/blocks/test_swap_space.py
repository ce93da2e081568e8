from __future__ import annotations

from torch_pagoda.runtime.blocks import NULL_BLOCK, BlockPool, CacheCopy, SwapSpace


def device_pool(num_blocks: int = 8) -> BlockPool:
    """Blocks 0 … contain b"0", b"1", …, and are used."""
    pool = BlockPool(num_blocks)
    for block in pool.take(num_blocks):
        pool.commit(block, str(block).encode())
    return pool


def let_go(held: list[tuple[BlockPool, int]]) -> None:
    for pool, block in held:
        pool.release(block)


def test_what_goes_out_is_copied_and_comes_back_as_it_was() -> None:
    space, device = SwapSpace([4]), device_pool()
    copies = space.store("a", [[5, 3]], [device], 7, is_stale=False)
    assert copies == [CacheCopy("out", 0, 5, 0), CacheCopy("out", 0, 3, 1)]
    assert "a" in space and space.num_tokens("a") == 7 and space.stats()["host_blocks_used"] == 2
    fresh = BlockPool(8)
    count, tables, copies, held = space.load("a", [fresh], may_share=True)
    assert (count, tables) == (7, [[0, 1]]) and "a" not in space
    assert copies == [CacheCopy("in", 0, 0, 0), CacheCopy("in", 0, 1, 1)]
    assert space.stats()["host_blocks_used"] == 2, "they are read until the copies are done"
    let_go(held)
    stats = space.stats()
    assert (stats["host_blocks_used"], stats["blocks_swapped_out"], stats["blocks_swapped_in"]) == (0, 2, 2)


def test_equal_blocks_are_stored_once() -> None:
    space, device = SwapSpace([4]), device_pool()
    space.store("a", [[0, 1]], [device], 8, is_stale=False)
    assert space.store("b", [[0, 1, 2]], [device], 12, is_stale=False) == [CacheCopy("out", 0, 2, 2)]
    assert space.stats()["host_blocks_used"] == 3
    let_go(space.forget("a"))
    assert space.stats()["host_blocks_used"] == 3
    let_go(space.forget("b"))
    assert space.stats()["host_blocks_used"] == 0


def test_what_left_the_host_is_still_known_there_until_it_is_overwritten() -> None:
    space, device = SwapSpace([3]), device_pool()
    space.store("a", [[0, 1]], [device], 8, is_stale=False)
    let_go(space.forget("a"))
    assert space.store("b", [[0, 1]], [device], 8, is_stale=False) == []
    let_go(space.forget("b"))
    assert len(space.store("c", [[5, 6, 7]], [device], 12, is_stale=False) or ()) == 3
    let_go(space.forget("c"))
    assert len(space.store("d", [[0, 1]], [device], 8, is_stale=False) or ()) == 2


def test_what_the_device_still_holds_is_not_copied_back() -> None:
    space, device = SwapSpace([4]), device_pool()
    space.store("a", [[0, 1, 2]], [device], 12, is_stale=False)
    for block in (0, 1, 2):
        device.release(block)
    device.take_these([2])  # evicted
    device.release(2)
    _, tables, copies, held = space.load("a", [device], may_share=True)
    assert tables == [[0, 1, 2]] and copies == [CacheCopy("in", 0, 2, 2)]
    let_go(held)
    space.store("b", [[3]], [device], 4, is_stale=False)
    device.release(2)
    _, tables, copies, _ = space.load("b", [device], may_share=False)
    assert tables == [[2]] and len(copies) == 1


def test_no_room_changes_nothing() -> None:
    space, device = SwapSpace([2, 1]), device_pool()
    pools = [device, device]
    assert space.store("a", [[0, 1], [2]], pools, 8, is_stale=False) is not None
    for tables in ([[3], [2]], [[0], [3]], [[0, 1, 3], [2]]):
        assert space.store("b", tables, pools, 8, is_stale=False) is None
        assert "b" not in space and space.stats()["host_blocks_used"] == 3
    assert space.store("b", [[1, 0], [2]], pools, 8, is_stale=False) == []


def test_cached_host_blocks_that_are_needed_themselves_make_no_room() -> None:
    space, device = SwapSpace([2]), device_pool()
    space.store("a", [[0, 1]], [device], 8, is_stale=False)
    let_go(space.forget("a"))
    assert space.store("b", [[0, 1, 2]], [device], 12, is_stale=False) is None
    assert space.store("b", [[0, 2]], [device], 8, is_stale=False) == [CacheCopy("out", 0, 2, 1)]


def test_without_host_blocks_nothing_goes_out() -> None:
    space, device = SwapSpace([0]), device_pool()
    assert space.store("a", [[0]], [device], 4, is_stale=False) is None
    assert space.stats()["host_blocks_total"] == 0


def test_what_left_the_window_takes_no_room() -> None:
    space, device = SwapSpace([1]), device_pool()
    assert space.store("a", [[NULL_BLOCK, NULL_BLOCK, 4]], [device], 12, is_stale=False) == [
        CacheCopy("out", 0, 4, 0)
    ]
    assert space.tables("a") == [[NULL_BLOCK, NULL_BLOCK, 0]]
    _, tables, copies, _ = space.load("a", [BlockPool(2)], may_share=True)
    assert tables == [[NULL_BLOCK, NULL_BLOCK, 0]] and len(copies) == 1


def test_staleness_is_remembered() -> None:
    space, device = SwapSpace([4]), device_pool()
    space.store("a", [[0]], [device], 4, is_stale=True)
    space.store("b", [[1]], [device], 4, is_stale=False)
    assert space.is_stale("a") and not space.is_stale("b")
    space.mark_stale()
    assert space.is_stale("b") and list(space) == ["a", "b"]
    space.reset()
    assert list(space) == [] and space.stats()["host_blocks_used"] == 0
