"""Compressed bodies: read as what they are, bounded by what they become, or refused."""

from __future__ import annotations

import gzip
import json
import random
import zlib
from typing import Any

import pytest
import zstandard

pytestmark = pytest.mark.anyio

URL = "/v1/completions"
BODY = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
ENCODE = {"gzip": gzip.compress, "deflate": zlib.compress, "zstd": zstandard.ZstdCompressor().compress}
LIMIT = 4096


async def post(serve: Any, content: bytes, coding: str) -> Any:
    headers = {"content-type": "application/json", "content-encoding": coding}
    async with serve(max_body_size=LIMIT) as client:
        response = await client.post(URL, content=content, headers=headers)
        assert client.front is not None
        return response


@pytest.mark.parametrize("coding", ENCODE)
async def test_a_compressed_body_is_read(serve: Any, coding: str) -> None:
    assert (await post(serve, ENCODE[coding](BODY), coding)).status_code == 200


@pytest.mark.parametrize("coding", ENCODE)
async def test_a_body_that_hardly_shrinks_is_read_whole(serve: Any, coding: str) -> None:
    stops = [random.Random(i).randbytes(30).hex() for i in range(16)]
    body = json.dumps({"prompt": "a", "max_tokens": 1, "stop": stops}).encode()
    encoded = ENCODE[coding](body)
    assert len(encoded) > 256 and (await post(serve, encoded, coding)).status_code == 200


@pytest.mark.parametrize("named", ["GZIP", " x-gzip ", "identity, gzip", "gzip,"])
async def test_names_of_codings(serve: Any, named: str) -> None:
    assert (await post(serve, gzip.compress(BODY), named)).status_code == 200


@pytest.mark.parametrize("named", ["", "identity"])
async def test_no_coding(serve: Any, named: str) -> None:
    assert (await post(serve, BODY, named)).status_code == 200


@pytest.mark.parametrize("named", ["br", "compress", "gzip, gzip", "gzip, br", "nonsense" * 100])
async def test_other_codings_are_refused_with_those_that_are_read(serve: Any, named: str) -> None:
    response = await post(serve, BODY, named)
    assert response.status_code == 415 and response.json()["error"]["code"] == "unsupported_content_encoding"
    assert response.headers["accept-encoding"] == "gzip, deflate, zstd"


@pytest.mark.parametrize("coding", ENCODE)
async def test_what_a_body_becomes_is_bounded(serve: Any, coding: str) -> None:
    at_limit = BODY + b" " * (LIMIT - len(BODY))
    assert (await post(serve, ENCODE[coding](at_limit), coding)).status_code == 200
    for size in (LIMIT + 1, 1 << 28):
        encoded = ENCODE[coding](bytes(size))
        response = await post(serve, encoded[: LIMIT - 1], coding)
        assert response.status_code == 413 and response.json()["error"]["code"] == "body_too_large", size


@pytest.mark.parametrize("coding", ENCODE)
@pytest.mark.parametrize("spoil", [lambda b: b[:-1], lambda b: b + b"x", lambda b: BODY, lambda b: b""])
async def test_a_body_that_is_not_of_its_coding_is_refused(serve: Any, coding: str, spoil: Any) -> None:
    response = await post(serve, spoil(ENCODE[coding](BODY)), coding)
    assert response.status_code == 400 and response.json()["error"]["code"] == "invalid_content_encoding"


async def test_nothing_of_a_refused_body_stays_counted(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_pagoda.serving.http import limits

    made = []
    begin = limits.BodyMiddleware.__init__

    def noted(self: limits.BodyMiddleware, *args: Any, **options: Any) -> None:
        made.append(self)
        begin(self, *args, **options)

    monkeypatch.setattr(limits.BodyMiddleware, "__init__", noted)
    for content in (gzip.compress(BODY), gzip.compress(bytes(1 << 20)), gzip.compress(BODY)[:-1]):
        await post(serve, content, "gzip")
    assert [middleware._held for middleware in made] == [0, 0, 0]
