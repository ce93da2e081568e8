"""``/v1/messages`` is a chat request in Anthropic's words; its events build up what comes whole otherwise."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema
import pytest

from torch_pagoda.serving.formats.registry import resolve
from torch_pagoda.serving.http.errors import ApiError
from torch_pagoda.serving.http.json_body import validated
from torch_pagoda.serving.protocol.message_blocks import chat_messages
from torch_pagoda.serving.protocol.messages import MessagesBody, as_chat
from torch_pagoda.serving.settings import ApiKey

from marked_text import MarkedFormats

TOOL = {"name": "look_up", "description": "d", "input_schema": {"type": "object"}}
ANSWER = '<think>Let me see.</think>I look ☕<call>look_up {"a": "é\\n"}</call><call>stop {}</call> done'
TOOL_USE = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
HI = [{"role": "user", "content": "Hi"}]


def events_of(text: str) -> list[dict[str, Any]]:
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        kind, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        found.append(event)
    return found


def run(serve, work, **settings):
    async def opened():
        async with serve(**settings) as client:
            return await work(client)

    return asyncio.run(opened())


def post(serve, body: dict[str, Any], path: str = "/v1/messages", headers: dict[str, str] | None = None, **settings):
    body = body if "messages" in body else {"messages": HI, **body}

    async def work(client):
        return await client.post(path, json=body, headers=headers)

    return run(serve, work, **settings)


def test_a_message_and_its_events(serve):
    whole = post(serve, {"max_tokens": 3, "system": "Be brief"}).json()
    assert whole.pop("id").startswith("msg_") and whole["usage"].pop("input_tokens") > 10
    assert whole == {
        **{"type": "message", "role": "assistant", "model": "tiny", "stop_reason": "max_tokens"},
        **{"content": [{"type": "text", "text": "def name(self"}], "stop_sequence": None},
        "usage": {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 2, "output_tokens": 3},
    }
    events = events_of(post(serve, {"max_tokens": 3, "stream": True}).text)
    assert [event["type"] for event in events] == [
        *("message_start", "ping", "content_block_start"),
        *["content_block_delta"] * 3,
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    start, end = events[0]["message"]["usage"], events[-2]["usage"]
    assert start["input_tokens"] == end["input_tokens"] + end["cache_read_input_tokens"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, len(ANSWER)])
def test_events_build_up_the_whole_message_for_every_split(serve, engine, size):
    engine.texts = tuple(ANSWER[i : i + size] for i in range(0, len(ANSWER), size))
    engine.finish, engine.finish_after = "stop", len(engine.texts)
    body = {"max_tokens": 200, "tools": [TOOL]}
    whole = post(serve, body, formats=MarkedFormats()).json()
    assert whole["content"] == [
        {"type": "thinking", "thinking": "Let me see.", "signature": ""},
        {"type": "text", "text": "I look ☕"},
        {"type": "tool_use", "id": "call_1", "name": "look_up", "input": {"a": "é\n"}},
        {"type": "tool_use", "id": "call_2", "name": "stop", "input": {}},
        {"type": "text", "text": " done"},
    ]
    assert whole["stop_reason"] == "tool_use"
    built = built_up(events_of(post(serve, {**body, "stream": True}, formats=MarkedFormats()).text))
    assert {**built, "id": ""} == {**whole, "id": ""}


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (r'{"x": "\ud83d"}', {"x": "\ufffd"}),
        (f'{{"x": 1{"0" * 4299}}}', {"x": 10**4299}),
        (f'{{"x": {"[" * 900}{"]" * 900}}}', None),
    ],
)
def test_arguments_that_few_programs_write(serve, engine, tokenizer, written, read):
    engine.texts = (f'<tool_call>{{"name": "look_up", "arguments": {written}}}</tool_call>',)
    engine.finish, engine.finish_after = "stop", 1
    formats = resolve("hermes", tokenizer, "{{ messages }}")
    response = post(serve, {"max_tokens": 200, "tools": [TOOL]}, formats=formats)
    assert response.status_code == 200, response.text
    streamed = post(serve, {"max_tokens": 200, "tools": [TOOL], "stream": True}, formats=formats).text
    for message in (response.json(), built_up(events_of(streamed))):
        (block,) = message["content"]
        if read is None:
            assert block["type"] == "text" and written in block["text"]
        else:
            assert block["type"] == "tool_use" and block["input"] == read


def built_up(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message as a client makes it of the events, each of which must fit what came before."""
    message = events[0]["message"]
    blocks, arguments, is_open = message["content"], "", False
    for event in events[1:]:
        kind = event["type"]
        if kind == "content_block_start":
            assert event["index"] == len(blocks) and not is_open
            blocks.append(event["content_block"])
            is_open, arguments = True, ""
        elif kind == "content_block_delta":
            assert event["index"] == len(blocks) - 1 and is_open
            delta, block = event["delta"], blocks[-1]
            if delta["type"] == "input_json_delta":
                arguments += delta["partial_json"]
            else:
                field = delta["type"].removesuffix("_delta")
                block[field] += delta[field]
        elif kind == "content_block_stop":
            is_open = False
            if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = json.loads(arguments)
        elif kind == "message_delta":
            assert not is_open
            message |= event["delta"]
            message["usage"] |= event["usage"]
    return message


