"""Results of a profiler: totals, percentiles, and the last steps and requests one by one."""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..requests.outputs import RequestMetrics
from .chrome_trace import chrome_trace

SCHEDULE, PACK, MODEL, SAMPLE, DETOKENIZE, OTHER = "schedule", "pack", "model", "sample", "detokenize", "other"
PHASES = (SCHEDULE, PACK, MODEL, SAMPLE, DETOKENIZE, OTHER)
"""The phases of a step in their order; a profile may contain others, too."""

PREFILL, DECODE, MIXED = "prefill", "decode", "mixed"
"""Kinds of steps: prompts only, one token per sequence only, or both."""


class StepRecord(NamedTuple):
    """One step of the engine; times in seconds of the profiler's clock.

    Attributes:
        start, end: start and end of the step.
        marks: phase and its end, in order; each phase begins where the previous one ended.
        num_prefill_tokens, num_decode_tokens: tokens that went through the model.
        num_running, num_waiting: number of requests after the step.
        blocks_used, blocks_cached, blocks_free: blocks of the KV cache after the step.
        sampled: ids of the sequences that got a token, one entry per token.
    """

    start: float
    end: float
    marks: Sequence[tuple[str, float]]
    num_prefill_tokens: int
    num_decode_tokens: int
    num_running: int
    num_waiting: int
    blocks_used: int
    blocks_cached: int
    blocks_free: int
    sampled: Sequence[str]


class Span(NamedTuple):
    """Background work, outside the steps."""

    name: str
    start: float
    end: float


class RequestRecord(NamedTuple):
    """A finished request.

    Attributes:
        request_id: the id that the caller knows.
        metrics: times and counts of the request.
        sequence_ids: ids of its completions in ``StepRecord.sampled``.
    """

    request_id: str
    metrics: RequestMetrics
    sequence_ids: tuple[str, ...]


@dataclass
class StepTotals:
    """Sums over all steps of a kind."""

    num_steps: int = 0
    seconds: float = 0.0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0


