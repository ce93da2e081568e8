"""The server's own description: requests that schemathesis makes of it, and answers that are not as described.

The answers of all other tests of routes are held against it, too (``serve`` in ``conftest.py``).
"""

from __future__ import annotations

import copy
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

from torch_pagoda.runtime.serving.app import make_app
from torch_pagoda.runtime.serving.settings import Settings

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


ANSWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "def", "logprobs": 2, "echo": True, "return_token_ids": True}),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}),
    "response": ("/v1/responses", {"input": "def"}),
    "message": ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4}),
    "tokens": ("/tokenize", {"prompt": "def"}),
    "error": ("/v1/completions", {"prompt": 3}),
    "Anthropic's error": ("/v1/messages", {"messages": []}),
}


@pytest.mark.parametrize(("path", "body"), ANSWERS.values(), ids=list(ANSWERS))
def test_a_field_that_is_missing_or_of_another_type_is_found(
    schema: Any, described: Described, path: str, body: dict[str, Any]
) -> None:
    answer = schema[path]["POST"].Case(body=body, media_type="application/json").call()
    sent = answer.json()
    optional = {"token_ids", "prompt_token_ids"}

    def wrong(value: Any) -> str | None:
        return described.wrong_with("POST", path, answer.status_code, "application/json", json.dumps(value).encode())

    assert wrong(sent) is None
    free = {"/v1/completions": "top_logprobs", "/v1/responses": "format"}.get(path)
    for place in [place for place in objects_of(sent) if free not in place]:
        for name in list(at(sent, place)):
            mutants = [{**at(sent, place), name: of_another_type(at(sent, place)[name])}]
            if name not in optional:
                mutants.append({key: value for key, value in at(sent, place).items() if key != name})
            mutants.append({**at(sent, place), "surprise": 1})
            for mutant in mutants:
                assert wrong(put(sent, place, mutant)) is not None, (place, name, mutant)
    assert described.wrong_with("POST", path, 418, "application/json", b"{}") is not None


@pytest.mark.parametrize("path", STREAMS)
def test_an_event_that_is_not_as_described_is_found(schema: Any, described: Described, path: str) -> None:
    body = {**STREAMS[path], "stream": True, "stream_options": {"include_usage": True}}
    text = schema[path]["POST"].Case(body=body, media_type="application/json").call().text

    def wrong(events: str) -> str | None:
        return described.wrong_with("POST", path, 200, "text/event-stream; charset=utf-8", events.encode())

    assert wrong(text) is None
    lines = text.splitlines()
    data = [i for i, line in enumerate(lines) if line.startswith("data: {")]
    assert len(data) > 3
    for i in data:
        event = json.loads(lines[i].removeprefix("data: "))
        for name in event:
            if name == "usage" and event[name] is None:  # only where it was asked for
                continue
            of_other = {**event, name: of_another_type(event[name])}
            for mutant in (of_other, {k: v for k, v in event.items() if k != name}):
                if name == "usage" and name not in mutant and path.startswith("/v1/c"):
                    continue
                changed = [*lines[:i], f"data: {json.dumps(mutant)}", *lines[i + 1 :]]
                assert wrong("\n".join(changed) + "\n") is not None, (name, mutant)
    assert wrong(text.replace("data: {", "data: [{", 1)) is not None
    assert wrong(text + "data: [OVER]\n\n") is not None


def objects_of(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Places of all objects in a value, its own first."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [place] if isinstance(value, dict) and value else []
    return found + [deeper for key, each in inner for deeper in objects_of(each, (*place, key))]


def of_another_type(value: Any) -> Any:
    return {"not": ["this"]} if isinstance(value, list) else [["not this"]]


def at(value: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        value = value[key]
    return value


def put(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    """A copy of a value with another object at a place."""
    value = copy.deepcopy(value)
    if not place:
        return new
    at(value, place[:-1])[place[-1]] = new
    return value
