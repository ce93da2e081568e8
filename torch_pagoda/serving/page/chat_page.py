"""The chat page: its files, served from memory, and the route that renders markdown for it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
from fastapi import APIRouter, Request, Response

from .markdown_process import MarkdownRenderer, RenderBusy, RenderFailed

FOLDER = Path(__file__).parent / "ui"

MARKDOWN_PATH = "/ui/markdown"

MAX_BODY_BYTES = 1 << 20
MAX_TEXTS = 64
MAX_CHARACTERS = 200_000
"""Maximum characters of all texts of one call."""

_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'; "
        "require-trusted-types-for 'script'; trusted-types rendered-markdown"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

_ETAG = re.compile(r'"[^"]*"|\*')


class _File(NamedTuple):
    content: bytes
    headers: dict[str, str]


class _Texts(msgspec.Struct):
    texts: list[str]


def page_paths() -> Iterator[tuple[str, Path]]:
    """Path of the URL → file, for all files of the page; they need no key."""
    for file in sorted(FOLDER.iterdir()):
        if file.suffix in _TYPES:
            yield ("/" if file.name == "index.html" else f"/ui/{file.name}"), file


def chat_page_router(renderer: MarkdownRenderer | None = None) -> APIRouter:
    """Routes of the chat page: ``GET /``, its files below ``/ui/``, and ``POST /ui/markdown``.

    ``POST /ui/markdown`` takes ``{"texts": [str, …]}`` and answers ``{"results": [[{"line": int, "html": str}, …],
    …]}``, the blocks of each text (see ``markdown.Block``). It costs CPU time, so it should require the server's key.

    Args:
        renderer: makes the HTML; by default a process of its own, which ends with this one.
    """
    renderer = renderer or MarkdownRenderer()
    router = APIRouter(include_in_schema=False)
    for path, file in page_paths():
        router.add_api_route(path, _sender(_load(file)), methods=["GET", "HEAD"], response_model=None)

    async def render_markdown(request: Request) -> Response:
        body = await _body(request)
        if body is None:
            return _error(413, "body_too_large", f"The body exceeds {MAX_BODY_BYTES} bytes; send fewer texts.")
        try:
            texts = msgspec.json.decode(body, type=_Texts).texts
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return _error(400, "invalid_value", 'The body must be JSON: {"texts": [string, …]}.')
        if len(texts) > MAX_TEXTS or sum(map(len, texts)) > MAX_CHARACTERS:
            limits = f"{MAX_TEXTS} texts and {MAX_CHARACTERS} characters"
            return _error(413, "body_too_large", f"'texts' exceeds the limit of {limits}.", "texts")
        try:
            results = await renderer.render(texts)
        except RenderBusy:
            return _error(
                429,
                "queue_full",
                "Too many texts are waiting to be rendered; retry later.",
                headers={"Retry-After": "1"},
            )
        except RenderFailed as failed:
            return _error(400, "invalid_value", f"{failed}".capitalize() + ".", "texts")
        return Response(b'{"results":' + results + b"}", media_type="application/json", headers=_json_headers())

    router.add_api_route(MARKDOWN_PATH, render_markdown, methods=["POST"], response_model=None)
    return router


def _load(file: Path) -> _File:
    content = file.read_bytes()
    etag = f'"{hashlib.sha256(content).hexdigest()[:24]}"'
    return _File(content, {**_HEADERS, "Content-Type": _TYPES[file.suffix], "ETag": etag})


def _sender(file: _File):
    async def send(request: Request) -> Response:
        known = _ETAG.findall(request.headers.get("if-none-match", ""))
        if file.headers["ETag"] in known or "*" in known:
            return Response(status_code=304, headers=file.headers)
        return Response(file.content, headers=file.headers)

    return send


async def _body(request: Request) -> bytes | None:
    """The request's body; None if it is too long, without reading all of it."""
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length[:12]) > MAX_BODY_BYTES:
        return None
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            return None
    return bytes(body)


def _json_headers() -> dict[str, str]:
    return {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


def _error(
    status: int, code: str, message: str, param: str | None = None, headers: dict[str, str] | None = None
) -> Response:
    kind = "rate_limit_error" if status == 429 else "invalid_request_error"
    body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    return Response(
        msgspec.json.encode(body), status, {**_json_headers(), **(headers or {})}, media_type="application/json"
    )
