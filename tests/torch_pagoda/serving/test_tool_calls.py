"""Calls that a request allows, in every route, whole and streamed: what is promised of them holds or is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from torch_pagoda.serving.formats import resolve
from torch_pagoda.serving.formats.library import TemplateFormat

from event_streams import events
from fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ROUTES = (CHAT, RESPONSES, MESSAGES)
HELLO = [{"role": "user", "content": "hi"}]
FREE = {"type": "object"}
NUMBER = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
THINKS = (
    "{{ tools | tojson if tools }}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def body(route: str, tools: dict[str, dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """A request of the route with these tools, name → what is said of it: ``parameters`` and ``strict``."""
    if route == MESSAGES:
        listed: list[dict[str, Any]] = [
            {
                "name": name,
                "input_schema": said.get("parameters", FREE),
                **{k: v for k, v in said.items() if k == "strict"},
            }
            for name, said in tools.items()
        ]
        return {"messages": HELLO, "max_tokens": 50, "tools": listed, **fields}
    functions = [{"name": name, "parameters": FREE, **said} for name, said in tools.items()]
    if route == RESPONSES:
        return {"input": "hi", "tools": [{"type": "function", **function} for function in functions], **fields}
    return {"messages": HELLO, "tools": [{"type": "function", "function": f} for f in functions], **fields}


def calls_and_text(route: str, answer: dict[str, Any]) -> tuple[list[str], str]:
    """Names of the calls of a whole answer, and its content."""
    if route == CHAT:
        message = answer["choices"][0]["message"]
        return [call["function"]["name"] for call in message.get("tool_calls", [])], message["content"] or ""
    if route == RESPONSES:
        output = answer["output"]
        texts = [part["text"] for item in output if item["type"] == "message" for part in item["content"]]
        return [item["name"] for item in output if item["type"] == "function_call"], "".join(texts)
    blocks = answer["content"]
    names = [block["name"] for block in blocks if block["type"] == "tool_use"]
    return names, "".join(block["text"] for block in blocks if block["type"] == "text")


def streamed(route: str, text: str) -> tuple[list[str], str]:
    """The same of events."""
    if route == CHAT:
        deltas = [choice["delta"] for chunk in events(text) for choice in chunk["choices"]]
        names = [call["function"]["name"] for delta in deltas for call in delta.get("tool_calls", ())]
        return names, "".join(delta.get("content") or "" for delta in deltas)
    found = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    if route == RESPONSES:
        return calls_and_text(route, found[-1]["response"])
    begun = [event["content_block"] for event in found if event["type"] == "content_block_start"]
    deltas = [event["delta"] for event in found if event["type"] == "content_block_delta"]
    names = [block["name"] for block in begun if block["type"] == "tool_use"]
    return names, "".join(delta.get("text", "") for delta in deltas)


async def answered(
    serve: Any, engine: FakeEngine, route: str, asked: dict[str, Any], texts: tuple[str, ...], **options: Any
) -> tuple[list[str], str]:
    """Calls and content of the answer, which are the same whole and streamed."""
    engine.texts, engine.finish, engine.finish_after = texts, "stop", len(texts)
    options.setdefault("formats", resolve("hermes", engine.tokenizer, None))
    async with serve(**options) as client:
        response = await client.post(route, json=asked)
        assert response.status_code == 200, response.text
        whole = calls_and_text(route, response.json())
        response = await client.post(route, json=asked | {"stream": True})
    assert streamed(route, response.text) == whole
    return whole


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("parallel", [True, False])
async def test_one_call_is_one_call(serve: Any, engine: FakeEngine, route: str, parallel: bool) -> None:
    texts = ("Well. ", called("f", a=1)[:20], called("f", a=1)[20:], " and ", called("g") + called("f"), " so.")
    fields: dict[str, Any] = {"parallel_tool_calls": parallel}
    if route == MESSAGES:
        fields = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": not parallel}}
    names, text = await answered(serve, engine, route, body(route, {"f": {}, "g": {}}, **fields), texts)
    assert names == (["f", "g", "f"] if parallel else ["f"])
    assert text == "Well.  and  so."


async def test_every_choice_has_its_one_call(serve: Any, engine: FakeEngine) -> None:
    engine.texts, engine.finish, engine.finish_after = (called("f"), called("g")), "stop", 2
    async with serve(formats=resolve("hermes", engine.tokenizer, None)) as client:
        asked = body(CHAT, {"f": {}, "g": {}}, parallel_tool_calls=False, n=3)
        choices = (await client.post(CHAT, json=asked)).json()["choices"]
    assert [[c["function"]["name"] for c in choice["message"]["tool_calls"]] for choice in choices] == [["f"]] * 3


OWN = TemplateFormat(
    {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": {
                "open_pattern": r"<tool_call>(?P<name>\w+)",
                "close": "</tool_call>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {"content": "text"},
        },
    }
)


def own(**reasoning: Any) -> TemplateFormat:
    """A tokenizer's own format with reasoning."""
    thinks = {"open": "<think>", "content": "text", **reasoning}
    template = {"start_anchor": "<|im_start|>assistant\n"}
    return TemplateFormat({**template, "fields": {"reasoning_content": thinks, "content": {"content": "text"}}})


