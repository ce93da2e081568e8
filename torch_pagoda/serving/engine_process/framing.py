"""Frames on a stream socket: a length of four bytes, big-endian, and so many bytes; bounded both ways."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterator

MAX_FRAME = 32 * 2**20
"""Bytes of a frame; a longer one is not sent, and where one comes the other side cannot be trusted."""

_LENGTH = 4
_READ = 2**16


class FrameTooLong(ValueError):
    """A frame is longer than it may be."""


class FrameReader:
    """Cuts what comes from a socket into frames.

    Args:
        max_frame: bytes of the longest that is taken.
    """

    def __init__(self, max_frame: int = MAX_FRAME) -> None:
        self.max_frame = max_frame
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take bytes as they come; yields each frame that is complete, without its length.

        Raises:
            FrameTooLong: a frame says that it is longer than ``max_frame``; nothing after it can be read.
        """
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= _LENGTH:
                length = int.from_bytes(self._buffer[start : start + _LENGTH], "big")
                if length > self.max_frame:
                    raise FrameTooLong(f"a frame of {length} bytes comes, at most {self.max_frame} are taken")
                end = start + _LENGTH + length
                if len(self._buffer) < end:
                    return
                frame = bytes(self._buffer[start + _LENGTH : end])
                start = end
                yield frame
        finally:
            del self._buffer[:start]

    def receive(self, sock: socket.socket, most: int = 4 * 2**20) -> tuple[list[bytes], bool]:
        """Read what a non-blocking socket has, about ``most`` bytes at once.

        Returns:
            The complete frames, and whether the other side can still send.

        Raises:
            FrameTooLong: as ``feed``.
        """
        frames: list[bytes] = []
        count = 0
        while count < most:
            try:
                data = sock.recv(_READ)
            except (BlockingIOError, InterruptedError):
                return frames, True
            except OSError:  # the other side is gone
                return frames, False
            if not data:
                return frames, False
            count += len(data)
            frames += self.feed(data)
            if len(data) < _READ:
                break
        return frames, True


class FrameWriter:
    """Sends frames on a non-blocking socket and keeps what it does not take yet.

    Args:
        max_frame: bytes of the longest that is sent.
    """

    def __init__(self, max_frame: int = MAX_FRAME) -> None:
        self.max_frame = max_frame
        self.num_unsent = 0
        """Bytes that wait."""
        self._unsent: deque[memoryview] = deque()

    def put(self, frame: bytes | bytearray) -> None:
        """Let a frame wait for the next ``send``.

        Raises:
            FrameTooLong: it is longer than ``max_frame``.
        """
        if len(frame) > self.max_frame:
            raise FrameTooLong(f"a frame of {len(frame)} bytes is not sent, at most {self.max_frame} are")
        data = len(frame).to_bytes(_LENGTH, "big") + frame
        self._unsent.append(memoryview(data))
        self.num_unsent += len(data)

    def send(self, sock: socket.socket) -> bool:
        """Send as much as the socket takes at once; returns whether the other side is there."""
        while self._unsent:
            first = self._unsent[0]
            try:
                sent = sock.send(first)
            except (BlockingIOError, InterruptedError):
                return True
            except OSError:
                return False
            self.num_unsent -= sent
            if sent == len(first):
                self._unsent.popleft()
            else:
                self._unsent[0] = first[sent:]
        return True
