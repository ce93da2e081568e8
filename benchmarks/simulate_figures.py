"""What is counted while an engine is simulated, and the figures that come of it."""

from __future__ import annotations

import dataclasses
from array import array
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
from simulate_traces import SimulatedRequest

from torch_pagoda.runtime.batching import Batcher, Schedule

_CDF_POINTS = 201


@dataclasses.dataclass(frozen=True)
class Objective:
    """What a request is promised; it counts for goodput if both are kept (DistServe, OSDI 2024).

    Attributes:
        ttft: most seconds from its arrival to its first token.
        tpot: most seconds per token after the first, on average.
    """

    ttft: float = 1.0
    tpot: float = 0.1


class Fairness:
    """Jain's index over the service that clients got while all of them wanted more.

    Time is cut into windows. In each, the clients that had a request waiting all the time are compared: 1 when all
    got the same, 1/n when one of n got everything. A prompt counts when it is computed, an output when it ends.

    Args:
        window: seconds of the model's clock.
    """

    def __init__(self, window: float = 20.0) -> None:
        self.window = window
        self._begin = 0.0
        self._waiting: Counter[str] = Counter()
        self._since: dict[str, float] = {}  # client → since when it has had a request waiting
        self._served: Counter[str] = Counter()
        self._sum = 0.0
        self._clients = 0

    def arrived(self, client: str, now: float) -> None:
        """A request begins to wait."""
        self._waiting[client] += 1
        self._since.setdefault(client, now)

    def began(self, client: str) -> None:
        """A request waits no longer."""
        self._waiting[client] -= 1
        if not self._waiting[client]:
            del self._since[client]

    def served(self, client: str, num_tokens: int) -> None:
        """The client got so many tokens."""
        self._served[client] += num_tokens

    def advance(self, now: float) -> None:
        """Close the window if it is over."""
        if now - self._begin < self.window:
            return
        got = [float(self._served[client]) for client, since in self._since.items() if since <= self._begin]
        if len(got) > 1 and any(got):
            self._sum += sum(got) ** 2 / sum(x * x for x in got)
            self._clients += len(got)
        self._served.clear()
        self._begin = now

    @property
    def index(self) -> float | None:
        """Mean over all windows, each weighted by its clients; None where there never were two to compare."""
        return self._sum / self._clients if self._clients else None


