"""Steps one ahead: step n + 1 is planned, packed and launched while the device computes step n.

The tokens that step n samples stay on the device, and one operator in front of the program puts them into the ids of
step n + 1. When that is launched, step n is settled: its tokens are read, stops are looked for, hashes and snapshots
are taken. What has ended by then has a share in step n + 1 that nobody looks at; its blocks are held until that step
is settled. Ends by length are known without the token, so that no sequence grows beyond its limits.

A step that needs the host's word before the next is planned (``synchronous_steps``) is computed and settled at once,
after the one before it. So every token is sampled from the same rows and with the same rules as without this.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakSet

import torch
from torch import Tensor

from ..autocast import without_autocast
from ..batching import Schedule, ScheduledRequest
from ..blocks import CacheCopy
from ..cache.block_copier import BlockCopier
from ..device_queue import DeviceQueue, HostCopy, with_sampled
from ..npu_errors.device_lost import raise_if_lost
from ..npu_errors.remedies import explain
from ..profiling.profile import MODEL, PACK, SAMPLE, SCHEDULE
from ..requests.request import Request, RequestStatus
from ..sampling.sampler import Sampler
from . import synchronous_steps
from .state import EngineState
from .step_computer import UNUSABLE_LOGITS
from .step_output import SampledToken, SampleTask, StepOutput
from .step_runner import StepRunner
from .submission import Submission, one_line
from .synchronous_steps import why_synchronous

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class LaunchedStep:
    """A step that the device has been given.

    Attributes:
        scheduled: its shares.
        tasks: one for each.
        sampled: ``[R]`` int64 on the device, the token of each share that samples.
        outcome: what ``Sampler.launch`` returned, on its way to the host.
        places: requests that sample → their places in ``sampled``.
        started: ``time.perf_counter`` when it was planned.
        launched: and when it was packed.
        void: requests whose share counts for nothing, because they go on from another token than it was given.
    """

    scheduled: list[ScheduledRequest]
    tasks: list[SampleTask]
    sampled: Tensor
    outcome: HostCopy
    places: dict[Request, int]
    started: float
    launched: float
    void: set[Request] = field(default_factory=set)


class LookAhead(StepRunner):
    """Runs the steps of an engine, one ahead of what is settled.

    Between two calls at most one step is launched. After an exception that leaves ``EngineCore.transaction``,
    ``reset`` takes back what is under way.

    Attributes:
        num_ahead: steps that were launched before the one before them was settled.
        synchronous: steps that were settled before the next was planned, by reason.
    """

    def __init__(self, state: EngineState, sampler: Sampler, copier: BlockCopier) -> None:
        super().__init__(state, sampler, copier)
        program = state.runner.program
        self.queue: DeviceQueue = getattr(program, "queue", None) or DeviceQueue(program.device)
        self.num_ahead = 0
        self.synchronous: Counter[str] = Counter()
        self._launched: LaunchedStep | None = None
        self._last_end = 0.0
        self._uncertain: WeakSet[Request] = WeakSet()
        self.computer.wait = self.queue.synchronize

    @property
    def is_under_way(self) -> bool:
        return self._launched is not None

    def run_step(self, progressed: list[Submission]) -> None:
        """Settle a step, and launch the one after it before; ``progressed`` gets who progressed or ended."""
        if self._launched is None and not self._run_next(progressed):
            return
        if not self._run_next(progressed):
            self.settle(progressed)

    def settle(self, progressed: list[Submission]) -> bool:
        step, self._launched = self._launched, None
        return step is None or self._settle(step, progressed)

    def settle_if_idle(self) -> None:
        if self._launched is not None and not self.state.batcher.has_unfinished():
            self.settle([])

    def reset(self) -> None:
        super().reset()
        self._synchronize()
        self._launched = None

    def _synchronize(self) -> None:
        """Wait for the device. Whether what it did has failed is found where that is settled."""
        try:
            self.queue.synchronize()
        except Exception as error:
            logger.warning("the device reports %s", one_line(explain(error)))

    def _run_next(self, progressed: list[Submission]) -> bool:
        """Plan the next step and launch it, or run it where it has to be settled at once.

        Returns:
            Whether a step is under way that may be followed by another: not where there was nothing to run, or where
            all is settled.
        """
        started = time.perf_counter()
        schedule = self.plan(started, progressed)
        before = self._launched
        if schedule is None:
            planner = self.state.batcher.planner
            if before is None or not (planner.could_preempt() or planner.awaits_drafts()):
                return False
            self.synchronous[synchronous_steps.DRAFTS if planner.awaits_drafts() else synchronous_steps.BLOCKS] += 1
            self.settle(progressed)
            return self._run_next(progressed)
        if schedule.copies and before is not None:
            self._synchronize()
        self.prepare(schedule, started)
        scheduled = schedule.requests
        tasks = list(map(self.sample_task, scheduled))
        reason = self._why_synchronous(schedule, tasks)
        if reason is None:
            try:
                step = self._launch(scheduled, tasks, started)
            except Exception as error:
                raise_if_lost(error)
                logger.warning("a step of %d requests failed (%s)", len(scheduled), one_line(explain(error)))
                self._run_settled(scheduled, started, progressed, (), one_by_one=True)
                return False
            self._note_launched(step)
            if before is not None:
                self.num_ahead += 1
                self._settle(before, progressed)
            return self._launched is not None
        self.synchronous[reason] += 1
        self._run_settled(scheduled, started, progressed, schedule.overlapped_copies)
        return False

    def _why_synchronous(self, schedule: Schedule, tasks: Sequence[SampleTask]) -> str | None:
        """The first reason why a step is to be settled before the next is planned, if there is one."""
        if schedule.overlapped_copies:
            return synchronous_steps.SWAP
        if self.state.batcher.planner.suspects:
            return synchronous_steps.FAILED
        limit = self.state.runner.program.restart_length
        for item, task in zip(schedule.requests, tasks, strict=True):
            reason = why_synchronous(item, task, limit, self._uncertain)
            if reason is not None:
                return reason
        return None

    def _run_settled(
        self,
        scheduled: Sequence[ScheduledRequest],
        started: float,
        progressed: list[Submission],
        copies: Sequence[CacheCopy],
        *,
        one_by_one: bool = False,
    ) -> None:
        """Compute and settle a prepared step, when the one before it is settled and as far as that leaves it."""
        if self._launched is not None:
            if not self.settle(progressed):
                self._restart(scheduled)
                scheduled = ()
            self.state.profiler.begin_step()
        left = [item for item in scheduled if self._goes_on(item)]
        if left:
            self.run(left, started, progressed, copies, one_by_one=one_by_one)
        else:
            self.copier.run(copies)

    def _goes_on(self, item: ScheduledRequest) -> bool:
        """True if a planned share is still the next of its request."""
        request = item.request
        return self._is_running(request) and request.num_computed_tokens == item.start

    def _launch(self, scheduled: list[ScheduledRequest], tasks: list[SampleTask], started: float) -> LaunchedStep:
        """Give the device a step, behind the one that is under way."""
        state = self.state
        state.profiler.mark(SCHEDULE)
        launched = time.perf_counter()
        ids, positions, metadata = state.runner.pack(scheduled)
        requests = [item.request for item in scheduled if item.is_last_chunk]
        with torch.inference_mode(), without_autocast(state.runner.program.device.type):
            if self._launched is not None:
                ids = self._with_sampled(ids, scheduled, self._launched)
            state.profiler.mark(PACK)
            logits = state.runner.run(scheduled, (ids, positions, metadata))
            drawn = self.computer.sampler.launch(logits.sampled, requests, self.queue.send)
            outcome = self.queue.read_later(drawn)
        state.profiler.mark(MODEL)
        places = {request: place for place, request in enumerate(requests)}
        return LaunchedStep(scheduled, tasks, drawn[0], outcome, places, started, launched)

    def _with_sampled(self, ids: Tensor, scheduled: Sequence[ScheduledRequest], before: LaunchedStep) -> Tensor:
        """The ids ``[1, T]`` of a step, with the tokens that the step before it samples where the host has none."""
        where, sources, end = [], [], 0
        for item in scheduled:
            end += item.num_tokens
            request = item.request
            if item.start + item.num_tokens > request.num_tokens:
                where.append(end - 1)
                sources.append(before.places[request])
        if not where:
            return ids
        places = torch.tensor(where), torch.tensor(sources), before.sampled
        let_wait = getattr(self.state.runner.program, "let_wait", None)
        return with_sampled(ids, *places) if let_wait is None else let_wait(ids, *places)  # type: ignore[no-any-return]

    def _note_launched(self, step: LaunchedStep) -> None:
        batcher = self.state.batcher
        for item, task in zip(step.scheduled, step.tasks, strict=True):
            batcher.launch(item.request, item.num_tokens, len(task.requests))
        batcher.planner.in_flight = frozenset([item.request for item in step.scheduled])
        self._launched = step

    def _settle(self, step: LaunchedStep, progressed: list[Submission]) -> bool:
        """Wait for a step and draw its consequences; the one after it may be under way. False if it has failed."""
        state, batcher = self.state, self.state.batcher
        try:
            columns = step.outcome.wait().T.tolist()
        except Exception as error:
            raise_if_lost(error)
            self._take_back(step, error)
            return False
        state.profiler.mark(SAMPLE)
        now, last_end = time.perf_counter(), self._last_end
        seconds, self._last_end = now - max(step.launched, last_end), now
        state.model_seconds += seconds
        state.measure_step(step.scheduled, seconds)
        batcher.block_manager.release_held()
        if self._launched is None:
            batcher.planner.in_flight = frozenset()
        scheduled, outputs = [], []
        for item, task in zip(step.scheduled, step.tasks, strict=True):
            output = _NOTHING
            if task.requests:
                token, is_usable, is_certain = columns[step.places[item.request]]
                if is_usable and not is_certain:
                    self._sample_again(item, step)
                    continue
                output = StepOutput(((SampledToken(token) if is_usable else _UNUSABLE,),))
            if item.request not in step.void:
                scheduled.append(item)
                outputs.append(output)
        self.update(scheduled, outputs, progressed, was_launched=True)
        self.end_step(step.scheduled, max(step.started, last_end))
        return True

    def _sample_again(self, item: ScheduledRequest, step: LaunchedStep) -> None:
        """Let the last token of a share be computed again, by a step that looks at more candidates."""
        request = item.request
        if request in step.void or not self._is_running(request):
            return
        self._uncertain.add(request)
        self.state.batcher.rewind(request, item.start + item.num_tokens - 1)
        if self._launched is not None:
            self._launched.void.add(request)

    def _take_back(self, step: LaunchedStep, error: Exception) -> None:
        """A step has failed on the device: compute everybody anew who is in it or in what was launched behind it."""
        logger.warning(
            "a step of %d requests failed (%s); recomputing them", len(step.scheduled), one_line(explain(error))
        )
        batcher, behind = self.state.batcher, self._launched
        self.reset()
        batcher.planner.in_flight = frozenset()
        batcher.block_manager.release_held()
        batcher.block_manager.forget_prefixes()  # blocks were committed that were not computed
        for item in (*step.scheduled, *(behind.scheduled if behind is not None else ())):
            if self._is_running(item.request):
                batcher.compute_anew(item.request)

    def _restart(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Let a step that was planned behind a failed one begin anew: who was admitted since may hold a prefix that
        the failed one was to compute."""
        batcher = self.state.batcher
        for item in scheduled:
            if self._is_running(item.request) and item.request not in batcher.planner.suspects:
                batcher.restart(item.request)

    def _is_running(self, request: Request) -> bool:
        return request.status is RequestStatus.RUNNING and self.state.batcher.get(request.request_id) is request

    def stats(self) -> dict[str, int]:
        """``steps_ahead``, and ``synchronous_steps_`` of each reason."""
        counts = {f"synchronous_steps_{reason}": self.synchronous[reason] for reason in synchronous_steps.REASONS}
        return {"steps_ahead": self.num_ahead, **counts}


_NOTHING = StepOutput()
_UNUSABLE = SampledToken(error=UNUSABLE_LOGITS)
