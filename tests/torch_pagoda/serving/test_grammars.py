"""Constraints of requests: compiled before they go to the engine, refused with a reason, or with a warning."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from torch_pagoda.runtime.structured.state import CANNOT_GO_ON
from torch_pagoda.serving.generation import grammars
from torch_pagoda.serving.generation.grammars import Grammars
from torch_pagoda.serving.http.errors import ApiError

from fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

URL = "/v1/completions"
UNIQUE = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}


def schema_format(schema: Any, strict: bool) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": strict}}


async def asked(serve: Any, **fields: Any) -> Any:
    async with serve() as client:
        return await client.post(URL, json={"prompt": "a", "max_tokens": 4, **fields})


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"response_format": schema_format(UNIQUE, True)}, "uniqueItems"),
        ({"structured_outputs": {"regex": "(a"}}, "regex"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "grammar"),
        ({"structured_outputs": {"json": False}}, "allows no text"),
        ({"guided_choice": []}, "choice"),
    ],
)
async def test_what_cannot_be_enforced_is_refused_before_the_engine_sees_it(
    serve: Any, engine: FakeEngine, fields: dict[str, Any], reason: str
) -> None:
    response = await asked(serve, **fields)
    assert response.status_code == 400 and reason in response.json()["error"]["message"], response.text
    assert engine.submits == []


async def test_what_a_client_does_not_insist_on_is_left_out_and_named(serve: Any, engine: FakeEngine) -> None:
    response = await asked(serve, response_format=schema_format(UNIQUE, False))
    assert response.status_code == 200, response.text
    assert "uniqueItems" in response.headers["x-pagoda-schema-warnings"]
    assert engine.submits[0].params["structured_outputs"]["strict"] is False


async def test_a_sound_schema_has_no_warnings(serve: Any, engine: FakeEngine) -> None:
    response = await asked(serve, response_format=schema_format({"type": "integer"}, True))
    assert response.status_code == 200 and "x-pagoda-schema-warnings" not in response.headers
    assert engine.submits[0].params["structured_outputs"] == {"json": {"type": "integer"}, "strict": True}


@pytest.mark.parametrize(
    ("sent", "reached"),
    [
        ({"json": {"type": "integer"}, "whitespace": "any"}, {"strict": False}),
        ({"json": {"type": "integer"}, "strict": True, "whitespace": "compact"}, {}),
        ({"json_object": True, "whitespace": "any", "strict": None}, {"strict": None}),
        ({"regex": "[ab]+", "after": "</think>"}, {}),
    ],
)
async def test_options_beside_a_constraint_reach_the_engine(
    serve: Any, engine: FakeEngine, sent: dict[str, Any], reached: dict[str, Any]
) -> None:
    response = await asked(serve, structured_outputs=sent)
    assert response.status_code == 200, response.text
    expected = {name: value for name, value in {**sent, **reached}.items() if value is not None}
    assert engine.submits[0].params["structured_outputs"] == expected


@pytest.mark.parametrize(
    ("options", "param", "reason"),
    [
        ({"whitespac": "any"}, "structured_outputs", "'whitespac', which is unknown"),
        ({"whitespace": "some"}, "structured_outputs.whitespace", "'some' is not known"),
        ({"strict": "yes"}, "structured_outputs.strict", "'yes' is not a bool"),
        ({"after": []}, "structured_outputs.after", "[] is neither text nor a list"),
    ],
)
async def test_options_that_mean_nothing_are_refused_as_by_the_engine(
    serve: Any, engine: FakeEngine, options: dict[str, Any], param: str, reason: str
) -> None:
    for kind in ({"json": {"type": "integer"}}, {"regex": "[ab]+"}):
        response = await asked(serve, structured_outputs={**kind, **options})
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"] == param and reason in error["message"]
    assert engine.submits == []


@pytest.mark.parametrize("kind", ["grammar", "structural_tag"])
async def test_schemas_within_other_kinds_may_be_lenient(serve: Any, kind: str) -> None:
    schema = {"type": "object", "minProperties": 2}
    tag = {"structures": [{"begin": "<f", "schema": schema, "end": ""}], "triggers": ["<f"]}
    asked = {kind: tag if kind == "structural_tag" else f"start: %json {json.dumps(schema)}"}
    async with serve() as client:
        statuses = []
        for strict in ({}, {"strict": True}, {"strict": False}):
            body = {"prompt": "a", "max_tokens": 1, "structured_outputs": {**asked, **strict}}
            response = await client.post("/v1/completions", json=body)
            statuses.append(response.status_code)
    assert statuses == [400, 400, 200] and "minProperties=2" in response.headers["x-pagoda-schema-warnings"]


async def test_grammars_that_take_long_hold_nobody_up_and_are_not_piled_up(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, seconds = threading.Event(), list[float]()
    monkeypatch.setattr(grammars, "check_structured", lambda *_: go_on.wait(60) and [])
    monkeypatch.setattr(grammars, "MAX_SECONDS", 0.05)
    monkeypatch.setattr(grammars, "MAX_WAITING", 3)
    checks = Grammars(tokenizer, seconds.append)
    monkeypatch.setattr(grammars, "MAX_SECONDS_IN_QUEUE", 0.1)
    for _ in range(2):
        with pytest.raises(ApiError, match="compiling the grammar") as error:
            await checks.check({"regex": "a"})
        assert error.value.status_code == 400
    # Both places are held by what was given up; whoever comes later is not told that the own grammar is at fault.
    others = [asyncio.create_task(checks.check({"regex": "b"})) for _ in range(4)]
    for result in await asyncio.gather(*others, return_exceptions=True):
        assert isinstance(result, ApiError) and result.status_code == 429
    waiting = asyncio.create_task(checks.check({"regex": "c"}))
    await asyncio.sleep(0)
    go_on.set()
    assert await waiting == [] and len(seconds) >= 2
    assert await checks.check({"regex": "a"}) == []
    checks.close()


async def test_without_a_tokenizer_nothing_can_be_constrained() -> None:
    with pytest.raises(ApiError, match="need a tokenizer"):
        await Grammars(None).check({"regex": "a"})


@pytest.mark.parametrize("url", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_a_grammar_that_cannot_go_on_is_the_requests_fault(serve: Any, engine: FakeEngine, url: str) -> None:
    engine.error = f"{CANNOT_GO_ON} (it requires more text and allows none)"
    asked = {"prompt": "a"} if url == URL else {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
    asked = {"input": "a"} if url == "/v1/responses" else asked
    async with serve() as client:
        whole = await client.post(url, json=asked)
        streamed = await client.post(url, json={**asked, "stream": True})
        engine.error = "out of memory"
        failed = await client.post(url, json=asked)
    assert (whole.status_code, failed.status_code) == (400, 500)
    assert "cannot continue (it requires more text and allows none)" in whole.json()["error"]["message"]
    assert (
        streamed.status_code == 200
        and "cannot continue" in streamed.text
        and "Internal engine error" not in streamed.text
    )
