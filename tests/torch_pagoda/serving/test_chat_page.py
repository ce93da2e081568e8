"""The chat page's files with their headers, and the route that renders markdown for it."""

from __future__ import annotations

import asyncio
import json
import re
import tomllib
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from torch_pagoda.serving.page import chat_page
from torch_pagoda.serving.page.chat_page import chat_page_router, page_paths
from torch_pagoda.serving.page.markdown import render_blocks
from torch_pagoda.serving.page.markdown_process import MarkdownRenderer, RenderBusy, RenderFailed


def in_page(check, renderer: MarkdownRenderer | None = None):
    """The result of an async ``check(client)`` against an app with the page."""
    renderer = renderer or MarkdownRenderer()

    async def run():
        app = FastAPI()
        app.include_router(chat_page_router(renderer))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://page") as client:
            return await check(client)

    try:
        return asyncio.run(run())
    finally:
        renderer.close()


def post(texts, renderer=None):
    return in_page(lambda client: client.post("/ui/markdown", json={"texts": texts}), renderer)


def test_the_route_renders_each_text():
    response = post(["# a\n\nb", "", "*c*"])
    assert response.status_code == 200
    assert response.json() == {"results": [render_blocks("# a\n\nb"), [], render_blocks("*c*")]}
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    "body, status",
    [
        (b"", 400),
        (b"[]", 400),
        (b"{", 400),
        (b'{"texts": "a"}', 400),
        (b'{"texts": [1]}', 400),
        (b'{"texts": [null]}', 400),
        (b'{"texts": ["\xff"]}', 400),
        (b"[" * 100_000, 400),
        (b'{"texts": ["\\ud800"]}', None),
        (json.dumps({"texts": [""] * 65}).encode(), 413),
        (json.dumps({"texts": ["a" * 200_001]}).encode(), 413),
        (b'{"texts": ["' + b" " * (1 << 20) + b'"]}', 413),
    ],
)
def test_bodies_that_are_not_texts_are_refused(body, status):
    response = in_page(lambda client: client.post("/ui/markdown", content=body))
    assert response.status_code == status or (status is None and response.status_code < 500)
    if response.status_code != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_a_long_body_is_refused_before_it_has_come():
    read = 0

    async def chunks():
        nonlocal read
        for _ in range(1_000):
            read += 1
            yield b" " * (1 << 16)

    async def ask():
        received: list = []
        source = chunks()

        async def receive():
            return {"type": "http.request", "body": await anext(source), "more_body": True}

        async def send(message):
            received.append(message)

        app = FastAPI()
        app.include_router(chat_page_router(MarkdownRenderer()))
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/ui/markdown",
            "raw_path": b"/ui/markdown",
            "query_string": b"",
            "headers": [],
            "http_version": "1.1",
        }
        await app(scope, receive, send)
        return received[0]["status"]

    assert asyncio.run(ask()) == 413
    assert read <= 18


def test_a_text_that_takes_too_long_is_given_up():
    renderer = MarkdownRenderer(seconds=1.0)
    slow = "![" * 60_000

    async def ask(client):
        return [await client.post("/ui/markdown", json={"texts": [text]}) for text in (slow, "*a*")]

    given_up, next_one = in_page(ask, renderer)
    assert given_up.status_code == 400
    assert "within 1 s" in given_up.json()["error"]["message"]
    assert next_one.json()["results"] == [render_blocks("*a*")]


@pytest.mark.parametrize(
    "raised, status, code", [(RenderBusy("x"), 429, "queue_full"), (RenderFailed("x"), 400, "invalid_value")]
)
def test_what_the_renderer_refuses_is_said(raised, status, code, monkeypatch):
    async def refuse(self, texts):
        raise raised

    monkeypatch.setattr(MarkdownRenderer, "render", refuse)
    response = post(["a"])
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert ("retry-after" in response.headers) == (status == 429)


