"""The real batcher and block manager, driven by a model that costs time but computes nothing.

The clock is the model's: each step takes what ``StepCost`` says of it. What the batcher and the block manager
themselves take is measured on the side and does not move that clock, so that a run with the same seed always makes
the same decisions.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator

from simulate_figures import Objective, Tally
from simulate_traces import SimulatedRequest, Workload, requests_of

from torch_pagoda.runtime.batching import Batcher, PreemptionCost, Schedule, make_policy
from torch_pagoda.runtime.blocks import BlockGroup, BlockManager

_TOKEN = 7  # whatever is sampled: prompts differ already, so nothing is shared by it
_PROGRESS = 100_000  # requests between two lines


@dataclasses.dataclass(frozen=True)
class StepCost:
    """What a step of the model takes, in seconds.

    The defaults are those of a bfloat16 model of Llama-3-8B's shape (16 GB of weights, 128 KiB of keys and values per
    token) on an accelerator that reads 2 TB/s, computes 250 Tflop/s in practice and is linked to its host at
    25 GB/s.

    Attributes:
        base: reading all weights: 16 GB at 2 TB/s.
        per_prefill_token: 16 Gflop at 250 Tflop/s.
        per_decode_sequence: sampling, and the part of the linear layers that reading weights does not hide.
        per_kv_token: reading keys and values of one token: 128 KiB at 2 TB/s.
        per_copied_block: of 16 tokens over the link: 2 MiB at 25 GB/s. Copies beside a step take time only as far as
            they last longer than it.
    """

    base: float = 8e-3
    per_prefill_token: float = 64e-6
    per_decode_sequence: float = 20e-6
    per_kv_token: float = 66e-9
    per_copied_block: float = 84e-6

    def seconds(self, schedule: Schedule) -> float:
        """How long the step takes, its copies included. A share of one token counts as decoding."""
        items = schedule.requests
        decodes = sum([item.num_tokens == 1 for item in items])
        read = sum([item.start for item in items]) + schedule.num_tokens
        model = (
            self.base
            + self.per_prefill_token * (schedule.num_tokens - decodes)
            + self.per_decode_sequence * decodes
            + self.per_kv_token * read
        )
        copies, beside = len(schedule.copies), len(schedule.overlapped_copies)
        return max(model, beside * self.per_copied_block) + copies * self.per_copied_block

    def preemption_cost(self, block_size: int) -> PreemptionCost:
        """What an engine would measure on such a machine; a token counts as one byte."""
        return PreemptionCost(
            bytes_per_token=1,
            tokens_per_second=1 / self.per_prefill_token,
            bytes_per_second=block_size / self.per_copied_block,
        )


@dataclasses.dataclass(frozen=True)
class EngineSizes:
    """How the engine is set up; the names are those of ``LLM`` where it has them.

    Attributes:
        num_blocks: on the device; 6,144 of 16 tokens are 12.9 GB of an 8B model's keys and values.
        block_size: tokens per block.
        max_num_seqs: most sequences that hold blocks at once.
        max_num_batched_tokens: most tokens in one step.
        num_host_blocks: that sequences can be swapped out to.
        enable_prefix_caching: as the block manager's.
    """

    num_blocks: int = 6144
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 1024
    num_host_blocks: int = 6144
    enable_prefix_caching: bool = True

    def batcher(self, policy: str, preemption: str, cost: StepCost, max_model_len: int) -> Batcher:
        """A new batcher with a new block manager."""
        group = BlockGroup(self.num_blocks, num_host_blocks=self.num_host_blocks)
        blocks = BlockManager([group], self.block_size, enable_prefix_caching=self.enable_prefix_caching)
        return Batcher(
            blocks,
            self.max_num_seqs,
            self.max_num_batched_tokens,
            max_model_len,
            policy=make_policy(policy),
            preemption=preemption,  # type: ignore[arg-type]
            cost=cost.preemption_cost(self.block_size),
        )


class Simulation:
    """Steps of one engine.

    Args:
        batcher: a new one.
        cost: of its steps.
        requests: in the order of arrival.
        num_requests: that are taken from them.
        population: so many are unfinished at any time: one arrives when another ends, whatever its time of arrival
            says. None: all arrive when they say.
        objective: what a request is promised.
        check_every: verify all invariants after so many steps; 0: never.
        clock: seconds, for what the scheduler takes: ``time.perf_counter``, or ``time.thread_time`` where others use
            the machine's cores too.
    """

    def __init__(
        self,
        batcher: Batcher,
        cost: StepCost,
        requests: Iterator[SimulatedRequest],
        num_requests: int,
        *,
        population: int | None = None,
        objective: Objective | None = None,
        check_every: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.batcher = batcher
        self.cost = cost
        self.population = population
        self.check_every = check_every
        self.now = 0.0
        self.num_steps = 0
        self.tally = Tally(batcher, objective or Objective())
        self._clock = clock
        self._requests = requests
        self._left = num_requests
        self._next: SimulatedRequest | None = None
        self._seconds_to_add = 0.0  # since the last step
        self._draw()

    def run(self, num_steps: int | None = None) -> Tally:
        """Go on until all requests have ended, or for so many steps."""
        last = None if num_steps is None else self.num_steps + num_steps
        while self.num_steps != last:
            self._arrive()
            if self.batcher.has_unfinished():
                self._step()
            elif self._next is not None:
                self.now = self._arrival_of(self._next)
            else:
                break
        return self.tally

    def _step(self) -> None:
        batcher, tally = self.batcher, self.tally
        began = self._clock()
        schedule = batcher.schedule(self.now)
        planned = self._clock() - began
        if schedule.expired:
            began = self._clock()
            for request in schedule.expired:
                batcher.finish(request, "timeout")
            # It is the next step that pays for it.
            self._seconds_to_add += planned + self._clock() - began
            for request in schedule.expired:
                assert isinstance(request, SimulatedRequest)
                tally.timed_out(request, self.now)
            return
        seconds = self.cost.seconds(schedule)
        tally.planned(schedule, self.now, seconds)
        self.now += seconds
        began = self._clock()
        for item in schedule.requests:
            batcher.advance(item.request, item.num_tokens)
        settled = self._clock() - began
        ended = self._sample(schedule)
        began = self._clock()
        for request in ended:
            batcher.finish(request, "stop")
        settled += self._clock() - began
        for request in ended:
            tally.finished(request, self.now)
            if tally.num_finished % _PROGRESS == 0:
                print(f"{tally.num_finished:,} requests, {batcher.num_waiting:,} wait", file=sys.stderr, flush=True)
        tally.step_took(planned, settled, self._seconds_to_add, len(schedule.requests))
        self._seconds_to_add = 0.0
        self.num_steps += 1
        if self.check_every and self.num_steps % self.check_every == 0:
            batcher.check()

    def _sample(self, schedule: Schedule) -> list[SimulatedRequest]:
        """Give a token to each whose last chunk was computed; returns who has got all."""
        ended = []
        tally = self.tally
        for item in schedule.requests:
            request = item.request
            assert isinstance(request, SimulatedRequest)
            end = item.start + item.num_tokens
            if item.start < request.most_computed:
                tally.recomputed_tokens += min(end, request.most_computed) - item.start
            if end > request.most_computed:
                request.most_computed = end
            if item.is_last_chunk:
                outputs = request.output_token_ids
                outputs.append(_TOKEN)
                if request.first_token_time is None:
                    tally.first_token(request, self.now)
                if len(outputs) >= request.num_outputs:
                    ended.append(request)
        return ended

    def _arrive(self) -> None:
        batcher = self.batcher
        while self._next is not None:
            request = self._next
            if self.population is None:
                if self._arrival_of(request) > self.now:
                    return
            else:
                if batcher.num_waiting + batcher.num_running >= self.population:
                    return
                request.arrival_time = self.now
            arrived = self._arrival_of(request)
            began = self._clock()
            batcher.add(request, arrived)
            self._seconds_to_add += self._clock() - began
            self.tally.arrived(request, arrived)
            self._draw()

    def _draw(self) -> None:
        self._next = next(self._requests) if self._left else None
        self._left -= 1

    @staticmethod
    def _arrival_of(request: SimulatedRequest) -> float:
        assert request.arrival_time is not None
        return request.arrival_time


def capacity(workload: Workload, sizes: EngineSizes, cost: StepCost) -> float:
    """Requests per second that such an engine ends when there are always others waiting, first come first served.

    Measured over the second half of a run, when the cache is warm and requests are at all stages.
    """
    count = max(500, 16 * sizes.max_num_seqs)
    workload = dataclasses.replace(workload, timeout=None)
    simulation = Simulation(
        sizes.batcher("fcfs", "auto", cost, workload.max_model_len),
        cost,
        requests_of(workload),
        10 * count,
        population=2 * sizes.max_num_seqs,
    )
    while simulation.tally.num_finished < count // 2:
        simulation.run(1)
    began, ended_before = simulation.now, simulation.tally.num_finished
    while simulation.tally.num_finished < count:
        simulation.run(1)
    return (simulation.tally.num_finished - ended_before) / (simulation.now - began)
