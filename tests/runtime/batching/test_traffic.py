"""Random traffic to its end under every policy and preemption: every token that is read is the reader's own."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import pytest

from torch_pagoda.runtime.batching import POLICIES, Batcher, make_policy, snapshots
from torch_pagoda.runtime.blocks import BlockGroup, BlockManager
from torch_pagoda.runtime.requests.request import Request
from torch_pagoda.runtime.requests.sampling_params import SamplingParams

from simulated_engine import TIMES, SimulatedEngine

BLOCK_SIZE = 4
SEQS, BUDGET, MAX_MODEL_LEN = 6, 24, 60
STEM = list(range(10, 22))

GROUPS = {
    "full": [BlockGroup(16, num_host_blocks=30)],
    "window": [BlockGroup(9, window=6, num_host_blocks=10)],
    "hybrid": [BlockGroup(24, num_host_blocks=9), BlockGroup(16, window=9, num_host_blocks=40)],
    "state": [BlockGroup(24, num_host_blocks=20), BlockGroup(5, is_state=True, num_host_blocks=3)],
    "snapshots": [BlockGroup(24, num_host_blocks=20), BlockGroup(14, is_state=True, num_host_blocks=3)],
}
ALL = list(itertools.product(sorted(GROUPS), sorted(POLICIES), ("recompute", "swap"), (False, True)))


def traffic(seed: int, count: int) -> list[Request]:
    rng = random.Random(seed)
    return [
        Request(
            f"r{i}",
            STEM[: rng.choice((0, 0, 5, 8, 12))] + [rng.randrange(3) for _ in range(rng.randrange(1, 30))],
            SamplingParams(max_tokens=rng.randrange(1, 25)),
            priority=rng.randrange(3),
            client=rng.choice("abc"),
            cache_salt=rng.choice(("", "", "", "pepper")),
            in_one_run=rng.random() < 0.2,
        )
        for i in range(count)
    ]


def serve(
    seed: int,
    groups: list[BlockGroup],
    policy: str,
    preemption: Any,
    *,
    caching: bool,
    count: int = 40,
    calm: bool = False,
) -> tuple[SimulatedEngine, list[Request], list[Any]]:
    """Serve random traffic with cancels, forks, defragmentation, resizing and failing steps in between.

    Args:
        seed: of all that is random.
        groups: of layers.
        policy: by name.
        preemption: as the batcher takes it.
        caching: of prefixes.
        count: requests.
        calm: nothing but the traffic.
    """
    rng = random.Random(seed + 1)
    manager = BlockManager(groups, BLOCK_SIZE, enable_prefix_caching=caching)
    batcher = Batcher(
        manager, SEQS, BUDGET, MAX_MODEL_LEN, policy=make_policy(policy), preemption=preemption, snapshot_interval=8
    )
    engine = SimulatedEngine(batcher)
    requests = traffic(seed, count)
    pending = iter(list(requests))
    left, trace = count, []
    while left or batcher.has_unfinished():
        for _ in range(rng.choice((0, 0, 1, 3))):
            request = next(pending, None)
            if request is not None:
                batcher.add(request, engine.now)
                left -= 1
        if not calm:
            disturb(engine, rng, requests)
        overlapped, fails = rng.choice(TIMES), not calm and rng.random() < 0.03
        schedule = engine.step(overlapped, fails=fails)
        engine.now += 0.1
        shares = [(item.request.request_id, item.start, item.num_tokens) for item in schedule.requests]
        preempted = [request.request_id for request in schedule.preempted]
        copies = (schedule.copies, schedule.overlapped_copies)
        trace.append((shares, preempted, schedule.new_blocks, schedule.tables, copies))
    manager.finish_copies()
    assert manager.num_used_blocks == manager.stats()["host_blocks_used"] == 0
    return engine, requests, trace


def disturb(engine: SimulatedEngine, rng: random.Random, requests: list[Request]) -> None:
    """Whatever else may happen between two steps."""
    batcher, manager = engine.batcher, engine.batcher.block_manager
    if rng.random() < 0.04 and batcher.running:
        batcher.cancel(rng.choice(batcher.running).request_id)
    if rng.random() < 0.03 and batcher.waiting:
        batcher.cancel(rng.choice(batcher.waiting).request_id)
    if rng.random() < 0.1:
        manager.defragment()
    if rng.random() < 0.05:
        sizes = [pool.num_blocks for pool in manager.pools]
        manager.resize([rng.randint(1, size) for size in sizes])
        assert manager.resize(sizes) == sizes
    if rng.random() < 0.02:
        engine.change_weights()
    if rng.random() < 0.02 and batcher.running:
        engine.restart(rng.choice(batcher.running))
    if rng.random() < 0.01:
        engine.requeue_all()
    if rng.random() < 0.15 and batcher.running:
        parent = rng.choice(batcher.running)
        computed = parent.num_computed_tokens
        if 1 <= computed < MAX_MODEL_LEN:
            child = Request(
                f"f{len(requests)}",
                [*parent.tokens(0, computed), 7],
                SamplingParams(max_tokens=rng.randrange(1, 9)),
                cache_salt=parent.cache_salt,
            )
            requests.append(child)
            engine.fork(parent, child)
    batcher.check()


@pytest.fixture(autouse=True)
def small_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are short here."""
    monkeypatch.setattr(snapshots, "WORTH", 8)


