"""The loop under the engine: plan, run, sample, update; and the way back to a consistent state from anywhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import get_args

from ..batching import Batcher, PreemptionCost, Schedule, ScheduledRequest
from ..blocks import CacheCopy
from ..cache.block_copier import BlockCopier
from ..profiling.profile import DETOKENISE, SCHEDULE
from ..profiling.profiler import Profiler
from ..requests.request import FinishReason, Request, RequestStatus
from ..sampling.sampler import Sampler
from ..structured.state import GrammarError
from .device_errors import DeviceLost, lost_reason
from .look_ahead import LookAhead
from .model_runner import ModelRunner
from .pieces import NewPiece
from .step_computer import StepComputer
from .step_output import SampledToken, SampleTask, StepOutput
from .step_sizes import StepSizes
from .submission import Completion, Submission, undecodable
from .turns import Turns

logger = logging.getLogger(__name__)


class EngineCore:
    """Runs submissions step by step.

    Everything that changes the state does so inside ``with core.transaction``. An exception that leaves such a
    block, Ctrl-C included, leaves the state marked as inconsistent, and the next block begins by rebuilding it
    from the submissions alone: all blocks and rows are taken back and every unfinished request queues again
    with the tokens that it has settled. So no line in here needs to be atomic.

    Whoever calls a method, or enters ``transaction``, does so in a turn of ``turns``; only ``drop`` takes its own.

    Attributes:
        turns: of the threads that use the engine.
        submissions: by id; those of ``generate`` and ``stream`` until they end, others until their last
            output has been given to the caller.
        completions: the unfinished ones, by the id of their request.
        updated: submissions that progressed or ended since the caller was told.
        pieces: pieces that a call was to return which was interrupted; the next one does.
        transaction: the context manager for every change.
        look_ahead: runs steps one ahead of what is settled; None: each is settled before the next is planned.
        device_lost: what the device reported when it was lost; None while it computes.
    """

    def __init__(
        self,
        batcher: Batcher,
        runner: ModelRunner,
        sampler: Sampler,
        copier: BlockCopier,
        cost: PreemptionCost,
        before_step: Callable[[], object],
    ) -> None:
        self.turns = Turns()
        self.batcher = batcher
        self.runner = runner
        self.copier = copier
        self.cost = cost
        self.submissions: dict[str, Submission] = {}
        self.completions: dict[str, Completion] = {}
        self.updated: dict[str, Submission] = {}
        self.pieces: list[NewPiece] = []
        self.transaction = _Transaction(self)
        self.num_steps = 0
        self.num_computed_tokens = 0
        self.step_sizes = StepSizes()
        self.num_generated_tokens = 0
        self.num_failed = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_finished: dict[FinishReason, int] = dict.fromkeys(get_args(FinishReason), 0)
        self.profiler = Profiler()
        self.computer = StepComputer(runner, sampler, cost, self.profiler)
        self.total_seconds = 0.0
        self.before_step = before_step
        self.look_ahead: LookAhead | None = None
        self.device_lost: str | None = None
        self._pool_sizes = [pool.num_blocks for pool in batcher.block_manager.pools]
        self._sampled: list[str] = []  # ids of the sequences that got tokens in this step, one for each token
        self._dropped: list[Submission] = []
        self._is_consistent = True
        self._in_transaction = False
        self._is_shut_down = False

    def compute_again(self) -> None:
        """Let what is under way wait again and be computed from its tokens: no key is used again."""
        with self.transaction:
            self.batcher.block_manager.forget_prefixes()
        self._recover()

    def check_queue(self, count: int) -> None:
        """Raise ``QueueFull`` if so many more completions find no room."""
        if not self._is_consistent:
            self._recover()  # what an interrupted step left running waits again, and counts
        # Completions that follow the first of their prompt wait, too, though the batcher does not know them yet.
        self.batcher.check_queue(count, len(self.completions) - self.batcher.num_unfinished)

    def add(self, batch: Iterable[Submission]) -> None:
        """Queue the submissions, in order; ``check_queue`` is asked before.

        Of several completions of a prompt only the first is queued. The others follow it: they are forked from it, on
        the same blocks, when the prompt is computed.
        """
        if self._is_shut_down:
            raise RuntimeError("the engine was shut down and takes no prompts; make a new one")
        if self.device_lost is not None:
            raise DeviceLost(self.device_lost)
        batch = list(batch)
        submissions = {submission.request_id: submission for submission in batch}
        completions = {c.request.request_id: c for submission in batch for c in submission.completions}
        with self.transaction:
            self.submissions.update(submissions)  # at once: what an interrupt leaves is all of them, or none
            self.completions.update(completions)
            for submission in batch:
                self.batcher.add(submission.completions[0].request, submission.arrival_time, was_promised=True)

    def end(self, completion: Completion, reason: FinishReason, error: str | None = None) -> None:
        """End a completion, inside ``transaction``; nothing happens if it has ended."""
        request, owner = completion.request, completion.owner
        if request.is_finished:
            return
        if error is not None:
            self.num_failed += 1
            logger.warning("request %s fails: %s", owner.request_id, error)
        followers = self.followers(completion)
        request.finished_time = time.perf_counter()
        if self.batcher.get(request.request_id) is request:
            self.batcher.finish(request, reason, error)
        else:  # it follows another
            request.finish_reason, request.error, request.status = reason, error, RequestStatus.FINISHED
        self.runner.remove(request)
        self.completions.pop(request.request_id, None)
        if owner.is_finished:
            self.num_finished[reason] += 1
            ids = [c.request.request_id for c in owner.completions]
            self.profiler.end_request(owner.request_id, owner.metrics(finished=True), ids)
        for follower in followers:
            # Whatever kept the first from computing the prompt keeps them too.
            self.end(follower, reason, error)
        if not owner.is_private:
            self.updated[owner.request_id] = owner
        elif owner.is_finished:
            self.submissions.pop(owner.request_id, None)

    def _end_early(self, completion: Completion, reason: FinishReason, error: str | None = None) -> None:
        """End a completion that is not complete; a beam ends its whole search."""
        for other in completion.owner.end_with(completion, error):
            self.end(other, "cancelled")
        self.end(completion, reason, error)

    def drop(self, batch: Iterable[Submission], *, may_wait: bool = True) -> None:
        """Cancel what is unfinished and forget all, whatever state an exception left behind.

        A Ctrl-C meanwhile is raised when this is done. In a forked process nothing is done.

        Args:
            may_wait: for the turn of this thread. The garbage collector may not: it can be calling from anywhere in
                here. What is under way then does it at its end, or the next change at its beginning.
        """
        self._dropped.extend(batch)  # first: if the wait for a turn is interrupted, the next change does it
        if not may_wait:
            self.turns.take_if_free(self._drop_unless_in_transaction)
        elif self.turns.is_here:
            self.turns.take(self._drop_all)

    def _drop_unless_in_transaction(self) -> None:
        if not self._in_transaction:
            self._drop_all()

    def _drop_all(self) -> None:
        interrupt: KeyboardInterrupt | None = None
        while self._dropped:
            try:
                if self._is_consistent:
                    with self.transaction:
                        self._drop_quickly()
                else:
                    self._recover()
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def shut_down(self) -> None:
        """Cancel everything and let go of the program and the caches; ``add`` raises ``RuntimeError`` from now on."""
        if self._is_shut_down:
            return
        with self.transaction:
            for completion in list(self.completions.values()):
                self.end(completion, "cancelled")
            if self.look_ahead is not None:
                self.look_ahead.settle_if_idle()
        self._is_shut_down = True
        self.look_ahead = None
        del self.runner, self.computer, self.copier  # nothing is left that a step would ask them for

    def run_step(self) -> list[Submission]:
        """Run one model step; returns the submissions that progressed or ended.

        When the device is lost all of them end with that error.
        """
        if self.batcher.has_unfinished():
            self.before_step()
        try:
            with self.transaction:
                progressed: list[Submission] = []
                if self.look_ahead is not None:
                    self.look_ahead.run_step(progressed)
                    return progressed
                started = time.perf_counter()
                schedule = self.plan(started, progressed)
                if schedule is not None:
                    self.prepare(schedule, started)
                    self.run(schedule.requests, started, progressed, schedule.overlapped_copies)
            return progressed
        except Exception as error:
            if (reason := lost_reason(error)) is None:
                raise
            return self._end_all(reason)

    def _end_all(self, reason: str) -> list[Submission]:
        """End everybody, as the device is lost for the ``reason``, and take nobody from now on."""
        self.device_lost = reason
        with self.transaction:  # which begins by taking back what the step has left behind
            ended = [c.owner for c in self.completions.values()]
            for completion in list(self.completions.values()):
                if not completion.request.is_finished:
                    self._end_early(completion, "error", reason)
        return ended

    @property
    def is_under_way(self) -> bool:
        """A step is launched and not settled."""
        return self.look_ahead is not None and self.look_ahead.is_under_way

    def settle(self) -> None:
        """Settle the step that is launched, if there is one; ``updated`` says what progressed."""
        if self.look_ahead is not None and self.look_ahead.is_under_way:
            with self.transaction:
                self.look_ahead.settle([])

    def plan(self, started: float, progressed: list[Submission]) -> Schedule | None:
        """Plan a step, inside ``transaction``; None where there is nothing to run.

        ``progressed`` gets the submissions that end by their deadline.
        """
        if not self.batcher.has_unfinished():
            return None
        self.profiler.begin_step()
        schedule = self.batcher.schedule(started)
        while schedule.expired:
            if self.look_ahead is not None:  # what was launched in time counts
                self.look_ahead.settle(progressed)
            for request in schedule.expired:
                completion = self.completions.get(request.request_id)
                if completion is not None:  # else its search has ended with another beam
                    self._end_early(completion, "timeout")
                    progressed.append(completion.owner)
            if not self.batcher.has_unfinished():
                return None
            schedule = self.batcher.schedule(started)
        return schedule if schedule.requests else None

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
        self.profiler.mark(SCHEDULE)
        tasks = list(map(self.sample_task, scheduled))
        try:
            self.copier.start(copies)
            compute = self.computer.compute_one_by_one if one_by_one else self.computer.compute
            outputs = compute(scheduled, tasks)
        finally:
            self.copier.join()
        self.cost.measure_copies(self.copier.copied_bytes, self.copier.seconds)
        self.update(scheduled, outputs, progressed)
        self.end_step(scheduled, started)

    def end_step(self, scheduled: Sequence[ScheduledRequest], started: float) -> None:
        """Count a step that is settled."""
        num_tokens = sum([item.num_tokens for item in scheduled])
        self.num_steps += 1
        self.num_computed_tokens += num_tokens
        self.step_sizes.count(num_tokens)
        self.profiler.mark(DETOKENISE)
        self.total_seconds += time.perf_counter() - started
        decodes = sum(item.num_tokens == 1 and item.start >= item.request.num_prompt_tokens for item in scheduled)
        blocks = self.batcher.block_manager
        self.profiler.end_step(
            num_prefill_tokens=num_tokens - decodes,
            num_decode_tokens=decodes,
            num_running=self.batcher.num_running,
            num_waiting=self.batcher.num_waiting,
            blocks_used=blocks.num_used_blocks,
            blocks_cached=blocks.num_cached_blocks,
            blocks_free=blocks.num_blocks - blocks.num_used_blocks - blocks.num_cached_blocks,
            sampled=self._sampled,
        )

    def prepare(self, schedule: Schedule, now: float) -> None:
        """Bring rows, tables and blocks to where the step expects them."""
        for request in schedule.preempted:
            self.runner.remove(request)
        for item in schedule.requests:
            if item.request.row is None:
                self.runner.add(item.request)
                if item.request.first_scheduled_time is None:
                    item.request.first_scheduled_time = now
                    self.num_prompt_tokens += item.request.num_prompt_tokens
                    self.num_cached_tokens += item.request.num_cached_tokens
        for request_id, tables in schedule.tables.items():
            self.runner.set_blocks(self.completions[request_id].request, tables)
        for request_id, blocks in schedule.new_blocks.items():
            self.runner.append_blocks(self.completions[request_id].request, blocks)
        self.copier.run(schedule.copies)
        sizes = [pool.num_blocks for pool in self.batcher.block_manager.pools]
        for group, (now_there, before) in enumerate(zip(sizes, self._pool_sizes, strict=True)):
            if now_there < before:
                self.copier.discard(group, now_there, before)
        self._pool_sizes = sizes

    def sample_task(self, item: ScheduledRequest) -> SampleTask:
        """What is made of the logits after a request's share of a step."""
        if not item.is_last_chunk:
            return SampleTask()
        completion = self.completions[item.request.request_id]
        return completion.owner.sample_task(self, completion)

    def followers(self, completion: Completion) -> list[Completion]:
        """The completions of its prompt that wait for it to compute the prompt."""
        siblings = completion.owner.completions
        if len(siblings) == 1 or completion is not siblings[0]:
            return []
        return [
            c for c in siblings[1:] if not c.is_finished and self.batcher.get(c.request.request_id) is not c.request
        ]

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
        now = time.perf_counter()
        self._sampled = []
        going_on: list[Completion] = []
        for item, output in zip(scheduled, outputs, strict=True):
            request = item.request
            completion = self.completions.get(request.request_id)
            if completion is None or completion.request is not request:
                continue  # another beam's error has ended its search, or it ended after the step was launched
            if output.error is not None:
                self._end_early(completion, "error", output.error)
                progressed.append(completion.owner)
                continue
            if output.is_spoilt:
                self.batcher.compute_anew(request)
                continue
            if was_launched:
                self.batcher.settle(request, item.start + item.num_tokens, len(output.tokens))
            else:
                self.batcher.advance(request, item.num_tokens)
            if output.prompt_logits is not None and completion.prompt_logprobs is not None:
                # A prompt that is computed again may come with tokens of the output.
                rows = request.num_prompt_tokens - item.start
                completion.prompt_logprobs.add(output.prompt_logits[:rows], item.start)
            if item.is_last_chunk:
                going_on += completion.owner.update(self, completion, output, now)
                progressed.append(completion.owner)
        # Those without a row bring all of their tokens when they get one.
        requests = [completion.request for completion in going_on if completion.request.row is not None]
        self.runner.append_tokens(requests, [request.output_token_ids[-1] for request in requests])

    def append_tokens(
        self, completion: Completion, tokens: Sequence[Sequence[SampledToken]], now: float
    ) -> list[Completion]:
        """Append sampled tokens: the completion's own, and those of each that follows it, which runs from now on.

        Returns:
            Those that go on. The runner has yet to be told the newest token of each.
        """
        request = completion.request
        followers = self.followers(completion)
        for follower in followers:
            self.batcher.fork(request, follower.request)
            follower.request.first_scheduled_time = request.first_scheduled_time
        sharing = (completion, *followers)
        return [each for each, own in zip(sharing, tokens, strict=True) if self._append_until_end(each, own, now)]

    def _append_until_end(self, completion: Completion, tokens: Sequence[SampledToken], now: float) -> bool:
        """Append tokens up to one that ends the completion; returns whether it goes on behind all of them."""
        request = completion.request
        for place, token in enumerate(tokens):
            if place and request.row is not None:
                self.runner.append_tokens([request], [tokens[place - 1].token_id])
            if not self._append_token(completion, token, now):
                return False
        return True

    def _append_token(self, completion: Completion, token: SampledToken, now: float) -> bool:
        """Append a token; returns whether the completion goes on."""
        request, owner = completion.request, completion.owner
        if token.error is not None:
            self.end(completion, "error", token.error)
            return False
        self.note_sampled(request, now)
        self.num_generated_tokens += 1
        goes_on = False
        try:
            reason = completion.append(token.token_id, token.logprob)
        except GrammarError as error:
            self.end(completion, "error", str(error))
        except Exception as error:
            self.end(completion, "error", undecodable(error))
        else:
            if reason is None:
                goes_on = True
                self.restart_if_outgrown(request)
            else:
                self.end(completion, reason)
        completion.num_settled = len(request.output_token_ids)
        if not (owner.is_private or owner.final_only):
            self.updated[owner.request_id] = owner
        return goes_on

    def note_sampled(self, request: Request, now: float) -> None:
        """Note for the metrics that a token was sampled for the request in this step."""
        if request.first_token_time is None:
            request.first_token_time = now
        self._sampled.append(request.request_id)

    def restart_if_outgrown(self, request: Request) -> None:
        """Compute the request anew if its keys changed with its newest token, see ``Program.restart_length``."""
        limit = self.runner.program.restart_length
        if limit is not None and request.num_prompt_tokens <= limit and request.num_tokens == limit + 1:
            self.batcher.restart(request)

    def _drop_quickly(self) -> None:
        dropped = self._dropped  # another thread may append to it meanwhile
        while dropped:
            submission = dropped[0]
            for completion in submission.completions:
                if self.batcher.get(completion.request.request_id) is completion.request:
                    self.end(completion, "cancelled")
                completion.mark_cancelled()  # it was never queued
            self._forget(submission)
            del dropped[0]
        if self.look_ahead is not None:
            self.look_ahead.settle_if_idle()

    def _forget(self, submission: Submission) -> None:
        for known in (self.submissions, self.updated):
            if known.get(submission.request_id) is submission:
                del known[submission.request_id]

    def _recover(self) -> None:
        """Rebuild everything from the submissions; can be interrupted and repeated."""
        self._is_consistent = False
        self._in_transaction = True
        dropped = list(self._dropped)  # another thread may append to it meanwhile
        for submission in dropped:
            self._forget(submission)
            submission.restore()
        completions = {}
        for submission in self.submissions.values():
            submission.restore()
            for completion in submission.completions:
                if not completion.request.is_finished:
                    completions[completion.request.request_id] = completion
            if submission.is_finished and not submission.is_private:
                self.updated[submission.request_id] = submission
        self.copier.join()
        if self.look_ahead is not None:
            self.look_ahead.reset()
        self.runner.reset()
        self.batcher.requeue_all()
        for request in self.batcher.waiting:
            if request.request_id not in completions:
                self.batcher.finish(request, "cancelled")
        for request_id, completion in completions.items():
            if self.batcher.get(request_id) is None:
                self.batcher.add(completion.request, was_promised=True)
        # Dropped before they were queued.
        for submission in dropped:
            for completion in submission.completions:
                completion.mark_cancelled()
        self.completions = completions
        del self._dropped[: len(dropped)]
        self._in_transaction = False
        self._is_consistent = True


class _Transaction:
    """``with`` block around every change of an ``EngineCore``'s state."""

    __slots__ = ("_core",)

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    def __enter__(self) -> None:
        core = self._core
        if not core._is_consistent:
            core._recover()
        core._is_consistent = False
        core._in_transaction = True
        if core._dropped:
            core._drop_quickly()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        core = self._core
        core._in_transaction = False
        if kind is None:
            core._is_consistent = True
            if core._dropped:
                core._drop_all()
