"""Many connections at once that are slow, or go: what they take of a real server, and what the others notice."""

from __future__ import annotations

import asyncio
import json
import random
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest

from served import PATIENCE, Served, read_until

pytestmark = pytest.mark.slow

SENDERS = 500
LEAVING = 500
READERS = 1000
KB_PER_CONNECTION = 150
HEADER_SECONDS, BODY_SECONDS, STALL_SECONDS = 4, 6, 5
OPTIONS = (
    *("--max-num-seqs", "128", "--max-queue", "4000", "--max-model-len", "512", "--max-connections", "4000"),
    *("--header-timeout", str(HEADER_SECONDS), "--body-timeout", str(BODY_SECONDS)),
    *("--stream-stall-timeout", str(STALL_SECONDS), "--log-requests", "none"),
)
SHORT = {"prompt": "Return the", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip(f"a process may have {hard} open files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))  # the server's, too
    served = Served(*OPTIONS)
    try:
        read_until(served.post("/v1/completions", SHORT), b"usage")  # what the first request alone takes
        yield served
    finally:
        served.kill()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def memory(server: Served) -> float:
    """kB of the API process."""
    return psutil.Process(server.process.pid).memory_info().rss / 1024


def request(body: dict[str, Any]) -> bytes:
    raw = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Connection: close\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw


async def connect(server: Served, receive_buffer: int | None = None) -> socket.socket:
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", server.port))
    return connection


async def read_to_the_end(connection: socket.socket) -> bytes:
    loop, parts = asyncio.get_running_loop(), []
    with suppress(ConnectionError):
        while part := await loop.sock_recv(connection, 65536):
            parts.append(part)
    return b"".join(parts)


async def whole_answers(server: Served, count: int = 8, patience: float = PATIENCE) -> list[str]:
    """Texts of as many streams as people read them."""

    async def one() -> str:
        connection = await connect(server)
        body = {**SHORT, "max_tokens": 64, "stream": True}
        await asyncio.get_running_loop().sock_sendall(connection, request(body))
        answer = await asyncio.wait_for(read_to_the_end(connection), patience)
        connection.close()
        assert b"data: [DONE]" in answer, answer[-300:]
        events = [line[6:] for line in answer.splitlines() if line.startswith(b"data: {")]
        return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])

    return list(await asyncio.gather(*(one() for _ in range(count))))


def test_slow_senders_end_in_408(server: Served) -> None:
    async def run() -> dict[str, float]:
        loop = asyncio.get_running_loop()
        before = memory(server)
        head, body = request(SHORT).split(b"\r\n\r\n")

        async def send(text: bytes, drip: bytes) -> tuple[bytes, float]:
            connection, begin = await connect(server), time.monotonic()
            await loop.sock_sendall(connection, text)

            async def dripping() -> None:
                with suppress(ConnectionError):
                    while True:
                        await asyncio.sleep(0.5)
                        await loop.sock_sendall(connection, drip)

            drips = asyncio.create_task(dripping())
            answer = await asyncio.wait_for(read_to_the_end(connection), PATIENCE)
            drips.cancel()
            connection.close()
            return answer, time.monotonic() - begin

        half = SENDERS // 2
        heads = [asyncio.create_task(send(head[:60], b"x")) for _ in range(half)]
        bodies = [asyncio.create_task(send(head + b"\r\n\r\n" + body[:5], b" ")) for _ in range(half)]
        await asyncio.sleep(1)
        held, served = memory(server), 0
        while not all(task.done() for task in (*heads, *bodies)):
            served += len(await whole_answers(server))
        results = {"heads": await asyncio.gather(*heads), "bodies": await asyncio.gather(*bodies)}
        for kind, answers in results.items():
            assert {answer.split(b"\r\n")[0].split()[1] for answer, _ in answers} == {b"408"}, kind
        assert all(b'"body_timeout"' in answer for answer, _ in results["bodies"])
        # None is ended before its time.
        assert min(seconds for _, seconds in results["heads"]) > HEADER_SECONDS - 0.5
        assert min(seconds for _, seconds in results["bodies"]) > BODY_SECONDS - 0.5
        return {
            "kB a connection": (held - before) / SENDERS,
            "slowest head": max(seconds for _, seconds in results["heads"]),
            "slowest body": max(seconds for _, seconds in results["bodies"]),
            "normal answers beside": served,
        }

    found = asyncio.run(run())
    print(f"\nslow senders: {found}")
    assert found["kB a connection"] < KB_PER_CONNECTION and found["normal answers beside"] >= 8
    server.becomes_idle()


def test_clients_that_go_leave_nothing_behind(server: Served) -> None:
    async def run() -> dict[str, float]:
        loop, draw = asyncio.get_running_loop(), random.Random(3)
        gone = server.figure("pagoda:disconnects_total")
        tokens = server.figure("vllm:generation_tokens_total")
        at_once = asyncio.Semaphore(50)

        async def leave(streams: bool) -> None:
            async with at_once:
                connection = await connect(server)
                await loop.sock_sendall(connection, request({**SHORT, "max_tokens": 480, "stream": streams}))
                await asyncio.sleep(draw.uniform(0.05, 0.5))
                connection.close()

        await asyncio.gather(*(leave(i % 2 == 0) for i in range(LEAVING)))
        await asyncio.to_thread(server.becomes_idle)
        return {
            "disconnects counted": server.figure("pagoda:disconnects_total") - gone,
            "tokens generated": server.figure("vllm:generation_tokens_total") - tokens,
        }

    found = asyncio.run(run())
    print(f"\nleaving: {found}")
    assert found["disconnects counted"] == LEAVING
    assert found["tokens generated"] < LEAVING * 480


def test_slow_readers_are_cut_and_nobody_waits_for_them(server: Served) -> None:
    async def run() -> dict[str, float]:
        loop = asyncio.get_running_loop()
        before, cut = memory(server), server.figure("pagoda:disconnects_total")
        # 350 kB of events: more than the system holds for either side.
        body = {**SHORT, "max_tokens": 480, "stream": True, "logprobs": 20}

        async def crawl() -> None:
            with await connect(server, receive_buffer=4096) as connection, suppress(ConnectionError):
                await loop.sock_sendall(connection, request(body))
                while await loop.sock_recv(connection, 1):
                    await asyncio.sleep(0.1)

        crawlers = [asyncio.create_task(crawl()) for _ in range(READERS)]
        held, answers = 0.0, 0
        deadline, count = time.monotonic() + 10 * PATIENCE, 0.0
        while count < READERS and time.monotonic() < deadline:
            answers += len(await whole_answers(server, patience=5 * PATIENCE))  # they queue behind the others
            held = max(held, memory(server))
            count = await asyncio.to_thread(server.figure, "pagoda:disconnects_total") - cut
        for task in crawlers:  # what came before the end they could read for long
            task.cancel()
        await asyncio.gather(*crawlers, return_exceptions=True)
        return {
            "cut": count,
            "kB a connection": (held - before) / READERS,
            "normal answers beside": answers,
        }

    found = asyncio.run(run())
    print(f"\nslow readers: {found}")
    assert found["cut"] == READERS
    assert found["kB a connection"] < KB_PER_CONNECTION and found["normal answers beside"] >= 8
    server.becomes_idle()
