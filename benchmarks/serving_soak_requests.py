"""What benchmarks/serving_soak.py asks a server, and what is wrong with an answer."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import jsonschema

KEY = "soak-key"
MAX_MODEL_LEN = 320
MAX_BODY_SIZE = 2**20
BODY_TIMEOUT = 3
STOP = ["\n\n", "the "]
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Return the absolute value."}]
CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": CITY}}]

KNOWN: tuple[tuple[str, dict[str, Any]], ...] = (
    *(
        ("/v1/completions", {"prompt": prompt, "max_tokens": 40, "temperature": 0})
        for prompt in ("Return the", "class Error(", "import os\n", "\u2615\U0001f600 is")
    ),
    ("/v1/completions", {"prompt": ["def f(", "a = 1"], "n": 2, "seed": 5, "temperature": 0.8, "max_tokens": 24}),
    ("/v1/completions", {"prompt": "Return the", "n": 3, "seed": 3, "temperature": 1, "max_tokens": 30}),
    ("/v1/completions", {"prompt": "Return the ", "seed": 1, "temperature": 0.9, "max_tokens": 60, "stop": STOP}),
    ("/v1/completions", {"prompt": "Raise ", "temperature": 0, "max_tokens": 12, "logprobs": 3}),
    ("/v1/chat/completions", {"messages": MESSAGES, "temperature": 0, "max_tokens": 32}),
    ("/v1/chat/completions", {"messages": MESSAGES, "seed": 9, "n": 2, "max_tokens": 32, "top_p": 0.9}),
    ("/v1/chat/completions", {"messages": MESSAGES, "temperature": 0, "max_tokens": 8, "chat_template": TEMPLATE}),
)
"""Requests whose answers are the same whenever they are asked, streamed or not."""

BAD: tuple[tuple[str, Any, int], ...] = (
    ("/v1/completions", b'{"prompt": ', 400),
    ("/v1/completions", {"prompt": 3}, 400),
    ("/v1/completions", {"prompt": "a", "max_tokens": 10**6}, 400),
    ("/v1/completions", {"prompt": "a", "temperature": -1}, 400),
    ("/v1/completions", {"prompt": "a", "model": "none"}, 404),
    ("/v1/completions", {"prompt": "a" * (MAX_BODY_SIZE + 1)}, 413),
    ("/v1/chat/completions", {"messages": []}, 400),
    ("/v1/chat/completions", {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "other"}, 400),
    ("/v1/chat/completions", {"messages": MESSAGES, "structured_outputs": {"regex": "(("}}, 400),
    ("/v1/chat/completions", {"messages": MESSAGES, "structured_outputs": {"grammar": "start: ("}}, 400),
    ("/v1/responses", {"input": "a", "previous_response_id": "resp_1"}, 400),
    ("/v1/messages", {"messages": MESSAGES[1:]}, 400),
    ("/v1/embeddings", {"input": "a"}, 404),
    ("/nothing", {}, 404),
)


class Wrong(Exception):
    """Says what is wrong with an answer."""


@dataclass
class Answer:
    """What came for one request.

    Attributes:
        status: of HTTP; 0: the connection ended first.
        body: of an answer that was not streamed.
        events: data of the others, decoded.
        failure: the error object of a stream that ended with one.
        is_done: the stream said that it was over.
    """

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: Any = None
    events: list[dict[str, Any]] = field(default_factory=list)
    failure: dict[str, Any] | None = None
    is_done: bool = False

    def choices(self) -> list[tuple[str, Any, Any]]:
        """Text, finish reason and stop reason of each choice of OpenAI's answers."""
        if self.body is not None:
            found = sorted(self.body["choices"], key=lambda choice: choice["index"])
            texts = [c["text"] if "text" in c else c["message"]["content"] for c in found]
            return [(t, c["finish_reason"], c["stop_reason"]) for t, c in zip(texts, found, strict=True)]
        parts: dict[int, tuple[str, Any, Any]] = {}
        for event in self.events:
            for choice in event["choices"]:
                text, reason, stop = parts.get(choice["index"], ("", None, None))
                text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                parts[choice["index"]] = (
                    text,
                    choice["finish_reason"] or reason,
                    choice.get("stop_reason") if choice["finish_reason"] else stop,
                )
        return [parts[index] for index in sorted(parts)]


