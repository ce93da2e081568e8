"""Requests that schemathesis makes of the server's own description, right and wrong ones."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
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


lazy = schemathesis.pytest.from_fixture("schema")
few = settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
many = settings(few, max_examples=200)


@lazy.parametrize()
@few
def test_nothing_fails_the_server(case: Any) -> None:
    case.call_and_validate(checks=CHECKS)


@pytest.mark.slow
@lazy.parametrize()
@many
def test_nothing_fails_the_server_often(case: Any) -> None:
    case.call_and_validate(checks=CHECKS)
