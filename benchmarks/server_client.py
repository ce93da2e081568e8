"""A small client of completions over raw sockets: what it costs must not be taken for the server's.

So what comes is only kept, with its times, while the server works, and read afterwards.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Answer:
    """One request's answer, as it was read.

    Attributes:
        status: of HTTP; 0: the connection ended before there was one.
        seconds: from sending the request, over a connection that the system has made, to the end.
        ended: when that was, in seconds of ``time.monotonic``.
        events: when each event with a choice was read, in seconds of ``time.monotonic``.
        characters: of the text up to and with each of them.
        text: of all events.
        usage: OpenAI's object, from the last event or the body.
        finish_reason: of the choice.
        body: of an answer that was not streamed.
    """

    status: int = 0
    seconds: float = 0.0
    ended: float = 0.0
    events: list[float] = field(default_factory=list)
    characters: list[int] = field(default_factory=list)
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None
    body: bytes = b""

    @property
    def tokens(self) -> int:
        """Generated tokens."""
        return int(self.usage.get("completion_tokens", 0))


_EVENT = b"\ndata: "


class Exchange(asyncio.Protocol):
    """One request over a connection of its own; what comes is kept as it is, to be read when nothing is timed.

    Args:
        request: its bytes.
        leave_after: close the connection after so many events.
    """

    def __init__(self, request: bytes, leave_after: int | None = None) -> None:
        self.begin = self.end = 0.0
        self.chunks: list[tuple[float, bytes]] = []
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request, self._left = request, leave_after
        self._tail = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.begin = time.monotonic()
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.chunks.append((time.monotonic(), data))
        if self._left is not None:
            joined = self._tail + data
            self._left -= joined.count(_EVENT)
            self._tail = joined[1 - len(_EVENT) :]  # what a chunk cuts in two is counted with the next one
            if self._left <= 0:
                self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.end = time.monotonic()
        if not self.over.done():
            self.over.set_result(None)


async def exchange(
    port: int, body: dict[str, Any], path: str = "/v1/completions", *, leave_after: int | None = None
) -> Exchange:
    """Send one request and wait until its connection is closed.

    Args:
        port: of the server on this machine.
        body: as JSON.
        path: of the route.
        leave_after: close the connection after so many events.
    """
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(content)}\r\nconnection: close\r\n\r\n".encode() + content
    loop = asyncio.get_running_loop()
    transport, found = await loop.create_connection(lambda: Exchange(request, leave_after), "127.0.0.1", port)
    try:
        await found.over
    finally:
        transport.close()
    return found


def read_answer(found: Exchange) -> Answer:
    """Read what came. Events end with an empty line; chunks of the transfer are not told apart, since an event is one
    line."""
    answer = Answer(seconds=found.end - found.begin, ended=found.end)
    content = b"".join(data for _, data in found.chunks)
    head, end, answer.body = content.partition(b"\r\n\r\n")
    if not end:
        return answer
    answer.status = int(head.split(maxsplit=2)[1])
    if b"text/event-stream" not in head.lower():
        _read_body(answer)
        return answer
    line = b""
    for now, data in found.chunks:
        *complete, line = (line + data).split(b"\n")
        for text in complete:
            if text.startswith(b"data: {"):
                _read_event(answer, now, json.loads(text[6:]))
    return answer


async def ask(
    port: int, body: dict[str, Any], path: str = "/v1/completions", *, leave_after: int | None = None
) -> Answer:
    """``exchange``, and what came."""
    return read_answer(await exchange(port, body, path, leave_after=leave_after))


def _read_event(answer: Answer, now: float, event: dict[str, Any]) -> None:
    if "error" in event:
        answer.finish_reason = "error"
        return
    if event.get("usage"):
        answer.usage = event["usage"]
    for choice in event.get("choices", ()):
        answer.events.append(now)
        answer.text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        answer.characters.append(len(answer.text))
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason


def _read_body(answer: Answer) -> None:
    try:
        content = json.loads(answer.body)
    except ValueError:
        return
    if isinstance(content, dict):
        answer.usage = content.get("usage") or {}
        for choice in content.get("choices", ()):
            answer.text += choice.get("text") or ""
            answer.finish_reason = choice.get("finish_reason")


async def get(port: int, path: str) -> tuple[int, bytes]:
    """Status and body of a GET."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nconnection: close\r\n\r\n".encode())
        status = int((await reader.readline()).split()[1])
        while (await reader.readline()).strip():
            pass
        return status, await reader.read()
    finally:
        writer.close()


def metric(text: bytes, name: str) -> float:
    """The sum of a metric's samples in what ``/metrics`` says; 0 where there is none."""
    total = 0.0
    for line in text.decode().splitlines():
        if line.startswith((f"{name}{{", f"{name} ")):
            total += float(line.rsplit(" ", 1)[1])
    return total