class Tally:
    """Counts of one run.

    Args:
        batcher: whose figures are taken at the end.
        objective: what counts for goodput.

    Attributes:
        num_finished: requests that got all their tokens.
        recomputed_tokens: that had been computed before their request was preempted.
    """

    def __init__(self, batcher: Batcher, objective: Objective) -> None:
        self.batcher = batcher
        self.objective = objective
        self.fairness = Fairness()
        self.num_finished = 0
        self.num_timeouts = 0
        self.recomputed_tokens = 0
        self.computed_tokens = 0
        self.generated_tokens = 0
        self.model_seconds = 0.0  # in steps
        self.end = 0.0
        self.longest_wait = 0.0
        self.most_waiting = 0
        self._block_seconds = 0.0
        self._ttft = array("f")  # of every request that ended, with the next two
        self._tpot = array("f")  # NaN where there is one token
        self._priority = array("b")
        self._kept = array("b")
        self._planned = array("d")  # of every step, with the next three
        self._settled = array("d")
        self._added = array("d")
        self._scheduled = array("l")

    # -- what happens

    def arrived(self, request: SimulatedRequest, now: float) -> None:
        """A request was added."""
        self.fairness.arrived(request.client, now)

    def planned(self, schedule: Schedule, now: float, seconds: float) -> None:
        """A step begins ``now`` and takes so long."""
        for item in schedule.requests:
            request = item.request
            if request.first_scheduled_time is None:
                request.first_scheduled_time = now
                self.fairness.began(request.client)
                assert request.arrival_time is not None
                self.longest_wait = max(self.longest_wait, now - request.arrival_time)
        self.most_waiting = max(self.most_waiting, self.batcher.num_waiting)
        self.computed_tokens += schedule.num_tokens
        self.model_seconds += seconds
        self._block_seconds += self.batcher.block_manager.num_used_blocks * seconds
        self.end = now + seconds
        self.fairness.advance(now)

    def first_token(self, request: SimulatedRequest, now: float) -> None:
        """The prompt is computed."""
        request.first_token_time = now
        self.fairness.served(request.client, request.num_prompt_tokens)

    def finished(self, request: SimulatedRequest, now: float) -> None:
        """A request has all its tokens."""
        assert request.arrival_time is not None and request.first_token_time is not None
        count = request.num_output_tokens
        ttft = request.first_token_time - request.arrival_time
        tpot = (now - request.first_token_time) / (count - 1) if count > 1 else None
        self.num_finished += 1
        self.generated_tokens += count
        self.fairness.served(request.client, count)
        kept = ttft <= self.objective.ttft and (tpot is None or tpot <= self.objective.tpot)
        self._end(request, ttft, tpot, kept)

    def timed_out(self, request: SimulatedRequest, now: float) -> None:
        """A request is dropped. Where it has no token, the time that it waited counts as its time to the first."""
        assert request.arrival_time is not None
        self.num_timeouts += 1
        self.generated_tokens += request.num_output_tokens
        if request.first_scheduled_time is None:
            self.fairness.began(request.client)
            self.longest_wait = max(self.longest_wait, now - request.arrival_time)
        first = now if request.first_token_time is None else request.first_token_time
        self._end(request, first - request.arrival_time, None, False)

    def step_took(self, planned: float, settled: float, added: float, num_scheduled: int) -> None:
        """Seconds of this machine that the scheduler spent on a step: to plan it, to settle it, and to add requests
        before it."""
        self._planned.append(planned)
        self._settled.append(settled)
        self._added.append(added)
        self._scheduled.append(num_scheduled)

    # -- what comes of it

    def report(self) -> dict[str, Any]:
        """All figures; seconds are the model's, but for those under "scheduler", which this machine took."""
        stats = self.batcher.stats()
        manager = self.batcher.block_manager
        ttft, priority, kept = (np.frombuffer(a, a.typecode) for a in (self._ttft, self._priority, self._kept))
        tpot = np.frombuffer(self._tpot, "f")
        seconds = self.end or 1.0
        return {
            "requests": self.num_finished,
            "timeouts": self.num_timeouts,
            "seconds": self.end,
            "requests_per_second": self.num_finished / seconds,
            "generated_tokens_per_second": self.generated_tokens / seconds,
            "computed_tokens_per_second": self.computed_tokens / seconds,
            "goodput": int(kept.sum()) / seconds,
            "attainment": _mean(kept),
            "ttft": _percentiles(ttft, (50, 90, 99)),
            "tpot": _percentiles(tpot[~np.isnan(tpot)], (50, 90, 99)),
            "longest_wait": self.longest_wait,
            "most_waiting": self.most_waiting,
            "jain_index": self.fairness.index,
            "preemptions": stats["preemptions"],
            "swaps": stats["swaps"],
            "blocks_swapped_out": stats["blocks_swapped_out"],
            "blocks_swapped_in": stats["blocks_swapped_in"],
            "recomputed_tokens": self.recomputed_tokens,
            "recomputed_share": self.recomputed_tokens / max(1, self.computed_tokens),
            "prefix_hit_rate": stats["prefix_hit_rate"],
            "evictions": stats["evictions"],
            "block_utilization": {
                "mean": self._block_seconds / (manager.num_blocks * (self.model_seconds or 1.0)),
                "peak": stats["blocks_used_peak"] / manager.num_blocks,
            },
            "by_priority": {
                str(p): {
                    "requests": int((priority == p).sum()),
                    "attainment": _mean(kept[priority == p]),
                    "ttft": _percentiles(ttft[priority == p], (50, 99)),
                }
                for p in np.unique(priority).tolist()
            },
            "ttft_cdf": _percentiles(ttft, tuple(np.linspace(0, 100, _CDF_POINTS).tolist())),
            "scheduler": self.scheduler(),
        }

    def scheduler(self, first_step: int = 0) -> dict[str, float]:
        """Microseconds of this machine per scheduled sequence, from a step on.

        Returns:
            Means of planning, settling (advance and finish) and adding, and of all together; median and 99th
            percentile of all together, over scheduled sequences, each of which counts with the mean of its step.
        """
        planned, settled, added = (
            1e6 * np.frombuffer(a, "d")[first_step:] for a in (self._planned, self._settled, self._added)
        )
        scheduled = np.frombuffer(self._scheduled, "l")[first_step:]
        total, count = planned + settled + added, max(1, int(scheduled.sum()))
        each = total / scheduled
        order = np.argsort(each)
        share = np.cumsum(scheduled[order]) / count
        at = {q: float(each[order[min(int(np.searchsorted(share, q)), len(each) - 1)]]) for q in (0.5, 0.99)}
        return {
            "steps": len(scheduled),
            "scheduled": count,
            "plan_us": float(planned.sum()) / count,
            "settle_us": float(settled.sum()) / count,
            "add_us": float(added.sum()) / count,
            "mean_us": float(total.sum()) / count,
            "p50_us": at[0.5],
            "p99_us": at[0.99],
            "longest_step_ms": float(total.max()) / 1e3,
        }

    def _end(self, request: SimulatedRequest, ttft: float, tpot: float | None, kept: bool) -> None:
        self._ttft.append(ttft)
        self._tpot.append(float("nan") if tpot is None else tpot)
        self._priority.append(request.priority)
        self._kept.append(kept)


def _mean(values: npt.NDArray[Any]) -> float | None:
    return float(values.mean()) if len(values) else None


def _percentiles(values: npt.NDArray[Any], which: tuple[float, ...]) -> dict[str, float | None]:
    found = np.percentile(values, which).tolist() if len(values) else [None] * len(which)
    return {f"p{q:g}": value for q, value in zip(which, found, strict=True)}
