"""What a plan of drafts weighs, and what is learnt from a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from torch_pagoda.runtime.batching import Batcher
from torch_pagoda.runtime.requests.request import Request
from torch_pagoda.runtime.speculation import drafting as module
from torch_pagoda.runtime.speculation.drafting import Drafting
from torch_pagoda.runtime.speculation.token_worth import token_worths

from batcher_steps import make_batcher, make_request, run

SECONDS = {1: 1.0, 3: 1.5, 4: 2.0, 64: 8.0}
"""Of steps, by rows."""


class Scripted:
    """Drafts what is written down for a request."""

    name = "scripted"
    expected = 0.5

    def __init__(self, drafts: Mapping[str, Sequence[int]]) -> None:
        self.drafts = dict(drafts)

    def propose(self, request: Request, most: int) -> Sequence[int]:
        return self.drafts.get(request.request_id, ())[:most]

    def settled(self, request: Request, tokens: Sequence[int]) -> None:
        pass

    def finished(self, request: Request) -> None:
        pass


class Batched(Scripted):
    """Computes its drafts for all."""

    most = 1
    holds_blocks = False

    def propose_all(self, requests: Sequence[Request], most: int) -> None:
        pass

    def seconds_of(self, count: int, length: int) -> float:
        return 0.0

    def reset(self) -> None:
        pass


@pytest.fixture(autouse=True)
def drafting_takes_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = count()
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))


def make_drafting(drafter: Scripted) -> tuple[Batcher, Drafting, list[Any]]:
    """Three requests that decode, of which the first two end late; what the lengths are told."""
    batcher = make_batcher(seqs=3, budget=64, max_len=40)
    for name, most in {"long": 1000, "short": 30, "plain": 21}.items():
        request = make_request(name, max_tokens=most)
        request.arrival_time, request.first_token_time = 0.0, 1.0
        batcher.add(request)
    run(batcher, batcher.schedule())
    drafting = Drafting([drafter], batcher, most=7, vocab_size=1000)
    for rows, seconds in SECONDS.items():
        drafting.lengths.seconds.measure(rows, seconds, is_settled=True)
    batcher.planner.drafting = drafting
    told: list[Any] = []
    for name in ("note", "judge", "idle", "measure"):
        setattr(drafting.lengths, name, lambda *given, name=name: told.append((name, *given)))
    return batcher, drafting, told


def choose(drafting: Drafting, length: int) -> list[Any]:
    """Have each candidate's drafts verified; returns the list that the candidates are added to."""
    seen: list[Any] = []

    def chosen(rows: int, others: int, candidates: Sequence[Any], *given: Any) -> tuple[int, Sequence[Any]]:
        seen.append({each.request.request_id: each.worth for each in candidates})
        return length, candidates

    drafting.lengths.choose = chosen  # type: ignore[method-assign, assignment]
    return seen


def test_drafts_are_weighed_while_a_batch_drains() -> None:
    drafter = Scripted({"long": [5], "short": [5]})
    batcher, drafting, _ = make_drafting(drafter)
    seen = choose(drafting, 0)
    run(batcher, batcher.schedule())
    # Until they end, and no further than the longest sequence; a draft is right every other time.
    long, short, _ = token_worths([36, 29, 20], [1.5, 1.5, 1.0], drafting.lengths.seconds.growing(3))
    assert seen == [{"long": long, "short": short}] and long > 1.2
    drafter.drafts = {"plain": [5]}
    run(batcher, batcher.schedule())
    assert seen[1]["plain"] < 1.0, "the others decide"
    batcher.add(make_request("waiting"))
    run(batcher, batcher.schedule())
    assert seen[2] == {"plain": 1.0}


