"""What steps take by their rows, on this machine and as it is loaded now."""

from __future__ import annotations

import math
from bisect import bisect_left, insort

_SMOOTHING = 0.1  # weight of the newest duration
_FIRST = 6  # durations of a size whose least one counts
_GUESS = 0.1  # cost of a further row, of the first one's, before any was measured
_MOST_ROWS = 256  # of steps whose duration tells what rows cost


class StepSeconds:
    """Seconds of a step by its rows: the tokens that it computes, of however many sequences.

    Durations also depend on the length of the sequences and on what else the machine does. So one moves those of
    all numbers of rows by the same factor, and that of its own by more.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._rows: list[int] = []
        self._seen: dict[int, int] = {}

    def measure(self, rows: int, seconds: float, *, is_settled: bool = False) -> None:
        """Record a step.

        Args:
            rows: of the step.
            seconds: that it took.
            is_settled: it is not one of the first two of its size, in which kernels are recorded.
        """
        if rows > _MOST_ROWS or seconds <= 0:
            return
        self._seen[rows] = seen = self._seen.get(rows, 0) + 1
        if seen <= 2 and not is_settled:
            return
        if rows not in self._seconds:
            insort(self._rows, rows)
            self._seconds[rows] = seconds
        if seen <= _FIRST:
            self._seconds[rows] = min(self._seconds[rows], seconds)
            return
        error = math.log(seconds / self._seconds[rows])
        factor = math.exp(_SMOOTHING * min(max(error, -1.0), 1.0))
        for known in self._rows:
            self._seconds[known] *= factor
        self._seconds[rows] *= factor

    def of(self, rows: int) -> float:
        """Return the seconds of a step of so many rows: measured, between two that were, or a guess.

        That is not more than a step of more rows took: then something else took the time.
        """
        known = self._rows
        if not known:
            return 1.0 + _GUESS * (rows - 1)
        place = bisect_left(known, rows)
        if place == len(known):
            last = known[-1]
            each = _GUESS * self._seconds[last] / last
            if place > 1:
                each = max(each, (self._seconds[last] - self._seconds[known[-2]]) / (last - known[-2]))
            return self._seconds[last] + (rows - last) * each
        most = min([self._seconds[more] for more in known[place:]])
        high = known[place]
        if high == rows:
            return most
        if place == 0:
            return most / (1.0 + _GUESS * (high - rows) / rows)
        low = known[place - 1]
        least = min(self._seconds[low], most)
        return least + (rows - low) / (high - low) * (most - least)

    def growing(self, rows: int) -> float:
        """Return the part of a step's seconds that fewer rows would save, from 0 to 1."""
        if rows < 2:
            return 0.0
        return min((1.0 - self.of(1) / self.of(rows)) * rows / (rows - 1), 1.0)

    def table(self) -> dict[int, float]:
        """Return the seconds by rows that were measured."""
        return {rows: self._seconds[rows] for rows in self._rows}
