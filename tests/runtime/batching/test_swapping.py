from __future__ import annotations

import pytest

from torch_pagoda.runtime.batching import PreemptionCost
from torch_pagoda.runtime.blocks import CacheCopy
from torch_pagoda.runtime.requests.request import RequestStatus

from batcher_steps import finish_all, make_batcher, make_request, run, shares


def test_preemption_by_swapping_computes_nothing_twice():
    batcher = make_batcher(num_blocks=4, block_size=2, budget=16, preemption="swap", host=8)
    a, b = make_request("a", prompt=2, max_tokens=6), make_request("b", prompt=2, max_tokens=6)
    batcher.add(a)
    batcher.add(b)
    for _ in range(3):
        run(batcher, batcher.schedule())
    schedule = batcher.schedule()
    assert schedule.preempted == [b] and (b.status, b.num_computed_tokens) == (RequestStatus.WAITING, 4)
    assert batcher.block_manager.is_swapped("b")
    assert [copy.where for copy in schedule.copies] == ["out", "out"], "a needs the blocks in this step"
    assert (batcher.num_preemptions, batcher.num_swaps) == (1, 1)
    run(batcher, schedule)
    rest = finish_all(batcher)
    assert 4 + 2 + 2 + 1 + rest == a.num_tokens + b.num_tokens - 2, "the last tokens are never computed"
    assert batcher.stats()["blocks_swapped_in"] == 2


def test_preemption_beside_a_step_that_runs_anyway():
    """Who cannot go on although others can waits one step for the blocks of whom it preempts."""
    batcher = make_batcher(num_blocks=8, block_size=2, preemption="swap", host=8)
    first, second, last = make_request("f", 1, 9), make_request("s", 2, 9), make_request("l", 2, 9)
    for request in (first, second, last):
        batcher.add(request)
    run(batcher, batcher.schedule())
    batcher.block_manager.allocate("someone", 10, 0)
    (held,) = batcher.block_manager.table("l")
    schedule = batcher.schedule()
    assert shares(schedule) == [("f", 1, 1, True)] and schedule.preempted == [last]
    assert schedule.copies == [] and schedule.overlapped_copies == [CacheCopy("out", 0, held, 0)]
    assert batcher.block_manager.num_available_blocks == 0, "it is still read"
    run(batcher, schedule)
    batcher.block_manager.free("someone")
    schedule = batcher.schedule()
    assert shares(schedule) == [("f", 2, 1, True), ("s", 2, 1, True)]
    assert [copy[:3] for copy in schedule.overlapped_copies] == [("in", 0, 0)], "it comes back beside this step"
    run(batcher, schedule)
    assert [s[0] for s in shares(batcher.schedule())] == ["f", "s", "l"]


def test_without_room_on_the_host_a_request_is_computed_again():
    batcher = make_batcher(num_blocks=4, block_size=2, budget=16, preemption="swap", host=1)
    for name in "ab":
        batcher.add(make_request(name, prompt=2, max_tokens=6))
    finish_all(batcher)
    assert batcher.num_preemptions > 0 and batcher.num_swaps == 0


@pytest.mark.parametrize(("bytes_per_second", "swaps"), [(1e9, True), (1.0, False)])
def test_the_cheaper_way_is_taken(bytes_per_second, swaps):
    cost = PreemptionCost(8, tokens_per_second=1000.0, bytes_per_second=bytes_per_second)
    batcher = make_batcher(num_blocks=4, block_size=2, budget=16, preemption="auto", host=9, cost=cost)
    for name in "ab":
        batcher.add(make_request(name, prompt=2, max_tokens=6))
    finish_all(batcher)
    assert batcher.num_preemptions > 0 and (batcher.num_swaps > 0) == swaps


def test_automatic_preemption_without_a_cost_computes_again():
    batcher = make_batcher(num_blocks=4, block_size=2, budget=16, preemption="auto", host=9)
    for name in "ab":
        batcher.add(make_request(name, prompt=2, max_tokens=6))
    finish_all(batcher)
    assert batcher.num_preemptions > 0 and batcher.num_swaps == 0
    with pytest.raises(ValueError, match="preemption='swpa'"):
        make_batcher(preemption="swpa")
