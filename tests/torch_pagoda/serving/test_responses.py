"""``/v1/responses`` is a chat request in other words; its events build up the answer that comes whole otherwise."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from torch_pagoda.serving.http.errors import ApiError
from torch_pagoda.serving.http.json_body import validated
from torch_pagoda.serving.protocol.response_items import input_messages
from torch_pagoda.serving.protocol.responses import ResponsesBody, as_chat

from marked_text import MarkedFormats

TOOL = {"type": "function", "name": "look_up", "parameters": {"type": "object"}, "strict": False}
ANSWER = '<think>Let me see.</think>I look ☕<call>look_up {"a": "é\\n"}</call><call>stop {}</call> done'


def split(text: str, size: int) -> tuple[str, ...]:
    return tuple(text[i : i + size] for i in range(0, len(text), size))


def events_of(text: str) -> list[dict[str, Any]]:
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        kind, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        found.append(event)
    return found


def without_marks(value: Any) -> Any:
    """The same without ids and times."""
    if isinstance(value, dict):
        return {k: without_marks(v) for k, v in value.items() if k not in ("id", "item_id", "created_at")}
    return [without_marks(entry) for entry in value] if isinstance(value, list) else value


def run(serve, work, **settings):
    async def opened():
        async with serve(**settings) as client:
            return await work(client)

    return asyncio.run(opened())


def post(serve, body: dict[str, Any], **settings):
    async def work(client):
        return await client.post("/v1/responses", json=body)

    return run(serve, work, **settings)


def test_openais_client_asks_whole_and_streamed(serve):
    async def work(http):
        client = openai.AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="x", http_client=http)
        whole = await client.responses.create(
            model="tiny", input="Hello", instructions="Be brief", max_output_tokens=4
        )
        async with client.responses.stream(model="tiny", input="Hello", max_output_tokens=4) as stream:
            kinds = [event.type async for event in stream]
        raw = await client.responses.create(model="tiny", input="Hello", max_output_tokens=4, stream=True)
        return whole, kinds, [event async for event in raw]

    whole, kinds, raw = run(serve, work)
    assert whole.output_text == "def name(self, value" and whole.store is False
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (whole.usage.output_tokens, whole.usage.input_tokens_details.cached_tokens) == (4, 2)
    expected = [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 4,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert kinds == expected == [event.type for event in raw]
    assert [event.sequence_number for event in raw] == list(range(len(raw)))
    assert raw[-1].response.output_text == whole.output_text


def test_a_finished_answer_is_completed(serve, engine):
    engine.finish, engine.finish_after = "stop", 2
    assert post(serve, {"input": "Hi"}).json()["status"] == "completed"
    assert events_of(post(serve, {"input": "Hi", "stream": True}).text)[-1]["type"] == "response.completed"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, len(ANSWER)])
def test_events_build_up_the_whole_answer_for_every_split(serve, engine, size):
    engine.texts, engine.finish = split(ANSWER, size), "stop"
    engine.finish_after = len(engine.texts)
    body = {"input": "Hi", "tools": [TOOL]}
    whole = post(serve, body, formats=MarkedFormats()).json()
    events = events_of(post(serve, {**body, "stream": True}, formats=MarkedFormats()).text)
    assert [item["type"] for item in whole["output"]] == [
        *("reasoning", "message", "function_call", "function_call", "message")
    ]
    assert whole["output"][0]["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
    assert [item["content"][0]["text"] for item in whole["output"] if item["type"] == "message"] == [
        "I look ☕",
        " done",
    ]
    call = whole["output"][2]
    assert (call["name"], call["arguments"], call["call_id"]) == ("look_up", '{"a": "é\\n"}', "call_1")
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] >= 1

    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert without_marks(events[-1]["response"]) == without_marks(whole)
    built = built_up(events)
    assert built == events[-1]["response"]["output"]


def built_up(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output as a client makes it of the events, each of which must fit what came before."""
    items: list[dict[str, Any]] = []
    texts: list[str] = []
    done: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items) == len(done) and event["item"]["status"] == "in_progress"
            assert not event["item"].get("arguments") and not event["item"].get("content")
            items.append(event["item"])
            texts.append("")
        elif kind == "content_part.added":
            assert event["part"]["text"] == "" and event["item_id"] == items[-1]["id"]
        elif kind.endswith(".delta"):
            assert event["item_id"] == items[event["output_index"]]["id"]
            texts[event["output_index"]] += event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == texts[-1]
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == texts[-1] and event["name"] == items[-1]["name"]
        elif kind == "output_item.done":
            assert event["item"]["id"] == items[-1]["id"]
            done.append(event["item"])
    return done


