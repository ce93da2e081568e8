"""The socket that a server listens at."""

from __future__ import annotations

import asyncio
import socket

import pytest

from torch_pagoda.serving.server import SEND_BUFFER_BYTES, bind
from torch_pagoda.serving.settings import Settings


@pytest.mark.anyio
async def test_its_connections_hold_little() -> None:
    """A reader that takes nothing is noticed before the system has stored megabytes for it."""
    sock = bind(Settings(port=0))
    assert sock is not None
    loop = asyncio.get_running_loop()
    with sock, socket.socket() as client:
        sock.listen()
        sock.setblocking(False)
        client.setblocking(False)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await loop.sock_connect(client, sock.getsockname())
        connection, _ = await loop.sock_accept(sock)
        with connection:
            connection.setblocking(False)
            taken = 0
            with pytest.raises(BlockingIOError):
                while taken < 1 << 22:
                    taken += connection.send(bytes(1 << 12))
    assert taken <= 4 * SEND_BUFFER_BYTES


def test_a_port_that_is_taken() -> None:
    first = bind(Settings(port=0))
    assert first is not None
    with first:
        first.listen()
        with pytest.raises(ValueError, match=r"cannot listen on .*choose others"):
            bind(Settings(port=first.getsockname()[1]))
