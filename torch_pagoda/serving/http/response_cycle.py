"""Responses of uvicorn to HTTP/1.0 clients, and to clients that are still sending their body."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

if TYPE_CHECKING:
    from asgiref.typing import ASGISendEvent

_UNKNOWN_LENGTH = sys.maxsize


class ResponseCycle(RequestResponseCycle):
    """One request and its response.

    HTTP/1.0 has no chunked encoding (RFC 9112, 6.1): a response without a length ends with the connection. A
    connection to be closed stays open while its client sends the body: closing it with unread bytes would reset it,
    and the client would lose the response.

    Attributes:
        keeps_open: called when the connection should close; True if somebody else closes it later.
    """

    keeps_open: Callable[[], bool]

    async def send(self, message: ASGISendEvent) -> None:
        """Write a part of the response."""
        if message["type"] == "http.response.start" and self.scope["http_version"] == "1.0":
            if not any(name.lower() == b"content-length" for name, _ in message.get("headers", ())):
                self.chunked_encoding, self.expected_content_length = False, _UNKNOWN_LENGTH
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            if not self.chunked_encoding and self.expected_content_length > _UNKNOWN_LENGTH // 2:
                self.expected_content_length = len(message.get("body", b""))
            self.keep_alive = self.keep_alive or self.keeps_open()
        await super().send(message)
