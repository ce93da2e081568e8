"""``/v1/chat/completions`` and ``/tokenize`` around a fake engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from torch_pagoda.serving.formats.events import ContentDelta, Event, ReasoningDelta, ToolCall
from torch_pagoda.serving.formats.registry import resolve

from event_streams import chat_text, events
from fake_engine import WORDS, FakeEngine

pytestmark = pytest.mark.anyio

HELLO = [{"role": "user", "content": "def f"}]
URL = "/v1/chat/completions"


async def test_an_answer_has_openais_fields(serve: Any, engine: FakeEngine) -> None:
    async with serve() as client:
        response = await client.post(URL, json={"messages": HELLO, "max_completion_tokens": 10, "seed": 5})
        tokens = (await client.post("/tokenize", json={"messages": HELLO})).json()
    answer = response.json()
    assert answer["id"].startswith("chatcmpl-") and answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "".join(WORDS), "refusal": None}
    assert choice["finish_reason"] == "length" and choice["logprobs"] is None
    (submit,) = engine.submits
    assert submit.params == {"max_tokens": 10, "seed": 5}
    assert submit.prompts == [tokens["tokens"]] and tokens["count"] == len(tokens["tokens"])


async def test_without_a_length_it_may_fill_the_context(serve: Any, engine: FakeEngine) -> None:
    async with serve() as client:
        await client.post(URL, json={"messages": HELLO})
    assert engine.submits[0].params == {"max_tokens": None}


@pytest.mark.parametrize("more", [{}, {"logprobs": True, "top_logprobs": 2}, {"n": 3}])
async def test_streamed_is_what_is_not_streamed(serve: Any, more: dict[str, Any]) -> None:
    body = {"messages": HELLO, "max_tokens": 12, **more}
    async with serve() as client:
        whole = (await client.post(URL, json=body)).json()
        chunks = events((await client.post(URL, json=body | {"stream": True})).text)
    for choice in whole["choices"]:
        index = choice["index"]
        assert chat_text(chunks, index) == choice["message"]["content"]
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["length"]
        if choice["logprobs"]:
            content = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
            assert content == choice["logprobs"]["content"]


async def test_logprobs_have_bytes_and_as_many_likely_tokens_as_asked(serve: Any) -> None:
    async with serve() as client:
        body = {"messages": HELLO, "max_tokens": 9, "logprobs": True, "top_logprobs": 2}
        (choice,) = (await client.post(URL, json=body)).json()["choices"]
        body["top_logprobs"] = 0
        (without,) = (await client.post(URL, json=body)).json()["choices"]
    content = choice["logprobs"]["content"]
    assert content[8]["token"] == " ☕" and bytes(content[8]["bytes"]).decode() == " ☕"
    assert {len(entry["top_logprobs"]) for entry in content} == {2}
    assert {len(entry["top_logprobs"]) for entry in without["logprobs"]["content"]} == {0}


async def test_messages_reach_the_template(serve: Any, engine: FakeEngine, tokenizer: Any) -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}|{{ m.content }}|{{ m.reasoning_content }}]{% endfor %}"
        "{{ documents[0].text }} {{ reasoning_effort }} {{ flag }} {{ other }} {{ add_generation_prompt }}"
    )
    body = {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "c", "reasoning": "r"},
        ],
        "documents": [{"text": "doc"}],
        "reasoning_effort": "low",
        "chat_template_kwargs": {"flag": 1},
        "continue_final_message": False,
        "add_generation_prompt": False,
        "max_tokens": 1,
    }
    async with serve(chat_template=template, chat_template_kwargs={"flag": 0, "other": 2}) as client:
        response = await client.post(URL, json=body)
    assert response.status_code == 200, response.text
    assert tokenizer.decode(engine.submits[0].prompts[0]) == "[system|a\nb|][assistant|c|r]doc low 1 2 False"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]},
            "messages[0].tool_calls[0]",
        ),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": 5}]}, "messages[0].tool_calls"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"chat_template": "x"}, "chat_template"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tokenizer": 1, "conversation": 1}}, "chat_template_kwargs"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt"),
        ({"functions": [{}]}, "functions"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tools": [{"type": "web"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(
    serve: Any, engine: FakeEngine, change: dict[str, Any], param: str
) -> None:
    async with serve() as client:
        response = await client.post(URL, json={"messages": HELLO, "max_tokens": 1} | change)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert not engine.submits


async def test_a_model_without_a_template_has_no_chat(serve: Any) -> None:
    async with serve(chat_template=None) as client:
        response = await client.post(URL, json={"messages": HELLO})
        listed = (await client.get("/v1/models")).json()
    assert response.status_code == 400 and "no chat template" in response.json()["error"]["message"]
    assert listed["data"][0]["capabilities"]["chat"] is False


async def test_a_template_that_blows_up_is_refused(serve: Any) -> None:
    template = "{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}"
    async with serve(chat_template=template) as client:
        response = await client.post(URL, json={"messages": HELLO})
    assert (
        response.status_code == 400 and "the rendered chat prompt is too long" in response.json()["error"]["message"]
    )


class Marked:
    """Formats with ``R`` before reasoning, ``C`` before content and ``T`` for a call."""

    calls_tools = True

    def kept_special_token_ids(self, stop: Any = ()) -> list[int]:
        return [7]

    def parser(self, prompt_text: str, tools: Any = (), **_: Any) -> MarkedParser:
        return MarkedParser()

    def reasoning_ahead(self, prompt_text: str) -> None:
        return None

    def grammar(self, tools: Any, choice: Any, **_: Any) -> str:
        return f'start: "{choice.mode} {" ".join(tool.name for tool in tools)}"'


class MarkedParser:
    """Holds a letter back, as parsers do."""

    malformed = 1
    reasoning_open = False

    def __init__(self) -> None:
        self.text = ""
        self.kind = "c"

    def feed(self, text: str) -> list[Event]:
        self.text += text
        *ready, self.text = self.text
        return self._events("".join(ready))

    def finish(self) -> list[Event]:
        return self._events(self.text)

    def _events(self, text: str) -> list[Event]:
        found: list[Event] = []
        for letter in text:
            if letter in "RCT":
                self.kind = letter
                if letter == "T":
                    found.append(ToolCall("call_1", "f", "{}"))
            elif self.kind != "T":
                found.append(ReasoningDelta(letter) if self.kind == "R" else ContentDelta(letter))
        return found


@pytest.mark.parametrize("shows", [True, False])
async def test_a_parser_splits_the_text(serve: Any, engine: FakeEngine, shows: bool) -> None:
    engine.texts, engine.finish = ("Rth", "inkC", "sa", "yT", "T"), "stop"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    body = {"messages": HELLO, "max_tokens": 5, "tools": tools, "include_reasoning": shows}
    async with serve(formats=Marked()) as client:
        (choice,) = (await client.post(URL, json=body)).json()["choices"]
        chunks = events((await client.post(URL, json=body | {"stream": True})).text)
        metrics = (await client.get("/metrics")).text
    assert engine.submits[0].params["kept_special_token_ids"] == [7]
    message = choice["message"]
    assert message["content"] == "say" == chat_text(chunks)
    assert message.get("reasoning_content") == message.get("reasoning") == ("think" if shows else None)
    calls = [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}] * 2
    assert message["tool_calls"] == calls
    assert choice["finish_reason"] == "tool_calls"
    deltas = [c["delta"] for chunk in chunks for c in chunk["choices"]]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == ("think" if shows else "")
    streamed = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert streamed == [{"index": i, **call} for i, call in enumerate(calls)]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert "pagoda:tool_parse_failures_total 2.0" in metrics


async def test_text_that_spells_a_special_token_stays(serve: Any, engine: FakeEngine, tokenizer: Any) -> None:
    special = tokenizer.eos_token
    engine.texts, engine.finish = ("Use ", special[:1], special[1:], " here."), "stop"
    body = {"messages": HELLO, "max_tokens": 4, "tools": [{"type": "function", "function": {"name": "f"}}]}
    async with serve(formats=resolve("hermes", tokenizer)) as client:
        (choice,) = (await client.post(URL, json=body)).json()["choices"]
        chunks = events((await client.post(URL, json=body | {"stream": True})).text)
        for asked in ({"skip_special_tokens": False}, {"stop": special}):
            await client.post(URL, json=body | asked)
    assert choice["message"]["content"] == f"Use {special} here." == chat_text(chunks)
    asked_of_engine = [submit.params for submit in engine.submits]
    assert [params["kept_special_token_ids"] for params in asked_of_engine] == [[], [], [], [tokenizer.eos_token_id]]
    assert [params.get("skip_special_tokens") for params in asked_of_engine] == [None, None, False, None]


async def test_a_parser_knows_how_a_truncated_prompt_ends(serve: Any, engine: FakeEngine) -> None:
    class Told(Marked):
        def parser(self, prompt_text: str, tools: Any = (), **_: Any) -> MarkedParser:
            told.append(prompt_text)
            return MarkedParser()

    told: list[str] = []
    body = {"messages": HELLO, "max_tokens": 1, "truncate_prompt_tokens": 3}
    async with serve(chat_template="{{ messages[0].content }} and think: <think>", formats=Told()) as client:
        assert (await client.post(URL, json=body)).status_code == 200
    assert len(engine.submits[0].prompts[0]) == 3 and told == ["def f and think: <think>"]


@pytest.mark.parametrize(("asked", "after"), [({}, "</think>"), ({"after": [7]}, [7])])
async def test_a_constraint_begins_behind_the_reasoning_or_where_the_request_says(
    serve: Any, engine: FakeEngine, tokenizer: Any, asked: dict[str, Any], after: object
) -> None:
    template = "{{ messages[0].content }}<think>"
    formats = resolve("none", tokenizer, template, reasoning_parser="qwen3")
    body = {"messages": HELLO, "max_tokens": 1, "structured_outputs": {"regex": "a+", **asked}}
    async with serve(chat_template=template, formats=formats) as client:
        assert (await client.post(URL, json=body)).status_code == 200
    assert engine.submits[0].params["structured_outputs"] == {"regex": "a+", "after": after}


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("auto", ["f", "g"]),
        ("required", ["f", "g"]),
        ("none", None),
        ({"type": "function", "function": {"name": "g"}}, ["g"]),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "name": "f"}]},
            },
            ["f"],
        ),
        ({"type": "function", "function": {"name": "h"}}, 400),
        ({"type": "function"}, 400),
        ({"type": "allowed_tools", "tools": []}, 400),
        ("perhaps", 400),
    ],
)
async def test_tools_that_the_choice_leaves(
    serve: Any, engine: FakeEngine, tokenizer: Any, choice: Any, names: Any
) -> None:
    template = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}.{{ messages[0].content }}"
    tools = [{"type": "function", "function": {"name": name}} for name in "fg"]
    async with serve(chat_template=template, formats=Marked()) as client:
        body = {"messages": HELLO, "tools": tools, "tool_choice": choice, "max_tokens": 1}
        response = await client.post(URL, json=body)
    if names == 400:
        assert response.status_code == 400 and response.json()["error"]["param"] == "tool_choice"
        return
    assert response.status_code == 200, response.text
    assert tokenizer.decode(engine.submits[0].prompts[0]) == "".join(names or []) + "." + HELLO[0]["content"]
    forced = choice == "required" or (isinstance(choice, dict) and choice["type"] == "function")
    grammar = {"grammar": f'start: "required {" ".join(names or [])}"'}
    assert engine.submits[0].params.get("structured_outputs") == (grammar if forced else None)


async def test_tokenize_and_detokenize_are_inverse(serve: Any) -> None:
    async with serve() as client:
        tokens = (await client.post("/tokenize", json={"prompt": "def ☕", "return_token_strs": True})).json()
        back = (await client.post("/detokenize", json={"tokens": tokens["tokens"]})).json()
        both = await client.post("/tokenize", json={"prompt": "a", "messages": HELLO})
        wrong = await client.post("/detokenize", json={"tokens": [10**6]})
    assert back == {"prompt": "def ☕"}
    assert len(tokens["token_strs"]) == tokens["count"] and tokens["max_model_len"] == 512
    assert both.status_code == wrong.status_code == 400


async def test_what_is_too_long_to_be_counted_is_refused_and_not_cut(serve: Any) -> None:
    text = " ".join(map(str, range(9000)))
    messages = [{"role": "user", "content": text}]
    routes = {
        "/tokenize": ({"prompt": text}, {"messages": messages}),
        "/v1/messages/count_tokens": ({"messages": messages},),
    }
    async with serve() as client:
        for path, bodies in routes.items():
            for body in bodies:
                response = await client.post(path, json=body)
                assert response.status_code == 400, response.text
                assert "more than 1024 tokens" in response.json()["error"]["message"]
        short = (await client.post("/tokenize", json={"prompt": " ".join(map(str, range(200)))})).json()
    assert short["count"] > 200


async def test_a_template_may_write_its_variables(serve: Any) -> None:
    """They are sent, too, so that text is not of the template's own making."""
    body = {"messages": HELLO, "max_tokens": 1, "chat_template_kwargs": {"story": "word " * 9000}}
    async with serve(chat_template="{{ messages[0].content }} {{ story }}") as client:
        response = await client.post(URL, json=body)
    assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_a_real_format_of_tool_calls(serve: Any, engine: FakeEngine, tokenizer: Any) -> None:
    template = (
        "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
    )
    engine.texts, engine.finish = (
        ("Well.", "<tool_", 'call>\n{"name": "f", "argu', 'ments": {"a": 1}}', "\n</tool_call>"),
        "stop",
    )
    body = {"messages": HELLO, "max_tokens": 5, "tools": [{"type": "function", "function": {"name": "f"}}]}
    async with serve(chat_template=template, formats=resolve("hermes", tokenizer, template)) as client:
        (choice,) = (await client.post(URL, json=body)).json()["choices"]
        chunks = events((await client.post(URL, json=body | {"stream": True})).text)
        listed = (await client.get("/v1/models")).json()
    assert choice["message"]["content"] == "Well." == chat_text(chunks)
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("f", {"a": 1})
    assert choice["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert listed["data"][0]["capabilities"] == {"chat": True, "tools": True}
