"""A conversation becomes the same prompt on every route, and errors name what the client of that route sent."""

from __future__ import annotations

from typing import Any

import pytest

from torch_pagoda.serving.formats import resolve

from fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
MOST = {CHAT: "max_tokens", RESPONSES: "max_output_tokens", MESSAGES: "max_tokens"}
BRACKETS = (
    "{% for m in messages %}[{{ m.role }}{{ ' ' ~ m.name if m.role == 'tool' }}] {{ m.content + ' ' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% endfor %}{% endfor %}"
)
TEXTS = (
    "{% for m in messages if m.role != 'developer' %}[{{ m.role }}] "
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
)
USER = {"role": "user", "content": "q"}
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
CALLED: dict[str, dict[str, Any]] = {
    CHAT: {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": PARTS},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"x":1}'}},
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": PARTS},
        ]
    },
    RESPONSES: {
        "instructions": "s",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"x":1}'},
            {"type": "function_call_output", "call_id": "c1", "output": [*PARTS[:1], {"type": "text", "text": "b"}]},
        ],
    },
    MESSAGES: {
        "system": "s",
        "messages": [
            {"role": "user", "content": PARTS},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {"x": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": PARTS}]},
        ],
    },
}


async def prompts(serve: Any, engine: FakeEngine, template: str, asked: dict[str, dict[str, Any]]) -> list[str]:
    """The prompt that each route makes of its body."""
    found = []
    async with serve(chat_template=template) as client:
        for route, body in asked.items():
            response = await client.post(route, json={MOST[route]: 1, **body})
            assert response.status_code == 200, response.text
            found.append(engine.tokenizer.decode(engine.submits[-1].prompts[0]))
    return found


async def test_calls_results_and_parts_are_the_same_on_every_route(serve: Any, engine: FakeEngine) -> None:
    expected = '[system] s [user] a\nb [assistant]  look{"x":1}[tool look] a\nb '
    assert await prompts(serve, engine, BRACKETS, CALLED) == [expected] * 3


async def test_a_template_of_parts_gets_parts_on_every_route(serve: Any, engine: FakeEngine) -> None:
    asked = {CHAT: {"messages": [USER]}, RESPONSES: {"input": "q"}, MESSAGES: {"messages": [USER]}}
    assert await prompts(serve, engine, TEXTS, asked) == ["[user] q"] * 3
    items = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    both = {CHAT: {"messages": items}, RESPONSES: {"input": items}}
    assert await prompts(serve, engine, TEXTS, both) == ["[system] d[user] ab"] * 2


@pytest.mark.parametrize("part", [{"type": "refusal", "refusal": "no"}, {"type": "output_text", "text": "no"}, "no"])
async def test_every_form_of_text_is_taken(serve: Any, engine: FakeEngine, part: Any) -> None:
    conversation = [USER, {"role": "assistant", "content": [part]}, USER]
    asked = {CHAT: {"messages": conversation}, RESPONSES: {"input": conversation}}
    assert await prompts(serve, engine, BRACKETS, asked) == ["[user] q [assistant] no [user] q "] * 2


async def test_what_anthropics_clients_send_back(serve: Any, engine: FakeEngine) -> None:
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "no city"}
    history = [
        USER,
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "a"}]},
        {"role": "user", "content": "b"},
        {"role": "user", "content": "c"},
        CALLED[MESSAGES]["messages"][1],
    ]
    texts = []
    for extra in ({}, {"is_error": False}, {"is_error": True}):
        messages = [*history, {"role": "user", "content": [{**result, **extra}]}]
        texts += await prompts(serve, engine, BRACKETS, {MESSAGES: {"messages": messages}})
    begin = '[user] q [assistant] a [user] b\nc [assistant]  look{"x":1}[tool look] '
    assert texts == [f"{begin}no city "] * 2 + [f"{begin}Error: no city "]


FIRST = "{% for m in messages[:2] %}{{ m.role }}: {{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        (CHAT, {"messages": [USER, USER, USER]}, "messages[2].content"),
        (RESPONSES, {"input": [USER, USER], "instructions": "s"}, "input[1].content"),
        (RESPONSES, {"input": [USER, {"role": "user", "content": []}]}, "input[1].content"),
        (RESPONSES, {"input": "q " * 200}, "input"),
        (MESSAGES, {"system": "s", "messages": [USER, {"role": "assistant", "content": "a"}]}, "messages[1].content"),
    ],
)
async def test_errors_name_the_field_that_the_client_sent(
    serve: Any, engine: FakeEngine, route: str, body: dict[str, Any], param: str
) -> None:
    async with serve(chat_template=FIRST) as client:
        response = await client.post(route, json={MOST[route]: 400, **body})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error.get("param", param) == param and (param in error["message"] or "context length" in error["message"])
    assert not engine.submits


@pytest.mark.parametrize("route", [CHAT, RESPONSES, MESSAGES])
async def test_tools_that_the_template_does_not_show_are_refused(serve: Any, engine: FakeEngine, route: str) -> None:
    function = {"name": "f", "parameters": {"type": "object"}}
    tools: dict[str, Any] = {
        CHAT: {"type": "function", "function": function},
        RESPONSES: {"type": "function", **function},
        MESSAGES: {"name": "f", "input_schema": {"type": "object"}},
    }
    body = {"input": "q"} if route == RESPONSES else {"messages": [USER]}
    async with serve(chat_template=TEXTS, formats=resolve("hermes", engine.tokenizer, TEXTS)) as client:
        response = await client.post(route, json={MOST[route]: 1, **body, "tools": [tools[route]]})
    assert (
        response.status_code == 400
        and "tools: the chat template does not show tools" in response.json()["error"]["message"]
    )
