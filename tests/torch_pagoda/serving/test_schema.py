"""The server's own description: requests that schemathesis makes of it, and answers that are not as described.

The answers of all other tests of routes are held against it, too (``serve`` in ``conftest.py``).
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)
from transformers import AutoTokenizer

from torch_pagoda.serving.app import make_app
from torch_pagoda.serving.settings import Settings

from described_answers import Described
from fake_engine import FakeEngine
from served import MODEL

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    unsupported_method,
]


@pytest.fixture(scope="module")
def app() -> Any:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    template = "{% for message in messages %}{{ message.content }}{% endfor %}."
    engine = FakeEngine(tokenizer, finish_after=3)
    made = make_app(Settings(chat_template=template, allowed_hosts=("*",), enable_admin=True), engine, tokenizer)
    yield made
    made.state.front.close()


@pytest.fixture(scope="module")
def schema(app: Any) -> Any:
    return schemathesis.openapi.from_asgi("/openapi.json", app)


@pytest.fixture(scope="module")
def described(app: Any) -> Described:
    return Described(app.openapi())


ROUTES = [
    *(("POST", path) for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")),
    *(("POST", path) for path in ("/v1/messages/count_tokens", "/tokenize", "/detokenize", "/reset_prefix_cache")),
    *(("GET", path) for path in ("/v1/models", "/v1/models/{model}", "/health", "/ready", "/ping", "/version")),
    *(("GET", path) for path in ("/load", "/server_info", "/healthz", "/metrics")),
    ("POST", "/ping"),
]


@pytest.mark.parametrize("count", [6, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_nothing_fails_the_server(schema: Any, method: str, path: str, count: int) -> None:
    operation = schema[path][method]

    for mode in GenerationMode:

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
        def check(case: Any) -> None:
            case.call_and_validate(checks=CHECKS)

        try:
            check()
        except Unsatisfiable:
            assert not operation.body  # there is nothing to get wrong


MESSAGES = [{"role": "user", "content": "def"}]
STREAMS = {
    "/v1/completions": {"prompt": "def"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "def"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
}


@pytest.mark.parametrize("path", STREAMS)
def test_streams_are_as_described(schema: Any, path: str) -> None:
    case = schema[path]["POST"].Case(body={**STREAMS[path], "stream": True}, media_type="application/json")
    response = case.call_and_validate(checks=CHECKS)
    assert response.status_code == 200
    assert response.headers["content-type"][0].startswith("text/event-stream")


def test_every_route_is_asked(schema: Any) -> None:
    described = {(method.upper(), path) for path in schema for method in schema[path]}
    assert described == set(ROUTES)


def test_every_answer_is_described(app: Any) -> None:
    document = app.openapi()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert "200" in operation["responses"], (method, path)
            for answer in operation["responses"].values():
                for content in answer["content"].values():
                    (schema,) = content.values()
                    assert schema, (method, path)
    references = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert references == set(document["components"]["schemas"])


def test_what_is_not_as_described_is_found(schema: Any, described: Described) -> None:
    path = "/v1/chat/completions"
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    answer = schema[path]["POST"].Case(body=body, media_type="application/json").call()

    def wrong(value: Any, status: int = 200, kind: str = "application/json") -> str | None:
        return described.wrong_with("POST", path, status, kind, json.dumps(value).encode())

    sent = answer.json()
    (choice,) = sent["choices"]
    assert wrong(sent) is None
    assert wrong(sent, status=418) is not None
    assert wrong(sent, kind="text/plain") is not None
    for mutant in (
        *({**choice, name: ["not this"]} for name in choice),
        *({key: value for key, value in choice.items() if key != name} for name in choice),
        {**choice, "surprise": 1},
        {**choice, "index": -1},
        {**choice, "finish_reason": "over"},
        {**choice, "message": {**choice["message"], "role": "user"}},
        {**choice, "message": {key: value for key, value in choice["message"].items() if key != "refusal"}},
    ):
        assert wrong({**sent, "choices": [mutant]}) is not None, mutant


@pytest.mark.parametrize("path", STREAMS)
def test_an_event_that_is_not_as_described_is_found(schema: Any, described: Described, path: str) -> None:
    text = (
        schema[path]["POST"].Case(body={**STREAMS[path], "stream": True}, media_type="application/json").call().text
    )

    def wrong(events: str) -> str | None:
        return described.wrong_with("POST", path, 200, "text/event-stream; charset=utf-8", events.encode())

    assert wrong(text) is None
    first = text.partition("data: ")[2].partition("\n")[0]
    for name in (event := json.loads(first)):
        without = {key: value for key, value in event.items() if key != name}
        for mutant in ({**event, name: [["not this"]]}, without):
            assert wrong(text.replace(first, json.dumps(mutant), 1)) is not None, (name, mutant)
    assert wrong(text + "data: [OVER]\n\n") is not None
