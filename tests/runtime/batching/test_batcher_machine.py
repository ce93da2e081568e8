"""Random traffic through the batcher: invariants after every operation, and every token read is its own."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from torch_pagoda.runtime.batching import POLICIES, Batcher, PreemptionCost, QueueFull, make_policy, snapshots
from torch_pagoda.runtime.blocks import BlockGroup, BlockManager
from torch_pagoda.runtime.requests.request import Request, RequestStatus
from torch_pagoda.runtime.requests.sampling_params import SamplingParams

from simulated_engine import TIMES, SimulatedEngine

BLOCK_SIZE = 4
MAX_MODEL_LEN = 60
PREEMPTIONS = ("recompute", "swap", "auto")
STEM = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]

GROUPS = {
    "full": [BlockGroup(16, num_host_blocks=20)],
    "tight": [BlockGroup(15, num_host_blocks=3)],
    "window": [BlockGroup(9, window=6, num_host_blocks=10)],
    "hybrid": [BlockGroup(20, num_host_blocks=9), BlockGroup(12, window=9, num_host_blocks=30)],
    "two windows": [BlockGroup(12, window=5, num_host_blocks=9), BlockGroup(14, window=14, num_host_blocks=30)],
    "state": [BlockGroup(18, num_host_blocks=12), BlockGroup(4, is_state=True, num_host_blocks=3)],
    "snapshots": [BlockGroup(18, num_host_blocks=12), BlockGroup(11, is_state=True, num_host_blocks=3)],
    "only state": [BlockGroup(3, is_state=True, num_host_blocks=2)],
}


INDEX = st.integers(0, 40)


def chosen(requests: list[Request], which: int) -> Request:
    return requests[which % len(requests)]


def make_engine(
    groups: list[BlockGroup], policy: str, preemption: str, *, caching: bool, max_queue: int | None = None
) -> SimulatedEngine:
    manager = BlockManager(groups, BLOCK_SIZE, enable_prefix_caching=caching)
    cost = PreemptionCost(1, tokens_per_second=10.0, bytes_per_second=20.0 * MAX_MODEL_LEN)
    return SimulatedEngine(
        Batcher(
            manager,
            max_num_seqs=5,
            max_num_batched_tokens=21,
            max_model_len=MAX_MODEL_LEN,
            policy=make_policy(policy),
            preemption=preemption,  # type: ignore[arg-type]
            cost=cost,
            max_queue=max_queue,
            snapshot_interval=8,
        )
    )


class BatcherMachine(RuleBasedStateMachine):
    """All operations of a batcher, with all that an engine does in between."""

    @initialize(
        groups=st.sampled_from(sorted(GROUPS)),
        policy=st.sampled_from(sorted(POLICIES)),
        preemption=st.sampled_from(PREEMPTIONS),
        caching=st.booleans(),
        max_queue=st.sampled_from([None, None, 3]),
        right=st.sampled_from([None, 0.0, 0.7, 1.0]),
        length=st.sampled_from([1, 3, 7]),
    )
    def start(
        self,
        groups: str,
        policy: str,
        preemption: str,
        caching: bool,
        max_queue: int | None,
        right: float | None,
        length: int,
    ) -> None:
        snapshots.WORTH = 8  # type: ignore[misc]  # prompts are short here
        self.engine = make_engine(GROUPS[groups], policy, preemption, caching=caching, max_queue=max_queue)
        self.batcher = self.engine.batcher
        if right is not None:  # drafts, so many of which are right
            self.engine.draft(right, length)
        self.requests: list[Request] = []

    def request(self, tokens: list[int], **options: object) -> Request:
        request = Request(f"r{len(self.requests)}", tokens, **options)  # type: ignore[arg-type]
        self.requests.append(request)
        return request

    @rule(
        stem=st.integers(0, len(STEM)),
        rest=st.lists(st.integers(0, 2), min_size=1, max_size=40),
        max_tokens=st.integers(1, 20),
        priority=st.integers(-1, 1),
        client=st.sampled_from("abc"),
        salt=st.sampled_from(["", "", "pepper"]),
        patience=st.sampled_from([None, None, None, 0.0, 3.0]),
        in_one_run=st.booleans(),
        scored=st.sampled_from([None, None, None, 1]),
    )
    def add(
        self,
        stem: int,
        rest: list[int],
        max_tokens: int,
        priority: int,
        client: str,
        salt: str,
        patience: float | None,
        in_one_run: bool,
        scored: int | None,
    ) -> None:
        request = self.request(
            STEM[:stem] + rest,
            params=SamplingParams(max_tokens=max_tokens, prompt_logprobs=scored),
            priority=priority,
            client=client,
            cache_salt=salt,
            deadline=None if patience is None else self.engine.now + patience,
            in_one_run=in_one_run,
        )
        try:
            self.batcher.add(request, self.engine.now)
        except QueueFull:
            assert self.batcher.max_queue is not None and self.batcher.num_waiting >= self.batcher.max_queue
            self.requests.pop()

    def let_someone_go_on(self) -> None:
        """Whoever pauses all that there is must resume one before the next step."""
        while self.paused() and all(r.is_paused for r in self.requests if not r.is_finished):
            self.engine.resume(self.paused()[0])

    def paused(self) -> list[Request]:
        return [r for r in self.requests if r.is_paused and not r.is_finished]

    @precondition(lambda self: self.batcher.has_unfinished())
    @rule(which=INDEX)
    def pause_when_it_samples(self, which: int) -> None:
        self.engine.pausing.add(chosen([r for r in self.requests if not r.is_finished], which))

    @precondition(lambda self: self.paused())
    @rule(which=INDEX)
    def resume(self, which: int) -> None:
        self.engine.resume(chosen(self.paused(), which))

    @rule(count=st.integers(1, 4), overlapped=st.sampled_from(TIMES))
    def step(self, count: int, overlapped: str) -> None:
        for _ in range(count):
            self.let_someone_go_on()
            self.engine.step(overlapped)
            self.engine.now += 0.5

    @rule(overlapped=st.sampled_from(TIMES))
    def failing_step(self, overlapped: str) -> None:
        self.let_someone_go_on()
        self.engine.step(overlapped, fails=True)

    @precondition(lambda self: self.batcher.running)
    @rule(which=INDEX, token=st.integers(0, 2), max_tokens=st.integers(1, 8), branches=st.booleans())
    def fork(self, which: int, token: int, max_tokens: int, branches: bool) -> None:
        parent = chosen(self.batcher.running, which)
        computed = parent.num_computed_tokens
        if not 1 <= computed < MAX_MODEL_LEN:
            return
        fork = self.engine.branch if branches else self.engine.fork
        child = self.request(
            [*parent.tokens(0, computed), token],
            params=SamplingParams(max_tokens=max_tokens),
            cache_salt=parent.cache_salt,
            priority=parent.priority,
        )
        assert fork(parent, child) == (child.status is RequestStatus.RUNNING)

    @precondition(lambda self: self.batcher.running)
    @rule(which=INDEX)
    def restart(self, which: int) -> None:
        request = chosen(self.batcher.running, which)
        if not request.is_paused:
            self.engine.restart(request)

    @precondition(lambda self: self.requests)
    @rule(which=INDEX)
    def cancel(self, which: int) -> None:
        request = chosen(self.requests, which)
        finished, reason = request.is_finished, request.finish_reason
        assert self.batcher.cancel(request.request_id) is (None if finished else request)
        assert request.finish_reason == (reason if finished else "cancelled")

    @precondition(lambda self: self.batcher.has_unfinished())
    @rule(which=INDEX)
    def finish(self, which: int) -> None:
        self.engine.finish(chosen([r for r in self.requests if not r.is_finished], which))

    @rule()
    def requeue_all(self) -> None:
        unfinished = [r for r in self.requests if not r.is_finished]
        self.engine.requeue_all()
        assert sorted(unfinished, key=lambda r: r.rank) == self.batcher.waiting
        assert not self.paused()

    @rule()
    def defragment(self) -> None:
        self.batcher.block_manager.defragment()

    @rule(data=st.data())
    def resize(self, data: st.DataObject) -> None:
        """A pool that was made smaller is given back its size: one sequence must always fit."""
        manager = self.batcher.block_manager
        sizes = [pool.num_blocks for pool in manager.pools]
        manager.resize([data.draw(st.integers(1, size)) for size in sizes])
        manager.check()
        assert manager.resize(sizes) == sizes

    @rule()
    def change_weights(self) -> None:
        self.engine.change_weights()

    @invariant()
    def is_sound(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.batcher.check()
        stats = self.batcher.stats()
        assert stats["blocks_used"] + stats["blocks_cached"] + stats["blocks_free"] == stats["blocks_total"]
        assert (stats["running"], stats["queue_length"]) == (self.batcher.num_running, self.batcher.num_waiting)
        for request in self.batcher.running:
            assert request.num_computed_tokens <= request.num_tokens <= MAX_MODEL_LEN

    def teardown(self) -> None:
        snapshots.WORTH = 64  # type: ignore[misc]
        if not hasattr(self, "engine"):
            return
        for request in self.requests:
            self.engine.resume(request)
        tokens = sum(r.num_tokens + r.params.max_tokens for r in self.requests)
        self.engine.run_to_the_end(limit=50 + tokens * (1 + len(self.requests)))
        manager = self.batcher.block_manager
        manager.finish_copies()
        assert manager.num_used_blocks == manager.stats()["host_blocks_used"] == 0
        assert not manager.leaks(())
        for request in self.requests:
            assert request.is_finished
            prompt, output = list(request.prompt_token_ids), request.output_token_ids
            for i, token in enumerate(output):
                assert token == self.engine.token_after([*prompt, *output[:i]]), "not what steps of one token give"
            if request.finish_reason == "length":
                full = request.num_output_tokens == request.params.max_tokens
                assert full or request.num_tokens == MAX_MODEL_LEN


TestBatcherMachine = BatcherMachine.TestCase
TestBatcherMachine.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.slow
class TestLongBatcherMachine(BatcherMachine.TestCase):  # type: ignore[name-defined, misc]
    """At least 100,000 steps."""

    settings = settings(
        max_examples=2500, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
    )