async def test_a_constraint_begins_behind_reasoning_in_a_format_of_its_own(serve: Any, engine: FakeEngine) -> None:
    asked = {"messages": HELLO, "response_format": {"type": "json_object"}}
    texts = ("hm.</think>", "{}")
    formats = own(close="</think>")
    assert await answered(serve, engine, CHAT, asked, texts, formats=formats, chat_template=THINKS) == ([], "{}")
    assert engine.submits[-1].params["structured_outputs"]["after"] == "</think>"
    async with serve(formats=own(close_pattern="</thinks?>"), chat_template=THINKS) as client:
        response = await client.post(CHAT, json=asked)
    assert response.status_code == 400 and response.json()["error"]["param"] == "response_format", response.text


@pytest.mark.parametrize("form", ["hermes", "its own"])
async def test_only_allowed_tools_are_called(serve: Any, engine: FakeEngine, form: str) -> None:
    texts = (called("g", a=1), called("f"), called("other"))
    if form == "its own":
        texts = ('<tool_call>g{"a": 1}</tool_call>', "<tool_call>f{}</tool_call>", "<tool_call>other{}</tool_call>")
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]}
    asked = body(CHAT, {"f": {}, "g": {}}, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    formats = resolve("hermes", engine.tokenizer, None) if form == "hermes" else OWN
    assert await answered(serve, engine, CHAT, asked, texts, formats=formats) == (["f"], texts[0] + texts[2])
    async with serve(formats=formats) as client:
        await client.post(CHAT, json=asked)
        assert "pagoda:tool_parse_failures_total 2.0" in (await client.get("/metrics")).text
    # Without such a choice, a call of a function that nobody knows is the client's to refuse.
    free = body(CHAT, {"f": {}, "g": {}})
    assert (await answered(serve, engine, CHAT, free, texts, formats=formats))[0] == ["g", "f", "other"]


async def test_a_call_within_reasoning_is_none_where_a_grammar_waits(serve: Any, engine: FakeEngine) -> None:
    formats = resolve("hermes", engine.tokenizer, THINKS, reasoning_parser="qwen3")
    texts = ("hm ", called("f", zzz=1), " so.</think>", '{"a": 1}')
    form = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": NUMBER}}
    asked = body(CHAT, {"f": {"parameters": NUMBER}})
    options = {"formats": formats, "chat_template": THINKS}
    assert await answered(serve, engine, CHAT, asked | {"response_format": form}, texts, **options) == (
        [],
        '{"a": 1}',
    )
    assert engine.submits[-1].params["structured_outputs"]["after"] == "</think>"
    # A model that nothing holds may end its reasoning with a call.
    assert await answered(serve, engine, CHAT, asked, texts, **options) == (["f"], 'so.</think>{"a": 1}')


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("form", ["llama3_json", "gemma4", "lfm2", "minimax_m3", "its own"])
async def test_strict_is_refused_where_calls_within_text_cannot_be_held(
    serve: Any, engine: FakeEngine, route: str, form: str
) -> None:
    formats = OWN if form == "its own" else resolve(form, engine.tokenizer, None)
    tools: dict[str, dict[str, Any]] = {"f": {"parameters": NUMBER}, "g": {"parameters": NUMBER, "strict": True}}
    async with serve(formats=formats) as client:
        refused = await client.post(route, json=body(route, tools))
        loose = await client.post(route, json=body(route, {"f": {"parameters": NUMBER, "strict": False}}))
    assert refused.status_code == 400, refused.text
    assert "tools[1] (g) is strict" in refused.json()["error"]["message"]
    assert ("use tool_choice='required'" in refused.json()["error"]["message"]) is (form == "llama3_json")
    assert loose.status_code == 200 and "structured_outputs" not in engine.submits[-1].params


async def test_a_refusal_counts_the_tools_that_were_sent(serve: Any, engine: FakeEngine) -> None:
    tools: dict[str, dict[str, Any]] = {"f": {}, "g": {"strict": True}}
    only = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]}
    async with serve(formats=resolve("gemma4", engine.tokenizer, None)) as client:
        asked = body(CHAT, tools, tool_choice={"type": "allowed_tools", "allowed_tools": only})
        refused = await client.post(CHAT, json=asked)
    assert refused.status_code == 400 and "tools[1] (g) is strict" in refused.json()["error"]["message"]


