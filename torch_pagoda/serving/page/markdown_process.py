"""Rendering in a child process, so that no text can hold up the streams of others or run for ever."""

from __future__ import annotations

import asyncio
import json
import struct
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock, Timer

LENGTH = struct.Struct(">I")
"""Precedes each request and each answer: its size in bytes."""


class RenderBusy(RuntimeError):
    """More texts wait than ``MarkdownRenderer.max_waiting``."""


class RenderFailed(ValueError):
    """A text was not rendered: it took too long, or the process ended."""


class MarkdownRenderer:
    """A process that renders; it starts with the first call.

    Args:
        seconds: limit on one call, all its texts together; the process is killed after it, and the next call starts a
            new one.
        max_waiting: limit on calls that wait for their turn.
    """

    def __init__(self, seconds: float = 5.0, max_waiting: int = 16) -> None:
        self.seconds = seconds
        self.max_waiting = max_waiting
        self._waiting = 0
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="markdown")

    async def render(self, texts: Sequence[str]) -> bytes:
        """JSON of the blocks of each text, see ``markdown.Block``.

        Raises:
            RenderBusy: too many wait.
            RenderFailed: no answer in time, or none at all.
        """
        if self._waiting >= self.max_waiting:
            raise RenderBusy(f"{self._waiting} requests wait; ask again later")
        self._waiting += 1
        request = json.dumps(list(texts)).encode()
        try:
            answer = await asyncio.get_running_loop().run_in_executor(self._thread, self._call, request)
        finally:
            self._waiting -= 1
        if not answer:
            raise RenderFailed("the text could not be rendered; show it as it is")
        return answer

    def close(self) -> None:
        """End the process, and the call that waits for it; a later call starts a new one."""
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._end()

    def _call(self, request: bytes) -> bytes:
        with self._lock:
            process = self._running()
            limit = Timer(self.seconds, process.kill)
            limit.daemon = True
            limit.start()
            try:
                answer = _exchange(process, request)
            finally:
                limit.cancel()
            if answer is None:
                self._end()
                raise RenderFailed(f"the text was not rendered within {self.seconds} s; show it as it is")
        return answer

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            # -P: no module of the working directory takes the place of an installed one.
            command = [sys.executable, "-P", "-m", f"{__package__}.markdown"]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _exchange(process: subprocess.Popen[bytes], request: bytes) -> bytes | None:
    """The answer to a request; None where the process ended before it."""
    assert process.stdin is not None and process.stdout is not None
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
