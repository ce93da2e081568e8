"""Limits on what a connection may send: its host, the kind, the size and the time of its body."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..settings import is_loopback
from .content_coding import content_coding, decoded, too_large
from .errors import ApiError


class HostMiddleware:
    """Refuses names in ``Host`` that are not this machine's.

    For servers that listen on the loopback only: a page from elsewhere whose name was made to point to 127.0.0.1
    would else be served by a browser that takes it for the page's own server.

    Args:
        app: the inner application.
        allowed: further names, of proxies in front; ``"*"`` allows all.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str] = ()) -> None:
        self.app = app
        self._allowed = frozenset(name.lower() for name in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request."""
        if scope["type"] == "http" and "*" not in self._allowed:
            hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
            for host in hosts:
                name = host_name(host)
                if not (is_loopback(name) or name.lower() in self._allowed):
                    raise ApiError(
                        400,
                        "invalid_host",
                        f"Host {host[:80]!r} is not this machine; ask 127.0.0.1, or start with --allowed-hosts",
                    )
        await self.app(scope, receive, send)


def host_name(host: str) -> str:
    """A ``Host`` header without its port."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]


BODIES_AT_ONCE = 32
"""Bodies of the largest size that all requests under way may hold together."""


_CURLS_OWN = "application/x-www-form-urlencoded"


class BodyMiddleware:
    """Bounds the size of a body before it is stored, and the time that it takes to come; takes JSON only.

    Pages of other origins can send those kinds, or no body at all, without asking: that would let any page that a
    person looks at use a server on the person's own machine, routes without a body included.

    What is refused is not read into memory; ``HttpProtocol`` goes on taking bytes from the socket and dropping them
    for a while, because closing at once would often lose the answer on its way. A compressed body is decoded, and
    bounded as it is then.

    Args:
        app: the inner application.
        max_size: bytes.
        timeout: seconds from the first ``receive`` to the last byte.
    """

    def __init__(self, app: ASGIApp, max_size: int, timeout: float) -> None:
        self.app = app
        self._max_size, self._timeout = max_size, timeout
        self._held = 0  # bytes of all bodies under way

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        for name, value in scope["headers"]:
            if name == b"content-length" and (not value.isdigit() or len(value) > 18 or int(value) > self._max_size):
                raise too_large(self._max_size)
        if scope["method"] == "POST" and not _is_json(scope):
            raise ApiError(415, "unsupported_media_type", "The body's type is not served; send application/json.")
        coding = content_coding(scope["headers"])
        size = 0
        complete = False
        deadline: float | None = None

        def hold(length: int) -> None:
            nonlocal size
            size += length
            self._held += length
            if self._held > BODIES_AT_ONCE * self._max_size:
                text = "Requests under way hold as many bytes as fit; come back later."
                raise ApiError(429, "queue_full", text, headers={"retry-after": "1"})

        async def whole_receive() -> Message:
            """The decoded body in one piece."""
            if complete:
                return await receive()
            parts = []
            while not complete:
                message = await bounded_receive()
                if message["type"] != "http.request":
                    return message
                parts.append(message.get("body", b""))
            body = await asyncio.to_thread(decoded, b"".join(parts), coding, self._max_size)
            hold(len(body))
            return {"type": "http.request", "body": body, "more_body": False}

        async def bounded_receive() -> Message:
            nonlocal complete, deadline
            if complete:
                return await receive()
            if deadline is None:
                deadline = asyncio.get_running_loop().time() + self._timeout
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                complete = True
                raise ApiError(
                    408,
                    "body_timeout",
                    f"The body was not complete after {self._timeout:g} s; send it faster.",
                    headers={"connection": "close"},
                ) from None
            if message["type"] == "http.request":
                length = len(message.get("body", b""))
                complete = not message.get("more_body", False)
                if size + length > self._max_size:
                    raise too_large(self._max_size)
                hold(length)
            else:
                complete = True
            return message

        try:
            await self.app(scope, whole_receive if coding else bounded_receive, send)
        finally:
            self._held -= size


def _is_json(scope: Scope) -> bool:
    """True for JSON, and for what curl says of its own accord, or nothing, where no page of a browser sends it."""
    headers = dict(scope["headers"])
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return True
    return kind in ("", _CURLS_OWN) and b"origin" not in headers
