"""Bodies that no client of ours sends: none of them may cost more than a 400."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from torch_pagoda.serving.protocol import fields

from fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

HEADERS = {"content-type": "application/json"}
ROUTES = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
GOOD = {
    "/v1/completions": b'{"prompt": "def f", "max_tokens": 2, "n": 2, "stop": ["x"], "logit_bias": {"5": 1.5}}',
    "/v1/chat/completions": b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "stream": true}',
    "/tokenize": b'{"messages": [{"role": "user", "content": "a"}], "return_token_strs": true}',
    "/detokenize": b'{"tokens": [5, 6, 7]}',
}

BODIES = {
    "nothing": b"",
    "NUL": b"\0",
    "a NUL in a string": b'{"prompt": "a\0b"}',
    "BOM": b'\xef\xbb\xbf{"prompt": "a"}',
    "UTF-16": '{"prompt": "a"}'.encode("utf-16"),
    "no UTF-8": b'{"prompt": "\xff\xfe"}',
    "a raw surrogate": b'{"prompt": "\xed\xa0\x80"}',
    "a lone surrogate": b'{"prompt": "\\ud800", "tokens": "\\ud800", "messages": [{"role": "\\udc00"}]}',
    "a list": b"[]",
    "a string": b'"prompt"',
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "Infinity": b'{"prompt": "a", "temperature": Infinity}',
    "1e999": b'{"prompt": "a", "temperature": 1e999}',
    "cut": b'{"prompt": "a"',
    "two objects": b'{"prompt": "a"}{}',
    "brackets": b"[" * 10_000,
    "nested lists": b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "nested objects": b'{"response_format": ' + b'{"a":' * 10_000 + b"1" + b"}" * 10_000 + b"}",
    "nested a little": b'{"x": ' + b"[" * 70 + b"]" * 70 + b"}",
    "a huge number": b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
    "a huge id": b'{"prompt": [' + b"9" * 400 + b'], "tokens": [' + b"9" * 400 + b"]}",
    "a huge seed": b'{"prompt": "a", "messages": [], "seed": ' + b"9" * 300 + b"}",
    "a huge bias": b'{"prompt": "a", "messages": [], "logit_bias": {"' + b"9" * 300 + b'": 1}}',
    "exotic digits": '{"prompt": "a", "messages": [], "logit_bias": {"²": 1, "٣": 1}}'.encode(),
    "a long name": b'{"' + b"n" * 100_000 + b'": 1, "tokens": 5}',
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
async def test_a_body_that_makes_no_sense_is_a_400(serve: Any, route: str, body: bytes) -> None:
    async with serve() as client:
        response = await client.post(route, content=body, headers=HEADERS)
    assert response.status_code == 400, response.text[:300]
    assert len(response.content) < 2000
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_a_key_that_is_there_twice_counts_once(serve: Any, engine: FakeEngine) -> None:
    body = b'{"prompt": "a", "max_tokens": 9, "max_tokens": 1}'
    async with serve() as client:
        assert (await client.post("/v1/completions", content=body, headers=HEADERS)).status_code == 200
    assert engine.submits[0].params["max_tokens"] == 1


async def test_a_body_with_odd_text_is_served(serve: Any) -> None:
    body = json.dumps({"prompt": "\0\u2028\ud83d\ude00", "max_tokens": 1, "user": "\r\n\0", "cache_salt": "\0"})
    async with serve() as client:
        assert (await client.post("/v1/completions", content=body, headers=HEADERS)).status_code == 200


def mutated(body: bytes, rng: random.Random) -> bytes:
    """``body`` with a few bytes changed, left out, doubled or put elsewhere."""
    result = bytearray(body)
    for _ in range(rng.randint(1, 4)):
        at, to = rng.randrange(len(result)), rng.randrange(len(result))
        kind = rng.randrange(5)
        if kind == 0:
            result[at] = rng.randrange(256)
        elif kind == 1 and len(result) > 2:
            del result[at : at + rng.randint(1, 4)]
        elif kind == 2:
            result[at:at] = result[to : to + 12]
        elif kind == 3:
            result[at:at] = rng.choice((b"-", b"9" * 20, b'"', b"{", b"[", b"null", b"1e9", b"\\u0000", b"true"))
        else:
            result[at], result[to] = result[to], result[at]
        if not result:
            return b" "
    return bytes(result)


@pytest.mark.parametrize("count", [150, pytest.param(2500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("route", ROUTES)
async def test_mutated_bodies_are_served_or_refused(serve: Any, route: str, count: int) -> None:
    rng = random.Random(f"{route} {count}")
    statuses = set()
    async with serve() as client:
        for _ in range(count):
            body = mutated(GOOD[route], rng)
            response = await client.post(route, content=body, headers=HEADERS)
            statuses.add(response.status_code)
            assert response.status_code in (200, 400, 404, 429), (response.status_code, body, response.text)
        front = client.front
    assert {200, 400} <= statuses
    assert front.admission.num_requests == front.admission.num_completions == 0


LARGE = 10**25


@pytest.mark.parametrize(
    "asked",
    [
        {"structured_outputs": {"json": {"type": "integer", "maximum": LARGE}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": LARGE}}}},
        {"stop_token_ids": [2**70]},
        {"allowed_token_ids": [2**70]},
        {"repetition_penalty": 1e-320},
        {"truncate_prompt_tokens": 0},
        {"allowed_token_ids": [""] * 200_000},
        {"stop": [1] * 200_000},
        {"guided_choice": ["a"] * 200_000},
    ],
    ids=lambda asked: next(iter(asked)),
)
async def test_values_beyond_all_bounds_are_refused(serve: Any, asked: dict[str, Any]) -> None:
    async with serve() as client:
        response = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, **asked})
    assert response.status_code == 400, response.text


@pytest.mark.parametrize("kind", [fields.TokenIds, fields.ShortTexts, fields.Texts])
def test_of_a_long_list_one_mistake_is_reported(kind: Any) -> None:
    """An error for each takes more than a thousand bytes."""
    with pytest.raises(ValidationError) as error:
        TypeAdapter(kind, config={"strict": True}).validate_python([None] * 1000)
    assert error.value.error_count() == 1
