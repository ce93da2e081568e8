"""Connections of the server: what stays of one that has ended."""

from __future__ import annotations

import asyncio
import gc
import select
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
import uvicorn
import uvloop

from torch_pagoda.serving.http import http_protocol
from torch_pagoda.serving.http.http_protocol import MAX_HEAD_BYTES, uvicorn_options
from torch_pagoda.serving.server import bind
from torch_pagoda.serving.settings import Settings

GET = b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
HEAD = b"POST / HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 100\r\n\r\n"
STALL_SECONDS = 0.3
BUFFER = 32 * 1024
LARGE = 1024 * 1024
PATIENCE = 20


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


async def large(scope: Any, receive: Any, send: Any) -> None:
    """More than the buffers of both systems and the server's own hold."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % LARGE)]})
    await send({"type": "http.response.body", "body": bytes(LARGE)})


class Waiting:
    """Begins an answer and waits until its client has gone."""

    def __init__(self) -> None:
        self.told = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        self.told.set()


async def serve(app: Any, visit: Callable[[int], Awaitable[None]]) -> tuple[list[dict[str, Any]], int]:
    """What the loop was told of errors, and connections in memory after those of ``visit`` and the last timer."""
    settings = Settings(port=0, stream_stall_timeout=STALL_SECONDS)
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    config = uvicorn.Config(app, **uvicorn_options(settings))
    server = uvicorn.Server(config)
    sock = bind(settings)
    assert sock is not None
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)  # connections have it from the listening socket
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


@pytest.mark.parametrize("app", [late, at_once, large])
def test_nothing_stays_of_a_connection_that_was_lost(app: Any) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        errors, left = runner.run(serve(app, leave))
    assert errors == [] and left == 0


async def connect(port: int) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    return connection


@pytest.mark.parametrize("count", [1, 40])
def test_a_connection_whose_reader_takes_nothing_is_dropped(count: int) -> None:
    async def ask_and_wait(port: int) -> None:
        connection = await connect(port)
        await asyncio.get_running_loop().sock_sendall(connection, GET * count)
        watch = select.poll()
        watch.register(connection, 0)  # errors and the end alone
        async with asyncio.timeout(PATIENCE):
            while not watch.poll(0):
                await asyncio.sleep(0.05)
        connection.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        errors, left = runner.run(serve(large, ask_and_wait))
    assert errors == [] and left == 0


def test_a_reader_that_is_slow_gets_all_and_may_ask_again() -> None:
    async def read_slowly(port: int) -> None:
        loop = asyncio.get_running_loop()
        connection = await connect(port)
        for _ in range(2):
            await loop.sock_sendall(connection, GET)
            answer = b""
            while len(answer.partition(b"\r\n\r\n")[2]) < LARGE:
                answer += await asyncio.wait_for(loop.sock_recv(connection, 16 * 1024), PATIENCE)
                await asyncio.sleep(0.01)
            await asyncio.sleep(3 * STALL_SECONDS)
        connection.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        errors, left = runner.run(serve(large, read_slowly))
    assert errors == [] and left == 0


def test_a_request_is_told_that_its_client_has_gone_though_another_waits_behind_it() -> None:
    async def run() -> None:
        app = Waiting()

        async def begin_and_leave(port: int) -> None:
            connection = await connect(port)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(connection, GET * 2)
            assert (await asyncio.wait_for(loop.sock_recv(connection, 100), PATIENCE)).startswith(b"HTTP/1.1 200")
            connection.close()
            await asyncio.wait_for(app.told.wait(), PATIENCE)

        assert await serve(app, begin_and_leave) == ([], 0)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


@pytest.mark.parametrize("behind", [b"no HTTP\r\n\r\n", b"GET / HTTP/1.1\r\nlong: " + b"x" * MAX_HEAD_BYTES])
def test_nothing_is_written_into_an_answer_though_another_waits_behind_it(behind: bytes) -> None:
    async def run() -> bytes:
        parts = []

        async def break_off(port: int) -> None:
            connection = await connect(port)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(connection, GET * 2)
            with suppress(ConnectionResetError):
                while part := await asyncio.wait_for(loop.sock_recv(connection, BUFFER), PATIENCE):
                    if not parts:
                        await loop.sock_sendall(connection, behind)
                    parts.append(part)
            connection.close()

        await serve(Waiting(), break_off)
        return b"".join(parts)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        read = runner.run(run())
    assert read.count(b"HTTP/1.1") == 1 and b"begun" in read


async def refusing(scope: Any, receive: Any, send: Any) -> None:
    """An application that answers 413 without reading the body, as a limit does."""
    await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"3")]})
    await send({"type": "http.response.body", "body": b"big"})


@pytest.mark.parametrize("head", ["POST / HTTP/1.1\r\nconnection: close", "POST / HTTP/1.0", "POST / HTTP/1.1"])
def test_a_client_that_is_still_sending_reads_the_answer(head: str) -> None:
    size = 32 * LARGE
    answers = []

    async def send_and_read(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"{head}\r\nhost: 127.0.0.1\r\ncontent-length: {size}\r\n\r\n".encode())
        for _ in range(32):
            writer.write(bytes(LARGE))
            await writer.drain()
        answers.append(await reader.readuntil(b"big"))
        if "close" in head or "1.0" in head:
            assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        errors, left = runner.run(serve(refusing, send_and_read))
    assert answers[0].startswith(b"HTTP/1.1 413") and errors == [] and left == 0


def test_a_body_that_nobody_reads_is_dropped_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "MAX_DISCARDED", LARGE)

    async def send_on(port: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n" % (1 << 40))
        with pytest.raises(ConnectionError):
            async with asyncio.timeout(PATIENCE):
                while True:
                    writer.write(bytes(LARGE))
                    await writer.drain()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        errors, left = runner.run(serve(refusing, send_on))
    assert errors == [] and left == 0


async def in_parts(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for part in (b"data: 1\n\n", b"data: 2\n\n"):
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b"end"})


@pytest.mark.parametrize(("version", "is_chunked"), [("1.0", False), ("1.1", True)])
def test_clients_of_http_1_0_get_no_chunks(version: str, is_chunked: bool) -> None:
    answers = []

    async def ask(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET / HTTP/{version}\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n".encode())
        answers.append(await reader.read())
        writer.close()
        await writer.wait_closed()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        errors, left = runner.run(serve(in_parts, ask))
    head, _, body = answers[0].partition(b"\r\n\r\n")
    assert (b"transfer-encoding: chunked" in head.lower()) is is_chunked and b"connection: close" in head.lower()
    assert (body == b"data: 1\n\ndata: 2\n\nend") is not is_chunked
    assert errors == [] and left == 0
