"""Engine processes: how one is started and ended, and how often another is."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

_POLL_SECONDS = 0.05


class EngineProcess:
    """One engine process, started here, with a socket to it.

    It has no terminal's signals, as it leads a session of its own; its stdout goes to stderr, which is ours. It ends
    when the socket is closed, whoever closes it: also when this process is killed.

    Args:
        argv: the command; the number of its socket's file descriptor is added at the end.

    Attributes:
        sock: our end of the socket.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self.sock, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [*argv, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except OSError:
            self.sock.close()
            raise
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        """Of the process, and of its group."""
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.poll()

    async def wait(self) -> int:
        """Wait for its end; returns the exit status."""
        while (status := self._process.poll()) is None:
            await asyncio.sleep(_POLL_SECONDS)
        return status

    async def end(self, seconds: float) -> int:
        """Wait for its end after the socket was closed, kill it when that takes longer, and end its children.

        Returns:
            The exit status.
        """
        try:
            status = await asyncio.wait_for(self.wait(), seconds)
        except TimeoutError:
            self.kill()
            status = await self.wait()
        self._kill_group()
        return status

    def kill(self) -> None:
        """End it at once, with its children."""
        self._kill_group()
        with suppress(OSError):
            self._process.kill()

    def _kill_group(self) -> None:
        with suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)


class RestartLimit:
    """So many restarts in so many seconds.

    Args:
        most: how many; 0 for none at all.
        seconds: in any stretch of this length.
        clock: seconds.
    """

    def __init__(self, most: int = 3, seconds: float = 600.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self.seconds = seconds
        self._clock = clock
        self._times: deque[float] = deque()

    def allows_one(self) -> bool:
        """Whether there may be another one now; if so, it counts."""
        now = self._clock()
        while self._times and self._times[0] <= now - self.seconds:
            self._times.popleft()
        if len(self._times) >= self.most:
            return False
        self._times.append(now)
        return True
