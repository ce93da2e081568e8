"""One end of a socket between rank 0 and another rank of its host."""

from __future__ import annotations

import select
import socket
from contextlib import suppress
from dataclasses import replace

from .messages import PREFIX_BYTES, Message, TornMessage, decode, encode, lengths


class ChannelClosed(RuntimeError):
    """The other end is closed; its process may have ended."""


class Channel:
    """Sends and receives messages, each of which has the number of the one before it plus one.

    Args:
        sock: a connected stream socket, closed with this.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sent = self._received = 0

    def fileno(self) -> int:
        """The descriptor that becomes readable."""
        return self._sock.fileno()

    def send(self, message: Message) -> int:
        """Send a message, waiting as long as the other end takes nothing; its number.

        Raises:
            ChannelClosed: nobody receives it.
        """
        self.send_bytes(encode(message, self._sent + 1))
        return self._sent

    def send_bytes(self, encoded: bytes) -> None:
        """Send a message that was encoded with the number that is next."""
        try:
            self._sock.sendall(encoded)
        except OSError as error:
            raise ChannelClosed(f"the channel is closed ({error})") from error
        self._sent += 1

    def receive(self) -> Message:
        """Wait for the next message.

        Raises:
            ChannelClosed: there is none.
            TornMessage: it is damaged, or one before it is lost.
        """
        prefix = self._take(PREFIX_BYTES, at_start=True)
        header, size = lengths(prefix)
        message = decode(self._take(header), self._take(size))
        if message.number != self._received + 1:
            raise TornMessage(f"message {message.number} follows message {self._received}")
        self._received += 1
        return replace(message, number=self._received)

    @property
    def has_news(self) -> bool:
        """``receive`` need not wait for the beginning of a message, or its end."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0))

    def end(self) -> None:
        """Send nothing more: the other end is told by ``ChannelClosed``."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close this end; a second call does nothing."""
        self._sock.close()

    def _take(self, count: int, *, at_start: bool = False) -> bytearray:
        taken = bytearray(count)
        left = memoryview(taken)
        while left:
            try:
                received = self._sock.recv_into(left)
            except OSError as error:
                raise ChannelClosed(f"the channel is closed ({error})") from error
            if not received:
                if at_start and len(left) == count:
                    raise ChannelClosed("the channel is closed")
                raise TornMessage(f"a message ends {len(left)} bytes early")
            left = left[received:]
        return taken
