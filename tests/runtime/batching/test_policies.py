from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import pytest

from torch_pagoda.runtime.batching import POLICIES, Batcher, Policy, make_policy
from torch_pagoda.runtime.batching.policies import ByPriority, FairByClient, LongestPrefixFirst, ShortestJobFirst
from torch_pagoda.runtime.blocks import BlockGroup, BlockManager
from torch_pagoda.runtime.requests.request import Request
from torch_pagoda.runtime.requests.sampling_params import SamplingParams


def make_batcher(policy: Policy, seqs: int = 1, num_blocks: int = 64, caching: bool = False) -> Batcher:
    manager = BlockManager([BlockGroup(num_blocks)], 4, enable_prefix_caching=caching)
    return Batcher(manager, seqs, 64, num_blocks * 4, policy=policy)


def make_request(name: str, prompt: int | list[int] = 3, max_tokens: int = 1, **options: object) -> Request:
    tokens = [1] * prompt if isinstance(prompt, int) else prompt
    return Request(name, tokens, SamplingParams(max_tokens=max_tokens), **options)  # type: ignore[arg-type]


def step(batcher: Batcher, now: float = 0.0) -> list[Request]:
    """Run a step; returns who ended in it."""
    ended = []
    for item in batcher.schedule(now).requests:
        batcher.advance(item.request, item.num_tokens)
        if item.is_last_chunk:
            item.request.output_token_ids.append(0)
            if item.request.num_output_tokens >= item.request.params.max_tokens:
                batcher.finish(item.request, "length")
                ended.append(item.request)
    return ended


def order(batcher: Batcher) -> list[str]:
    """In which order the requests of the queue end when they run one at a time."""
    ended: list[str] = []
    while batcher.has_unfinished():
        ended += [request.request_id for request in step(batcher)]
    return ended


def test_names() -> None:
    assert set(POLICIES) == {"fcfs", "priority", "sjf", "fair", "prefix"}
    with pytest.raises(ValueError, match="policy='lifo' is not known; use one of 'fcfs'"):
        make_policy("lifo")
    for build in (ByPriority, ShortestJobFirst, FairByClient):
        for bad in (0, -1.0, math.inf, math.nan):
            with pytest.raises(ValueError, match=r"is not a number in \(0, inf\); use a positive value"):
                build(bad)
    with pytest.raises(ValueError, match="lookahead=0"):
        LongestPrefixFirst(0)


def test_first_come_first_served() -> None:
    batcher = make_batcher(make_policy("fcfs"))
    for i, name in enumerate("cab"):
        batcher.add(make_request(name, priority=-i, prompt=9 - i), 10.0 - i)
    assert order(batcher) == ["c", "a", "b"]


def test_the_lowest_priority_number_comes_first_and_equals_in_order_of_arrival() -> None:
    batcher = make_batcher(make_policy("priority"))
    for name, priority in [("a", 1), ("b", 0), ("c", -2), ("d", 0), ("e", 1)]:
        batcher.add(make_request(name, priority=priority))
    assert order(batcher) == ["c", "b", "d", "a", "e"]


def test_the_shortest_job_comes_first() -> None:
    batcher = make_batcher(make_policy("sjf"))
    for name, prompt, max_tokens in [("a", 9, 1), ("b", 2, 2), ("c", 2, 9), ("d", 3, 1)]:
        batcher.add(make_request(name, prompt, max_tokens))
    assert order(batcher) == ["b", "d", "a", "c"]


def test_clients_take_turns() -> None:
    batcher = make_batcher(make_policy("fair"))
    for name in ("a1", "a2", "a3", "b1", "c1", "b2"):
        batcher.add(make_request(name, client=name[0]))
    assert order(batcher) == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_clients_get_equal_numbers_of_tokens_whatever_the_size_of_their_requests() -> None:
    batcher = make_batcher(make_policy("fair"), seqs=2)
    for i in range(300):
        batcher.add(make_request(f"s{i}", 3, 2, client="short"))
        if i < 60:
            batcher.add(make_request(f"l{i}", 20, 5, client="long"))
        if i < 100:
            batcher.add(make_request(f"m{i}", 13, 2, client="middle"))
    served = Counter(short=0, middle=0, long=0)
    largest = 25
    while sum(served.values()) < 3 * 1000:
        for request in step(batcher):
            served[request.client] += request.num_prompt_tokens + request.params.max_tokens
        # Start-time fair queueing: never further apart than the largest jobs of two clients, and what runs just now.
        assert max(served.values()) - min(served.values()) <= 3 * largest


def test_a_client_that_was_idle_has_saved_nothing_up() -> None:
    batcher = make_batcher(make_policy("fair"))
    for i in range(20):
        batcher.add(make_request(f"a{i}", client="a"))
    for _ in range(10):
        step(batcher)
    for i in range(10):
        batcher.add(make_request(f"b{i}", client="b"))
    ended = order(batcher)
    assert [name[0] for name in ended[:12]].count("b") in (5, 6, 7)


