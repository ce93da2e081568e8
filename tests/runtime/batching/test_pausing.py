"""Paused requests, and branches of one request."""

from __future__ import annotations

import pytest

from torch_pagoda.runtime.batching import Batcher, QueueFull
from torch_pagoda.runtime.blocks import BlockGroup, BlockManager
from torch_pagoda.runtime.requests.request import Request, RequestStatus
from torch_pagoda.runtime.requests.sampling_params import SamplingParams


def make_batcher(num_blocks: int = 8, max_num_seqs: int = 4, **options: object) -> Batcher:
    host = 8 if options.get("preemption") == "swap" else 0
    blocks = BlockManager([BlockGroup(num_blocks, num_host_blocks=host)], 4)
    return Batcher(blocks, max_num_seqs, 64, 4 * num_blocks, **options)  # type: ignore[arg-type]


def make_request(name: str, length: int) -> Request:
    return Request(name, list(range(length)), SamplingParams(temperature=0, max_tokens=8))


def run_step(batcher: Batcher) -> list[str]:
    """Runs a step; every request that has no token left to compute is paused."""
    schedule = batcher.schedule()
    for item in schedule.requests:
        batcher.advance(item.request, item.num_tokens)
        if item.is_last_chunk:
            batcher.pause(item.request)
    batcher.check()
    return [item.request.request_id for item in schedule.requests]


def go_on(batcher: Batcher, *requests: Request) -> None:
    for request in requests:
        request.output_token_ids.append(7)
        batcher.resume(request)
    batcher.check()


def test_a_paused_request_gets_no_tokens_and_keeps_its_blocks() -> None:
    batcher = make_batcher()
    a, b = make_request("a", 5), make_request("b", 6)
    for request in (a, b):
        batcher.add(request)
    assert run_step(batcher) == ["a", "b"]
    go_on(batcher, b)
    assert run_step(batcher) == ["b"]
    assert a.is_paused and a.status is RequestStatus.RUNNING and len(batcher.block_manager.table("a")) == 2
    go_on(batcher, a)
    assert run_step(batcher) == ["a"] and batcher.num_preemptions == 0


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_paused_request_gives_way_when_nobody_else_could_progress(preemption: str) -> None:
    batcher = make_batcher(num_blocks=4, preemption=preemption)
    a, b = make_request("a", 13), make_request("b", 13)
    batcher.add(a)
    assert run_step(batcher) == ["a"]
    batcher.add(b)
    assert run_step(batcher) == ["b"]
    assert a.status is RequestStatus.WAITING and a.is_paused and batcher.num_waiting == 1
    assert a.num_computed_tokens == (13 if preemption == "swap" else 0)
    assert batcher.stats()["queue_length"] == 1
    with pytest.raises(RuntimeError, match="none of 2 requests can progress"):
        batcher.schedule()  # all are paused: nothing is left to run
    batcher.check()
    assert b.status is RequestStatus.WAITING
    go_on(batcher, a, b)
    assert batcher.waiting == [a, b]
    assert run_step(batcher) == ["a"]
    assert run_step(batcher) == ["b"]
    batcher.finish(b, "stop")
    assert batcher.cancel("a") is a and not a.is_paused
    batcher.check()
    batcher.block_manager.finish_copies()
    assert not batcher.has_unfinished() and batcher.block_manager.num_used_blocks == 0


def test_a_paused_request_gives_its_seat_away() -> None:
    batcher = make_batcher(max_num_seqs=1)
    a, b = make_request("a", 3), make_request("b", 3)
    batcher.add(a)
    assert run_step(batcher) == ["a"]
    batcher.add(b)
    assert run_step(batcher) == ["b"]


def test_the_last_in_the_order_takes_the_blocks_of_one_that_is_paused() -> None:
    batcher = make_batcher(num_blocks=5)
    a, b = make_request("a", 7), make_request("b", 7)
    for request in (a, b):
        batcher.add(request)
    assert run_step(batcher) == ["a", "b"]
    while b.num_tokens < 13:
        assert a.num_preemptions == 0
        go_on(batcher, b)
        assert run_step(batcher) == ["b"]
    assert a.num_preemptions == 1 and b.num_preemptions == 0


def test_requeueing_pauses_nobody() -> None:
    batcher = make_batcher(num_blocks=4)
    a, b = make_request("a", 13), make_request("b", 13)
    batcher.add(a)
    run_step(batcher)
    batcher.add(b)
    run_step(batcher)
    assert batcher.requeue_all() == [a, b]
    assert not a.is_paused and not b.is_paused
    batcher.check()


def test_a_branch_stands_behind_its_parent_whatever_waits() -> None:
    batcher = make_batcher(num_blocks=8, max_num_seqs=2)
    parent, other = make_request("parent", 6), make_request("other", 6)
    batcher.add(parent)
    run_step(batcher)
    batcher.add(other)
    child, late = (make_request(name, 6) for name in ("child", "late"))
    for request in (child, late):
        request.output_token_ids.append(9)
    assert batcher.branch(parent, child) and child.num_computed_tokens == 6
    assert not batcher.branch(parent, late) and late.status is RequestStatus.WAITING
    batcher.check()
    assert batcher.waiting == [late, other] and batcher.running == [parent, child]
    assert batcher.block_manager.table("child") == batcher.block_manager.table("parent")
    go_on(batcher, parent)
    assert run_step(batcher) == ["parent", "child"]
    assert batcher.block_manager.table("child") != batcher.block_manager.table("parent")


def test_a_parent_without_blocks_can_be_branched() -> None:
    batcher = make_batcher(num_blocks=4)
    parent, other = make_request("parent", 13), make_request("other", 13)
    batcher.add(parent)
    run_step(batcher)
    batcher.add(other)
    run_step(batcher)
    child = make_request("child", 13)
    child.output_token_ids.append(9)
    assert not batcher.branch(parent, child)
    assert batcher.waiting == [child]
    with pytest.raises(ValueError, match="cannot branch"):
        batcher.branch(make_request("stranger", 3), make_request("x", 4))
    with pytest.raises(ValueError, match="cannot pause"):
        batcher.pause(child)


def test_a_promised_request_is_taken_whatever_waits() -> None:
    batcher = make_batcher(max_queue=1)
    batcher.add(make_request("a", 3))
    with pytest.raises(QueueFull):
        batcher.add(make_request("b", 3))
    batcher.add(make_request("b", 3), was_promised=True)
    assert batcher.num_waiting == 2


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_one_that_lost_its_blocks_can_restart(preemption: str) -> None:
    batcher = make_batcher(num_blocks=4, preemption=preemption)
    a, b = make_request("a", 13), make_request("b", 13)
    batcher.add(a)
    run_step(batcher)
    batcher.add(b)
    run_step(batcher)
    batcher.finish(b, "stop")
    go_on(batcher, a)
    batcher.restart(a)
    batcher.check()
    schedule = batcher.schedule()
    assert [(item.start, item.num_tokens) for item in schedule.requests] == [(0, 14)]
