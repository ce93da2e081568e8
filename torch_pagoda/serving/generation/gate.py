"""Refuses generation requests before their bodies are parsed, when the server is full."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..http.errors import ApiError
from .stream import CLIENT_CLOSED

if TYPE_CHECKING:
    from .front import Front

GENERATION_PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"})
"""Routes that end in ``respond``."""


class GateMiddleware:
    """Reserves room for a generation request, or refuses it.

    A full server refuses as soon as it has the headers. Otherwise it reserves room once the body is complete, so slow
    senders hold none. The request's watch and reservation are ``scope["state"]["watch"]`` and ``["place"]``.

    Args:
        app: the inner application.
        front: the server's state.
    """

    def __init__(self, app: ASGIApp, front: Front) -> None:
        self.app = app
        self._front = front
        self._turns = Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        # The routes' patterns let a newline follow, as it comes with %0A.
        path = scope["path"].removeprefix(scope.get("root_path", "")).removesuffix("\n")
        if path not in GENERATION_PATHS:
            await self.app(scope, receive, send)
            return
        front, state = self._front, scope["state"]
        state["handler"] = path
        watch = state["watch"] = front.watch(scope, path)
        try:
            front.admission.check_room()
            body = await _whole_body(receive)
            if body is None:
                front.ended(watch.finish(status=CLIENT_CLOSED, disconnected=True))
                return
            place = state["place"] = front.admission.reserve()
        except ApiError as error:
            front.ended(watch.finish(status=error.status_code, error_code=error.code))
            raise
        message: Message | None = {"type": "http.request", "body": body, "more_body": False}

        async def receive_again() -> Message:
            nonlocal message
            if message is None:
                return await receive()
            first, message = message, None
            return first

        try:
            await self._turns.take()
            await self.app(scope, receive_again, send)
        finally:
            place.close()


class Turns:
    """Lets one task per iteration of the event loop pass.

    Preparing a request takes a millisecond of the loop. A hundred at once would block all streams, and other
    refusals, for a tenth of a second.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_taken = False

    async def take(self) -> None:
        """Wait for a turn, in the order of calls; the first call of an iteration does not wait."""
        loop = asyncio.get_running_loop()
        if not self._is_taken:
            self._is_taken = True
            loop.call_soon(self._give)
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _give(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # whoever waited may have been cancelled
                turn.set_result(None)
                turn.get_loop().call_soon(self._give)
                return
        self._is_taken = False


async def _whole_body(receive: Receive) -> bytes | None:
    """The body of a request; None if the client disconnects before its end."""
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)
