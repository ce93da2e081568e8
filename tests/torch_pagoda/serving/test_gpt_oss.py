"""A gpt-oss server: channels in every route, whole and streamed, and what holds its answers."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import torch
from harmony_family import TEMPLATE, harmony_tokenizer

from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.serving.app import make_app
from torch_pagoda.serving.formats import resolve
from torch_pagoda.serving.settings import Settings

from event_streams import chat_text, events
from fake_engine import FakeEngine
from toy_client import toy_client
from toy_program import ToyProgram

pytestmark = pytest.mark.anyio

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HELLO = [{"role": "user", "content": "hi"}]
NUMBER = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": NUMBER}}
ANSWER = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Four."
CALL = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Plan.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
)


def asked(route: str, **fields: Any) -> dict[str, Any]:
    if route == RESPONSES:
        return {"input": "hi", "tools": [{"type": "function", **FUNCTION["function"]}], **fields}  # type: ignore[dict-item]
    if route == MESSAGES:
        return {"messages": HELLO, "max_tokens": 9, "tools": [{"name": "f", "input_schema": NUMBER}], **fields}
    return {"messages": HELLO, "tools": [FUNCTION], **fields}


def parts(route: str, answer: dict[str, Any]) -> tuple[str, str, list[str]]:
    """Reasoning, text, and arguments of the calls of a whole answer."""
    if route == CHAT:
        message = answer["choices"][0]["message"]
        calls = [call["function"]["arguments"] for call in message.get("tool_calls", [])]
        return message.get("reasoning", ""), message["content"] or "", calls
    if route == RESPONSES:
        found: dict[str, list[Any]] = {"reasoning": [], "message": [], "function_call": []}
        for item in answer["output"]:
            found[item["type"]].append(item)
        thoughts, texts = (
            "".join(part["text"] for item in found[kind] for part in item["content"])
            for kind in ("reasoning", "message")
        )
        return thoughts, texts, [item["arguments"] for item in found["function_call"]]
    blocks = answer["content"]
    texts = ["".join(block.get(kind, "") for block in blocks) for kind in ("thinking", "text")]
    return texts[0], texts[1], [json.dumps(block["input"]) for block in blocks if block["type"] == "tool_use"]


def formats() -> dict[str, Any]:
    return {"formats": resolve(None, harmony_tokenizer()), "chat_template": TEMPLATE}


@pytest.mark.parametrize("route", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize(("text", "said"), [(ANSWER, ("Hm.", "Four.", [])), (CALL, ("Hm.", "Plan.", ['{"a": 1}']))])
async def test_channels(serve: Any, engine: FakeEngine, route: str, text: str, said: Any) -> None:
    engine.texts = tuple(text[i : i + 7] for i in range(0, len(text), 7))
    engine.finish, engine.finish_after = "stop", len(engine.texts)
    engine.max_model_len = 4096
    async with serve(**formats()) as client:
        body = asked(route, **({"max_tokens": 200} if route == MESSAGES else {}))
        whole = (await client.post(route, json=body)).json()
        streamed = await client.post(route, json=body | {"stream": True})
    assert parts(route, whole) == said
    if route == CHAT:
        assert whole["choices"][0]["finish_reason"] == ("tool_calls" if said[2] else "stop")
        assert chat_text(events(streamed.text)) == said[1]
        deltas = [choice["delta"] for chunk in events(streamed.text) for choice in chunk["choices"]]
        assert "".join(delta.get("reasoning", "") for delta in deltas) == said[0]
        assert [c["function"]["arguments"] for d in deltas for c in d.get("tool_calls", ())] == said[2]
    assert "<|" not in streamed.text


@pytest.mark.parametrize("ignore_eos", [False, True])
async def test_calls_end_an_answer(serve: Any, engine: FakeEngine, ignore_eos: bool) -> None:
    ends = list(resolve(None, harmony_tokenizer()).end_token_ids)  # type: ignore[union-attr]
    async with serve(**formats()) as client:
        await client.post(CHAT, json={"messages": HELLO, "stop_token_ids": [7], "ignore_eos": ignore_eos})
        await client.post(CHAT, json={"messages": HELLO, "reasoning_effort": "high"})
        await client.post(RESPONSES, json={"input": "hi", "reasoning": {"effort": "high"}})
    first, second, third = engine.submits
    assert first.params["stop_token_ids"] == ([7] if ignore_eos else [7, *ends])
    assert second.params["stop_token_ids"] == ends
    prompts = [engine.tokenizer.decode(submit.prompts[0]) for submit in (first, second, third)]
    assert ["Reasoning: high" in prompt for prompt in prompts] == [False, True, True]


@pytest.mark.parametrize("route", [CHAT, RESPONSES, MESSAGES])
async def test_where_constraints_begin(serve: Any, engine: FakeEngine, route: str) -> None:
    named = {CHAT: {"type": "function", "function": {"name": "f"}}, RESPONSES: {"type": "function", "name": "f"}}
    choice = named.get(route, {"type": "tool", "name": "f"})
    async with serve(**formats()) as client:
        for fields in ({"tool_choice": choice}, {"structured_outputs": {"json": NUMBER}}):
            response = await client.post(route, json=asked(route, **fields))
            assert response.status_code == 200, response.text
    called, answered = (submit.params["structured_outputs"] for submit in engine.submits)
    assert "after" not in called and called["grammar"].startswith("start: ")
    assert list(answered["after"]) == ["<|channel|>final", "<|message|>"]


async def test_reasoning_and_text_before_a_call_go_back_as_one(serve: Any, engine: FakeEngine) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    turn = {"role": "assistant", "content": "Plan.", "reasoning_content": "Hm.", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c", "content": "r"}
    async with serve(**formats()) as client:
        response = await client.post(CHAT, json={"messages": [*HELLO, turn, result]})
    assert response.status_code == 200, response.text
    prompt = engine.tokenizer.decode(engine.submits[0].prompts[0])
    assert "<|message|>Hm.\nPlan.<|end|><|start|>assistant to=functions.f<|channel|>commentary json" in prompt


TAKES = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (TAKES, "supports tools, but the format of its calls is unknown"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "does not support tools"),
    ],
)
async def test_why_tools_are_refused(serve: Any, engine: FakeEngine, template: str, said: str) -> None:
    async with serve(chat_template=template) as client:
        response = await client.post(CHAT, json=asked(CHAT))
    assert response.status_code == 400
    assert said in response.json()["error"]["message"] and "--tool-call-parser" in response.json()["error"]["message"]


def reciting_engine(text: str) -> Engine:
    """Answers with this text, token by token, where it may."""
    tokenizer = harmony_tokenizer()
    script = tokenizer(text, add_special_tokens=False).input_ids
    program = ToyProgram(vocab_size=len(tokenizer), max_model_len=400)
    spoken = 0

    def recite(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        nonlocal spoken
        wanted = script[min(spoken, len(script) - 1)]
        spoken += 1
        return torch.nn.functional.one_hot(torch.full((len(tokens),), wanted), logits.shape[-1]).float()

    program.change_logits = recite
    sizes = {"block_size": 4, "num_blocks": 128}
    # It knows no more than one token a step.
    return Engine(program, tokenizer, eos_token_ids=[tokenizer.eos_token_id], draft_forced_tokens=False, **sizes)


@pytest.mark.parametrize(
    ("text", "fields", "message"),
    [
        (f"{CALL}<|call|>x".partition("assistant")[2], {"tools": [FUNCTION]}, {"content": "Plan."}),
        (
            ANSWER.replace("final", "final <|constrain|>json").replace("Four.", '{"a": 4}'),
            {"structured_outputs": {"json": NUMBER}},
            {"reasoning": "Hm.", "content": '{"a": 4}'},
        ),
        (
            CALL.rpartition("assistant")[2],
            {"tools": [FUNCTION], "tool_choice": "required"},
            {"content": None},
        ),
    ],
    ids=["call", "JSON", "required"],
)
async def test_a_real_engine(text: str, fields: dict[str, Any], message: dict[str, Any]) -> None:
    engine = reciting_engine(text)
    tokenizer = harmony_tokenizer()
    settings = Settings(chat_template=TEMPLATE, served_model_names=("toy",))
    async with toy_client(engine) as client:
        app = make_app(settings, client, tokenizer, formats=resolve(None, tokenizer))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as http:
            body = {"messages": HELLO, "max_tokens": 200, "temperature": 0, **fields}
            (choice,) = (await http.post(CHAT, json=body)).json()["choices"]
        app.state.front.close()
    assert {key: choice["message"].get(key) for key in message} == message
    calls = [call["function"]["arguments"] for call in choice["message"].get("tool_calls", [])]
    assert calls == (['{"a": 1}'] if "tools" in fields else [])
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
