"""Limits on requests: host, content type, body size, and the time to receive the body."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..settings import is_loopback
from .content_coding import content_coding, decoded, too_large
from .errors import ApiError


class HostMiddleware:
    """Refuses ``Host`` headers that do not name this machine.

    For servers that listen on the loopback only, against DNS rebinding: a foreign page whose name resolves to
    127.0.0.1 could otherwise read responses as its own server's.

    Args:
        app: the inner application.
        allowed: additional names, of proxies in front; ``"*"`` allows all.
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
                        f"Host {host[:80]!r} is not allowed; use 127.0.0.1, or start the server with --allowed-hosts",
                    )
        await self.app(scope, receive, send)


def host_name(host: str) -> str:
    """A ``Host`` header without its port."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]


BODIES_AT_ONCE = 32
"""Maximum number of largest bodies that all requests together may hold."""


_CURLS_OWN = "application/x-www-form-urlencoded"


class BodyMiddleware:
    """Limits the size of a body before it is stored, and the time to receive it; accepts JSON only.

    Pages of other origins can send other content types, or no body, without a CORS preflight: any page that a person
    opens could then use a server on that person's machine, routes without a body included.

    A refused body is not read into memory; ``HttpProtocol`` goes on dropping bytes from the socket for a while,
    because closing at once would often lose the response. The limit of a compressed body applies to its decoded size.

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
            raise ApiError(415, "unsupported_media_type", "Unsupported Content-Type; use application/json.")
        coding = content_coding(scope["headers"])
        size = 0
        complete = False
        deadline: float | None = None

        def hold(length: int) -> None:
            nonlocal size
            size += length
            self._held += length
            if self._held > BODIES_AT_ONCE * self._max_size:
                text = "The bodies of other requests use all memory for bodies; retry later."
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
                    f"Timed out after {self._timeout:g} s while reading the request body.",
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
    """True for JSON, and for curl's default type, or none, unless a browser's page sends it."""
    headers = dict(scope["headers"])
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return True
    return kind in ("", _CURLS_OWN) and b"origin" not in headers
