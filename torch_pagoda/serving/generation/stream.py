"""Writes responses to the connection as they arise: server-sent events, or one JSON object.

Starlette's own streaming response costs ten times as much per token, and keeps generating a JSON response for a
client that has disconnected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..http.errors import ApiError, JsonResponse, internal_error
from .choices import Choices
from .generate import Generation, Piece

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
CUT_SECONDS = 1.0
"""Seconds that a client has to receive the rest when the server shuts down."""
CLIENT_CLOSED = 499
"""Logged status of a request whose client disconnected before the response."""


class Renderer(Protocol):
    """The format of one kind of response.

    Attributes:
        done: the last event of every stream; b"" for none.
    """

    @property
    def done(self) -> bytes: ...

    def events(self, pieces: list[Piece]) -> bytes:
        """Server-sent events of new pieces; b"" if there is no news."""
        ...

    def last_events(self) -> bytes:
        """Events after the last piece, without ``done``."""
        ...

    def failure_events(self, error: ApiError) -> bytes:
        """Events that report an error, without ``done``."""
        ...

    def failure_body(self, error: ApiError, request_id: str) -> Any:
        """The error object, if the response has not begun."""
        ...

    def add(self, pieces: list[Piece]) -> None:
        """Keep pieces for ``body``."""
        ...

    def body(self) -> Any:
        """The response as one object."""
        ...


class GenerationResponse(Response):
    """Runs a generation and writes its response; ends it if the client disconnects, or reads nothing for too long.

    Args:
        generation: a generation that has not started.
        renderer: the renderer of its kind.
        on_end: called with the record of the request, and ``prompt`` and ``output`` if the log wants them.
        headers: additional headers.
    """

    def __init__(
        self,
        generation: Generation,
        renderer: Renderer,
        on_end: Callable[..., None],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.background = None
        self._generation, self._renderer, self._on_end = generation, renderer, on_end
        self._extra = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        kept = generation.front.log.wants_content
        self._kept = Choices(generation.ask.num_choices) if kept else None
        self._started = False
        self._ended = False
        self._sending_since: float | None = None
        self._last_sent = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._ping: asyncio.Task[None] | None = None
        self._writes = asyncio.Lock()
        """Keeps events and pings in order, after the headers."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the generation."""
        generation = self._generation
        self._task = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        self._abort = scope.get("state", {}).get("abort")
        status, code = 200, None
        gone = self._loop.create_task(_until_disconnect(receive))
        gone.add_done_callback(lambda _: self._leave("disconnect"))
        try:
            try:
                generation.start()
                await (self._stream(send) if generation.ask.streams else self._whole(send))
            except ApiError as error:
                status, code = (200 if self._started else error.status_code), error.code
                await self._fail(error, scope, receive, send)
            except Exception as error:
                failure = internal_error(error, generation.ask.request_id)
                status, code = (200 if self._started else 500), failure.code
                await self._fail(failure, scope, receive, send)
        except asyncio.CancelledError:
            if generation.left is None:
                raise
            assert self._task is not None
            self._task.uncancel()
            status = status if self._started else CLIENT_CLOSED
            if generation.left == "stall" and self._abort is not None:
                self._abort()
        finally:
            self._ended = True
            scope.setdefault("state", {})["error_code"] = code
            gone.cancel()
            if self._timer is not None:
                self._timer.cancel()
            if self._ping is not None:
                self._ping.cancel()
            generation.close()
            disconnected = generation.left is not None
            record = generation.watch.finish(status=status, disconnected=disconnected, error_code=code)
            self._on_end(record, **self._content())

    async def _whole(self, send: Send) -> None:
        generation, renderer = self._generation, self._renderer
        while not generation.finished:
            renderer.add(await self._next())
        body = msgspec.json.encode(renderer.body())
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": [*headers, *self._extra]})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, send: Send) -> None:
        generation, renderer = self._generation, self._renderer
        self._send = send
        self._last_sent = self._loop.time()
        # A generation that is cut ends at once: what is not over by then waits for its reader.
        generation.on_cut = lambda: self._loop.call_later(CUT_SECONDS, self._leave, "stall")
        self._tick()
        # Until there is news, the status is open: a refusal of the engine has its own.
        while not generation.finished:
            events = renderer.events(await self._next())
            if events:
                await self._write(events)
        await self._write(renderer.last_events() + renderer.done, last=True)

    async def _next(self) -> list[Piece]:
        pieces = await self._generation.next()
        if self._kept is not None:
            self._kept.add(pieces)
        return pieces

    async def _write(self, events: bytes, last: bool = False) -> None:
        async with self._writes:
            self._sending_since = self._loop.time()
            if not self._started:
                self._started = True
                headers = [
                    (b"content-type", b"text/event-stream; charset=utf-8"),
                    (b"cache-control", b"no-store"),
                    (b"x-accel-buffering", b"no"),
                    *self._extra,
                ]
                await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._send({"type": "http.response.body", "body": events, "more_body": not last})
            self._sending_since = None
            self._last_sent = self._loop.time()

    def _content(self) -> dict[str, Any]:
        """Prompt and output, for a log that wants them."""
        if self._kept is None:
            return {}
        prompts = [
            prompt.token_ids if prompt.text is None else prompt.text for prompt in self._generation.ask.prompts
        ]
        return {"prompt": prompts, "output": [choice.text for choice in self._kept.by_index]}

    async def _fail(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        """Report an error in a response of its own, or as the stream's last event."""
        if self._started:
            await self._write(self._renderer.failure_events(error) + self._renderer.done, last=True)
            return
        self._started = True
        body = self._renderer.failure_body(error, self._generation.ask.request_id)
        async with self._writes:
            self._sending_since = self._loop.time()
            await JsonResponse(body, error.status_code, error.headers)(scope, receive, send)

    def _tick(self) -> None:
        """Watch a stream: drop a stuck reader, ping an idle one."""
        settings = self._generation.front.settings
        now = self._loop.time()
        if self._ended:
            return
        if self._sending_since is not None:
            if now - self._sending_since >= settings.stream_stall_timeout:
                self._leave("stall")
                return
        elif now - self._last_sent >= settings.sse_ping:
            self._ping = self._loop.create_task(self._write(PING))
        period = min(settings.stream_stall_timeout, settings.sse_ping) / 4
        self._timer = self._loop.call_later(period, self._tick)

    def _leave(self, why: Any) -> None:
        if not self._ended and self._generation.left is None and self._task is not None:
            self._generation.left = why
            self._task.cancel()


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
