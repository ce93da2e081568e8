from __future__ import annotations

import pytest

from torch_pagoda.runtime.batching import Batcher
from torch_pagoda.runtime.batching.planner import Planner
from torch_pagoda.runtime.blocks import BlockGroup, BlockManager
from torch_pagoda.runtime.requests.request import RequestStatus

from batcher_steps import make_batcher, make_request, next_token, run, shares


def test_a_lone_request_from_prompt_to_end():
    batcher = make_batcher()
    request = make_request("a", prompt=5, max_tokens=3)
    batcher.add(request)
    assert (request.arrival, batcher.num_waiting, batcher.num_running) == (0, 1, 0)
    schedule = batcher.schedule()
    assert shares(schedule) == [("a", 0, 5, True)]
    assert (schedule.tables, schedule.new_blocks, schedule.num_tokens) == ({"a": [[0, 1]]}, {}, 5)
    assert request.status is RequestStatus.RUNNING
    run(batcher, schedule)
    assert shares(batcher.schedule()) == [("a", 5, 1, True)]
    run(batcher, batcher.schedule())
    run(batcher, batcher.schedule())
    assert (request.finish_reason, request.num_output_tokens) == ("length", 3)
    assert not batcher.has_unfinished() and batcher.get("a") is None
    assert batcher.block_manager.num_available_blocks == 64
    empty = batcher.schedule()
    assert (empty.requests, empty.preempted, empty.new_blocks, empty.num_tokens) == ([], [], {}, 0)


def test_a_restarted_request_is_computed_again_in_its_own_blocks():
    batcher = make_batcher(budget=4)
    request, other = make_request("a", prompt=5, max_tokens=9), make_request("b", prompt=2, max_tokens=9)
    batcher.add(request)
    batcher.add(other)
    with pytest.raises(ValueError, match="'x' is waiting; restart only unfinished requests"):
        batcher.restart(make_request("x"))
    for _ in range(4):
        run(batcher, batcher.schedule())
    tokens, table = request.num_tokens, batcher.block_manager.table("a")
    batcher.restart(request)
    batcher.check()
    seen = []
    while not seen or not seen[-1][3]:
        schedule = batcher.schedule()
        seen += [share for share in shares(schedule) if share[0] == "a"]
        assert any(item.request is other for item in schedule.requests), "decodes go on"
        run(batcher, schedule)
    assert [share[1] for share in seen] == list(range(0, tokens, 3)) and sum(share[2] for share in seen) == tokens
    assert batcher.block_manager.table("a")[: len(table)] == table
    assert (request.num_tokens, request.num_preemptions) == (tokens + 1, 0)


def test_a_long_prompt_is_cut_into_chunks_and_only_the_last_samples():
    batcher = make_batcher(budget=4)
    batcher.add(make_request("a", prompt=10))
    seen = []
    for _ in range(4):
        schedule = batcher.schedule()
        seen += shares(schedule)
        run(batcher, schedule)
    assert seen == [("a", 0, 4, False), ("a", 4, 4, False), ("a", 8, 2, True), ("a", 10, 1, True)]


def test_decodes_come_before_chunks_and_share_the_budget():
    batcher = make_batcher(budget=8)
    batcher.add(make_request("a", prompt=3, max_tokens=9))
    run(batcher, batcher.schedule())
    batcher.add(make_request("long", prompt=20))
    batcher.add(make_request("late", prompt=2))
    schedule = batcher.schedule()
    assert shares(schedule) == [("a", 3, 1, True), ("long", 0, 7, False)]
    run(batcher, schedule)
    schedule = batcher.schedule()
    assert shares(schedule) == [("a", 4, 1, True), ("long", 7, 7, False)]
    run(batcher, schedule)
    schedule = batcher.schedule()
    assert shares(schedule) == [
        ("a", 5, 1, True),
        ("long", 14, 6, True),
        ("late", 0, 1, False),
    ]
    run(batcher, schedule)
    assert shares(batcher.schedule()) == [("a", 6, 1, True), ("long", 20, 1, True), ("late", 1, 1, True)]


