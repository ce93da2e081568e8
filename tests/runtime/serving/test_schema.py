"""Requests that schemathesis makes of the server's own description, right and wrong ones."""

from __future__ import annotations

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
def schema() -> Any:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    template = "{% for message in messages %}{{ message.content }}{% endfor %}."
    engine = FakeEngine(tokenizer, finish_after=3)
    app = make_app(Settings(chat_template=template, allowed_hosts=("*",), enable_admin=True), engine, tokenizer)
    yield schemathesis.openapi.from_asgi("/openapi.json", app)
    app.state.front.close()


ROUTES = [
    *(("POST", path) for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")),
    *(("POST", path) for path in ("/v1/messages/count_tokens", "/tokenize", "/detokenize", "/reset_prefix_cache")),
    *(("GET", path) for path in ("/v1/models", "/v1/models/{model}", "/health", "/ready", "/ping", "/version")),
    *(("GET", path) for path in ("/load", "/server_info")),
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
