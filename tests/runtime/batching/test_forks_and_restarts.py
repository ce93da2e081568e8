from __future__ import annotations

import pytest

from torch_pagoda.runtime.blocks import NULL_BLOCK

from batcher_steps import finish_all, make_batcher, make_request, run, shares


def test_n_forks_share_the_prompt_and_copy_what_is_partly_filled():
    batcher = make_batcher(num_blocks=16)
    parent = make_request("p", prompt=range(10), max_tokens=6)
    batcher.add(parent)
    schedule = batcher.schedule()
    batcher.advance(parent, 10)
    children = [make_request(f"c{i}", prompt=range(10), max_tokens=6) for i in range(3)]
    for child in children:
        assert batcher.fork(parent, child)
    for i, request in enumerate((parent, *children)):
        request.output_token_ids.append(i)
    assert batcher.block_manager.num_used_blocks == 3
    schedule = batcher.schedule()
    batcher.check()
    assert shares(schedule) == [(r.request_id, 10, 1, True) for r in (parent, *children)]
    assert batcher.block_manager.num_used_blocks == 2 + 4
    assert {copy.source for copy in schedule.copies} == {2} and len(schedule.copies) == 3
    assert len({copy.target for copy in schedule.copies} | {2}) == 4
    assert batcher.stats()["copies_on_write"] == 3
    assert schedule.tables.keys() == {"p", "c0", "c1", "c2"}
    for name, tables in schedule.tables.items():
        assert tables == batcher.block_manager.tables(name) and tables[0][:2] == [0, 1]


def test_forks_beyond_the_seats_wait():
    batcher = make_batcher(seqs=2, max_queue=1)
    parent = make_request("p", prompt=9, max_tokens=6)
    batcher.add(parent)
    batcher.schedule()
    batcher.advance(parent, 9)
    children = [make_request(f"c{i}", prompt=10, max_tokens=2) for i in range(4)]
    assert [batcher.fork(parent, child) for child in children] == [True, False, False, False]
    parent.output_token_ids.append(1)
    assert batcher.num_waiting == 3, "forks are not refused"
    batcher.check()
    finish_all(batcher)
    assert all(child.num_output_tokens == 2 for child in children)


def test_what_cannot_be_forked_changes_nothing():
    batcher, other = make_batcher(), make_batcher()
    foreign, waiting = make_request("f"), make_request("w")
    other.add(foreign)
    run(other, other.schedule())
    batcher.add(waiting)
    for parent in (foreign, waiting):
        with pytest.raises(ValueError, match="cannot fork"):
            batcher.fork(parent, make_request("child", prompt=9))
        batcher.check()
    assert batcher.get("child") is None


def test_a_restart_after_the_window_has_passed_begins_with_new_blocks():
    batcher = make_batcher(num_blocks=5, block_size=4, window=9, max_len=60, budget=7)
    request = make_request("a", prompt=30, max_tokens=20)
    batcher.add(request)
    for _ in range(8):
        run(batcher, batcher.schedule())
    assert NULL_BLOCK in batcher.block_manager.table("a")
    batcher.restart(request)
    batcher.check()
    schedule = batcher.schedule()
    assert shares(schedule)[0][:2] == ("a", 0)
    assert NULL_BLOCK not in schedule.tables["a"][0]
    run(batcher, schedule)
    finish_all(batcher)
    assert request.num_output_tokens == 20


def test_a_restart_of_a_fork_takes_blocks_from_later_ones_if_need_be():
    batcher = make_batcher(num_blocks=6, max_len=24)
    parent, child = make_request("p", prompt=14, max_tokens=4), make_request("c", prompt=15, max_tokens=4)
    batcher.add(parent)
    batcher.schedule()
    batcher.advance(parent, 14)
    assert batcher.fork(parent, child)
    parent.output_token_ids.append(1)
    batcher.restart(parent)
    finish_all(batcher)
    assert parent.num_output_tokens == child.num_output_tokens == 4
    assert batcher.num_preemptions == 1
