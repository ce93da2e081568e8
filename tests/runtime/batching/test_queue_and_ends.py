from __future__ import annotations

import pytest

from torch_pagoda.runtime.batching import QueueFull
from torch_pagoda.runtime.requests.request import RequestStatus

from batcher_steps import finish_all, make_batcher, make_request, run, shares


def test_the_queue_has_a_limit():
    batcher = make_batcher(seqs=1, max_queue=2)
    for name in "ab":
        batcher.add(make_request(name))
    with pytest.raises(QueueFull, match="1 new requests, 2 waiting, max_queue=2"):
        batcher.add(make_request("c"))
    assert batcher.get("c") is None
    batcher.check_queue(0)
    with pytest.raises(QueueFull):
        batcher.check_queue(1)
    batcher.schedule()
    batcher.add(make_request("c"))
    assert (batcher.num_waiting, batcher.num_running) == (2, 1)
    with pytest.raises(ValueError, match="max_queue=0"):
        make_batcher(max_queue=0)


def test_preempted_requests_are_not_refused_but_count():
    batcher = make_batcher(num_blocks=4, block_size=2, budget=16, max_queue=1)
    batcher.add(make_request("a", prompt=2, max_tokens=6))
    batcher.add(make_request("b", prompt=2, max_tokens=6), was_promised=True)
    for _ in range(4):
        run(batcher, batcher.schedule())
    assert batcher.num_preemptions == 1
    assert batcher.num_waiting == 1
    with pytest.raises(QueueFull):
        batcher.add(make_request("c"))


def test_deadlines_in_the_queue_and_while_running():
    batcher = make_batcher(seqs=1)
    running, waiting, patient = (
        make_request(n, max_tokens=50, deadline=d) for n, d in zip("rwp", (5, 3, None), strict=True)
    )
    for request in (running, waiting, patient):
        batcher.add(request, 0.0)
    run(batcher, batcher.schedule(2.9))
    schedule = batcher.schedule(3.0)
    assert (schedule.expired, schedule.requests) == ([waiting], [])
    assert waiting.status is RequestStatus.WAITING, "whoever runs the steps ends it"
    batcher.finish(waiting, "timeout")
    run(batcher, batcher.schedule(3.0))
    assert batcher.schedule(7.0).expired == [running]
    batcher.finish(running, "timeout")
    assert shares(batcher.schedule(7.0)) == [("p", 0, 3, True)]
    batcher.check()


def test_a_deadline_that_was_met_says_nothing_later():
    batcher = make_batcher()
    batcher.add(make_request("a", max_tokens=1, deadline=9.0))
    finish_all(batcher)
    again = make_request("a")
    batcher.add(again)
    assert batcher.schedule(10.0).expired == []


def test_a_deadline_survives_an_interrupted_step():
    batcher = make_batcher()
    request = make_request("a", max_tokens=9, deadline=1.0)
    batcher.add(request)
    assert batcher.schedule(2.0).expired == [request]
    batcher.requeue_all()  # before anybody ended it
    assert batcher.schedule(2.0).expired == [request]


def test_deadlines_of_ended_requests_are_not_kept():
    batcher = make_batcher()
    for i in range(1000):
        batcher.add(make_request(str(i), max_tokens=1, deadline=1e9))
        run(batcher, batcher.schedule())
    assert len(batcher._queues._deadlines) < 200


@pytest.mark.parametrize("way", ["cancel", "finish"])
@pytest.mark.parametrize("moment", ["queued", "chunk", "decode", "planned", "preempted", "swapped", "paused", "fork"])
def test_all_blocks_come_back_whenever_a_request_ends(moment, way):
    preemption = "recompute" if moment == "preempted" else "swap"
    batcher = make_batcher(
        num_blocks=8, block_size=2, budget=4, max_len=16, caching=True, preemption=preemption, host=8
    )
    other, request = make_request("o", prompt=3, max_tokens=10), make_request("r", prompt=range(9), max_tokens=5)
    batcher.add(other)
    run(batcher, batcher.schedule())
    batcher.add(request)
    if moment != "queued":
        run(batcher, batcher.schedule())
        assert 0 < request.num_computed_tokens < 9
    if moment == "planned":
        batcher.schedule()
    if moment in ("decode", "paused", "fork"):
        while request.num_output_tokens < 1:
            run(batcher, batcher.schedule())
    if moment == "paused":
        del request.output_token_ids[-1]
        batcher.pause(request)
    if moment == "fork":
        batcher.fork(request, make_request("child", prompt=[*range(9), 1], max_tokens=2))
    if moment in ("preempted", "swapped"):
        while request.status is RequestStatus.RUNNING:
            run(batcher, batcher.schedule())
        assert batcher.block_manager.is_swapped("r") == (moment == "swapped")
    if way == "cancel":
        assert batcher.cancel("r") is request and request.finish_reason == "cancelled"
        assert batcher.cancel("r") is None
    else:
        batcher.finish(request, "error", "it broke")
        assert (request.finish_reason, request.error) == ("error", "it broke")
    batcher.check()
    assert batcher.get("r") is None and "r" not in batcher.block_manager
    finish_all(batcher)
    assert other.num_output_tokens == 10
    batcher.block_manager.finish_copies()
    stats = batcher.stats()
    assert (stats["blocks_used"], stats["host_blocks_used"]) == (0, 0)


def test_a_paused_request_gives_way_and_comes_back():
    batcher = make_batcher(num_blocks=4, block_size=4, max_len=16)
    paused, other = make_request("p", prompt=8), make_request("o", prompt=9, max_tokens=2)
    batcher.add(paused)
    batcher.schedule()
    batcher.advance(paused, 8)
    batcher.pause(paused)
    batcher.add(other)
    for _ in range(2):
        run(batcher, batcher.schedule())
        batcher.check()
    assert other.is_finished
    assert paused.num_computed_tokens == 0 and batcher.num_waiting == 1
    batcher.resume(paused)
    paused.output_token_ids.append(3)
    finish_all(batcher)
    assert paused.num_output_tokens == 4
