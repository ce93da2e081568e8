"""The event loop's end of a socket to an engine: sends messages, receives messages, detects the loss."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from msgspec import DecodeError
from msgspec.msgpack import Decoder, Encoder

from .framing import FrameReader, FrameTooLong, FrameWriter
from .wire import FromEngine, Start, ToEngine

MAX_UNSENT = 64 * 2**20
"""Bytes that may wait until the engine reads them."""


class NotTaken(RuntimeError):
    """The engine does not read its messages."""


class EngineConnection:
    """Sends messages to one engine and receives its messages, in the running event loop.

    Args:
        sock: a connected stream socket; closed with this object.
        on_message: called with each message.
        on_lost: called once with the reason, when the engine closes its end or sends an invalid message.
    """

    def __init__(
        self, sock: socket.socket, on_message: Callable[[FromEngine], None], on_lost: Callable[[str], None]
    ) -> None:
        self._sock = sock
        self._on_message = on_message
        self._on_lost = on_lost
        self._reader = FrameReader()
        self._writer = FrameWriter()
        self._encoder = Encoder()
        self._decoder: Decoder[FromEngine] = Decoder(FromEngine)
        self._loop = asyncio.get_running_loop()
        self._is_open = True
        self._is_writing = False
        sock.setblocking(False)
        self._loop.add_reader(sock, self._read)

    def send(self, message: ToEngine | Start) -> None:
        """Send a message, or queue it until the engine reads; a no-op after the engine is lost.

        Raises:
            NotTaken: too many bytes wait already.
            FrameTooLong: the message exceeds the maximum frame.
        """
        if not self._is_open:
            return
        if self._writer.num_unsent > MAX_UNSENT:
            raise NotTaken(f"{self._writer.num_unsent} bytes wait; the engine does not read them")
        self._writer.put(self._encoder.encode(message))
        if not self._is_writing:
            self._write()

    def close(self) -> None:
        """Close the socket, which ends the engine; ``on_lost`` is not called any more."""
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._sock)
            if self._is_writing:
                self._loop.remove_writer(self._sock)
            self._sock.close()

    def _write(self) -> None:
        # An engine that is gone is noticed by the reader, which hears what it said before.
        waits = self._writer.send(self._sock) and self._writer.num_unsent > 0
        if waits != self._is_writing:
            self._is_writing = waits
            if waits:
                self._loop.add_writer(self._sock, self._write)
            else:
                self._loop.remove_writer(self._sock)

    def _read(self) -> None:
        try:
            frames, is_open = self._reader.receive(self._sock)
            for frame in frames:
                message = self._decoder.decode(frame)
                if self._is_open:
                    self._on_message(message)
        except (DecodeError, FrameTooLong, RecursionError) as error:
            self._lose(f"the engine sent an invalid message ({error})")
            return
        if not is_open:
            self._lose("the engine has ended")

    def _lose(self, reason: str) -> None:
        if self._is_open:
            self.close()
            self._on_lost(reason)