def test_requests_are_weighed_before_drafts_are_computed() -> None:
    batcher, drafting, _ = make_drafting(Batched({}))
    seen: list[Any] = []

    def to_compute(name: str, asking: Sequence[Any], *given: Any) -> tuple[int, Sequence[Request]]:
        seen.append([(each.request.request_id, each.worth) for each in asking])
        return 0, ()

    drafting.lengths.to_compute = to_compute  # type: ignore[method-assign]
    run(batcher, batcher.schedule())
    worths = token_worths([36, 29, 20], [1.5] * 3, drafting.lengths.seconds.growing(3))
    assert seen == [list(zip(("long", "short", "plain"), worths, strict=True))] and worths[0] > worths[2]


def test_a_step_is_judged_by_the_worth_of_its_tokens_and_what_it_took() -> None:
    batcher, drafting, told = make_drafting(Scripted({"long": [5], "short": [5]}))
    seen = choose(drafting, 1)
    items = batcher.schedule().requests
    drafting.learn(items, [2, 1, 1], 3.0)
    requests = [item.request for item in items]
    assert told == [
        ("note", requests[0], "scripted", 1, 1),
        ("note", requests[1], "scripted", 1, 0),
        ("judge", ["scripted"], 3 + seen[0]["long"], 3, 3.0 + 1.0, SECONDS[3]),
        ("measure", 3, 5, 3.0),
    ]


def test_a_step_in_which_nothing_was_found_costs_the_asking() -> None:
    batcher, drafting, told = make_drafting(Scripted({}))
    for _ in range(2):
        schedule = batcher.schedule()
        drafting.learn(schedule.requests, [1, 1, 1], 3.0)
        run(batcher, schedule)
    assert [given for given in told if given[0] == "idle"] == [("idle", {"scripted"}, 1.0, SECONDS[3])] * 2
    drafting.lengths._drafters["scripted"].rest = 10
    told.clear()
    drafting.learn(batcher.schedule().requests, [1, 1, 1], 3.0)
    assert told == [("measure", 3, 3, 3.0)]


def test_a_step_with_a_prompt_is_judged_with_the_next_one() -> None:
    batcher, drafting, told = make_drafting(Scripted({}))
    batcher.cancel("plain")
    batcher.add(make_request("prompt", prompt=10))
    for _ in range(2):
        schedule = batcher.schedule()
        drafting.learn(schedule.requests, [1] * 3, 5.0)
        run(batcher, schedule)
    assert told == [
        ("measure", 3, 12, 5.0),
        ("idle", {"scripted"}, 2.0, SECONDS[3]),
        ("measure", 3, 3, 5.0),
    ]


def test_a_step_that_preempts_or_mends_has_no_drafts() -> None:
    batcher, drafting, _ = make_drafting(Scripted({"long": [5]}))
    choose(drafting, 1)
    planner = batcher.planner
    plan = planner.plan()
    (long, short, _) = batcher.running

    def num_drafts() -> int:
        drafting.extend(plan)
        return sum([len(item.drafts) for item in plan.planned.values()])

    plan.preempted.append(short)
    assert not num_drafts()
    plan.preempted.clear()
    planner.suspects.add(short)
    assert not num_drafts()
    planner.suspects.clear()
    planner.in_flight = frozenset([short])
    assert not num_drafts()
    planner.in_flight = frozenset()
    assert num_drafts() == 1 and plan.planned[long.request_id].drafts == (5,)


def test_drafts_leave_a_block_for_the_next_step() -> None:
    batcher = make_batcher(seqs=1, budget=64, max_len=40)
    batcher.add(make_request("r", prompt=5, max_tokens=30))
    run(batcher, batcher.schedule())
    batcher.planner.drafting = drafting = Drafting([Scripted({"r": [1] * 7})], batcher, most=7, vocab_size=1000)
    choose(drafting, 7)
    (pool,) = batcher.block_manager.pools
    pool.take(pool.num_free - 1)
    (item,) = batcher.schedule().requests
    assert item.drafts == (1, 1) and pool.num_free == 1, "as far as the last block of the sequence reaches"
