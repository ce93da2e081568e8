"""Steps of an engine: planned, prepared, computed, and settled before the next is planned."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ..batching import Schedule, ScheduledRequest
from ..blocks import CacheCopy
from ..cache.block_copier import BlockCopier
from ..profiling.profile import DETOKENIZE, SCHEDULE
from ..requests.request import Request
from ..sampling.sampler import Sampler
from .beam_submission import BeamSubmission
from .draft_settlement import settle_drafts, settle_states
from .state import EngineState
from .step_computer import StepComputer
from .step_output import SampleTask, StepOutput
from .submission import Completion, Submission

_STORE_SECONDS = 0.005
"""Longest wait for blocks from a store before it is planned again, where nothing else can run."""


_COPIES_WHEN_IDLE = 512
"""Most blocks that are copied for a store at once where no step runs beside."""


class StepRunner:
    """Runs the steps of an engine, each settled before the next is planned.

    Everything is called inside ``EngineCore.transaction``.

    Args:
        state: the engine's.
        sampler: chooses tokens.
        copier: copies blocks of the KV cache.

    Attributes:
        computer: packs, runs the model and samples.
    """

    def __init__(self, state: EngineState, sampler: Sampler, copier: BlockCopier) -> None:
        self.state = state
        self.copier = copier
        self.computer = StepComputer(state, sampler)
        self._pool_sizes = [pool.num_blocks for pool in state.batcher.block_manager.pools]

    @property
    def is_under_way(self) -> bool:
        """A step is launched and not settled."""
        return False

    def run_step(self, progressed: list[Submission]) -> None:
        """Run a step; ``progressed`` gets the submissions that progressed or ended."""
        started = time.perf_counter()
        schedule = self.plan(started, progressed)
        if schedule is not None:
            self.prepare(schedule, started)
            self.run(schedule.requests, started, progressed, schedule.overlapped_copies)

    def settle(self, progressed: list[Submission]) -> bool:
        """Settle the step that is under way, if there is one.

        Returns:
            False if it has failed on the device: everybody in it is to be computed anew.
        """
        return True

    def settle_if_idle(self) -> None:
        """Settle what is under way if everybody in it has ended."""

    def reset(self) -> None:
        """Forget what is under way, when the device has done it, whatever came of it."""
        self.copier.join()

    def close(self) -> None:
        """Let go of the program and the caches: nothing is left that a step would ask them for."""
        del self.computer, self.copier

    def stats(self) -> dict[str, int]:
        """Figures of steps that were launched before the one before them was settled."""
        return {}

    def plan(self, started: float, progressed: list[Submission]) -> Schedule | None:
        """Plan a step; None where there is nothing to run.

        ``progressed`` gets the submissions that end by their deadline.
        """
        state = self.state
        if not state.batcher.has_unfinished():
            return None
        self.copier.join()  # what was begun when there was nothing to run
        state.profiler.begin_step()
        schedule = state.batcher.schedule(started)
        while schedule.expired:
            self.settle(progressed)  # what was launched in time counts
            for request in schedule.expired:
                completion = state.completions.get(request.request_id)
                if completion is not None:  # else its search has ended with another beam
                    state.end_early(completion, "timeout")
                    progressed.append(completion.owner)
            if not state.batcher.has_unfinished():
                return None
            schedule = state.batcher.schedule(started)
        if not schedule.requests and state.traffic is not None and not self.is_under_way:
            state.traffic.wait(_STORE_SECONDS)
        return schedule if schedule.requests else None

    def store_when_idle(self) -> None:
        """Begin to copy blocks that are to be stored, if there is no step beside which they could be copied."""
        state = self.state
        if state.traffic is None or state.batcher.has_unfinished() or self.is_under_way:
            return
        self.copier.join()
        state.batcher.block_manager.finish_copies()
        state.traffic.take_arrived()
        state.traffic.plan_copies(_COPIES_WHEN_IDLE)
        copies, overlapped, _ = state.batcher.block_manager.take_changes()
        self.copier.start([*copies, *overlapped])

    def run(
        self,
        scheduled: list[ScheduledRequest],
        started: float,
        progressed: list[Submission],
        copies: Sequence[CacheCopy] = (),
        *,
        one_by_one: bool = False,
    ) -> None:
        """Compute and settle a step that is prepared; ``copies`` are made while it runs."""
        state = self.state
        state.profiler.mark(SCHEDULE)
        tasks = list(map(self.sample_task, scheduled))
        computing = time.perf_counter()
        try:
            self.copier.start(copies)
            compute = self.computer.compute_one_by_one if one_by_one else self.computer.compute
            outputs = compute(scheduled, tasks)
        finally:
            self.copier.join()
        state.cost.measure_copies(self.copier.copied_bytes, self.copier.seconds)
        if state.drafting is not None and not copies:
            given = [len(output.tokens[0]) if output.tokens else 0 for output in outputs]
            state.drafting.learn(scheduled, given, time.perf_counter() - computing)
        self.update(scheduled, outputs, progressed)
        self.end_step(scheduled, started)

    def end_step(self, scheduled: Sequence[ScheduledRequest], started: float) -> None:
        """Count a step that is settled."""
        state = self.state
        num_tokens = sum([item.num_tokens for item in scheduled])
        state.num_steps += 1
        state.num_computed_tokens += num_tokens
        state.step_sizes.count(num_tokens)
        state.profiler.mark(DETOKENIZE)
        state.total_seconds += time.perf_counter() - started
        decodes = sum(
            item.num_tokens
            for item in scheduled
            if item.num_tokens == 1 + item.num_draft_rows and item.start >= item.request.num_prompt_tokens
        )
        blocks = state.batcher.block_manager
        state.profiler.end_step(
            num_prefill_tokens=num_tokens - decodes,
            num_decode_tokens=decodes,
            num_running=state.batcher.num_running,
            num_waiting=state.batcher.num_waiting,
            blocks_used=blocks.num_used_blocks,
            blocks_cached=blocks.num_cached_blocks,
            blocks_free=blocks.num_blocks - blocks.num_used_blocks - blocks.num_cached_blocks,
            sampled=state.sampled,
        )

    def prepare(self, schedule: Schedule, now: float) -> None:
        """Bring rows, tables and blocks to where the step expects them."""
        state = self.state
        for request in schedule.preempted:
            state.runner.remove(request)
        for item in schedule.requests:
            if item.request.row is None:
                state.runner.add(item.request)
                if item.request.first_scheduled_time is None:
                    item.request.first_scheduled_time = now
                    state.num_prompt_tokens += item.request.num_prompt_tokens
                    state.num_cached_tokens += item.request.num_cached_tokens
        for request_id, tables in schedule.tables.items():
            state.runner.set_blocks(state.completions[request_id].request, tables)
        for request_id, blocks in schedule.new_blocks.items():
            state.runner.append_blocks(state.completions[request_id].request, blocks)
        self.copier.run(schedule.copies)
        sizes = [pool.num_blocks for pool in state.batcher.block_manager.pools]
        for group, (now_there, before) in enumerate(zip(sizes, self._pool_sizes, strict=True)):
            if now_there < before:
                self.copier.discard(group, now_there, before)
        self._pool_sizes = sizes

    def sample_task(self, item: ScheduledRequest) -> SampleTask:
        """What is made of the logits after a request's share of a step."""
        if not item.is_last_chunk:
            return SampleTask()
        state = self.state
        completion = state.completions[item.request.request_id]
        if isinstance(completion.owner, BeamSubmission):
            return SampleTask(num_candidates=completion.owner.search.num_candidates)
        if item.request.max_tokens == 0:
            return SampleTask()
        return SampleTask((item.request, *(follower.request for follower in state.followers(completion))))

    def update(
        self,
        scheduled: Sequence[ScheduledRequest],
        outputs: Sequence[StepOutput],
        progressed: list[Submission],
        *,
        was_launched: bool = False,
    ) -> None:
        """Give the submissions what a step computed; ``progressed`` gets those that progressed or ended.

        Args:
            was_launched: the batcher knows already that the step computes what it does.
        """
        state = self.state
        now = time.perf_counter()
        state.sampled = []
        if state.batcher.block_manager.has_state:
            settle_states(state.batcher.block_manager, scheduled, outputs)
        going_on: list[Completion] = []
        for item, output in zip(scheduled, outputs, strict=True):
            request = item.request
            completion = state.completions.get(request.request_id)
            if completion is None or completion.request is not request:
                continue  # another beam's error has ended its search, or it ended after the step was launched
            if output.error is not None:
                state.end_early(completion, "error", output.error)
                progressed.append(completion.owner)
                continue
            if output.is_spoilt:
                state.batcher.compute_anew(request)
                continue
            if item.num_draft_rows:
                going_on += settle_drafts(state, completion, item, output.tokens[0], now)
                progressed.append(completion.owner)
                self._tell_drafters(request, len(output.tokens[0]))
                continue
            if was_launched:
                state.batcher.settle(request, item.start + item.num_tokens, len(output.tokens))
            else:
                state.batcher.advance(request, item.num_tokens)
            if output.prompt_logits is not None and completion.prompt_logprobs is not None:
                # A prompt that is computed again may come with tokens of the output.
                rows = request.num_prompt_tokens - item.start
                completion.prompt_logprobs.add(output.prompt_logits[:rows], item.start)
            if item.is_last_chunk:
                going_on += self._take_output(completion, output, now)
                progressed.append(completion.owner)
                self._tell_drafters(request, 1)
        # Those without a row bring all of their tokens when they get one.
        requests = [completion.request for completion in going_on if completion.request.row is not None]
        state.runner.append_tokens(requests, [request.output_token_ids[-1] for request in requests])

    def _tell_drafters(self, request: Request, count: int) -> None:
        if self.state.drafting is not None and not request.is_finished:
            self.state.drafting.settled(request, count)

    def _take_output(self, completion: Completion, output: StepOutput, now: float) -> list[Completion]:
        """Give a completion what follows its last token; returns the completions that got a token and go on."""
        if isinstance(completion.owner, BeamSubmission):
            return completion.owner.take_candidates(self.state, completion, output.candidates, now)
        if completion.request.max_tokens == 0:
            self.state.end(completion, "length")
            return []
        return self.state.append_tokens(completion, output.tokens, now)