def test_the_longest_cached_prefix_comes_first() -> None:
    batcher = make_batcher(LongestPrefixFirst(), caching=True)
    stem = list(range(100, 116))
    batcher.add(make_request("warm", stem))
    order(batcher)
    for name, tokens in [("a", [1] * 9), ("b", [*stem[:8], 1]), ("c", [*stem, 1]), ("d", [2] * 9)]:
        batcher.add(make_request(name, tokens))
    assert order(batcher) == ["c", "b", "a", "d"]


def test_beyond_the_lookahead_nobody_is_compared() -> None:
    batcher = make_batcher(LongestPrefixFirst(2), caching=True)
    stem = list(range(100, 116))
    batcher.add(make_request("warm", stem))
    order(batcher)
    for name, tokens in [("a", [1] * 9), ("b", [2] * 9), ("c", [*stem, 1])]:
        batcher.add(make_request(name, tokens))
    assert order(batcher) == ["a", "c", "b"]


def starve(policy: Policy, victim: Request, rival: Callable[[int], Request], caching: bool = False) -> int:
    """A rival arrives before each step, and one request ends per step: how many end before the victim does."""
    batcher = make_batcher(policy, caching=caching)
    for i in range(3):
        batcher.add(rival(i), 0.0)
    if caching:
        step(batcher, 0.0)
    batcher.add(victim, 0.0)
    for i in range(3, 3000):
        batcher.add(rival(i), float(i))
        step(batcher, float(i))
        if victim.is_finished:
            return i
    raise AssertionError("it waits for ever")


def test_nobody_starves_behind_better_priorities() -> None:
    """Three priorities of ten seconds each: rivals that arrive in the first 30 seconds come before it."""
    waited = starve(ByPriority(10.0), make_request("v", priority=3), lambda i: make_request(f"r{i}", priority=0))
    assert 30 <= waited <= 37


def test_nobody_starves_behind_shorter_jobs() -> None:
    waited = starve(ShortestJobFirst(1.0), make_request("v", 23, 1), lambda i: make_request(f"r{i}", 3, 1))
    assert 20 <= waited <= 27


def test_nobody_starves_behind_ever_new_clients() -> None:
    """A client's second request stands behind the first ones of others, of which there may be any number."""
    policy = FairByClient(tokens_per_second=1.0)
    batcher_victim = make_request("v", 3, 1, client="r0")
    waited = starve(policy, batcher_victim, lambda i: make_request(f"r{i}", 39, 1, client=f"r{i}"))
    assert 20 <= waited <= 50


def test_nobody_starves_behind_a_client_with_many_requests() -> None:
    waited = starve(FairByClient(), make_request("v", client="v"), lambda i: make_request(f"r{i}", client="r"))
    assert waited <= 7


def test_nobody_starves_behind_cached_prefixes() -> None:
    stem = list(range(100, 116))
    waited = starve(
        LongestPrefixFirst(), make_request("v", [1] * 9), lambda i: make_request(f"r{i}", [*stem, 1]), caching=True
    )
    assert 16 <= waited <= 24


def test_first_come_first_served_lets_nobody_overtake() -> None:
    assert starve(make_policy("fcfs"), make_request("v"), lambda i: make_request(f"r{i}")) <= 7


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_preemption_takes_from_the_last_in_the_order(name: str) -> None:
    batcher = make_batcher(make_policy(name), seqs=4, num_blocks=8)
    for i in range(12):
        batcher.add(make_request(f"r{i}", 3 + i % 3, 14, priority=i % 3, client="abc"[i % 3]), 0.1 * i)
    preempted = 0
    for _ in range(1000):
        if not batcher.has_unfinished():
            break
        running = batcher.running
        schedule = batcher.schedule(2.0)
        preempted += len(schedule.preempted)
        if schedule.preempted:
            count = len(schedule.preempted)
            assert schedule.preempted == running[::-1][:count]
        for item in schedule.requests:
            batcher.advance(item.request, item.num_tokens)
            if item.is_last_chunk:
                item.request.output_token_ids.append(0)
                if item.request.num_output_tokens >= 14:
                    batcher.finish(item.request, "length")
        batcher.check()
    assert not batcher.has_unfinished() and preempted > 0


def test_what_is_known_of_clients_does_not_grow_for_ever() -> None:
    policy = FairByClient()
    batcher = make_batcher(policy)
    for i in range(2000):
        batcher.add(make_request(f"r{i}", client=f"c{i}"), float(i))
        step(batcher, float(i))
    assert len(policy._ends) < 300 and not policy._starts
