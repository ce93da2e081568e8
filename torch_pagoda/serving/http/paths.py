"""Requests that mean a route without naming it: HEAD for GET, and paths with a trailing slash."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class PathMiddleware:
    """Serves HEAD as GET without a body, and ``/v1/models/`` as ``/v1/models``."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            if message["type"] != "http.response.body":
                await send(message)
            elif not message.get("more_body", False):
                await send({"type": "http.response.body"})

        is_head = scope["method"] == "HEAD"
        path = scope["path"].rstrip("/") or "/"
        if path == scope.get("root_path", ""):
            path += "/"
        scope = {**scope, "path": path, "method": "GET" if is_head else scope["method"]}
        await self.app(scope, receive, send_head if is_head else send)