@dataclass(frozen=True)
class Percentiles:
    """Percentiles of durations in seconds, with linear interpolation."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Iterable[float | None]) -> Percentiles | None:
        """Return the percentiles of the known values; None if there is none."""
        known = np.array([s for s in seconds if s is not None], np.float64)
        if not len(known):
            return None
        p50, p90, p99 = np.percentile(known, (50, 90, 99)).tolist()
        return cls(len(known), float(known.mean()), p50, p90, p99, float(known.max()))


@dataclass(frozen=True)
class Profile:
    """Statistics of where an engine's time went.

    Totals cover everything since the profiler was reset; percentiles cover only the steps and requests that it still
    keeps. Durations are in seconds.

    Attributes:
        totals: by kind of step ("prefill", "decode", "mixed").
        phases: seconds in each phase of the steps; they add up to ``busy_seconds``.
        background: seconds of background work by name, over the kept spans.
        wall_seconds: from the first step's start to the last one's end.
        num_requests: number of finished requests.
        num_generated_tokens: number of sampled tokens.
        step_time: durations of steps, by kind.
        queue_time: from a request's arrival to its first step.
        ttft: per request, time to first token.
        tpot: per request, time per generated token after the first.
        itl: inter-token latency, each gap between two tokens of a sequence, measured at the ends of steps.
        steps, requests, spans: the kept records, oldest first.
    """

    totals: Mapping[str, StepTotals]
    phases: Mapping[str, float]
    background: Mapping[str, float]
    wall_seconds: float
    num_requests: int
    num_generated_tokens: int
    step_time: Mapping[str, Percentiles]
    queue_time: Percentiles | None
    ttft: Percentiles | None
    tpot: Percentiles | None
    itl: Percentiles | None
    steps: tuple[StepRecord, ...]
    requests: tuple[RequestRecord, ...]
    spans: tuple[Span, ...]

    @property
    def num_steps(self) -> int:
        """Number of steps."""
        return sum(total.num_steps for total in self.totals.values())

    @property
    def busy_seconds(self) -> float:
        """Seconds in steps."""
        return sum(total.seconds for total in self.totals.values())

    @property
    def num_prefill_tokens(self) -> int:
        """Prompt tokens that went through the model, including recomputed ones."""
        return sum(total.num_prefill_tokens for total in self.totals.values())

    @property
    def num_decode_tokens(self) -> int:
        """Tokens that went through the model in decoding, one per sequence and step."""
        return sum(total.num_decode_tokens for total in self.totals.values())

    @property
    def input_tokens_per_second(self) -> float:
        """Prefill tokens per second in steps."""
        return self.num_prefill_tokens / self.busy_seconds if self.busy_seconds else 0.0

    @property
    def output_tokens_per_second(self) -> float:
        """Sampled tokens per second in steps."""
        return self.num_generated_tokens / self.busy_seconds if self.busy_seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the statistics without single steps and requests, ready for ``json.dump``."""

        def plain(percentiles: Percentiles | None) -> dict[str, Any] | None:
            return None if percentiles is None else asdict(percentiles)

        return {
            "num_steps": self.num_steps,
            "num_requests": self.num_requests,
            "num_prefill_tokens": self.num_prefill_tokens,
            "num_decode_tokens": self.num_decode_tokens,
            "num_generated_tokens": self.num_generated_tokens,
            "wall_seconds": self.wall_seconds,
            "busy_seconds": self.busy_seconds,
            "input_tokens_per_second": self.input_tokens_per_second,
            "output_tokens_per_second": self.output_tokens_per_second,
            "steps": {
                kind: {**asdict(total), "step_time": plain(self.step_time.get(kind))}
                for kind, total in self.totals.items()
            },
            "phases": dict(self.phases),
            "background": dict(self.background),
            "queue_time": plain(self.queue_time),
            "ttft": plain(self.ttft),
            "tpot": plain(self.tpot),
            "itl": plain(self.itl),
        }

    def to_chrome_trace(self) -> dict[str, Any]:
        """Return the kept steps and requests in the Trace Event Format, for Perfetto and chrome://tracing."""
        return chrome_trace(self)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write ``to_chrome_trace`` to a file."""
        Path(path).write_text(json.dumps(self.to_chrome_trace(), allow_nan=False), encoding="utf-8")


def kind_of(step: StepRecord) -> str:
    """Return the kind of a step."""
    if not step.num_prefill_tokens:
        return DECODE
    return MIXED if step.num_decode_tokens else PREFILL


def summarize(
    *,
    steps: tuple[StepRecord, ...],
    requests: tuple[RequestRecord, ...],
    spans: tuple[Span, ...],
    totals: Mapping[str, StepTotals],
    phases: Mapping[str, float],
    wall_seconds: float,
    num_requests: int,
    num_generated_tokens: int,
) -> Profile:
    """Compute a profile from the records; see ``Profile`` for the arguments."""
    step_time = {
        kind: found
        for kind in totals
        if (found := Percentiles.of(s.end - s.start for s in steps if kind_of(s) == kind)) is not None
    }
    background: dict[str, float] = {}
    for span in spans:
        background[span.name] = background.get(span.name, 0.0) + span.end - span.start
    metrics = [request.metrics for request in requests]
    order = {name: i for i, name in enumerate(PHASES)}
    return Profile(
        totals=totals,
        phases={name: phases[name] for name in sorted(phases, key=lambda name: order.get(name, len(order) - 2))},
        background=background,
        wall_seconds=wall_seconds,
        num_requests=num_requests,
        num_generated_tokens=num_generated_tokens,
        step_time=step_time,
        queue_time=Percentiles.of(m.time_in_queue for m in metrics),
        ttft=Percentiles.of(m.ttft for m in metrics),
        tpot=Percentiles.of(m.tpot for m in metrics),
        itl=Percentiles.of(_gaps(steps, requests)),
        steps=steps,
        requests=requests,
        spans=spans,
    )


def _gaps(steps: Sequence[StepRecord], requests: Sequence[RequestRecord]) -> list[float]:
    """Return the seconds between neighboring tokens of a sequence. A later sequence may reuse an id."""
    arrivals: dict[str, list[float]] = {}
    for request in requests:
        for sequence in request.sequence_ids:
            arrivals.setdefault(sequence, []).append(request.metrics.arrival_time)
    for times in arrivals.values():
        times.sort()
    last: dict[str, float] = {}
    gaps = []
    for step in steps:
        for sequence in step.sampled:
            before = last.get(sequence)
            last[sequence] = step.end
            if before is None:
                continue
            starts = arrivals.get(sequence, [])
            if bisect_left(starts, before) == bisect_left(starts, step.end):
                gaps.append(step.end - before)
    return gaps
