"""Exports a profile in the Trace Event Format, for Perfetto (ui.perfetto.dev) and chrome://tracing.

Format: *Trace Event Format*, Google, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"X" is a complete event, "C" a counter, "b", "n" and "e" the parts of an asynchronous one; times are in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .profile import Profile, RequestRecord, StepRecord

ENGINE, REQUESTS = 1, 2
"""Processes of the trace: the engine (steps with their phases and counters) and the requests."""

_STEPS = 1  # thread of ENGINE; background work gets threads from 2 on
_MICROSECONDS = 1e6

Event = dict[str, Any]


def chrome_trace(profile: Profile) -> dict[str, Any]:
    """Return the trace as an object, ready for ``json.dump``. Its time 0 is the first recorded event."""
    starts = [step.start for step in profile.steps] + [span.start for span in profile.spans]
    origin = min([*starts, *(request.metrics.arrival_time for request in profile.requests)], default=0.0)
    threads = {name: 2 + i for i, name in enumerate(dict.fromkeys(span.name for span in profile.spans))}
    events = [
        _name("process_name", ENGINE, 0, "engine"),
        _name("thread_name", ENGINE, _STEPS, "steps"),
        _name("process_name", REQUESTS, 0, "requests"),
    ]
    events += [_name("thread_name", ENGINE, thread, name) for name, thread in threads.items()]
    for step in profile.steps:
        events += _step(step, origin)
    for span in profile.spans:
        events.append(_complete(span.name, "background", threads[span.name], span.start, span.end, origin))
    sampling: dict[str, list[StepRecord]] = {}
    for step in profile.steps:
        for sequence in step.sampled:
            sampling.setdefault(sequence, []).append(step)
    for request in profile.requests:
        events += _request(request, sampling, origin)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _name(what: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _complete(
    name: str, category: str, thread: int, start: float, end: float, origin: float, args: Event | None = None
) -> Event:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": ENGINE,
        "tid": thread,
        "ts": _at(start, origin),
        "dur": max(0.0, round((end - start) * _MICROSECONDS, 3)),
        "args": args or {},
    }


def _step(step: StepRecord, origin: float) -> Iterator[Event]:
    """Yield the step, the phases inside it, and the counters at its end."""
    parts = [("prefill", step.num_prefill_tokens), ("decode", step.num_decode_tokens)]
    name = " + ".join(f"{kind} {tokens}" for kind, tokens in parts if tokens) or "no tokens"
    args = {
        "prefill tokens": step.num_prefill_tokens,
        "decode tokens": step.num_decode_tokens,
        "sampled tokens": len(step.sampled),
    }
    yield _complete(name, "step", _STEPS, step.start, step.end, origin, args)
    before = step.start
    for phase, at in (*step.marks, ("other", step.end)):
        yield _complete(phase, "phase", _STEPS, before, at, origin)
        before = at
    blocks = {"used": step.blocks_used, "cached": step.blocks_cached, "free": step.blocks_free}
    queue = {"running": step.num_running, "waiting": step.num_waiting}
    for title, values in (("KV blocks", blocks), ("requests", queue)):
        yield {
            "ph": "C",
            "name": title,
            "pid": ENGINE,
            "tid": 0,
            "ts": _at(step.end, origin),
            "args": values,
        }


def _request(request: RequestRecord, sampling: dict[str, list[StepRecord]], origin: float) -> Iterator[Event]:
    """Yield the request's time in the queue, in prefill and in decode, and an instant for each token.

    Args:
        request: a finished request.
        sampling: for each sequence, the steps that sampled a token for it; a later request may reuse the id.
        origin: time 0.
    """
    metrics = request.metrics
    common = {"cat": "request", "pid": REQUESTS, "tid": 0, "id": f"{request.request_id} {metrics.arrival_time!r}"}
    known = (metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time, metrics.finished_time)
    end = max(at for at in known if at is not None)

    def part(kind: str, name: str, at: float, args: Event | None = None) -> Event:
        return {**common, "ph": kind, "name": name, "ts": _at(at, origin), "args": args or {}}

    name = f"request {request.request_id}"
    args = {"generated tokens": metrics.num_generated_tokens, "preemptions": metrics.num_preemptions}
    yield part("b", name, metrics.arrival_time, args)
    before = metrics.arrival_time
    for stage, at in (
        ("queue", metrics.first_scheduled_time),
        ("prefill", metrics.first_token_time),
        ("decode", end),
    ):
        yield part("b", stage, before)
        yield part("e", stage, end if at is None else at)
        if at is None:  # it ended there
            break
        before = at
    for sequence in request.sequence_ids:
        for step in sampling.get(sequence, ()):
            if metrics.arrival_time <= step.end and step.start <= end:
                yield part("n", "token", step.end)
    yield part("e", name, end)


def _at(seconds: float, origin: float) -> float:
    return round((seconds - origin) * _MICROSECONDS, 3)
