"""A small client of completions over raw sockets: what it costs must not be taken for the server's."""

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
        events: when each event with a choice was read, in seconds of ``time.monotonic``.
        characters: of the text up to and with each of them.
        text: of all events.
        usage: OpenAI's object, from the last event or the body.
        finish_reason: of the choice.
        body: of an answer that was not streamed.
    """

    status: int = 0
    seconds: float = 0.0
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


async def ask(
    port: int, body: dict[str, Any], path: str = "/v1/completions", *, leave_after: int | None = None
) -> Answer:
    """Send one request over a connection of its own and read all of its answer.

    Args:
        port: of the server on this machine.
        body: as JSON; ``stream`` says how the answer is read.
        path: of the route.
        leave_after: close the connection after so many events.
    """
    answer = Answer()
    content = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    begin = time.monotonic()
    try:
        head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(content)}\r\nconnection: close\r\n\r\n".encode() + content)
        await writer.drain()
        status = await reader.readline()
        answer.status = int(status.split()[1]) if status else 0
        while (await reader.readline()).strip():
            pass
        if body.get("stream") and answer.status == 200:
            await _read_events(reader, answer, leave_after)
        else:
            answer.body = await reader.read()
            _read_body(answer)
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()
    answer.seconds = time.monotonic() - begin
    return answer


async def _read_events(reader: asyncio.StreamReader, answer: Answer, leave_after: int | None) -> None:
    """Events end with an empty line; chunks of the transfer are not told apart, since an event is one line."""
    while True:
        line = await reader.readline()
        if not line:
            return
        if not line.startswith(b"data: "):
            continue
        now = time.monotonic()
        if line.startswith(b"data: [DONE]"):
            return
        event = json.loads(line[6:])
        if "error" in event:
            answer.finish_reason = "error"
            continue
        if event.get("usage"):
            answer.usage = event["usage"]
        for choice in event.get("choices", ()):
            answer.events.append(now)
            answer.text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            answer.characters.append(len(answer.text))
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        if leave_after is not None and len(answer.events) >= leave_after:
            return


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