def test_stop_reasons(serve, engine):
    assert post(serve, {"max_tokens": 3}).json()["stop_reason"] == "max_tokens"
    assert post(serve, {"max_tokens": 600}).json()["stop_reason"] == "model_context_window_exceeded"
    assert engine.submits[-1].params["max_tokens"] == 512 - len(engine.submits[-1].prompts[0])
    engine.finish, engine.finish_after = "stop", 2
    assert post(serve, {"max_tokens": 3}).json()["stop_reason"] == "end_turn"
    answer = post(serve, {"max_tokens": 3, "stop_sequences": ["x"]}).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)


def test_a_stop_sequence_is_named(serve, engine, monkeypatch):
    engine.finish, engine.finish_after = "stop", 2
    make = type(engine.submit(_submit())).next

    async def next_with_reason(stream):
        deltas = await make(stream)
        for delta in deltas:
            delta.stop_reason = "x" if delta.finish_reason else None
        return deltas

    monkeypatch.setattr(type(engine.submit(_submit())), "next", next_with_reason)
    answer = post(serve, {"max_tokens": 3, "stop_sequences": ["x"]}).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "x")
    assert engine.submits[-1].params["stop"] == ["x"]


def _submit():
    from torch_pagoda.serving.engine_process.wire import Submit

    return Submit("r", [[1]], {}, {})


def test_blocks_become_messages():
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "c"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"x": "é"}},
                {"type": "tool_use", "id": "2", "name": "g", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": "one", "cache_control": {"type": "ephemeral"}},
                {"type": "tool_result", "tool_use_id": "2", "content": [{"type": "text", "text": "two"}]},
                {"type": "tool_result", "tool_use_id": "3", "is_error": True},
                {"type": "text", "text": "d"},
            ],
        },
        {"role": "assistant", "content": "e"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "f"},
                {"type": "tool_result", "tool_use_id": "4", "content": "four"},
                {"type": "text", "text": "g"},
            ],
        },
    ]
    system = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief"}]
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x":"é"}'}},
        {"id": "2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    found, places = chat_messages(messages, system)
    assert found == [
        {"role": "system", "content": ["Be", "brief"]},
        {"role": "user", "content": ["a", "b"]},
        {"role": "assistant", "content": ["c"], "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": ["one"]},
        {"role": "tool", "tool_call_id": "2", "content": ["two"]},
        {"role": "tool", "tool_call_id": "3", "content": ["Error"]},
        {"role": "user", "content": ["d"]},
        {"role": "assistant", "content": ["e"]},
        {"role": "user", "content": ["f"]},
        {"role": "tool", "tool_call_id": "4", "content": ["four"]},
        {"role": "user", "content": ["g"]},
    ]
    indices = [0, 1, 2, 2, 2, 2, 3, 4, 4, 4]
    assert places == ["system", *(f"messages[{i}]" for i in indices)]


def test_turns_of_one_side_that_follow_each_other_are_one():
    result = {"type": "tool_result", "tool_use_id": "1", "content": "no such city", "is_error": True}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "c"}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, TOOL_USE]},
        {"role": "user", "content": [result]},
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": []},
    ]
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    assert chat_messages(messages, None) == (
        [
            {"role": "user", "content": ["a", "b"]},
            {"role": "assistant", "content": ["c"], "reasoning_content": "hm", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "1", "content": ["Error: no such city"]},
            {"role": "user", "content": ["d"]},
            {"role": "assistant", "content": []},
        ],
        [f"messages[{i}]" for i in (0, 2, 4, 5, 6)],
    )


