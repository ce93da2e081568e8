"""A request's record says what its deltas said, and every gap between two tokens is counted once."""

from __future__ import annotations

import pytest

from torch_pagoda.serving.engine_process.wire import Delta, RequestTimes
from torch_pagoda.serving.monitoring import request_watch
from torch_pagoda.serving.monitoring.request_watch import RequestWatch


class Latencies:
    def __init__(self) -> None:
        self.seen: list[tuple[float, int]] = []

    def observe_inter_token_latency(self, seconds: float, count: int = 1) -> None:
        self.seen.append((pytest.approx(seconds), count))


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

        def monotonic(self) -> float:
            return self.now

        def time(self) -> float:
            return 1.7e9

    clock = Clock()
    monkeypatch.setattr(request_watch, "time", clock)
    return clock


def started(latencies: Latencies, prompts: list[int], n: int = 1) -> RequestWatch:
    watch = RequestWatch(latencies, request_id="r", endpoint="/v1/completions", model="tiny", key_name="k")
    watch.submitted(prompts, n=n, max_tokens=8, streamed=True, temperature=0.5, top_p=0.9)
    return watch


def test_a_streamed_request(clock):
    latencies = Latencies()
    watch = started(latencies, [7])
    clock.now = 101.0
    watch.saw([Delta("r", 0, 0, "a", [1])])
    clock.now = 101.5
    watch.saw([Delta("r", 0, 0, "b", [2])])
    clock.now = 102.5
    times = RequestTimes(0.1, 0.8, 1.6, 4, 0)
    watch.saw([Delta("r", 0, 0, "cd", [3, 4], finish_reason="stop", num_cached_tokens=5, times=times)])
    clock.now = 103.0
    record = watch.finish(status=200)
    assert latencies.seen == [(0.5, 1), (0.5, 2)]
    assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (7, 5, 4)
    assert (record.seconds, record.first_token_seconds, record.arrival) == (3.0, 1.0, 1.7e9)
    assert record.finish_reasons == ("stop",) and record.prompts[0].times == times
    assert (record.n, record.max_tokens, record.temperature, record.top_p) == (1, 8, 0.5, 0.9)
    assert (record.status, record.streamed, record.disconnected, record.key_name) == (200, True, False, "k")


def test_what_came_at_once_has_the_gaps_that_the_engine_saw(clock):
    latencies = Latencies()
    watch = started(latencies, [3], n=2)
    watch.saw([Delta("r", 0, 0, "a", [1] * 4, finish_reason="length")])
    assert latencies.seen == []
    watch.saw([Delta("r", 0, 1, "b", [1] * 6, finish_reason="length", times=RequestTimes(0, 0, 2.0, 10, 0))])
    assert latencies.seen == [(2.0 * 2 / 8, 8)]
    assert watch.finish(status=200).prompts[0].seconds_per_output_token == 0.5


def test_several_prompts_are_kept_apart(clock):
    watch = started(Latencies(), [3, 5], n=2)
    watch.saw([Delta("r", 1, 0, "", [1, 2]), Delta("r", 0, 1, "", [1])])
    watch.saw([Delta("r", 1, 0, "", [], finish_reason="stop", num_cached_tokens=4)])
    watch.saw([Delta("r", 1, 1, "", [7], finish_reason="length", times=RequestTimes(1, 2, 3, 3, 0))])
    first, second = watch.finish(status=499, disconnected=True).prompts
    assert (first.output_tokens, first.finish_reasons, first.times) == ((0, 1), (None, None), None)
    assert (second.output_tokens, second.finish_reasons) == ((2, 1), ("stop", "length"))
    assert second.cached_tokens == 4 and second.times == RequestTimes(1, 2, 3, 3, 0)


def test_a_request_that_was_refused(clock):
    watch = RequestWatch(Latencies(), request_id="r", endpoint="/v1/completions", model="nobody")
    clock.now += 0.25
    record = watch.finish(status=404, error_code="model_not_found")
    assert (record.prompts, record.output_tokens, record.first_token_seconds) == ((), 0, None)
    assert (record.seconds, record.error_code) == (0.25, "model_not_found")