def test_every_file_has_its_type_and_headers():
    async def ask(client):
        return {path: await client.get(path) for path, _ in page_paths()}

    answers = in_page(ask)
    types = {path.rpartition(".")[2]: answer.headers["content-type"] for path, answer in answers.items()}
    assert types == {
        "/": "text/html; charset=utf-8",
        "js": "text/javascript; charset=utf-8",
        "css": "text/css; charset=utf-8",
        "svg": "image/svg+xml",
    }
    for path, file in page_paths():
        assert answers[path].status_code == 200
        assert answers[path].content == file.read_bytes()
        headers = answers[path].headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'self';") and "unsafe" not in policy and "http" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-cache"
        assert headers["referrer-policy"] == "no-referrer"


def test_a_file_that_is_known_is_not_sent_again():
    async def ask(client):
        first = await client.get("/ui/app.js")
        etag = first.headers["etag"]
        asked = [etag, f'W/"x", W/{etag}', "*", '"other"', "", 'W/"']
        answers = [await client.get("/ui/app.js", headers={"if-none-match": value}) for value in asked]
        head = await client.head("/ui/app.js")
        return [answer.status_code for answer in answers], [answer.content for answer in answers[:3]], head

    statuses, contents, head = in_page(ask)
    assert statuses == [304, 304, 304, 200, 200, 200]
    assert contents == [b""] * 3
    assert head.status_code == 200 and head.content == b""


@pytest.mark.parametrize(
    "path",
    [
        "/ui/../chat_page.py",
        "/ui/..%2fchat_page.py",
        "/ui/%2e%2e/chat_page.py",
        "/ui/....//chat_page.py",
        "/ui//etc/passwd",
        "/ui/app.js%00.html",
        "/ui/app.js/",
        "/ui/",
        "/ui",
        "/ui/index.html",
        "/app.js",
        "/ui/APP.JS",
    ],
)
def test_no_other_path_is_served(path):
    response = in_page(lambda client: client.get(path, follow_redirects=False))
    assert response.status_code in (307, 404)
    assert b"def " not in response.content


def test_a_file_is_not_written_to():
    response = in_page(lambda client: client.post("/ui/app.js", content=b"x"))
    assert response.status_code == 405


def test_the_page_is_small_and_asks_nobody_else():
    files = {path: file.read_text(encoding="utf-8") for path, file in page_paths()}
    assert sum(len(text.encode()) for text in files.values()) <= 90_000
    for path, text in files.items():
        foreign = re.findall(r"https?://[^\s\"')]+", text.replace("http://www.w3.org/2000/svg", ""))
        assert foreign == [], path
        assert not re.search(r"\beval\(|new Function|@import|insertAdjacentHTML|outerHTML|document\.write", text), (
            path
        )
    # HTML goes into the page at one place, which takes it from the route.
    assert [path for path, text in files.items() if "innerHTML" in text] == ["/ui/markdown.js"]
    assert files["/ui/markdown.js"].count("innerHTML") == 1
    page = files["/"]
    assert not re.search(r"\son\w+=|\sstyle=|<style|<script(?![^>]*\bsrc=)", page)


def test_what_the_page_links_exists():
    known = {path.lstrip("/") for path, _ in page_paths()}
    texts = {path: file.read_text(encoding="utf-8") for path, file in page_paths()}
    linked = set(re.findall(r'(?:src|href)="(ui/[^"#]+)"', texts["/"]))
    imported = {f"ui/{name}" for text in texts.values() for name in re.findall(r'from "\./([^"]+)"', text)}
    assert linked | imported <= known
    # Nothing lies there that nobody loads.
    assert known - {""} == linked | imported
    icons = set(re.findall(r'<symbol id="i-([a-z]+)"', texts["/"]))
    used = {name for text in texts.values() for name in re.findall(r'(?:\bicon|iconButton)\("([a-z]+)"', text)}
    used |= set(re.findall(r'data-icon="([a-z]+)"', texts["/"]))
    assert used <= icons


def test_the_wheel_carries_the_page():
    settings = tomllib.loads((Path(__file__).resolve().parents[3] / "pyproject.toml").read_text(encoding="utf-8"))
    data = settings["tool"]["setuptools"]["package-data"]["torch_pagoda.serving.page"]
    covered = {file for pattern in data for file in chat_page.FOLDER.parent.glob(pattern)}
    assert {file for _, file in page_paths()} <= covered
