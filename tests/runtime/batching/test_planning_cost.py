"""What planning costs, counted in operations, and a day's traffic through a small cache."""

from __future__ import annotations

import random
from typing import Any

import pytest

from torch_pagoda.runtime.batching import POLICIES, Batcher, make_policy
from torch_pagoda.runtime.blocks import BlockGroup, BlockManager
from torch_pagoda.runtime.requests.request import Request
from torch_pagoda.runtime.requests.sampling_params import SamplingParams

from batcher_steps import run

STEM = list(range(10, 22))


class CountedRequest(Request):
    """Counts how often anybody looks at a request of this kind."""

    touches = 0

    def __getattribute__(self, name: str) -> Any:
        CountedRequest.touches += 1
        return super().__getattribute__(name)


class CountedNumber(float):
    """Counts comparisons of ranks."""

    comparisons = 0

    def __lt__(self, other: float) -> bool:
        CountedNumber.comparisons += 1
        return float.__lt__(self, other)

    def __eq__(self, other: object) -> bool:
        CountedNumber.comparisons += 1
        return float.__eq__(self, other)  # type: ignore[arg-type]

    __hash__ = float.__hash__


def cost_of_planning(name: str, queue: int, *, caching: bool) -> tuple[float, float]:
    """Looks at requests and comparisons of ranks per scheduled sequence, over steps with many admissions."""
    policy = make_policy(name)
    rank = policy.rank

    def counted(request: Request, now: float) -> tuple[float, int]:
        return CountedNumber(rank(request, now)[0]), request.arrival

    policy.rank = counted  # type: ignore[method-assign]
    manager = BlockManager([BlockGroup(400)], 4, enable_prefix_caching=caching)
    batcher = Batcher(manager, 16, 64, 100, policy=policy)
    rng = random.Random(0)
    params = [SamplingParams(max_tokens=n) for n in (1, 2, 3)]
    for i in range(queue):
        tokens = STEM[: rng.choice((0, 4, 8))] + [rng.randrange(50) for _ in range(1 + i % 7)]
        request = CountedRequest(f"r{i}", tokens, params[i % 3], priority=i % 3, client=str(i % 5))
        batcher.add(request, 0.01 * i)
    scheduled = touches = comparisons = 0
    for _ in range(60):
        CountedRequest.touches = CountedNumber.comparisons = 0
        schedule = batcher.schedule(0.01 * queue)
        touches += CountedRequest.touches
        comparisons += CountedNumber.comparisons
        scheduled += len(schedule.requests)
        run(batcher, schedule)
    assert scheduled > 300
    return touches / scheduled, comparisons / scheduled


def check_costs(policy: str, queue: int, caching: bool) -> None:
    few, many = cost_of_planning(policy, 1200, caching=caching), cost_of_planning(policy, queue, caching=caching)
    assert few[0] > 0 and few[1] > 0
    assert many[0] < 1.5 * few[0] + 20, f"looks at requests: {few[0]}, {many[0]}"
    assert many[1] < 2.5 * few[1] + 50, f"comparisons of ranks: {few[1]}, {many[1]}"


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_planning_does_not_cost_more_with_a_long_queue(policy: str, caching: bool) -> None:
    """Only the depth of the heap, the logarithm of its length, may be seen."""
    check_costs(policy, 10_000, caching)


@pytest.mark.slow
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_planning_does_not_cost_more_with_a_hundred_thousand_waiting(policy: str, caching: bool) -> None:
    check_costs(policy, 100_000, caching)


def serve_many(seed: int, num_requests: int = 1000, num_blocks: int = 256) -> tuple[Batcher, list[Request], int, int]:
    """Random arrivals; returns batcher, requests, computed tokens and the greatest number of sequences in a step."""
    rng = random.Random(seed)
    batcher = Batcher(BlockManager([BlockGroup(num_blocks)], 16), 32, 128, 512)
    requests = [
        Request(
            f"r{i}",
            [1] * min(300, int(rng.lognormvariate(4, 1)) + 1),
            SamplingParams(max_tokens=rng.randint(1, 64)),
        )
        for i in range(num_requests)
    ]
    pending, computed, peak, arrived = iter(requests), 0, 0, 0
    while arrived < num_requests or batcher.has_unfinished():
        for _ in range(rng.choice((0, 0, 1, 3))):
            if request := next(pending, None):
                batcher.add(request)
                arrived += 1
        schedule = batcher.schedule()
        computed += schedule.num_tokens
        peak = max(peak, len(schedule.requests))
        assert schedule.num_tokens <= 128 and batcher.num_running <= 32
        run(batcher, schedule)
    batcher.check()
    return batcher, requests, computed, peak


def test_a_thousand_requests_finish() -> None:
    batcher, requests, computed, peak = serve_many(1)
    assert all(r.num_output_tokens == r.params.max_tokens for r in requests)
    assert batcher.block_manager.num_used_blocks == 0 and peak == 32
    needed = sum(r.num_tokens - 1 for r in requests)  # the last sampled token of a request is never computed
    assert computed >= needed and (computed == needed) == (batcher.num_preemptions == 0)


def test_scarce_blocks_cost_preemptions_but_not_progress() -> None:
    batcher, requests, computed, _ = serve_many(2, num_requests=300, num_blocks=40)
    assert all(r.num_output_tokens == r.params.max_tokens for r in requests)
    assert batcher.num_preemptions > 0
    assert computed < 1.2 * sum(r.num_tokens - 1 for r in requests), "recomputation got out of hand"
