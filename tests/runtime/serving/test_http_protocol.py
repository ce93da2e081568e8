"""Connections of the server: what stays of one that has ended."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
import uvloop

from torch_pagoda.runtime.serving.http.http_protocol import uvicorn_options
from torch_pagoda.runtime.serving.server import bind
from torch_pagoda.runtime.serving.settings import Settings

HEAD = b"POST / HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 100\r\n\r\n"
STALL_SECONDS = 0.3


async def late(scope: Any, receive: Any, send: Any) -> None:
    """An application that answers without having read the body, and is complete when its client has gone."""
    await send({"type": "http.response.start", "status": 408, "headers": [(b"content-length", b"0")]})
    while (await receive())["type"] != "http.disconnect":
        pass
    await send({"type": "http.response.body", "body": b""})
    scope["state"]["abort"]()


async def at_once(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 408, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


async def serve(app: Any, visit: Callable[[int], Awaitable[None]]) -> tuple[list[dict[str, Any]], int]:
    """What the loop was told of errors, and connections in memory after those of ``visit`` and the last timer."""
    settings = Settings(port=0, stream_stall_timeout=STALL_SECONDS)
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    config = uvicorn.Config(app, **uvicorn_options(settings))
    server = uvicorn.Server(config)
    sock = bind(settings)
    assert sock is not None
    running = asyncio.create_task(server.serve([sock]))
    while not server.started:
        await asyncio.sleep(0.01)
    await visit(sock.getsockname()[1])
    await asyncio.sleep(0.1)
    gc.collect()
    left = sum(type(each).__name__ == "HttpProtocol" for each in gc.get_objects())
    await asyncio.sleep(2 * STALL_SECONDS)
    server.should_exit = True
    await running
    return errors, left


async def leave(port: int) -> None:
    """Send half a body, read what comes, and close."""
    for _ in range(3):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"half")
        await reader.read(12)
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("app", [late, at_once])
def test_nothing_stays_of_a_connection_that_was_lost(app: Any) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        errors, left = runner.run(serve(app, leave))
    assert errors == [] and left == 0