def test_an_answer_without_a_word_still_has_a_message(serve, engine):
    engine.texts, engine.finish, engine.finish_after = ("<think>",), "stop", 1
    whole = post(serve, {"input": "Hi"}, formats=MarkedFormats()).json()
    assert [item["content"][0]["text"] for item in whole["output"]] == [""]
    events = events_of(post(serve, {"input": "Hi", "stream": True}, formats=MarkedFormats()).text)
    assert without_marks(events[-1]["response"]) == without_marks(whole)
    assert built_up(events) == events[-1]["response"]["output"]


def test_items_become_messages():
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "id": "fc_1"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "2", "output": "two"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "one"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]},
        {"role": "assistant", "content": "d"},
        {"role": "developer", "content": "e"},
    ]
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
        {"id": "2", "type": "function", "function": {"name": "g", "arguments": '{"x": 1}'}},
    ]
    messages, places = input_messages(items, "Be brief")
    assert messages == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": ["a", "b"]},
        {"role": "assistant", "content": ["c"], "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "2", "content": ["two"]},
        {"role": "tool", "tool_call_id": "1", "content": ["one"]},
        {"role": "assistant", "content": ["d"], "reasoning_content": "so"},
        {"role": "developer", "content": ["e"]},
    ]
    assert places == ["instructions", *(f"input[{i}]" for i in (0, 1, 5, 6, 7, 9))]
    assert input_messages("Hi", None) == ([{"role": "user", "content": "Hi"}], ["input"])


def test_fields_become_those_of_a_chat_request():
    schema = {"type": "object", "properties": {}}
    body = {
        "input": "Hi",
        "max_output_tokens": 7,
        "temperature": 0.5,
        "top_k": 3,
        "user": "u",
        "tools": [{**TOOL, "description": "d"}],
        "tool_choice": {"type": "function", "name": "look_up"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
        "reasoning": {"effort": "none"},
    }
    found = as_chat(validated(body, ResponsesBody))[0].model_dump(exclude_none=True)
    function = {"name": "look_up", "description": "d", "parameters": {"type": "object"}, "strict": False}
    assert found == {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_completion_tokens": 7,
        "temperature": 0.5,
        "top_k": 3,
        "user": "u",
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "look_up"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}},
        "reasoning_effort": "none",
        "chat_template_kwargs": {"enable_thinking": False},
    }


def test_tool_choice_reaches_the_formats(serve):
    formats = MarkedFormats()
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "look_up"}]}
    for choice in ("required", {"type": "function", "name": "look_up"}, allowed):
        body = {"input": "Hi", "tools": [TOOL], "tool_choice": choice, "max_output_tokens": 2}
        answer = post(serve, body, formats=formats).json()
        assert answer["tool_choice"] == choice and answer["tools"] == [TOOL]
    assert formats.choices == ["required"] * 3


KNOWS = "{% if messages[0].role == 'developer' %}Obey.{% endif %}"


@pytest.mark.parametrize("branch, role", [("", "system"), ("{# developer #}", "system"), (KNOWS, "Obey.developer")])
def test_a_developer_speaks_as_the_system_where_the_template_knows_none(serve, engine, tokenizer, branch, role):
    items = [{"role": "developer", "content": "Be brief"}, {"role": "user", "content": "Hi"}]
    template = branch + "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
    post(serve, {"input": items, "max_output_tokens": 2}, chat_template=template)
    assert tokenizer.decode(engine.submits[-1].prompts[0]) == f"{role}: Be brief;user: Hi;"


USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    "body, param, words",
    [
        ({"input": "Hi", "previous_response_id": "resp_1"}, "previous_response_id", "stores nothing"),
        ({"input": "Hi", "conversation": "conv_1"}, "conversation", "stores nothing"),
        ({"input": "Hi", "background": True}, "background", "wait for the response"),
        ({"input": "Hi", "truncation": "middle"}, "truncation", "'auto' or 'disabled'"),
        ({"input": "Hi", "include": ["file_search_call.results"]}, "include", "omit it"),
        ({"input": "Hi", "top_logprobs": 3}, "top_logprobs", "use /v1/chat/completions"),
        ({}, "input", "input is missing"),
        ({"input": 3}, "input", "not an input"),
        ({"input": []}, "input", "not an input"),
        ({"input": [USER, 7]}, "input[1]", "is not an item"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "item_reference"),
        ({"input": [{"role": "tool", "content": ""}]}, "input[0].role", "use one of"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_image"}]}]},
            "input[0].content[1].type",
            "'input_image' is not supported",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            "input[0].content[0].text",
            "not a string",
        ),
        ({"input": [{"role": "user", "content": None}]}, "input[0].content", "not content"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id", "not a string"),
        ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input[0].output", "not content"),
        ({"input": [{"type": "reasoning", "content": "x"}]}, "input[0].content", "not a list of parts"),
        ({"input": "Hi", "tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search' is not supported"),
        ({"input": "Hi", "tools": [TOOL]}, "tools", "omit tools"),
        ({"input": "Hi", "tool_choice": "required"}, "tool_choice", "pass tools"),
        ({"input": "Hi", "text": {"format": {"type": "xml"}}}, "text.format.type", "'xml' is not supported"),
        ({"input": "Hi", "text": {"format": {"type": "json_schema"}}}, "text.format.schema", "is missing"),
        ({"input": "Hi", "text": {"format": "json"}}, "text.format", "not an object"),
        ({"input": "Hi", "temperature": -1}, "temperature", "-1"),
        ({"input": "Hi", "max_output_tokens": 0}, "max_output_tokens", "0"),
        ({"input": "word " * 2000}, "input", "maximum context length is 512 tokens"),
        ({"input": "Hi", "max_output_tokens": 511}, "input", "maximum context length is 512 tokens"),
        ({"input": "Hi", "reasoning": {"effort": 3}}, "reasoning.effort", "3"),
    ],
)
def test_what_is_not_served_is_refused_by_name(serve, engine, body, param, words):
    for stream in (False, True):
        response = post(serve, {**body, "stream": stream})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param)
        assert words in error["message"]
    assert engine.submits == []


@pytest.mark.parametrize("include", [None, ["reasoning.encrypted_content"]])
def test_what_clients_send_by_habit_is_taken(serve, include):
    body = {
        **{"input": [USER], "store": True, "metadata": {"a": "b"}, "truncation": "auto", "include": include},
        **{"service_tier": "auto", "prompt_cache_key": "k", "safety_identifier": "s", "max_output_tokens": 2},
    }
    response = post(serve, body, strict_fields=True)
    assert response.status_code == 200 and response.json()["store"] is False
    assert response.json()["metadata"] == {"a": "b"}


def test_a_failure_ends_the_stream_by_name(serve, engine):
    engine.error = "secret detail"
    events = events_of(post(serve, {"input": "Hi", "max_output_tokens": 3, "stream": True}).text)
    assert events[-1]["type"] == "response.failed" and events[-1]["response"]["status"] == "failed"
    assert events[-1]["response"]["error"]["code"] == "server_error" and "secret" not in json.dumps(events)
    whole = post(serve, {"input": "Hi", "max_output_tokens": 3})
    assert whole.status_code == 500 and whole.json()["error"]["code"] == "internal_error"
    engine.refusal = ("queue_full", "full")
    assert post(serve, {"input": "Hi", "stream": True}).status_code == 429


def test_a_request_is_counted(serve):
    async def work(client):
        await client.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 3})
        return (await client.get("/metrics")).text

    text = run(serve, work)
    assert 'http_requests_total{handler="/v1/responses",method="POST",status="2xx"} 1.0' in text
    assert 'finished_reason="length",model_name="tiny"} 1.0' in text


def test_bad_items_never_end_in_a_failure_of_ours():
    values = [None, 1, "x", [], {}, [None], [[]], [{}], {"type": "text"}, [{"type": "output_text", "text": None}]]
    values += [[{"type": value, "text": value}] for value in values]
    kinds = ["message", "reasoning", "function_call", "function_call_output", None, 3, {}, []]
    fields = ["role", "content", "output", "call_id", "summary", "name", "arguments"]
    for kind in kinds:
        for field in fields:
            for value in values:
                item = {"type": kind, "role": "assistant", "content": "c", field: value}
                try:
                    input_messages([item, item], None)
                except ApiError as error:
                    assert error.status_code == 400