class Traffic:
    """Draws requests, sends them, and looks at what comes.

    Args:
        url: of the server.
        draw: decides everything.

    Attributes:
        counts: how often each kind ended how.
    """

    def __init__(self, url: str, draw: random.Random) -> None:
        self.url, self.draw = url, draw
        self.counts: Counter[str] = Counter()
        self._expected: dict[int, list[tuple[str, Any, Any]]] = {}
        self._kinds: list[tuple[int, Callable[[], Awaitable[str]]]] = [
            (30, self.known),
            (12, self.schema),
            (6, self.constrained),
            (8, self.tool),
            (5, self.responses),
            (5, self.messages),
            (4, self.scored),
            (4, self.tokens),
            (8, self.leaves),
            (5, self.late),
            (8, self.bad),
            (2, self.slow_body),
            (2, self.slow_reader),
            (3, self.looks),
        ]
        self.open()

    def open(self) -> None:
        """Connections for what follows."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=16)
        self._client = httpx.AsyncClient(base_url=self.url, timeout=120, limits=limits, trust_env=False)

    async def close(self) -> None:
        """End all connections."""
        await self._client.aclose()

    async def prepare(self) -> None:
        """Learn the answers of ``KNOWN``, one at a time, and fill the caches of grammars."""
        for i, (path, body) in enumerate(KNOWN):
            answer = await self.ask(path, body)
            if answer.status != 200:
                raise Wrong(f"{path} {body}: {answer.status} {answer.body}")
            self._expected[i] = answer.choices()
        for number in range(300):
            await self.ask("/v1/completions", self._schema_body(number) | {"max_tokens": 1})

    async def one(self) -> str:
        """A request of any kind; returns how it ended.

        Raises:
            Wrong: it did not end as it must.
        """
        kinds = [kind for _, kind in self._kinds]
        kind = self.draw.choices(kinds, [weight for weight, _ in self._kinds])[0]
        return f"{kind.__name__}: {await kind()}"

    async def ask(
        self, path: str, body: Any, *, leave_after: int | None = None, headers: dict[str, str] | None = None
    ) -> Answer:
        """Send one request and read its answer, or a few of its events."""
        answer = Answer()
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"content-type": "application/json", "authorization": f"Bearer {KEY}", **(headers or {})}
        with suppress(httpx.TransportError):
            async with self._client.stream("POST", path, content=content, headers=sent) as response:
                answer.headers = dict(response.headers)
                if "event-stream" in response.headers.get("content-type", ""):
                    answer.status = response.status_code
                    await self._read_events(response, answer, leave_after)
                else:
                    raw = await response.aread()
                    answer.status, answer.body = response.status_code, json.loads(raw)
        return answer

    async def _read_events(self, response: httpx.Response, answer: Answer, leave_after: int | None) -> None:
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                answer.is_done = True
                continue
            event = json.loads(line[6:])
            if event.get("type") in ("response.completed", "response.incomplete", "message_stop"):
                answer.is_done = True
            if "error" in event and event.get("type", "error") == "error":
                answer.failure = event["error"]
            else:
                answer.events.append(event)
            if leave_after is not None and len(answer.events) >= leave_after:
                return

    def _refused(self, answer: Answer) -> str | None:
        """How it ended where it was not served for a reason that a busy or broken server may give."""
        if answer.status == 429:
            if not answer.headers.get("retry-after", "").isdigit():
                raise Wrong("429 without Retry-After")
            return "429"
        if answer.status in (0, 408, 503):
            return str(answer.status)
        if answer.failure is not None:
            return "error event"
        if answer.status != 200:
            raise Wrong(f"status {answer.status}: {answer.body}")
        if answer.body is None and not answer.is_done:
            raise Wrong(f"a stream ended without saying so, after {len(answer.events)} events")
        return None

    async def known(self) -> str:
        i = self.draw.randrange(len(KNOWN))
        path, body = KNOWN[i]
        streams = self.draw.random() < 0.7
        answer = await self.ask(path, {**body, "stream": streams})
        if (refused := self._refused(answer)) is not None:
            return refused
        if (found := answer.choices()) != self._expected[i]:
            raise Wrong(f"{path} {body}, stream={streams}: {found} and not {self._expected[i]}")
        return "the same text"

    def _schema_body(self, number: int) -> dict[str, Any]:
        schema = {
            "type": "object",
            "properties": {
                f"name{number}": {"type": "string", "maxLength": 1 + number % 9},
                "kind": {"enum": ["function", "class"]},
                "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
            },
            "required": [f"name{number}", "kind", "sizes"],
            "additionalProperties": False,
        }
        form = {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": schema}}
        return {"prompt": "Return ", "temperature": 1.5, "max_tokens": 100, "response_format": form}

    async def schema(self) -> str:
        body = self._schema_body(self.draw.randrange(1000))
        answer = await self.ask("/v1/completions", {**body, "n": 2, "stream": self.draw.random() < 0.5})
        if (refused := self._refused(answer)) is not None:
            return refused
        for text, reason, _ in answer.choices():
            if reason == "stop":
                self._validate(text, body["response_format"]["json_schema"]["schema"])
        return "valid"

    def _validate(self, text: str, schema: dict[str, Any]) -> None:
        try:
            jsonschema.validate(json.loads(text), schema)
        except (ValueError, jsonschema.ValidationError) as error:
            raise Wrong(f"{text!r} is not of its schema: {str(error).splitlines()[0]}") from error

    async def constrained(self) -> str:
        asked, pattern = self.draw.choice(
            (
                ({"regex": "[a-f]{4}-[0-9]{2}"}, "[a-f]{4}-[0-9]{2}"),
                ({"choice": ["yes", "no", "perhaps"]}, "yes|no|perhaps"),
                ({"grammar": 'start: "a" ("b" | "c")+ "d"'}, "a[bc]+d"),
            )
        )
        body = {"messages": MESSAGES, "temperature": 1.5, "max_tokens": 40, "structured_outputs": asked}
        answer = await self.ask("/v1/chat/completions", {**body, "stream": self.draw.random() < 0.5})
        if (refused := self._refused(answer)) is not None:
            return refused
        for text, reason, _ in answer.choices():
            if reason == "stop" and re.fullmatch(pattern, text) is None:
                raise Wrong(f"{asked}: {text!r}")
        return "valid"

    async def tool(self) -> str:
        named: Any = {"type": "function", "function": {"name": "get_weather"}}
        body: dict[str, Any] = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 120, "temperature": 1.2}
        body["tool_choice"] = self.draw.choice(("required", named))
        answer = await self.ask("/v1/chat/completions", {**body, "stream": self.draw.random() < 0.5})
        if (refused := self._refused(answer)) is not None:
            return refused
        if answer.body is not None:
            (choice,) = answer.body["choices"]
            reason, calls = choice["finish_reason"], choice["message"].get("tool_calls") or []
            arguments = {i: call["function"]["arguments"] for i, call in enumerate(calls)}
        else:
            arguments, reason = {}, None
            for event in answer.events:
                for choice in event["choices"]:
                    reason = choice["finish_reason"] or reason
                    for call in choice["delta"].get("tool_calls", ()):
                        arguments[call["index"]] = arguments.get(call["index"], "") + call["function"]["arguments"]
        if reason == "length":
            return "cut"
        if reason != "tool_calls" or not arguments:
            raise Wrong(f"a tool had to be called, and it ended with {reason!r} and {arguments}")
        for text in arguments.values():
            self._validate(text, CITY)
        return "valid"

    async def responses(self) -> str:
        body = {"input": "Return the", "max_output_tokens": 24, "temperature": 0}
        answer = await self.ask("/v1/responses", {**body, "stream": self.draw.random() < 0.5})
        return self._refused(answer) or "answered"

    async def messages(self) -> str:
        body = {"messages": MESSAGES[1:], "max_tokens": 24, "temperature": 0}
        answer = await self.ask("/v1/messages", {**body, "stream": self.draw.random() < 0.5})
        return self._refused(answer) or "answered"

    async def scored(self) -> str:
        body = {"prompt": "Return the absolute value.", "echo": True, "logprobs": 2, "max_tokens": 0}
        answer = await self.ask("/v1/completions", body)
        if (refused := self._refused(answer)) is not None:
            return refused
        logprobs = answer.body["choices"][0]["logprobs"]
        if answer.body["choices"][0]["text"] != body["prompt"] or None in logprobs["token_logprobs"][1:]:
            raise Wrong(f"{body}: {answer.body}")
        return "scored"

    async def tokens(self) -> str:
        text = "".join(self.draw.choices("def class\n\u2615 \U0001f600():", k=self.draw.randrange(1, 60)))
        answer = await self.ask("/tokenize", {"prompt": text, "add_special_tokens": False})
        if (refused := self._refused(answer)) is not None:
            return refused
        back = await self.ask("/detokenize", {"tokens": answer.body["tokens"]})
        if (refused := self._refused(back)) is not None:
            return refused
        if back.body["prompt"] != text:
            raise Wrong(f"{text!r} came back as {back.body['prompt']!r}")
        return "back again"

    async def leaves(self) -> str:
        body = {"prompt": "class", "max_tokens": 250, "ignore_eos": True}
        if self.draw.random() < 0.5:
            answer = await self.ask(
                "/v1/completions", {**body, "stream": True}, leave_after=self.draw.randrange(1, 30)
            )
            return "left" if answer.status == 200 and answer.failure is None else self._refused(answer) or "left"
        with suppress(TimeoutError):
            answer = await asyncio.wait_for(self.ask("/v1/completions", body), self.draw.random() / 2)
            return self._refused(answer) or "answered before it left"
        return "left"

    async def late(self) -> str:
        body = {
            "prompt": "class",
            "max_tokens": 250,
            "ignore_eos": True,
            "timeout": 10 ** self.draw.uniform(-3, -0.5),
        }
        answer = await self.ask("/v1/completions", body)
        if answer.status == 504:
            return "504"
        if (refused := self._refused(answer)) is not None:
            return refused
        ((_, reason, stop),) = answer.choices()
        if reason != "length" or stop not in (None, "timeout"):
            raise Wrong(f"{body}: it ended with {reason!r}, {stop!r}")
        return "cut" if stop else "in time"

    async def bad(self) -> str:
        if self.draw.random() < 0.1:
            answer = await self.ask("/v1/completions", {"prompt": "a"}, headers={"authorization": "Bearer wrong"})
            wanted, path = 401, "a wrong key"
        else:
            path, body, wanted = self.draw.choice(BAD)
            answer = await self.ask(path, body)
        if answer.status in (0, 429, 503):
            return str(answer.status)
        error = (answer.body or {}).get("error", {})
        if answer.status != wanted or not error.get("message"):
            raise Wrong(f"{path}: {answer.status} {answer.body} and not {wanted}")
        return str(wanted)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = self.url.rpartition("/")[2].partition(":")
        return await asyncio.open_connection(host, int(port), limit=2)

    def _head(self, length: int) -> bytes:
        lines = ("POST /v1/completions HTTP/1.1", "host: 127.0.0.1", "content-type: application/json")
        return "\r\n".join((*lines, f"authorization: Bearer {KEY}", f"content-length: {length}", "", "")).encode()

    async def slow_body(self) -> str:
        try:
            reader, writer = await self._connect()
        except OSError:
            return "0"
        begin = time.monotonic()
        try:
            writer.write(self._head(100) + b'{"prompt": ')
            await writer.drain()
            status = (await asyncio.wait_for(reader.read(2), 20) + await reader.read(10))[9:12].decode()
        except (OSError, TimeoutError):
            status = ""
        finally:
            writer.close()
        if status not in ("408", "429", "503", ""):
            raise Wrong(f"half a body was answered with {status!r} after {time.monotonic() - begin:.1f} s")
        return status or "0"

    async def slow_reader(self) -> str:
        try:
            reader, writer = await self._connect()
        except OSError:
            return "0"
        body = json.dumps({"prompt": "class", "max_tokens": 100, "stream": True, "logprobs": 5}).encode()
        with suppress(OSError):
            writer.write(self._head(len(body)) + body)
            for _ in range(100):
                if not await reader.read(1):
                    break
                await asyncio.sleep(0.05)
        writer.close()
        return "left"

    async def looks(self) -> str:
        for path in ("/", "/metrics", "/v1/models", "/health", "/docs", "/openapi.json"):
            try:
                found = await self._client.get(path, headers={"authorization": f"Bearer {KEY}"})
            except httpx.TransportError:
                return "0"
            if found.status_code not in (200, 503) or (found.status_code == 503 and path not in _NEEDS_ENGINE):
                raise Wrong(f"{path}: {found.status_code}")
        answer = await self.ask("/ui/markdown", {"texts": ["# Title\n\n```python\ndef f(): ...\n```\n"]})
        if (refused := self._refused(answer)) is not None:
            return refused
        if len(answer.body["results"][0]) != 2:
            raise Wrong(f"markdown of two blocks: {answer.body}")
        return "seen"

    async def burst(self, count: int) -> str:
        """As many at once, more than may wait, and those that run need more blocks than there are."""
        body = {"prompt": "class", "ignore_eos": True, "stream": True}
        lengths = [self.draw.randrange(8, 160) for _ in range(count)]
        asked = (self.ask("/v1/completions", body | {"max_tokens": length}) for length in lengths)
        answers = await asyncio.gather(*asked)
        refused = Counter(self._refused(answer) or "served" for answer in answers)
        for how, number in refused.items():
            self.counts[f"burst: {how}"] += number
        if failed := {how: number for how, number in refused.items() if how not in ("served", "429")}:
            raise Wrong(f"of {count} requests at once: {failed}")
        return "burst"


_NEEDS_ENGINE = ("/v1/models", "/health")
