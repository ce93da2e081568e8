"""Renders markdown in a child process, so that no text can block the streams of others or run forever."""

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
"""Length prefix of each request and response, in bytes."""


class RenderBusy(RuntimeError):
    """More calls wait than ``MarkdownRenderer.max_waiting``."""


class RenderFailed(ValueError):
    """A text was not rendered: it took too long, or the process ended."""


class MarkdownRenderer:
    """A rendering process; it starts with the first call.

    Args:
        seconds: limit on one call, all its texts together; then the process is killed, and the next call starts
            another.
        max_waiting: limit on waiting calls.
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
            RenderBusy: too many calls wait.
            RenderFailed: no answer in time, or none at all.
        """
        if self._waiting >= self.max_waiting:
            raise RenderBusy(f"{self._waiting} requests wait; retry later")
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
        """End the process and the call that waits for it; a later call starts another."""
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
                raise RenderFailed(f"the text was not rendered within {self.seconds:g} s; show it as it is")
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
    """The answer to a request; None if the process ended before it."""
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
