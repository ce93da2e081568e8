from __future__ import annotations

import pytest

from torch_pagoda.runtime.batching import PreemptionCost, ScheduledRequest
from torch_pagoda.runtime.requests.request import Request
from torch_pagoda.runtime.requests.sampling_params import SamplingParams


def step(*counts: int) -> list[ScheduledRequest]:
    request = Request("a", [1] * 1000, SamplingParams())
    return [ScheduledRequest(request, count, 0, False) for count in counts]


def test_the_cheaper_of_computing_and_copying_there_and_back() -> None:
    # 100 tokens: 0.1 s to compute, 2 · 100 · 1000 / 4e6 = 0.05 s to copy.
    assert PreemptionCost(1000, tokens_per_second=1e3, bytes_per_second=4e6).cheaper(100) == "swap"
    assert PreemptionCost(1000, tokens_per_second=1e3, bytes_per_second=1.9e6).cheaper(100) == "recompute"
    assert PreemptionCost(1000, tokens_per_second=1e3, bytes_per_second=2e6).cheaper(100) == "recompute", "a tie"


def test_steps_of_prompts_tell_how_fast_prompts_are() -> None:
    cost = PreemptionCost(1, tokens_per_second=1000.0)
    cost.measure_step(step(1, 1, 1), 1.0)  # decodes
    cost.measure_step(step(2, 2), 1.0)
    cost.measure_step(step(500), 0.0)
    assert cost.tokens_per_second == 1000.0
    cost.measure_step(step(400, 100), 0.25)
    assert cost.tokens_per_second == pytest.approx(1100.0)
    for _ in range(200):
        cost.measure_step(step(400, 100), 0.25)
    assert cost.tokens_per_second == pytest.approx(2000.0, rel=1e-3)


def test_copies_tell_how_fast_copies_are() -> None:
    cost = PreemptionCost(1)
    before = cost.bytes_per_second
    cost.measure_copies(0, 0.0)
    assert cost.bytes_per_second == before
    cost.measure_copies(3000, 1.5)
    assert cost.bytes_per_second == 2000.0