def test_limits_are_reached_exactly():
    batcher = make_batcher(seqs=3, budget=7)
    for name in "abcd":
        batcher.add(make_request(name, prompt=3, max_tokens=5))
    schedule = batcher.schedule()
    assert shares(schedule) == [("a", 0, 3, True), ("b", 0, 3, True), ("c", 0, 1, False)]
    assert schedule.num_tokens == 7
    run(batcher, schedule)
    schedule = batcher.schedule()
    assert batcher.num_running == 3 and schedule.num_tokens == 4
    run(batcher, schedule)
    assert [s[0] for s in shares(batcher.schedule())] == ["a", "b", "c"]
    batcher.cancel("b")
    assert [s[0] for s in shares(batcher.schedule())] == ["a", "c", "d"]


def test_admission_waits_for_the_blocks_of_the_whole_prompt_and_a_token():
    batcher = make_batcher(num_blocks=4, block_size=4, budget=16)
    batcher.add(make_request("a", prompt=2, max_tokens=2))
    batcher.add(make_request("b", prompt=12))
    run(batcher, batcher.schedule())
    assert batcher.num_waiting == 1, "three blocks are free, but not the one for b's first token"
    batcher.add(make_request("c", prompt=1))
    run(batcher, batcher.schedule())
    assert [r.request_id for r in batcher.waiting] == ["b", "c"], "nobody overtakes b"


def test_admission_leaves_a_block_for_everyone_who_may_grow():
    for max_tokens, admitted in ((4, True), (5, False)):
        batcher = make_batcher(num_blocks=4, block_size=4)
        batcher.add(make_request("a", prompt=4, max_tokens=max_tokens))
        run(batcher, batcher.schedule())
        run(batcher, batcher.schedule())
        assert batcher.block_manager.num_available_blocks == 2
        batcher.add(make_request("b", prompt=7))
        assert ("b" in [s[0] for s in shares(batcher.schedule())]) == admitted


def test_requests_admitted_in_one_step_leave_each_other_a_block():
    for max_tokens, admitted in ((2, ["a", "b"]), (3, ["a"])):
        batcher = make_batcher(num_blocks=3, block_size=4)
        batcher.add(make_request("a", prompt=2, max_tokens=max_tokens))
        batcher.add(make_request("b", prompt=7))
        assert [s[0] for s in shares(batcher.schedule())] == admitted


def test_several_tokens_appended_at_once_are_computed_at_once():
    batcher = make_batcher(num_blocks=4, block_size=2, budget=4)
    a, b = make_request("a", prompt=2, max_tokens=9), make_request("b", prompt=2, max_tokens=2)
    for request in (a, b):
        batcher.add(request)
    run(batcher, batcher.schedule())
    a.output_token_ids += [7, 8]
    batcher.block_manager.allocate("someone", 2, 0)
    schedule = batcher.schedule()  # b decodes, and first takes the last block, which a needs more
    assert schedule.preempted == [b] and schedule.new_blocks.keys() == {"a"}
    assert shares(schedule) == [("a", 2, 3, True)] and schedule.num_tokens == 3


def test_requests_that_cannot_grow_fill_the_cache_to_the_last_block():
    batcher = make_batcher(num_blocks=8, block_size=4, seqs=4, max_len=8)
    for name in "abcd":
        batcher.add(make_request(name, prompt=7, max_tokens=50))
    batcher.schedule()
    assert batcher.num_running == 4 and batcher.block_manager.num_available_blocks == 0


def test_a_request_as_long_as_the_cache_is_admitted_alone():
    batcher = make_batcher(num_blocks=4, block_size=4, budget=5)
    request = make_request("a", prompt=16)
    batcher.add(request)
    while batcher.has_unfinished():
        run(batcher, batcher.schedule())
        batcher.check()
    assert (request.finish_reason, request.num_output_tokens) == ("length", 1)


