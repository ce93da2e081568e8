"""Frames on a stream socket: a length of four bytes, big-endian, then that many bytes; bounded both ways."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterator

MAX_FRAME = 32 * 2**20
"""Maximum bytes of a frame. A longer one is not sent; a peer that announces one cannot be trusted."""

_LENGTH = 4
_READ = 2**16


class FrameTooLong(ValueError):
    """A frame exceeds the maximum length."""


class FrameReader:
    """Splits received bytes into frames.

    Args:
        max_frame: maximum bytes of a frame.
    """

    def __init__(self, max_frame: int = MAX_FRAME) -> None:
        self.max_frame = max_frame
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Append received bytes; yields each complete frame, without its length.

        Raises:
            FrameTooLong: a frame announces more than ``max_frame`` bytes; nothing after it can be read.
        """
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= _LENGTH:
                length = int.from_bytes(self._buffer[start : start + _LENGTH], "big")
                if length > self.max_frame:
                    raise FrameTooLong(f"received a frame of {length} bytes; the maximum is {self.max_frame}")
                end = start + _LENGTH + length
                if len(self._buffer) < end:
                    return
                frame = bytes(self._buffer[start + _LENGTH : end])
                start = end
                yield frame
        finally:
            del self._buffer[:start]

    def receive(self, sock: socket.socket, most: int = 4 * 2**20) -> tuple[list[bytes], bool]:
        """Read the available bytes of a non-blocking socket, about ``most`` at once.

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
    """Sends frames on a non-blocking socket and keeps the bytes that the socket does not accept yet.

    Args:
        max_frame: maximum bytes of a frame.
    """

    def __init__(self, max_frame: int = MAX_FRAME) -> None:
        self.max_frame = max_frame
        self.num_unsent = 0
        """Unsent bytes."""
        self._unsent: deque[memoryview] = deque()

    def put(self, frame: bytes | bytearray) -> None:
        """Queue a frame for the next ``send``.

        Raises:
            FrameTooLong: the frame exceeds ``max_frame``.
        """
        if len(frame) > self.max_frame:
            raise FrameTooLong(f"cannot send a frame of {len(frame)} bytes; the maximum is {self.max_frame}")
        data = len(frame).to_bytes(_LENGTH, "big") + frame
        self._unsent.append(memoryview(data))
        self.num_unsent += len(data)

    def send(self, sock: socket.socket) -> bool:
        """Send as many bytes as the socket accepts at once; returns whether the peer is still there."""
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
