"""An OpenAI server without a model, for tests of the chat page: what it answers follows from what it is asked."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from torch_pagoda.serving.page.chat_page import chat_page_router
from torch_pagoda.serving.page.markdown_process import MarkdownRenderer


@dataclass
class Seen:
    """One generation request: its path and body, the chunks sent, and whether the client went away."""

    path: str
    body: dict[str, Any]
    sent: int = 0
    aborted: bool = False
    done: bool = False


@dataclass
class FakeServer:
    """What the server does, which a test may change at any time, and what it saw.

    Attributes:
        answers: the last user message (or the prompt) → what is streamed: a text, or a list of deltas. Anything else
            is answered with "You said: …".
        delay: seconds between two chunks.
        chunk: characters of a chunk.
        cut_after: chunks, after which the connection is closed without an end.
        error_after: chunks, after which an error event comes.
        refuse: (status, error object, headers) instead of an answer.
        key: that is asked for.
        has_chat_template: as the capabilities in ``/v1/models`` say; None leaves it out.
    """

    answers: dict[str, str | list[dict[str, Any]]] = field(default_factory=dict)
    delay: float = 0.0
    chunk: int = 4
    cut_after: int | None = None
    error_after: int | None = None
    refuse: tuple[int, dict[str, Any], dict[str, str]] | None = None
    key: str | None = None
    has_chat_template: bool | None = True
    max_model_len: int | None = 4096
    models: list[str] = field(default_factory=lambda: ["fake-1b"])
    seen: list[Seen] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def wait_for(self, condition: Any, seconds: float = 20.0) -> None:
        """Wait until ``condition()`` holds; AssertionError after ``seconds``."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it did not come about"
            time.sleep(0.01)

    def app(self, renderer: MarkdownRenderer) -> FastAPI:
        app = FastAPI()

        @app.middleware("http")
        async def check_key(request: Request, call_next: Any) -> Any:
            guarded = request.url.path.startswith("/v1") or request.url.path == "/ui/markdown"
            if self.key and guarded and request.headers.get("authorization") != f"Bearer {self.key}":
                return _error(401, "Incorrect API key provided.", "invalid_api_key", {"WWW-Authenticate": "Bearer"})
            return await call_next(request)

        @app.get("/v1/models")
        async def models() -> Any:
            capabilities = None if self.has_chat_template is None else {"chat": self.has_chat_template}
            facts = {"capabilities": capabilities, "max_model_len": self.max_model_len}
            known = {name: value for name, value in facts.items() if value is not None}
            return {"object": "list", "data": [{"id": name, "object": "model", **known} for name in self.models]}

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Any:
            body = await request.json()
            last = body["messages"][-1]
            return self._answer("chat", body, last["content"] if last["role"] == "user" else "continue", request)

        @app.post("/v1/completions")
        async def complete(request: Request) -> Any:
            body = await request.json()
            return self._answer("text", body, body["prompt"], request)

        app.include_router(chat_page_router(renderer))
        return app

    def _answer(self, kind: str, body: dict[str, Any], asked: str, request: Request) -> Any:
        seen = Seen(kind, body)
        self.seen.append(seen)
        if self.refuse:
            status, error, headers = self.refuse
            return _error(status, error["message"], error.get("code", ""), headers)
        deltas = self.answers.get(asked, f"You said: {asked}")
        if isinstance(deltas, str):
            name = "content" if kind == "chat" else "text"
            deltas = [{name: deltas[i : i + self.chunk]} for i in range(0, len(deltas), self.chunk)]
        return StreamingResponse(self._stream(seen, kind, deltas, request), media_type="text/event-stream")

    async def _stream(
        self, seen: Seen, kind: str, deltas: list[dict[str, Any]], request: Request
    ) -> AsyncIterator[bytes]:
        def event(choices: list[dict[str, Any]], **more: Any) -> bytes:
            chunk = {"id": "x", "object": "chunk", "model": "fake-1b", "choices": choices, **more}
            return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode()

        def choice(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
            body = {"delta": delta} if kind == "chat" else delta
            return {"index": 0, "finish_reason": finish, **body}

        try:
            yield b": ping\n\n"
            for delta in deltas:
                if await request.is_disconnected():
                    seen.aborted = True
                    return
                if seen.sent == self.cut_after:
                    raise ConnectionResetError("cut, as the test wants it")
                if seen.sent == self.error_after:
                    yield b'data: {"error":{"message":"The engine ended.","code":"engine_dead"}}\n\n'
                    yield b"data: [DONE]\n\n"
                    return
                yield event([choice(delta)])
                seen.sent += 1
                await asyncio.sleep(self.delay)
            finish = "tool_calls" if any("tool_calls" in delta for delta in deltas) else "stop"
            yield event([choice({} if kind == "chat" else {"text": ""}, finish)])
            usage = {
                "prompt_tokens": 120,
                "completion_tokens": len(deltas),
                "total_tokens": 120 + len(deltas),
                "prompt_tokens_details": {"cached_tokens": 96},
            }
            yield event([], usage=usage)
            yield b"data: [DONE]\n\n"
            seen.done = True
        except asyncio.CancelledError:
            seen.aborted = True
            raise


def _error(status: int, message: str, code: str, headers: dict[str, str]) -> JSONResponse:
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
    return JSONResponse(body, status, headers=headers)


@contextmanager
def running(fake: FakeServer | None = None) -> Iterator[FakeServer]:
    """Serve on a free port of the loopback interface, in a thread, until the block ends."""
    fake = fake or FakeServer()
    renderer = MarkdownRenderer()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        fake.port = listener.getsockname()[1]
        config = uvicorn.Config(fake.app(renderer), log_level="critical", timeout_graceful_shutdown=1, lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            fake.wait_for(lambda: server.started)
            yield fake
        finally:
            server.should_exit = True
            thread.join(timeout=20)
            renderer.close()
