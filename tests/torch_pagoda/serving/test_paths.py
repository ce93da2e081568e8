"""HEAD beside GET, paths that end with a slash, and what pages of allowed origins may send."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.anyio

OPENAI = (
    "authorization,content-type,openai-beta,openai-organization,openai-project,x-stainless-arch,x-stainless-lang,"
    "x-stainless-os,x-stainless-package-version,x-stainless-retry-count,x-stainless-runtime,"
    "x-stainless-runtime-version,x-stainless-timeout"
)
ANTHROPIC = (
    "anthropic-beta,anthropic-dangerous-direct-browser-access,anthropic-version,content-type,traceparent,user-agent,"
    "x-api-key,idempotency-key,http-referer,x-title"
)


@pytest.mark.parametrize(
    "path", ["/", "/health", "/ready", "/ping", "/version", "/v1/models", "/v1/models/tiny", "/metrics", "/docs"]
)
async def test_head_is_get_without_a_body(serve: Any, path: str) -> None:
    async with serve() as client:
        found, head = await client.get(path), await client.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == found.headers["content-type"]
    if path != "/metrics":
        assert head.headers["content-length"] == found.headers["content-length"]


async def test_head_of_what_has_no_get(serve: Any) -> None:
    async with serve() as client:
        for path, status in (("/v1/completions", 405), ("/nope", 404), ("/v1/models/nope", 404)):
            response = await client.head(path)
            assert (response.status_code, response.content) == (status, b"")


@pytest.mark.parametrize("path", ["/v1/completions/", "/v1/completions//"])
async def test_a_path_may_end_with_a_slash(serve: Any, path: str) -> None:
    async with serve() as client:
        assert (await client.post(path, json={"prompt": "a", "max_tokens": 1})).status_code == 200
        assert (await client.get("/v1/models/")).json() == (await client.get("/v1/models")).json()


async def test_keys_are_needed_with_a_slash_and_head_too(serve: Any) -> None:
    from torch_pagoda.serving.settings import ApiKey

    async with serve(api_keys=(ApiKey("ann", "sk-1"),)) as client:
        assert (await client.head("/v1/models")).status_code == 401
        assert (await client.get("/v1/models/")).status_code == 401
        assert (await client.head("/health/")).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("asked", [OPENAI, ANTHROPIC])
async def test_a_page_of_an_allowed_origin_may_send_what_clients_send(serve: Any, path: str, asked: str) -> None:
    headers = {"access-control-request-method": "POST", "access-control-request-headers": asked}
    async with serve(allowed_origins=("http://localhost:5173",)) as client:
        response = await client.options(path, headers=headers | {"origin": "http://localhost:5173"})
        assert response.status_code == 200
        assert set(asked.split(",")) <= set(response.headers["access-control-allow-headers"].split(","))
        assert response.headers["access-control-allow-origin"] == "http://localhost:5173"
        other = await client.options(path, headers=headers | {"origin": "http://evil.example"})
        assert other.status_code == 400 and "access-control-allow-origin" not in other.headers
