"""A limit on restarts of processes, so that what fails at once is not started for ever."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable


class RestartLimit:
    """A limit on restarts per time.

    Args:
        most: maximum restarts; 0: none.
        seconds: length of the sliding window.
        clock: the current time in seconds.
    """

    def __init__(self, most: int = 3, seconds: float = 600.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self.seconds = seconds
        self._clock = clock
        self._times: deque[float] = deque()

    def allows_one(self) -> bool:
        """Whether another restart is allowed now; if so, count it."""
        now = self._clock()
        while self._times and self._times[0] <= now - self.seconds:
            self._times.popleft()
        if len(self._times) >= self.most:
            return False
        self._times.append(now)
        return True
