"""Steps of a pipeline: as many are under way as it has stages, so that all stages work at the same time.

This process runs the last stage. A step is launched by telling the other ranks of it; its last part is computed when
no further step can be launched, and settled at once. A request whose next token is not settled is in no other step,
so that every token is sampled from what the host knows; chunks of its prompt may follow each other. All ranks run the
steps in the order in which they were launched: a step may read what an earlier one writes.

Blocks are copied when all that was launched is computed, as this rank makes its copies at once.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, replace

from ..autocast import without_autocast
from ..batching import ScheduledRequest
from ..cache.block_copier import BlockCopier
from ..npu_errors.device_lost import DeviceLost
from ..profiling.profile import MODEL, PACK, SAMPLE, SCHEDULE
from ..sampling.sampler import Sampler
from .model_runner import PackedStep
from .state import EngineState
from .step_output import SampleTask, StepOutput
from .step_runner import StepRunner
from .submission import Submission, one_line

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Launched:
    """A step that the other ranks have been told of.

    Attributes:
        scheduled: its shares.
        tasks: one for each.
        packed: what the runner made of them.
        started: ``time.perf_counter`` when it was planned.
        outputs: one for each, once it is computed.
    """

    scheduled: list[ScheduledRequest]
    tasks: list[SampleTask]
    packed: PackedStep
    started: float
    outputs: list[StepOutput] | None = None


class PipelinedSteps(StepRunner):
    """Runs the steps of an engine over a pipeline.

    After an exception that leaves ``EngineCore.transaction``, ``reset`` takes back what is under way.

    Attributes:
        num_beside: steps that were launched while another one was under way.
    """

    def __init__(self, state: EngineState, sampler: Sampler, copier: BlockCopier) -> None:
        super().__init__(state, sampler, copier)
        self.num_beside = 0
        self._program = state.runner.program
        self._stages: int = self._program.num_stages  # type: ignore[attr-defined]
        self._launched: deque[_Launched] = deque()
        self._last_end = 0.0
        state.batcher.planner.num_stages = self._stages

    @property
    def is_under_way(self) -> bool:
        return bool(self._launched)

    def run_step(self, progressed: list[Submission]) -> None:
        """Launch as many steps as there are stages, and settle the first; ``progressed`` gets who progressed or
        ended."""
        while len(self._launched) < self._stages and self._launch_next(progressed):
            pass
        if self._launched:
            self._settle_first(progressed)

    def settle(self, progressed: list[Submission]) -> bool:
        while self._launched:
            self._settle_first(progressed)
        return True

    def settle_if_idle(self) -> None:
        if not self.state.batcher.has_unfinished():
            self.settle([])

    def reset(self) -> None:
        super().reset()
        self._launched.clear()
        try:
            self._program.drain()  # type: ignore[attr-defined]
        except DeviceLost as error:  # which the next step finds, too
            logger.warning("the ranks report %s", one_line(error))

    def close(self) -> None:
        super().close()
        del self._program

    def _launch_next(self, progressed: list[Submission]) -> bool:
        """Plan a step and launch it; False where there is nothing to run before another one is settled."""
        state, started = self.state, time.perf_counter()
        schedule = self.plan(started, progressed)
        if schedule is None:
            return False
        if schedule.copies or schedule.overlapped_copies:
            for step in self._launched:
                self._compute(step)
        self.prepare(schedule, started)
        state.profiler.mark(SCHEDULE)
        tasks = list(map(self.sample_task, schedule.requests))
        packed = state.runner.pack(schedule.requests)
        state.profiler.mark(PACK)
        self.num_beside += bool(self._launched)
        step = _Launched(schedule.requests, tasks, packed, started)
        try:
            self.copier.start(schedule.overlapped_copies)
            self._program.begin(*packed)  # type: ignore[attr-defined]
            self._note_launched(step)
            if schedule.overlapped_copies:
                self._compute(step)
        finally:
            self.copier.join()
        if schedule.overlapped_copies:
            state.cost.measure_copies(self.copier.copied_bytes, self.copier.seconds)
        return True

    def _note_launched(self, step: _Launched) -> None:
        for item in step.scheduled:
            self.state.batcher.launch(item.request, item.num_tokens)
        self._launched.append(step)
        self._note_in_flight()

    def _note_in_flight(self) -> None:
        shares = (item for step in self._launched for item in step.scheduled)
        self.state.batcher.planner.in_flight = frozenset(item.request for item in shares)

    def _compute(self, step: _Launched) -> None:
        """Compute the last part of a step and choose its tokens; it is the first that is not computed."""
        if step.outputs is not None:
            return
        state = self.state
        with without_autocast(self._program.device.type):
            finish = self._program.finish  # type: ignore[attr-defined]
            logits = state.runner.run(step.scheduled, step.packed, lambda *_: finish())
            state.profiler.mark(MODEL)
            outputs = self.computer.choose_tokens(step.scheduled, step.tasks, logits)
        # Logits hold until the next step.
        step.outputs = [
            output if output.prompt_logits is None else replace(output, prompt_logits=output.prompt_logits.clone())
            for output in outputs
        ]
        state.profiler.mark(SAMPLE)

    def _settle_first(self, progressed: list[Submission]) -> None:
        """Compute the step that was launched first, and draw its consequences."""
        state, step = self.state, self._launched[0]
        begun = max(step.started, self._last_end)
        self._compute(step)
        assert step.outputs is not None
        self._launched.popleft()
        self._last_end = time.perf_counter()
        state.model_seconds += self._last_end - begun
        state.cost.measure_step(step.scheduled, self._last_end - begun)
        state.batcher.block_manager.release_held()
        self._note_in_flight()
        for item, output in zip(step.scheduled, step.outputs, strict=True):
            item.request.num_output_placeholders = len(output.tokens)  # which are settled now
        self.update(step.scheduled, step.outputs, progressed, was_launched=True)
        self.end_step(step.scheduled, begun)

    def stats(self) -> dict[str, int]:
        """``steps_beside_others``."""
        return {"steps_beside_others": self.num_beside}