def test_the_latest_request_is_preempted_and_recomputed():
    batcher = make_batcher(num_blocks=4, block_size=2, budget=16)
    a, b = make_request("a", prompt=2, max_tokens=6), make_request("b", prompt=2, max_tokens=6)
    batcher.add(a)
    batcher.add(b)
    for _ in range(3):
        run(batcher, batcher.schedule())
    assert (a.num_tokens, b.num_tokens, batcher.block_manager.num_available_blocks) == (5, 5, 0)
    outputs = list(b.output_token_ids)
    schedule = batcher.schedule()
    assert shares(schedule) == [("a", 4, 1, True)]
    assert schedule.preempted == [b] and "b" not in schedule.new_blocks and "b" not in schedule.tables
    assert (b.status, b.num_computed_tokens, b.num_preemptions) == (RequestStatus.WAITING, 0, 1)
    assert b.output_token_ids == outputs and "b" not in batcher.block_manager
    assert batcher.num_preemptions == batcher.stats()["preemptions"] == 1
    while a.status is RequestStatus.RUNNING:
        run(batcher, schedule)
        schedule = batcher.schedule()
    assert shares(schedule) == [("b", 0, 5, True)], "its output is recomputed like a prompt"
    assert len(schedule.tables["b"][0]) == 3
    while batcher.has_unfinished():
        run(batcher, batcher.schedule())
    assert b.output_token_ids[:3] == outputs and b.num_output_tokens == 6


def test_the_latest_request_waits_with_its_blocks_when_it_is_the_one_in_need():
    batcher = make_batcher(num_blocks=6, block_size=2, budget=16)
    a, b = make_request("a", prompt=1, max_tokens=3), make_request("b", prompt=6, max_tokens=4)
    batcher.add(a)
    batcher.add(b)
    run(batcher, batcher.schedule())
    run(batcher, batcher.schedule())
    assert (a.num_tokens, b.num_tokens, batcher.block_manager.num_available_blocks) == (3, 8, 1)
    batcher.block_manager.allocate("someone", 1, 0)
    b.output_token_ids.append(5)  # pretend that b is ahead by one, so that it is the one that needs a block
    b.num_computed_tokens += 1
    a.num_computed_tokens = 1  # and that a still fits in the blocks that it has
    a.output_token_ids.pop()
    schedule = batcher.schedule()
    assert shares(schedule) == [("a", 1, 1, True)] and not schedule.preempted
    assert b.status is RequestStatus.RUNNING
    batcher.finish(a, "stop")
    assert shares(batcher.schedule()) == [("b", 8, 1, True)]


def test_a_chunk_shrinks_to_the_free_blocks_before_anyone_is_preempted():
    batcher = make_batcher(num_blocks=8, block_size=2, budget=4, max_len=16)
    a, b = make_request("a", prompt=2, max_tokens=12), make_request("b", prompt=8)
    batcher.add(a)
    run(batcher, batcher.schedule())
    batcher.add(b)
    run(batcher, batcher.schedule())
    assert b.num_computed_tokens == 3
    batcher.block_manager.allocate("someone", 6, 0)
    schedule = batcher.schedule()
    assert shares(schedule) == [("a", 3, 1, True), ("b", 3, 3, False)]
    run(batcher, schedule)
    assert batcher.block_manager.num_available_blocks == 0
    schedule = batcher.schedule()  # a takes b's blocks
    assert shares(schedule) == [("a", 4, 1, True)] and schedule.preempted == [b]
    batcher.block_manager.free("someone")
    batcher.check()


def test_cancel_at_any_moment():
    batcher = make_batcher(budget=4)
    waiting, chunked = make_request("w"), make_request("c", prompt=10)
    batcher.add(chunked)
    batcher.add(waiting)
    run(batcher, batcher.schedule())
    assert batcher.cancel("w") is waiting and batcher.cancel("c") is chunked
    assert waiting.finish_reason == chunked.finish_reason == "cancelled"
    assert batcher.cancel("c") is None and batcher.cancel("never") is None
    assert batcher.block_manager.num_available_blocks == 64 and not batcher.has_unfinished()
    batcher.check()


