"""One turn of an engine, and recovery to a consistent state from any failure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TypeVar

from ..npu_errors.device_lost import DeviceLost, lost_reason
from ..profiling.profile import Profile
from ..requests.outputs import RequestOutput, StreamPiece
from .pieces import end_undecodable, new_pieces
from .state import EngineState
from .step_runner import StepRunner
from .submission import Submission
from .turns import Turns

_STORE_SECONDS = 2.0
"""Longest time that an engine that is shut down takes to copy blocks for a store."""

Result = TypeVar("Result")
AnySubmission = TypeVar("AnySubmission", bound=Submission)


class EngineCore:
    """Runs submissions step by step.

    Everything that changes the state does so inside ``with core.transaction``. An exception that leaves such a
    block, Ctrl-C included, leaves the state marked as inconsistent, and the next block begins by rebuilding it
    from the submissions alone: all blocks and rows are taken back and every unfinished request queues again
    with the tokens that it has settled. So no line in here needs to be atomic.

    Whoever calls a method, or enters ``transaction``, does so in a turn of ``turns``; only ``drop`` takes its own.

    Args:
        state: what it keeps consistent.
        steps: runs the steps.
        before_step: called where a step is about to be planned.

    Attributes:
        turns: of the threads that use the engine.
        transaction: the context manager for every change.
        device_lost: what the device reported when it was lost; None while it computes.
    """

    def __init__(self, state: EngineState, steps: StepRunner, before_step: Callable[[], object]) -> None:
        self.state = state
        self.steps = steps
        self.before_step = before_step
        self.turns = Turns()
        self.transaction = _Transaction(self)
        self.device_lost: str | None = None
        self._dropped: list[Submission] = []
        self._is_consistent = True
        self._in_transaction = False
        self._is_shut_down = False

    def compute_again(self) -> None:
        """Let what is under way wait again and be computed from its tokens: no key is used again."""
        self.forget_prefixes()
        self._recover()

    def queue(self, batch: list[AnySubmission], prepare: Iterable[Callable[[], AnySubmission]]) -> None:
        """Make submissions, ids included, and queue them in order, all or none; ``batch`` gets them.

        Of several completions of a prompt only the first is queued. The others follow it: they are forked from it, on
        the same blocks, when the prompt is computed.

        Raises:
            QueueFull: so many completions find no room.
            RuntimeError: the engine was shut down, or its device is lost.
        """
        batch.extend(make() for make in prepare)
        if not self._is_consistent:
            self._recover()  # what an interrupted step left running waits again, and counts
        # Completions that follow the first of their prompt wait, too, though the batcher does not know them yet.
        batcher = self.state.batcher
        num_promised = len(self.state.completions) - batcher.num_unfinished
        batcher.check_queue(sum(len(submission.completions) for submission in batch), num_promised)
        if self._is_shut_down:
            raise RuntimeError("engine is shut down; create a new one")
        if self.device_lost is not None:
            raise DeviceLost(self.device_lost)
        submissions = {submission.request_id: submission for submission in batch}
        completions = {c.request.request_id: c for submission in batch for c in submission.completions}
        with self.transaction:
            self.state.submissions.update(submissions)  # at once: what an interrupt leaves is all of them, or none
            self.state.completions.update(completions)
            for submission in batch:
                batcher.add(submission.completions[0].request, submission.arrival_time, was_promised=True)

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
        """Cancel everything and let go of the program and the caches; ``queue`` raises from now on."""
        if self._is_shut_down:
            return
        with self.transaction:
            for completion in list(self.state.completions.values()):
                self.state.end(completion, "cancelled")
            self.steps.settle_if_idle()
            self._store_all()
        self._is_shut_down = True
        self.steps.close()
        close = getattr(self.state.runner.program, "close", None)
        del self.state.runner
        self.state.drafting = self.state.batcher.planner.drafting = None
        self.state.traffic = self.state.batcher.planner.traffic = None
        if close is not None:
            close()

    def _store_all(self) -> None:
        """Copy what waits to be stored, as far as that takes little time, and close the store."""
        traffic = self.state.traffic
        if traffic is None:
            return
        end = time.perf_counter() + _STORE_SECONDS
        self.steps.store_when_idle()
        while traffic.has_copies and time.perf_counter() < end:
            time.sleep(0.001)
            self.steps.store_when_idle()
        self.steps.copier.join()
        traffic.close()

    def num_stored(self) -> int:
        """Blocks that were given to the store so far, those that still wait included."""
        return 0 if self.state.traffic is None else self.state.traffic.num_queued

    def is_stored(self, count: int) -> bool:
        """Whether of the first ``count`` blocks that were given to the store none waits; goes on storing."""
        if self.state.traffic is None:
            return True
        with self.transaction:
            self.steps.store_when_idle()
        return self.state.traffic.is_written(count)

    def run_step(self) -> list[Submission]:
        """Run one model step; returns the submissions that progressed or ended.

        When the device is lost all of them end with that error, unless the program starts again without what it
        kept in caches, as that of several ranks does.
        """
        if self.state.batcher.has_unfinished():
            self.before_step()
        try:
            with self.transaction:
                progressed: list[Submission] = []
                self.steps.run_step(progressed)
                self.steps.store_when_idle()
            return progressed
        except Exception as error:
            if (reason := lost_reason(error)) is None:
                raise
            reason = self._start_again(reason)
            return self._end_all(reason) if reason else []

    def notice_failure(self) -> None:
        """Let a program of several ranks start again if one of them has ended while no step ran."""
        failure = getattr(self.state.runner.program, "failure", None)
        if failure is not None and self.device_lost is None and (reason := self._start_again(str(failure))):
            self._end_all(reason)

    def _start_again(self, reason: str) -> str:
        """Let the program start again, and what is under way be computed again; why that is impossible, or ""."""
        start_again = getattr(self.state.runner.program, "start_again", None)
        try:
            if start_again is None or not start_again():
                return reason
        except DeviceLost as error:
            return str(error)
        with self.transaction:
            self.state.batcher.block_manager.forget_prefixes()  # the store's are of the same weights
        self._recover()
        return ""

    def _end_all(self, reason: str) -> list[Submission]:
        """End everybody, as the device is lost for the ``reason``, and take nobody from now on."""
        self.device_lost = reason
        with self.transaction:  # which begins by taking back what the step has left behind
            completions = list(self.state.completions.values())
            ended = [completion.owner for completion in completions]
            for completion in completions:
                if not completion.request.is_finished:
                    self.state.end_early(completion, "error", reason)
        return ended

    def step(self) -> list[RequestOutput]:
        """Run one model step; returns the requests of ``submit`` that progressed or ended."""
        state = self.state
        self.run_step()
        with self.transaction:
            outputs = [self.output(s) for s in state.updated.values() if s.is_finished or not s.final_only]
            state.forget_finished()
        state.updated = {}  # last: whatever is interrupted before this is returned by the next call
        return outputs

    def step_pieces(self) -> list[StreamPiece]:
        """Run one model step; returns what is new of the requests of ``submit``."""
        state = self.state
        self.run_step()
        with self.transaction:
            for known in state.pieces:  # of a call that was interrupted
                known.give()
            new = [piece for submission in state.updated.values() for piece in new_pieces(state, submission)]
            state.pieces = [*state.pieces, *new]
            pieces = [piece.give() for piece in state.pieces]
            state.forget_finished()
        state.updated = {}
        state.pieces = []  # last: whatever is interrupted before this is returned by the next call
        return pieces

    def output(self, submission: Submission) -> RequestOutput:
        """Everything up to now, inside ``transaction``; an undecodable completion ends with an error."""
        output = submission.output()
        if any([end_undecodable(self.state, completion) for completion in submission.completions]):
            output = submission.output()
        return output

    def results(self, batch: Iterable[AnySubmission], result: Callable[[AnySubmission], Result]) -> list[Result]:
        """Return what ``result`` makes of each submission."""
        with self.transaction:
            return [result(submission) for submission in batch]

    def next_pieces(self, submission: Submission) -> list[StreamPiece]:
        """Return what is new of a submission."""
        with self.transaction:
            return [piece.give() for piece in new_pieces(self.state, submission)]

    def cancel(self, request_ids: Sequence[str]) -> int:
        """End requests of ``submit``; returns the number of unfinished ones that were there."""
        count = 0
        with self.transaction:
            for request_id in request_ids:
                submission = self.state.submissions.get(request_id)
                if submission is None or submission.is_finished:
                    continue
                for completion in submission.completions:
                    self.state.end(completion, "cancelled")
                count += 1
        return count

    def settled(self, action: Callable[[], Result]) -> Result:
        """Settle the step that is launched, if there is one, and return what ``action`` returns."""
        if self.steps.is_under_way:
            with self.transaction:
                self.steps.settle([])
        return action()

    def defragment(self) -> int:
        """Move blocks to the front with the next step; returns how many. No step is under way."""
        blocks = self.state.batcher.block_manager
        with self.transaction:
            self.steps.copier.join()
            blocks.finish_copies()
            return blocks.defragment()

    def forget_prefixes(self) -> None:
        """Forget all cached prefixes, and use no store any more: the weights may have changed."""
        with self.transaction:
            self.state.batcher.block_manager.forget_prefixes()
            if self.state.traffic is not None:
                self.steps.copier.join()
                self.state.traffic.stop()

    def profile(self, reset: bool) -> Profile:
        """Times since the engine was made or the last reset."""
        profiler = self.state.profiler
        result = profiler.result()
        if reset:
            profiler.reset()
        return result

    def stats(self) -> dict[str, int | float]:
        """Figures since the engine was made, see ``Engine.stats``."""
        state = self.state
        with self.transaction:
            return {
                **state.batcher.stats(),
                "block_size": state.batcher.block_manager.block_size,
                "steps": state.num_steps,
                **state.step_sizes.stats(),
                **self.steps.stats(),
                **({} if state.drafting is None else state.drafting.stats()),
                **({} if state.traffic is None else state.traffic.stats()),
                **getattr(state.runner.program, "graph_stats", dict)(),
                "computed_tokens": state.num_computed_tokens,
                "generated_tokens": state.num_generated_tokens,
                "prompt_tokens": state.num_prompt_tokens,
                "cached_tokens": state.num_cached_tokens,
                **{f"finished_{reason}": count for reason, count in state.num_finished.items()},
                "failed": state.num_failed,
                "model_seconds": state.model_seconds,
                "total_seconds": state.total_seconds,
            }

    def _drop_quickly(self) -> None:
        dropped = self._dropped  # another thread may append to it meanwhile
        while dropped:
            submission = dropped[0]
            for completion in submission.completions:
                if self.state.batcher.get(completion.request.request_id) is completion.request:
                    self.state.end(completion, "cancelled")
                completion.mark_cancelled()  # it was never queued
            self.state.forget(submission)
            del dropped[0]
        self.steps.settle_if_idle()

    def _recover(self) -> None:
        """Rebuild everything from the submissions; can be interrupted and repeated."""
        self._is_consistent = False
        self._in_transaction = True
        state, batcher = self.state, self.state.batcher
        dropped = list(self._dropped)  # another thread may append to it meanwhile
        for submission in dropped:
            state.forget(submission)
            submission.restore()
        completions = {}
        for submission in state.submissions.values():
            submission.restore()
            for completion in submission.completions:
                if not completion.request.is_finished:
                    completions[completion.request.request_id] = completion
            if submission.is_finished and not submission.is_private:
                state.updated[submission.request_id] = submission
        self.steps.reset()
        state.runner.reset()
        if state.drafting is not None:
            state.drafting.reset()
        batcher.requeue_all()
        for request in batcher.waiting:
            if request.request_id not in completions:
                batcher.finish(request, "cancelled")
        for request_id, completion in completions.items():
            if batcher.get(request_id) is None:
                batcher.add(completion.request, was_promised=True)
        # Dropped before they were queued.
        for submission in dropped:
            for completion in submission.completions:
                completion.mark_cancelled()
        state.completions = completions
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
