"""Processes of their own for work that may never end: they answer one request after the other, and can be killed."""

from __future__ import annotations

import asyncio
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Lock, Timer

LENGTH = struct.Struct(">I")
"""Before each request and each answer: its bytes."""


class ChildBusy(RuntimeError):
    """More requests wait than ``ChildProcess.max_waiting``."""


class ChildFailed(ValueError):
    """A request was not answered: it took too long, or the process ended."""


class ChildProcess:
    """A Python module that runs in a process, begun with the first request.

    Args:
        module: that reads frames, ``LENGTH`` and as many bytes, and answers each with one, in turn. It may end after
            an answer, with status 0.
        seconds: that one request may take; then the process is killed, and the next request begins a new one.
        max_waiting: requests that may wait for their turn.
        start_seconds: None: the time for the first request counts from the start of the process; else the module
            writes an empty frame when it is ready, within so many seconds.
    """

    def __init__(
        self,
        module: str,
        seconds: float,
        max_waiting: int = 16,
        start_seconds: float | None = None,
    ) -> None:
        self.seconds = seconds
        self.max_waiting = max_waiting
        self._module = module
        self._start_seconds = start_seconds
        self._waiting = 0
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=module.rpartition(".")[2])

    async def ask(self, request: bytes) -> bytes:
        """The answer.

        Raises:
            ChildBusy: too many wait.
            ChildFailed: no answer in time, or none at all.
        """
        if self._waiting >= self.max_waiting:
            raise ChildBusy(f"{self._waiting} requests wait; ask again later")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._call, request)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """End the process, and the call that waits for it; a later call begins a new one."""
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._end()

    def _call(self, request: bytes) -> bytes:
        with self._lock:
            process = self._running()
            answer = _within(self.seconds, process, request)
            if answer is None and process.wait() == 0:
                answer = _within(self.seconds, self._running(), request)
            if answer is None:
                self._end()
                raise ChildFailed(f"there was no answer within {self.seconds:g} s")
        return answer

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            # -P: no module of the working directory takes the place of an installed one.
            command = [sys.executable, "-P", "-m", self._module]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            if self._start_seconds is not None and _within(self._start_seconds, self._process, None) is None:
                self._end()
                raise ChildFailed(f"{self._module} did not start")
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _within(seconds: float, process: subprocess.Popen[bytes], request: bytes | None) -> bytes | None:
    """The answer to a request, or the first frame for None; None where the process ended before it."""
    limit = Timer(seconds, process.kill)
    limit.daemon = True
    limit.start()
    try:
        return _exchange(process, request)
    finally:
        limit.cancel()


def _exchange(process: subprocess.Popen[bytes], request: bytes | None) -> bytes | None:
    assert process.stdin is not None and process.stdout is not None
    if request is not None:
        try:
            process.stdin.write(LENGTH.pack(len(request)) + request)
            process.stdin.flush()
        except OSError:
            return None
    head = process.stdout.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    answer = process.stdout.read(length)
    return answer if len(answer) == length else None
