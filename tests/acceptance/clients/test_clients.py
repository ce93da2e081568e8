"""Clients that speak OpenAI's and Anthropic's API, against ``pagoda serve``: all are given the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from openai import OpenAI

from served import PATIENCE, Served

pytestmark = pytest.mark.acceptance

MESSAGES: Any = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "Return the absolute value of the argument."},
]
"""What every program asks, greedily, for 32 tokens."""
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 12},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}

FoundBy = Callable[[str, str], Any]
Report = Callable[..., None]


@pytest.fixture(scope="module")
def answer(server: Served) -> Any:
    with OpenAI(base_url=f"{server.url}/v1", api_key="x", timeout=PATIENCE, max_retries=0) as client:
        return client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, max_tokens=32)


@pytest.fixture
def text(answer: Any) -> str:
    assert answer.usage.prompt_tokens == 66 and len(answer.choices[0].message.content) > 40
    return str(answer.choices[0].message.content)


def test_langchain(found_by: FoundBy, text: str, report: Report) -> None:
    found = found_by("langchain-openai", "with_langchain.py")
    for way in ("invoke", "stream", "ainvoke", "responses", "responses_stream"):
        assert found[way] == text, way
    assert found["batch"] == [text, text]
    assert found["stream_chunks"] > 25 and found["finish_reason"] == "length"
    for usage in (found["usage"], found["stream_usage"]):
        assert [usage[name] for name in ("input_tokens", "output_tokens", "total_tokens")] == [66, 32, 98]
    assert found["stream_usage"]["input_token_details"]["cache_read"] == 64
    for method in ("json_schema", "function_calling"):
        jsonschema.validate(found[method], {**WEATHER, "required": ["city", "unit", "days"]})
    for choice in ("any", "required", "Weather"):
        calls, streamed = (
            [(c["name"], c["args"]) for c in found[f"tool_choice {choice}{s}"]] for s in ("", ", streamed")
        )
        assert calls and calls == streamed
        for name, arguments in calls:
            assert name == "Weather"
            jsonschema.validate(arguments, WEATHER)
    assert len(found["tool_choice Weather"]) == 1
    assert found["after_a_tool"] not in ("", text)
    did = "invoke, stream, ainvoke, batch, responses; with_structured_output; bind_tools with any, required, a name"
    report("langchain-openai", found["version"], did, "texts equal, usage equal, values valid, streamed calls equal")


def test_litellm(found_by: FoundBy, text: str, report: Report) -> None:
    found = found_by("litellm", "with_litellm.py")
    for provider in ("hosted_vllm", "openai"):
        assert found[f"completion {provider}"] == found[f"stream {provider}"] == text
    assert found["acompletion"] == [text] * 4 and found["acompletion, streamed"] == text
    for usage in (found["usage"], found["stream_usage"]):
        assert [usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")] == [66, 32, 98]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 64
    assert found["finish_reason"] == "length" and len(found["text_completion"]) > 40
    jsonschema.validate(json.loads(found["response_format"]), WEATHER)
    assert found["tool"] == found["tool, streamed"] and found["tool"][0] == "get_weather"
    jsonschema.validate(found["tool"][1], WEATHER)
    assert found["errors"] == ["ContextWindowExceededError", "BadRequestError", "NotFoundError"]
    did = "completion, stream, acompletion, text_completion, response_format, a named tool, errors"
    report("litellm", found["version"], did, "texts equal, usage equal, values valid, errors of the right classes")


def test_anthropic(found_by: FoundBy, text: str, report: Report) -> None:
    found = found_by("anthropic", "with_anthropic.py")
    assert found["create"] == found["stream"] == "".join(found["text_stream"]) == text
    assert found["async"] == [text] * 4 and len(found["text_stream"]) > 25
    assert found["stop_reason"] == found["stream_stop_reason"] == "max_tokens"
    for usage in (found["usage"], found["stream_usage"]):
        assert usage["output_tokens"] == 32 and usage["input_tokens"] + usage["cache_read_input_tokens"] == 66
    assert list(dict.fromkeys(found["events"])) == [
        *("message_start", "content_block_start", "content_block_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    assert found["stopped"] == [text[:5], "stop_sequence", text[5:9]]
    for choice in ("any", "tool"):
        name, value, reason = found[f"tool_choice {choice}"]
        assert [name, value, reason] == found[f"tool_choice {choice}, streamed"] and reason == "tool_use"
        assert name in ({"get_weather", "get_time"} if choice == "any" else {"get_time"})
        jsonschema.validate(value, WEATHER)
    assert found["after_a_tool"] not in ("", text)
    assert found["count_tokens"] == 66 and found["models"] == ["tiny"]
    assert found["errors"] == [
        ["NotFoundError", "not_found_error"],
        ["BadRequestError", "invalid_request_error"],
        ["BadRequestError", "invalid_request_error"],
    ]
    did = "create, stream, async, stop_sequences, tool_choice any and tool, count_tokens, models, errors"
    report("anthropic", found["version"], did, "texts equal to chat's, usage and events right, values valid")