@pytest.mark.parametrize("strict", [True, False])
async def test_what_the_grammar_does_not_take_for_a_call_is_text(
    serve: Any, engine: FakeEngine, strict: bool
) -> None:
    text = "<function=f>\n<parameter=a>\nno number\n</parameter>\n</function>"
    asked = body(CHAT, {"f": {"parameters": NUMBER, "strict": strict}})
    formats = resolve("qwen3_coder", engine.tokenizer, None)
    wanted = ([], text) if strict else (["f"], "")
    assert await answered(serve, engine, CHAT, asked, (text,), formats=formats) == wanted


PATTERN = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "x": {"type": "string", "pattern": "^[A-Z]{3}$", "maxLength": 3}},
    "required": ["n"],
    "minProperties": 2,
}


@pytest.mark.parametrize(
    "form", ["qwen3_coder", "glm45", "glm47", "minimax_m2", "hy_v3", "deepseek_v32", "deepseek_v4"]
)
async def test_what_bare_text_does_not_fit_is_refused_or_named(serve: Any, engine: FakeEngine, form: str) -> None:
    async with serve(formats=resolve(form, engine.tokenizer, None)) as client:
        tools = {"f": {"parameters": NUMBER, "strict": True}, "g": {"parameters": PATTERN, "strict": True}}
        refused = await client.post(CHAT, json=body(CHAT, tools))
        held = await client.post(CHAT, json=body(CHAT, {"f": tools["f"]}))
        free = await client.post(CHAT, json=body(CHAT, {"f": tools["f"], "g": {"parameters": PATTERN}}))
        responses = [
            await client.post(
                route, json=body(route, {"f": {"parameters": NUMBER}, "g": {"parameters": PATTERN}}, **how)
            )
            for route, how in (
                (CHAT, {"tool_choice": "required"}),
                (RESPONSES, {"tool_choice": "required"}),
                (MESSAGES, {"tool_choice": {"type": "any"}}),
            )
        ]
    assert refused.status_code == 400
    assert "tools[1] (g) is strict" in refused.json()["error"]["message"]
    assert "minProperties, pattern of 'x', maxLength of 'x';" in refused.json()["error"]["message"]
    assert held.status_code == 200 and "x-pagoda-schema-warnings" not in held.headers
    left_out = "tools[1] (g): minProperties; tools[1] (g): pattern of 'x'; tools[1] (g): maxLength of 'x'"
    for response in (free, *responses):
        assert response.status_code == 200 and response.headers["x-pagoda-schema-warnings"] == left_out


async def test_what_json_does_not_fit_is_refused_or_named(serve: Any, engine: FakeEngine) -> None:
    pair = {"type": "object", "minProperties": 2}
    async with serve(formats=resolve("hermes", engine.tokenizer, None)) as client:
        refused = await client.post(CHAT, json=body(CHAT, {"f": {"parameters": pair, "strict": True}}))
        named = await client.post(CHAT, json=body(CHAT, {"f": {"parameters": pair}}, tool_choice="required"))
    assert refused.status_code == 400 and "tools[0] (f) is strict" in refused.json()["error"]["message"]
    assert named.status_code == 200 and "minProperties=2" in named.headers["x-pagoda-schema-warnings"]
