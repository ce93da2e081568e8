"""The profiler: exact totals, percentiles over what is kept, and the trace."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_pagoda.runtime.profiling.profile import PHASES, Percentiles, Profile
from torch_pagoda.runtime.profiling.profiler import Profiler
from torch_pagoda.runtime.requests.outputs import RequestMetrics


class Clock:
    """Shows what the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def after(self, seconds: float) -> None:
        self.now += seconds


def run_step(
    profiler: Profiler,
    clock: Clock,
    phases: tuple[tuple[str, float], ...] = (("schedule", 0.25), ("model", 2.0)),
    rest: float = 0.5,
    *,
    prefill: int = 0,
    decode: int = 0,
    sampled: tuple[str, ...] = (),
) -> None:
    profiler.begin_step()
    for phase, seconds in phases:
        clock.after(seconds)
        profiler.mark(phase)
    clock.after(rest)
    profiler.end_step(
        num_prefill_tokens=prefill,
        num_decode_tokens=decode,
        num_running=2,
        num_waiting=1,
        blocks_used=5,
        blocks_cached=3,
        blocks_free=8,
        sampled=sampled,
    )


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_phases_and_kinds_of_steps_add_up(clock: Clock) -> None:
    profiler = Profiler(clock=clock)
    run_step(profiler, clock, prefill=100, sampled=("a",))
    clock.after(10.0)  # idle
    run_step(profiler, clock, prefill=50, decode=1, sampled=("a", "b"))
    run_step(profiler, clock, (("model", 1.0), ("sample", 0.5), ("model", 1.0)), 0.0, decode=2, sampled=("a", "b"))
    found = profiler.result()
    assert found.phases == {"schedule": 0.5, "model": 6.0, "sample": 0.5, "other": 1.0}
    assert list(found.phases) == [name for name in PHASES if name in found.phases]
    assert {kind: (t.num_steps, t.seconds) for kind, t in found.totals.items()} == {
        "prefill": (1, 2.75),
        "mixed": (1, 2.75),
        "decode": (1, 2.5),
    }
    assert (found.num_prefill_tokens, found.num_decode_tokens, found.num_generated_tokens) == (150, 3, 5)
    assert (found.num_steps, found.busy_seconds, found.wall_seconds) == (3, 8.0, 18.0)
    assert sum(found.phases.values()) == found.busy_seconds
    assert found.input_tokens_per_second == 150 / 8 and found.output_tokens_per_second == 5 / 8
    assert found.step_time["decode"] == Percentiles(1, 2.5, 2.5, 2.5, 2.5, 2.5)


def test_latencies_of_requests_and_gaps_between_tokens(clock: Clock) -> None:
    profiler = Profiler(clock=clock)
    for seconds, sampled in ((1.0, ("a",)), (2.0, ("a", "b")), (4.0, ("b",)), (8.0, ("a", "b"))):
        run_step(profiler, clock, (("model", seconds),), 0.0, decode=1, sampled=sampled)
    steps = profiler.result().steps
    assert [(step.end, step.sampled) for step in steps] == [
        (1, ("a",)),
        (3, ("a", "b")),
        (7, ("b",)),
        (15, ("a", "b")),
    ]
    gaps = [2.0, 12.0, 4.0, 8.0]
    itl = profiler.result().itl
    assert itl is not None and (itl.count, itl.max, itl.mean) == (4, 12.0, 6.5)
    assert (itl.p50, itl.p90, itl.p99) == tuple(np.percentile(gaps, (50, 90, 99)))
    profiler.end_request("a", RequestMetrics(0.0, 0.5, 1.0, 15.0, 3))
    profiler.end_request("b", RequestMetrics(1.0, 1.0, 3.0, 15.0, 3))
    profiler.end_request("c", RequestMetrics(1.0))  # cancelled in the queue
    found = profiler.result()
    assert found.num_requests == 3
    assert found.ttft is not None and (found.ttft.count, found.ttft.mean) == (2, 1.5)
    assert found.tpot is not None and (found.tpot.count, found.tpot.mean) == (2, (7.0 + 6.0) / 2)
    assert found.queue_time is not None and found.queue_time.max == 0.5


def test_a_sequence_id_that_is_used_again_makes_no_gap(clock: Clock) -> None:
    profiler = Profiler(clock=clock)
    run_step(profiler, clock, (("model", 1.0),), 0.0, decode=1, sampled=("a/0",))
    profiler.end_request("a", RequestMetrics(0.0, 0.0, 1.0, 1.0, 1), ["a/0"])
    clock.after(100.0)
    for _ in range(2):
        run_step(profiler, clock, (("model", 1.0),), 0.0, decode=1, sampled=("a/0",))
    profiler.end_request("a", RequestMetrics(101.0, 101.0, 102.0, 103.0, 2), ["a/0"])
    itl = profiler.result().itl
    assert itl is not None and (itl.count, itl.max) == (1, 1.0)


def test_rings_forget_and_counters_do_not(clock: Clock) -> None:
    profiler = Profiler(max_steps=3, max_requests=2, clock=clock)
    for i in range(10):
        run_step(profiler, clock, decode=1, sampled=("a",))
        profiler.end_request(str(i), RequestMetrics(float(i)))
        profiler.span("detokenize", clock.now - 0.5, clock.now)
    found = profiler.result()
    assert (len(found.steps), len(found.requests), len(found.spans)) == (3, 2, 3)
    assert (found.num_steps, found.num_requests, found.num_generated_tokens) == (10, 10, 10)
    assert found.busy_seconds == found.wall_seconds == 27.5
    assert [request.request_id for request in found.requests] == ["8", "9"]
    assert found.background == {"detokenize": 1.5}