def test_fields_become_those_of_a_chat_request():
    schema = {"type": "object", "properties": {}}
    body = {
        **{"messages": [*HI, {"role": "assistant", "content": "The"}], "max_tokens": 7, "temperature": 0.5},
        **{"top_k": 3, "stop_sequences": ["x"], "metadata": {"user_id": "u"}, "tools": [TOOL]},
        **{"tool_choice": {"type": "tool", "name": "look_up", "disable_parallel_tool_use": True}, "seed": 5},
        **{"thinking": {"type": "enabled", "budget_tokens": 1024}, "system": "s"},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": schema}},
    }
    found = as_chat(validated(body, MessagesBody))[0].model_dump(exclude_none=True)
    function = {"name": "look_up", "description": "d", "parameters": {"type": "object"}}
    assert found == {
        "messages": [
            {"role": "system", "content": ["s"]},
            {"role": "user", "content": ["Hi"]},
            {"role": "assistant", "content": ["The"]},
        ],
        **{"temperature": 0.5, "top_k": 3, "stop": ["x"], "user": "u", "seed": 5, "reasoning_effort": "low"},
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "look_up"}},
        "parallel_tool_calls": False,
        "response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}},
        "chat_template_kwargs": {"enable_thinking": True},
        "continue_final_message": True,
    }


def test_a_message_of_the_assistant_is_gone_on_with(serve, engine, tokenizer):
    post(serve, {"messages": [*HI, {"role": "assistant", "content": "The answer"}], "max_tokens": 2})
    assert tokenizer.decode(engine.submits[-1].prompts[0]).endswith("The answer")


def test_tokens_are_counted(serve, engine):
    body = {"messages": HI, "system": "Be brief"}
    count = post(serve, body, "/v1/messages/count_tokens").json()
    usage = post(serve, {**body, "max_tokens": 2}).json()["usage"]
    assert count == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    assert len(engine.submits) == 1


