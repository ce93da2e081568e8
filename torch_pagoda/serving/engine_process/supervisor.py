"""Starts and ends engine processes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress

_POLL_SECONDS = 0.05


class EngineProcess:
    """One engine process, started here, with a socket to it.

    It leads a session of its own, so terminal signals do not reach it; its stdout goes to our stderr. It exits when
    the socket is closed, also if this process is killed.

    Args:
        argv: the command; the file descriptor of its socket is appended.

    Attributes:
        sock: our end of the socket.

    Raises:
        OSError: the process could not be started.
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
        """The process id, also the id of its group."""
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """The exit status; None while it runs; negative: the signal that ended it."""
        return self._process.poll()

    async def wait(self) -> int:
        """Wait for the exit; returns the status."""
        while (status := self._process.poll()) is None:
            await asyncio.sleep(_POLL_SECONDS)
        return status

    async def end(self, seconds: float) -> int:
        """Wait for the exit after the socket was closed, kill the process if that takes too long, and end its
        children.

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
        """Kill the process and its children."""
        self._kill_group()
        with suppress(OSError):
            self._process.kill()

    def _kill_group(self) -> None:
        with suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