def test_a_step_that_raises_is_forgotten(clock: Clock) -> None:
    profiler = Profiler(clock=clock)
    profiler.begin_step()
    clock.after(5.0)
    profiler.mark("model")
    run_step(profiler, clock, decode=1)
    found = profiler.result()
    assert (found.num_steps, found.busy_seconds) == (1, 2.75)
    # Nor does an end without a beginning count.
    profiler.end_step(num_prefill_tokens=1, num_decode_tokens=0)
    assert profiler.result().num_steps == 1


def test_a_result_does_not_change_afterwards_and_reset_forgets(clock: Clock) -> None:
    profiler = Profiler(clock=clock)
    run_step(profiler, clock, decode=1)
    first = profiler.result()
    run_step(profiler, clock, decode=1)
    assert (first.num_steps, first.phases["model"], len(first.steps)) == (1, 2.0, 1)
    profiler.reset()
    empty = profiler.result()
    assert empty.num_steps == empty.num_requests == empty.busy_seconds == empty.wall_seconds == 0
    assert empty.phases == {} and empty.itl is None and empty.output_tokens_per_second == 0.0
    assert json.dumps(empty.to_dict()) and empty.to_chrome_trace()["traceEvents"]


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="max_steps=0"):
        Profiler(max_steps=0)
    with pytest.raises(ValueError, match="max_requests=0"):
        Profiler(max_requests=0)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=50))
def test_percentiles_are_ordered_and_within_the_data(seconds: list[float]) -> None:
    found = Percentiles.of([None, *seconds])
    assert found is not None and found.count == len(seconds)
    assert min(seconds) <= found.p50 <= found.p90 <= found.p99 <= found.max == max(seconds)


def busy_profile(clock: Clock) -> Profile:
    profiler, t = Profiler(clock=clock), clock.now
    run_step(profiler, clock, prefill=10, sampled=("a",))
    run_step(profiler, clock, prefill=4, decode=1, sampled=("a", "b/0", "b/1"))
    profiler.span("detokenize", t + 1.0, t + 3.5)
    profiler.end_request("a", RequestMetrics(t, t + 0.25, t + 2.5, t + 5.25, 2))
    profiler.end_request("b", RequestMetrics(t + 1.0, t + 2.75, t + 5.25, t + 5.25, 2), ["b/0", "b/1"])
    profiler.end_request("c", RequestMetrics(t + 1.0, finished_time=t + 2.0))
    return profiler.result()


def within(inner: dict, outer: dict) -> bool:
    slack = 0.01  # microseconds, of rounding
    ends = inner["ts"] + inner["dur"], outer["ts"] + outer["dur"]
    return inner["ts"] >= outer["ts"] - slack and ends[0] <= ends[1] + slack


def test_the_trace_holds_steps_phases_counters_and_requests(clock: Clock, tmp_path: Path) -> None:
    clock.now = 100.0
    found = busy_profile(clock)
    found.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for event in events:
        assert {"ph", "name", "pid", "tid"} <= set(event), event
        assert event["ph"] == "M" or event["ts"] >= 0, event
    steps = [event for event in events if event.get("cat") == "step"]
    assert [event["name"] for event in steps] == ["prefill 10", "prefill 4 + decode 1"]
    assert [event["dur"] for event in steps] == [2.75e6, 2.75e6]
    phases = [event for event in events if event.get("cat") == "phase"]
    assert [event["name"] for event in phases] == ["schedule", "model", "other"] * 2
    assert all(sum(within(phase, step) for step in steps) == 1 for phase in phases)
    counters = [event for event in events if event["ph"] == "C"]
    assert [event["args"] for event in counters if event["name"] == "KV blocks"] == [
        {"used": 5, "cached": 3, "free": 8}
    ] * 2
    assert [event["args"] for event in counters if event["name"] == "requests"] == [{"running": 2, "waiting": 1}] * 2
    assert [event["name"] for event in events if event.get("cat") == "background"] == ["detokenize"]
    by_request: dict[str, list[dict]] = {}
    for event in events:
        if event.get("cat") == "request":
            by_request.setdefault(event["id"].split()[0], []).append(event)
    assert set(by_request) == {"a", "b", "c"}
    for parts in by_request.values():
        names = {kind: sorted(event["name"] for event in parts if event["ph"] == kind) for kind in "be"}
        assert names["b"] == names["e"]  # all that begins ends
    assert {event["name"] for event in by_request["a"]} == {"request a", "queue", "prefill", "decode", "token"}
    assert {event["name"] for event in by_request["c"]} == {"request c", "queue"}


def test_tokens_of_the_trace_belong_to_their_request(clock: Clock) -> None:
    events = busy_profile(clock).to_chrome_trace()["traceEvents"]
    tokens = [event["id"].split()[0] for event in events if event["ph"] == "n"]
    assert sorted(tokens) == ["a", "a", "b", "b"]


def test_figures_are_plain_data(clock: Clock) -> None:
    plain = json.loads(json.dumps(busy_profile(clock).to_dict()))
    assert plain["num_steps"] == 2 and plain["steps"]["mixed"]["step_time"]["p50"] == 2.75
    assert set(plain["ttft"]) == {"count", "mean", "p50", "p90", "p99", "max"}
    assert plain["background"] == {"detokenize": 2.5}
