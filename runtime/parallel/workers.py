"""The other ranks on this host: child processes of rank 0, and how they end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ..process_state import process_state
from .channel import Channel

COMMAND = (sys.executable, "-P", "-m", "torch_pagoda.rank")
"""Starts one rank; its arguments follow."""


@dataclass(frozen=True)
class Worker:
    """A process that runs one rank.

    Attributes:
        rank: 1 or more.
        process: it.
        pidfd: a descriptor that becomes readable when it ends.
        channel: to it.
    """

    rank: int
    process: subprocess.Popen[bytes]
    pidfd: int
    channel: Channel

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    @property
    def name(self) -> str:
        """For messages, behind "rank n"."""
        return f"(pid {self.process.pid})"

    @property
    def is_stopped(self) -> bool:
        """A signal or a debugger holds it up."""
        return process_state(self.process.pid) in ("T", "t")

    def how_it_ended(self) -> str:
        """In words; waits for the end, which must have come."""
        status = self.process.wait()
        return f"died with signal {-status}" if status < 0 else f"ended with status {status}"

    def wait(self, seconds: float) -> None:
        """Wait for its end, so long at most."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(max(seconds, 0.0))

    def kill(self) -> None:
        """End it at once, also if it is stopped, and close its descriptors; once."""
        with suppress(OSError):
            self.process.kill()
        self.process.wait()
        os.close(self.pidfd)
        self.channel.close()


def no_more(rank: int) -> Mapping[str, str]:
    """An environment that has nothing besides."""
    return {}


def start_workers(
    command: Sequence[str],
    size: int,
    stages: int,
    meeting: int,
    threads: int,
    environment: Callable[[int], Mapping[str, str]] = no_more,
) -> list[Worker]:
    """Start ranks 1 to ``size - 1``. They end when the calling thread does, and ignore Ctrl-C.

    Args:
        command: starts one; ``torch_pagoda.rank`` says which arguments follow.
        size: number of ranks, this process included.
        stages: that they run, of a pipeline.
        meeting: descriptor of the file in which the ranks find each other.
        threads: of each.
        environment: what each rank's environment has besides.

    Raises:
        OSError: a process could not be started; none is left.
    """
    workers: list[Worker] = []
    try:
        for rank in range(1, size):
            own = {"OMP_NUM_THREADS": str(threads), **environment(rank)}
            workers.append(_start(command, (meeting, rank, size, stages), own))
    except BaseException:
        for worker in workers:
            worker.kill()
        raise
    return workers


def _start(command: Sequence[str], place: tuple[int, int, int, int], environment: Mapping[str, str]) -> Worker:
    ours, theirs = socket.socketpair()
    with theirs:
        numbers = (theirs.fileno(), *place, os.getpid())
        try:
            process = subprocess.Popen(
                [*command, *map(str, numbers)],
                stdin=subprocess.DEVNULL,
                stdout=2,
                env={**os.environ, **environment},
                pass_fds=[theirs.fileno(), place[0]],
            )
        except OSError:
            ours.close()
            raise
    return Worker(place[1], process, os.pidfd_open(process.pid), Channel(ours))
