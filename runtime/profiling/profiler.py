"""Records where the engine's time goes, step by step, in bounded memory.

The engine calls it like this:

    profiler.begin_step()
    schedule = batcher.schedule()
    profiler.mark(SCHEDULE)          # the time since the last mark was scheduling
    step = runner.pack(...)
    profiler.mark(PACK)
    ...
    profiler.end_step(num_prefill_tokens=512, num_decode_tokens=8, sampled=["0", "3"], ...)

A step that raises is not ended; the next ``begin_step`` discards it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from ..requests.checks import check_at_least
from ..requests.outputs import RequestMetrics
from .profile import DECODE, MIXED, OTHER, PREFILL, Profile, RequestRecord, Span, StepRecord, StepTotals, summarize


class Profiler:
    """Records steps, requests and background work.

    Counters are exact since the last ``reset``; steps, requests and spans are kept in ring buffers, which drop the
    oldest. Only one thread may use it, except for ``span``, which any thread may call.

    Args:
        max_steps: number of steps kept, for percentiles and the trace.
        max_requests: number of finished requests kept.
        clock: returns seconds; the clock of ``RequestMetrics``.
    """

    def __init__(
        self, max_steps: int = 4096, max_requests: int = 4096, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        check_at_least(1, "keep at least one", max_steps=max_steps, max_requests=max_requests)
        self._clock = clock
        self._steps: deque[StepRecord] = deque(maxlen=max_steps)
        self._requests: deque[RequestRecord] = deque(maxlen=max_requests)
        self._spans: deque[Span] = deque(maxlen=max_steps)
        self.reset()

    def reset(self) -> None:
        """Discard all records."""
        self._steps.clear()
        self._requests.clear()
        self._spans.clear()
        self._totals = {kind: StepTotals() for kind in (PREFILL, DECODE, MIXED)}
        self._phases: dict[str, float] = {}
        self._num_requests = 0
        self._num_sampled = 0
        self._first_start = self._last_end = 0.0
        self._marks: list[tuple[str, float]] = []
        self._start: float | None = None

    def begin_step(self) -> None:
        """Begin a step."""
        self._marks = []
        self._start = self._clock()

    def mark(self, phase: str) -> None:
        """Count the time since the last mark, or the beginning, as ``phase``; a phase may occur several times."""
        self._marks.append((phase, self._clock()))

    def end_step(
        self,
        *,
        num_prefill_tokens: int,
        num_decode_tokens: int,
        num_running: int = 0,
        num_waiting: int = 0,
        blocks_used: int = 0,
        blocks_cached: int = 0,
        blocks_free: int = 0,
        sampled: Sequence[str] = (),
    ) -> None:
        """End the step; the time since the last mark is counted as "other".

        Args:
            num_prefill_tokens: prompt tokens (including recomputed ones) that went through the model.
            num_decode_tokens: tokens that went through the model in decoding.
            num_running, num_waiting: number of requests after the step.
            blocks_used, blocks_cached, blocks_free: blocks of the KV cache after the step.
            sampled: ids of the sequences that got a token, one entry per token. The profiler keeps the list, so do
                not change it afterwards.
        """
        end, start = self._clock(), self._start
        if start is None:
            return
        self._start = None
        if not self._steps:
            self._first_start = start
        self._last_end = end
        phases, before = self._phases, start
        for phase, at in self._marks:
            phases[phase] = phases.get(phase, 0.0) + at - before
            before = at
        phases[OTHER] = phases.get(OTHER, 0.0) + end - before
        totals = self._totals[DECODE if not num_prefill_tokens else MIXED if num_decode_tokens else PREFILL]
        totals.num_steps += 1
        totals.seconds += end - start
        totals.num_prefill_tokens += num_prefill_tokens
        totals.num_decode_tokens += num_decode_tokens
        self._num_sampled += len(sampled)
        self._steps.append(
            StepRecord(
                start,
                end,
                self._marks,
                num_prefill_tokens,
                num_decode_tokens,
                num_running,
                num_waiting,
                blocks_used,
                blocks_cached,
                blocks_free,
                sampled,
            )
        )

    def span(self, name: str, start: float, end: float) -> None:
        """Record background work, for instance in another thread: ``name`` ran from ``start`` to ``end``."""
        self._spans.append(Span(name, start, end))

    def end_request(self, request_id: str, metrics: RequestMetrics, sequence_ids: Sequence[str] = ()) -> None:
        """Record a finished request.

        Args:
            request_id: the id that the caller knows.
            metrics: final times and counts of the request.
            sequence_ids: ids of its completions in ``sampled``; by default the id of the request.
        """
        self._num_requests += 1
        self._requests.append(RequestRecord(request_id, metrics, tuple(sequence_ids) or (request_id,)))

    def result(self) -> Profile:
        """Return all records so far; recording continues."""
        return summarize(
            steps=tuple(self._steps),
            requests=tuple(self._requests),
            spans=tuple(self._spans),
            totals={kind: replace(totals) for kind, totals in self._totals.items()},
            phases=dict(self._phases),
            num_requests=self._num_requests,
            num_generated_tokens=self._num_sampled,
            wall_seconds=self._last_end - self._first_start,
        )