def test_a_finished_id_can_be_used_again():
    batcher = make_batcher()
    first = make_request("a")
    batcher.add(first)
    batcher.finish(first, "error", "it broke")
    assert first.error == "it broke"
    second = make_request("a")
    batcher.add(second)
    batcher.finish(first, "stop")  # too late: neither first nor second changes
    assert first.finish_reason == "error" and batcher.get("a") is second


def test_misuse_is_refused():
    batcher = make_batcher(num_blocks=4, block_size=4, max_len=10)
    batcher.add(make_request("a"))
    with pytest.raises(ValueError, match="'a' is already in use"):
        batcher.add(make_request("a"))
    with pytest.raises(ValueError, match="above max_model_len=10"):
        batcher.add(make_request("long", prompt=11))
    with pytest.raises(ValueError, match="never added"):
        batcher.finish(make_request("x"), "stop")
    request = batcher.get("a")
    with pytest.raises(ValueError, match="is waiting"):
        batcher.advance(request, 1)
    batcher.schedule()
    for count in (0, 4):
        with pytest.raises(ValueError, match=f"num_tokens={count}"):
            batcher.advance(request, count)
    batcher.advance(request, 3)
    with pytest.raises(RuntimeError, match="append the sampled token"):
        batcher.schedule()
    batcher.finish(request, "stop")
    with pytest.raises(ValueError, match="finished"):
        batcher.add(request)
    blocks = BlockManager([BlockGroup(4)], 4)
    for bad in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(ValueError, match="=0 is not an integer >= 1"):
            Batcher(blocks, *bad)
    with pytest.raises(ValueError, match="max_model_len=17 is above the 16 tokens"):
        Batcher(blocks, 1, 1, 17)
    with pytest.raises(ValueError, match="empty"):
        make_request("e", prompt=0)


def test_blocks_held_by_somebody_else_are_reported_and_not_spun_upon():
    batcher = make_batcher(num_blocks=4, block_size=4)
    batcher.block_manager.allocate("foreign", 16, 0)
    batcher.add(make_request("a"))
    with pytest.raises(RuntimeError, match="0 of 4 blocks are free"):
        batcher.schedule()
    batcher.block_manager.free("foreign")
    assert shares(batcher.schedule()) == [("a", 0, 3, True)]


@pytest.mark.parametrize("method", ["_preempt", "_plan", "_admit"])
def test_requeue_all_repairs_an_interrupted_step(method, monkeypatch):
    """Ctrl-C lands anywhere inside schedule(); afterwards all is computed again, with the same result."""
    batcher = make_batcher(num_blocks=6, block_size=2, budget=8, max_len=12)
    requests = [make_request(name, prompt=2, max_tokens=6) for name in "abc"]
    for request in requests:
        batcher.add(request)
    original = getattr(Planner, method)
    calls = 0

    def interrupted(self, *args):
        nonlocal calls
        calls += 1
        if calls == 3:
            if method == "_plan":
                self.blocks.pools[0]._free.popitem()  # a block that is neither free nor in a table
            raise KeyboardInterrupt
        return original(self, *args)

    monkeypatch.setattr(Planner, method, interrupted)
    interrupts = 0
    while batcher.has_unfinished():
        try:
            schedule = batcher.schedule()
        except KeyboardInterrupt:
            interrupts += 1
            assert [r.request_id for r in batcher.requeue_all()] == sorted(
                r.request_id for r in requests if not r.is_finished
            )
            assert batcher.num_running == 0
        else:
            run(batcher, schedule)
        batcher.check()
    assert interrupts == (calls >= 3)
    for request in requests:
        alone = make_request(request.request_id, prompt=2, max_tokens=6)
        while alone.num_output_tokens < 6:
            alone.output_token_ids.append(next_token(alone))
        assert request.output_token_ids == alone.output_token_ids
