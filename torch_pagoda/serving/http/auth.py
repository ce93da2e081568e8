"""API keys."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from ..settings import ApiKey
from .errors import ApiError

OPEN_PATHS = frozenset({"/health", "/healthz", "/ready", "/ping", "/version"})
"""Paths that need no key: load balancers poll them."""


class KeyRing:
    """API keys by digest; each lookup compares with all of them, in constant time."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._digests = [(key.name, _digest(key.key.encode())) for key in keys]

    def owner(self, key: bytes) -> str | None:
        """The name of a key; None if it is unknown."""
        digest = _digest(key)
        found = None
        for name, known in self._digests:
            if hmac.compare_digest(digest, known):
                found = name
        return found


class AuthMiddleware:
    """Refuses requests without a valid key, and puts its name into ``scope["state"]["key_name"]``.

    Keys are read from ``Authorization: Bearer KEY`` and ``x-api-key: KEY``, never from the query.

    Args:
        app: the inner application.
        keys: empty: accept every request.
        open_paths: paths that need no key.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[ApiKey], open_paths: frozenset[str]) -> None:
        self.app = app
        self._ring = KeyRing(keys) if keys else None
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request."""
        if scope["type"] == "http" and self._ring is not None:
            owner = next((name for key in _sent_keys(scope) if (name := self._ring.owner(key)) is not None), None)
            if owner is not None:
                scope["state"]["key_name"] = owner
            elif scope["path"].removeprefix(scope.get("root_path", "")) not in self._open_paths:
                raise ApiError(
                    401,
                    "invalid_api_key",
                    "Missing or invalid API key; send it as 'Authorization: Bearer KEY'.",
                    headers={"www-authenticate": "Bearer"},
                )
        await self.app(scope, receive, send)


def _sent_keys(scope: Scope) -> list[bytes]:
    keys = []
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer":
                keys.append(key.strip())
        elif name == b"x-api-key":
            keys.append(value.strip())
    return keys[:4]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