@pytest.mark.parametrize(("groups", "policy", "preemption", "caching"), ALL)
def test_every_sequence_reads_what_it_or_an_equal_one_wrote(
    groups: str, policy: str, preemption: str, caching: bool
) -> None:
    seed = ALL.index((groups, policy, preemption, caching))
    _, requests, _ = serve(seed, GROUPS[groups], policy, preemption, caching=caching)
    assert all(request.is_finished for request in requests)


def test_the_traffic_is_hard_enough() -> None:
    """Whatever can happen does, in each kind of group."""
    for name, groups in GROUPS.items():
        totals: Counter[str] = Counter()
        for seed in range(3):
            engine, _, _ = serve(seed, groups, "priority", "swap", caching=True)
            totals.update({key: value for key, value in engine.batcher.stats().items() if isinstance(value, int)})
        expected = {"preemptions", "swaps", "copies_on_write", "blocks_swapped_in", "blocks_moved"}
        if name != "state":  # it has fewer slots than sequences: no snapshot lives long
            expected |= {"prefix_hit_tokens", "evictions"}
        if groups[-1].is_state:
            expected.add("state_slots_evicted")
        assert all(totals[key] > 0 for key in expected), (name, totals)


@pytest.mark.parametrize(("groups", "policy"), itertools.product(sorted(GROUPS), sorted(POLICIES)))
def test_outputs_are_those_of_each_request_alone(groups: str, policy: str) -> None:
    """Whoever shares the cache, comes first or is preempted: tokens do not depend on it."""
    engine, requests, _ = serve(7, GROUPS[groups], policy, "swap", caching=True, calm=True)
    for request in requests:
        alone = Request("alone", request.prompt_token_ids, request.params)
        longest = min(alone.num_prompt_tokens + alone.params.max_tokens, MAX_MODEL_LEN)
        while alone.num_tokens < longest:
            alone.output_token_ids.append(engine.next_token(alone))
        assert request.output_token_ids == alone.output_token_ids
    if groups != "state":
        assert engine.batcher.stats()["prefix_hit_tokens"] > 0


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_equal_traffic_gives_equal_schedules(policy: str) -> None:
    first, second = (serve(3, GROUPS["hybrid"], policy, "swap", caching=True)[2] for _ in range(2))
    assert first == second


def test_limits_are_reached_exactly() -> None:
    """``SimulatedEngine`` asserts that they are never exceeded."""
    _, _, trace = serve(5, [BlockGroup(90)], "fcfs", "recompute", caching=False, calm=True)
    assert max(sum(share[2] for share in shares) for shares, *_ in trace) == BUDGET
    assert max(len(shares) for shares, *_ in trace) == SEQS


@pytest.mark.parametrize("caching", [False, True])
def test_swapping_computes_no_more_than_is_needed(caching: bool) -> None:
    """With room for all on the host, whatever was computed is never computed again."""
    engine, requests, _ = serve(11, GROUPS["full"], "fcfs", "swap", caching=caching, calm=True)
    needed = sum(request.num_tokens - 1 for request in requests)
    hits = sum(request.num_cached_tokens for request in requests)
    assert engine.batcher.num_swaps == engine.batcher.num_preemptions > 0
    assert engine.num_tokens == needed - hits and (hits > 0) == caching


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(25))
def test_long_traffic(seed: int) -> None:
    """More than 100,000 steps together."""
    steps = 0
    for i, (groups, policy, preemption, caching) in enumerate(ALL):
        seed_of_run = 1000 * (seed + 1) + i
        steps += len(serve(seed_of_run, GROUPS[groups], policy, preemption, caching=caching, count=60)[2])
    assert steps > 4000
