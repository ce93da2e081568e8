"""The loop under the engine: plan, run, sample, settle; and the way back to a sound state from anywhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType

from .batcher import Batcher, ScheduledRequest
from .request import FinishReason, Request
from .runner import Runner
from .sampler import Logprob, Sampler
from .submission import Completion, Submission, one_line, undecodable

logger = logging.getLogger(__name__)

_UNUSABLE_LOGITS = "the model's logits allow no choice (NaN, infinity, or every token ruled out)"


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a step gave one of its requests: nothing yet (token None), a token, or an error."""

    token: int | None = None
    logprob: dict[int, Logprob] | None = None
    error: str | None = None


class EngineCore:
    """Runs submissions step by step.

    Everything that changes the state does so inside ``with core.change``. An exception that leaves such a
    block, Ctrl-C included, leaves the state marked as unsound, and the next block begins by rebuilding it
    from the submissions alone: all blocks and rows are taken back and every unfinished request queues again
    with the tokens that it has settled. So no line in here needs to be atomic.

    Attributes:
        submissions: by id; those of ``generate`` and ``stream`` until they end, others until their last
            output has been given to the caller.
        completions: the unfinished ones, by the id of their request.
        news: submissions that progressed or ended since the caller was told.
        change: the context manager for every change.
    """

    def __init__(self, batcher: Batcher, runner: Runner, sampler: Sampler) -> None:
        self.batcher = batcher
        self.runner = runner
        self.sampler = sampler
        self.submissions: dict[str, Submission] = {}
        self.completions: dict[str, Completion] = {}
        self.news: dict[str, Submission] = {}
        self.change = _Change(self)
        self.num_steps = 0
        self.num_computed_tokens = 0
        self.num_generated_tokens = 0
        self.num_failed = 0
        self.model_seconds = 0.0
        self.total_seconds = 0.0
        self._dropped: list[Submission] = []
        self._is_sound = True
        self._is_changing = False

    def add(self, batch: Iterable[Submission]) -> None:
        """Queue the submissions' completions, in order."""
        with self.change:
            for submission in batch:
                self.submissions[submission.request_id] = submission
                for completion in submission.completions:
                    self.completions[completion.request.request_id] = completion
                    self.batcher.add(completion.request)

    def end(self, completion: Completion, reason: FinishReason, error: str | None = None) -> None:
        """End a completion, inside ``change``; nothing happens if it has ended."""
        request, owner = completion.request, completion.owner
        if request.is_finished:
            return
        if error is not None:
            self.num_failed += 1
            logger.warning("request %s fails: %s", owner.request_id, error)
        request.finished_time = time.perf_counter()
        self.batcher.finish(request, reason, error)
        self.runner.remove(request)
        self.completions.pop(request.request_id, None)
        if not owner.is_private:
            self.news[owner.request_id] = owner
        elif owner.is_finished:
            self.submissions.pop(owner.request_id, None)

    def drop(self, batch: Iterable[Submission], *, may_be_nested: bool = False) -> None:
        """Cancel what is unfinished and forget all, whatever state an exception left behind.

        A Ctrl-C meanwhile is raised when this is done.

        Args:
            may_be_nested: the garbage collector may be calling within a change, whose end then does it.
        """
        self._dropped.extend(batch)
        if may_be_nested and self._is_changing:
            return
        interrupt: KeyboardInterrupt | None = None
        while self._dropped:
            try:
                if self._is_sound:
                    with self.change:
                        self._drop_quickly()
                else:
                    self._recover()
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def run_step(self) -> list[Submission]:
        """Run one model step; returns whose completions got a token or ended, once per completion."""
        with self.change:
            if not self.batcher.has_unfinished():
                return []
            started = time.perf_counter()
            schedule = self.batcher.schedule()
            for request in schedule.preempted:
                self.runner.remove(request)
            for item in schedule.requests:
                if item.request.row is None:
                    self.runner.add(item.request)
                    if item.request.first_scheduled_time is None:
                        item.request.first_scheduled_time = started
            for request_id, blocks in schedule.new_blocks.items():
                self.runner.append_blocks(self.completions[request_id].request, blocks)
            progressed = self._settle(schedule.requests, self._compute(schedule.requests))
            self.num_steps += 1
            self.num_computed_tokens += schedule.num_tokens
            self.total_seconds += time.perf_counter() - started
        return progressed

    def _compute(self, scheduled: list[ScheduledRequest]) -> list[_Outcome]:
        """Run the model and sample; if that raises, each request runs alone, so that only culprits fail."""
        try:
            return self._compute_together(scheduled)
        except Exception as error:
            if len(scheduled) == 1:
                logger.debug("a model step failed", exc_info=True)
                return [_Outcome(error=f"the model step failed with {one_line(error)}")]
            logger.warning(
                "a model step of %d requests failed (%s); running them one by one",
                len(scheduled),
                one_line(error),
            )
        return [self._compute([item])[0] for item in scheduled]

    def _compute_together(self, scheduled: list[ScheduledRequest]) -> list[_Outcome]:
        started = time.perf_counter()
        logits = self.runner.run(scheduled)
        self.model_seconds += time.perf_counter() - started
        rows = [i for i, item in enumerate(scheduled) if item.is_last_chunk]
        outcomes = [_Outcome()] * len(scheduled)
        if rows:
            sampled = self.sampler.sample(logits, [scheduled[i].request for i in rows])
            for i, token, logprob in zip(rows, sampled.token_ids, sampled.logprobs, strict=True):
                outcomes[i] = _Outcome(token, logprob)
            for row in sampled.failed:
                outcomes[rows[row]] = _Outcome(error=_UNUSABLE_LOGITS)
        return outcomes

    def _settle(self, scheduled: list[ScheduledRequest], outcomes: list[_Outcome]) -> list[Submission]:
        """Draw the consequences of a step."""
        now = time.perf_counter()
        progressed: list[Submission] = []
        going_on: list[Request] = []
        tokens: list[int] = []
        for item, outcome in zip(scheduled, outcomes, strict=True):
            request = item.request
            completion = self.completions[request.request_id]
            owner = completion.owner
            if outcome.error is not None:
                self.end(completion, "error", outcome.error)
                progressed.append(owner)
                continue
            self.batcher.advance(request, item.num_tokens)
            if outcome.token is None:
                continue
            if request.first_token_time is None:
                request.first_token_time = now
            self.num_generated_tokens += 1
            try:
                reason = completion.append(outcome.token, outcome.logprob)
            except Exception as error:
                self.end(completion, "error", undecodable(error))
            else:
                if reason is None:
                    going_on.append(request)
                    tokens.append(outcome.token)
                    if self._outgrows_its_keys(request):
                        self.batcher.restart(request)
                else:
                    self.end(completion, reason)
            completion.num_settled = len(request.output_token_ids)
            progressed.append(owner)
            if not owner.is_private:
                self.news[owner.request_id] = owner
        self.runner.append_tokens(going_on, tokens)
        return progressed

    def _outgrows_its_keys(self, request: Request) -> bool:
        limit = self.runner.program.restart_length
        return limit is not None and request.num_prompt_tokens <= limit and request.num_tokens == limit + 1

    def _drop_quickly(self) -> None:
        for submission in self._dropped:
            for completion in submission.completions:
                if self.batcher.get(completion.request.request_id) is completion.request:
                    self.end(completion, "cancelled")
                completion.mark_cancelled()  # it was never queued
            self._forget(submission)
        self._dropped = []

    def _forget(self, submission: Submission) -> None:
        for known in (self.submissions, self.news):
            if known.get(submission.request_id) is submission:
                del known[submission.request_id]

    def _recover(self) -> None:
        """Rebuild everything from the submissions; can be interrupted and repeated."""
        self._is_sound = False
        self._is_changing = True
        for submission in self._dropped:
            self._forget(submission)
            for completion in submission.completions:
                completion.restore()
        completions = {}
        for submission in self.submissions.values():
            for completion in submission.completions:
                completion.restore()
                if not completion.request.is_finished:
                    completions[completion.request.request_id] = completion
            if submission.is_finished and not submission.is_private:
                self.news[submission.request_id] = submission
        self.runner.reset()
        self.batcher.requeue_all()
        for request in self.batcher.waiting:
            if request.request_id not in completions:
                self.batcher.finish(request, "cancelled")
        for request_id, completion in completions.items():
            if self.batcher.get(request_id) is None:
                self.batcher.add(completion.request)
        # Dropped before they were queued.
        for submission in self._dropped:
            for completion in submission.completions:
                completion.mark_cancelled()
        self.completions = completions
        self._dropped = []
        self._is_changing = False
        self._is_sound = True


class _Change:
    """``with`` block around every change of an ``EngineCore``'s state."""

    __slots__ = ("_core",)

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    def __enter__(self) -> None:
        core = self._core
        if not core._is_sound:
            core._recover()
        core._is_sound = False
        core._is_changing = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        core = self._core
        core._is_changing = False
        if kind is None:
            core._is_sound = True
            if core._dropped:
                core.drop(())