def image(kind: str) -> dict[str, Any]:
    return {"type": kind, "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    "body, words",
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role='tool' is not known"),
        ({"messages": [{"role": "user"}]}, "messages[0].content=None is not content"),
        ({"messages": [{"role": "user", "content": [image("image")]}]}, "messages[0].content[0].type='image' is not"),
        ({"messages": [{"role": "user", "content": [image("document")]}]}, "type='document' is not supported"),
        ({"messages": [{"role": "user", "content": [{"type": "redacted_thinking"}]}]}, "'redacted_thinking'"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content=[] is empty"),
        ({"messages": [{"role": "assistant", "content": []}, *HI]}, "messages[0].content=[] is empty"),
        (
            {"messages": [*HI, {"role": "assistant", "content": [TOOL_USE]}]},
            "messages[1] ends in a tool call, which cannot be continued",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "send text or tool_result"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id=None is not a string"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [image("image")]}]}]},
            "messages[0].content[0].content[0].type='image'",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f"}]}]},
            "input=None is not an object",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type='bash_20250124' is not supported"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema is missing"),
        ({"tools": [TOOL]}, "omit tools"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type='some' is not known"),
        ({"thinking": {"type": "deep"}}, "thinking.type='deep' is not known"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format="),
        ({"system": [image("image")]}, "system[0].type='image' is not supported"),
        ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers is not supported"),
        ({"stop_sequences": ["x" * 300]}, "stop[0] has 300 characters"),
        ({"messages": [{"role": "user", "content": "word " * 2000}]}, "maximum context length is 512 tokens"),
    ],
)
def test_what_is_not_served_is_refused_by_name(serve, engine, body, words):
    for stream in (False, True):
        response = post(serve, {"max_tokens": 5, **body, "stream": stream})
        found = response.json()
        assert response.status_code == 400 and found["type"] == "error"
        assert found["error"]["type"] == "invalid_request_error" and words in found["error"]["message"]
        assert found["request_id"] == response.headers["x-request-id"]
    assert engine.submits == []


def test_every_refusal_has_anthropics_form(serve, engine):
    keys = (ApiKey("k", "secret"),)
    found = [post(serve, {"max_tokens": 3}, api_keys=keys)]
    found.append(post(serve, {"max_tokens": 3, "model": "nobody"}))
    found.append(post(serve, {"max_tokens": 3, "system": "x" * 3000}, max_body_size=2048))
    engine.refusal = ("queue_full", "full")
    found += [post(serve, {"max_tokens": 3, "stream": stream}) for stream in (False, True)]
    engine.refusal, engine.error = None, "secret detail"
    found.append(post(serve, {"max_tokens": 3}))
    engine.state = "loading"
    found.append(post(serve, {"max_tokens": 3}))
    assert [(r.status_code, r.json()["type"], r.json()["error"]["type"]) for r in found] == [
        (401, "error", "authentication_error"),
        (404, "error", "not_found_error"),
        (413, "error", "request_too_large"),
        (429, "error", "rate_limit_error"),
        (429, "error", "rate_limit_error"),
        (500, "error", "api_error"),
        (503, "error", "overloaded_error"),
    ]
    assert all("secret" not in response.text for response in found)
    assert "retry-after" in found[3].headers and "retry-after" in found[6].headers
    accepted = post(serve, {"max_tokens": 3}, headers={"x-api-key": "secret"}, api_keys=keys)
    assert accepted.status_code == 503


def test_the_description_has_anthropics_errors(serve):
    async def work(client):
        return (await client.get("/openapi.json")).json()

    schema = run(serve, work)
    responses = schema["paths"]["/v1/messages"]["post"]["responses"]
    assert responses["200"]["content"].keys() == {"application/json", "text/event-stream"}
    content = responses["400"]["content"]
    assert content["application/json"]["schema"] == {"$ref": "#/components/schemas/AnthropicError"}
    described = content["application/json"]["schema"] | {"components": schema["components"]}
    jsonschema.validate(post(serve, {"max_tokens": 0}).json(), described)
    assert {"MessagesBody", "CountTokensBody", "ResponsesBody"} <= schema["components"]["schemas"].keys()


def test_a_failure_ends_the_stream_with_an_error_event(serve, engine):
    engine.error = "secret detail"
    events = events_of(post(serve, {"max_tokens": 3, "stream": True}).text)
    assert events[-1]["type"] == "error" and events[-1]["error"]["type"] == "api_error"
    assert "secret" not in json.dumps(events)


def test_a_client_that_goes_ends_the_work(serve, engine):
    engine.gate = asyncio.Event()

    async def work(client):
        app = client._transport.app
        left = asyncio.Event()
        body = json.dumps({"messages": HI, "max_tokens": 3}).encode()
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive():
            if messages:
                return messages.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            raise AssertionError(message)

        headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/messages", "headers": headers, "query_string": b""}
        running = asyncio.create_task(app({**scope, "state": {}, "scheme": "http", "root_path": ""}, receive, send))
        while not engine.submits:
            await asyncio.sleep(0)
        left.set()
        await asyncio.wait_for(running, 30)
        return (await client.get("/metrics")).text

    text = run(serve, work)
    assert engine.cancelled == [engine.submits[0].request_id]
    assert "pagoda:disconnects_total 1.0" in text and 'finished_reason="abort",model_name="tiny"} 1.0' in text


def test_bad_blocks_never_end_in_a_failure_of_ours():
    values = [None, 1, "x", [], {}, [None], [[]], [{}], {"type": "text"}, [{"type": "text", "text": None}]]
    kinds = ["text", "thinking", "tool_use", "tool_result", None, 3, {}, []]
    for role in ("user", "assistant", "system", None, 3, [], {}):
        for kind in kinds:
            for field in ("text", "thinking", "id", "name", "input", "tool_use_id", "content"):
                for value in values:
                    for content in (value, [{"type": kind, field: value}]):
                        try:
                            chat_messages([{"role": role, "content": content}], value)
                        except ApiError as error:
                            assert error.status_code == 400
