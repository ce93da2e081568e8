"""A histogram for one event loop: fixed buckets, a sum, and one bisection per value."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

REQUEST_SECONDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
"""vLLM's bounds for whole requests and their phases."""

FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
"""vLLM's bounds for the time to the first token."""

TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
"""vLLM's bounds for the time between two tokens."""

COUNTS_OF_N = (1, 2, 5, 10, 20)
"""vLLM's bounds for the parameter ``n``."""

HTTP_SECONDS = (0.1, 0.5, 1)
"""Bounds of ``http_request_duration_seconds``, as in vLLM's instrumentator."""

SHORT_SECONDS = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
"""Bounds for durations of milliseconds."""


def one_two_five(maximum: int) -> tuple[int, ...]:
    """Bounds 1, 2, 5, 10, … up to ``maximum``, as in vLLM for token counts."""
    bounds = (mantissa * 10**exponent for exponent in range(len(str(maximum))) for mantissa in (1, 2, 5))
    return tuple(bound for bound in bounds if bound <= maximum)


class Histogram:
    """Counts of values by bucket; Prometheus's own takes a lock and walks the buckets for each value.

    Attributes:
        sum: of all values.
    """

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count ``value``, ``count`` times; a bound belongs to its own bucket."""
        self._counts[bisect_left(self._bounds, value)] += count
        self.sum += value * count

    def buckets(self) -> list[tuple[str, float]]:
        """Bounds in Prometheus's spelling, with the number of values up to each; the last one is +Inf."""
        bounds = (*(str(float(bound)) for bound in self._bounds), "+Inf")
        return list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
