"""Messages come to the template in the form that it takes."""

from __future__ import annotations

from typing import Any

import pytest

from torch_pagoda.runtime.serving.formats import TemplateFacts, probe_template, template_messages

from chat_families import chat_tokenizer

TEXT = TemplateFacts()
PARTS = TemplateFacts(takes_text=False, takes_parts=True)
PART = {"type": "text", "text": "a"}


def one(message: dict[str, Any], facts: TemplateFacts = TEXT) -> dict[str, Any]:
    return template_messages([message], facts)[0]


def call(arguments: Any = "{}", name: Any = "f", call_id: Any = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def answer(*calls: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **more}


@pytest.mark.parametrize(
    "content, facts, expected",
    [
        ("a", TEXT, "a"),
        ([PART, PART], TEXT, "a\na"),
        ("a", PARTS, [PART]),
        ([PART, {"type": "input_text", "text": "b"}], PARTS, [PART, {"type": "text", "text": "b"}]),
        ([PART], TemplateFacts(takes_parts=True), [PART]),
        ("a", TemplateFacts(takes_parts=True), "a"),
    ],
)
def test_content(content, facts, expected):
    assert one({"role": "user", "content": content}, facts) == {"role": "user", "content": expected}


def test_developer_is_the_system_where_the_template_does_not_know_it():
    message = {"role": "developer", "content": "a"}
    assert one(message)["role"] == "system"
    assert one(message, TemplateFacts(knows_developer=True))["role"] == "developer"


@pytest.mark.parametrize("given, expected", [('{"a": "é"}', {"a": "é"}), ({"a": 1}, {"a": 1}), ("", {}), (None, {})])
def test_arguments_are_objects_or_text(given, expected):
    assert one(answer(call(given)))["tool_calls"][0]["function"]["arguments"] == expected
    as_text = one(answer(call('{"a": "é"}')), TemplateFacts(arguments_as_text=True))
    assert as_text["tool_calls"][0]["function"]["arguments"] == '{"a": "é"}'


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_is_passed_under_every_name(field):
    message = one({"role": "assistant", "content": "a", field: "hm"})
    assert (message["reasoning_content"], message["reasoning"], message["thinking"]) == ("hm",) * 3


def test_a_tool_message_gets_the_name_of_its_function():
    tool = {"role": "tool", "tool_call_id": "c2", "content": [PART]}
    messages = template_messages([answer(call(), call(name="g", call_id="c2")), tool], TEXT)
    assert messages[1] == {"role": "tool", "content": "a", "tool_call_id": "c2", "name": "g"}
    assert messages[0]["content"] == ""
    assert "tool_calls" not in one(answer())


@pytest.mark.parametrize(
    "messages, message",
    [
        ([], "messages is no array"),
        ({}, "messages is no array"),
        ([{"role": "user", "content": "a"}] * 10_001, "messages has 10001 entries"),
        ([3], r"messages\[0\] is no object"),
        ([{"role": "user", "content": "a"}, {"role": "robot"}], r"messages\[1\].role='robot'"),
        ([{"role": ["user"]}], r"messages\[0\].role=list"),
        ([{"role": "user"}], r"messages\[0\].content is missing"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content is neither"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\].content\[0\] of type 'image_url'"),
        ([{"role": "user", "content": [{"type": "text", "text": 3}]}], r"messages\[0\].content\[0\]"),
        ([{"role": "assistant", "reasoning": 3}], r"messages\[0\].reasoning_content"),
        ([answer(3)], r"messages\[0\].tool_calls\[0\] is no call"),
        ([answer(*[call()] * 513)], r"messages\[0\].tool_calls is no array"),
        ([answer(call(call_id=3))], r"messages\[0\].tool_calls\[0\].id"),
        ([answer(call("{"))], r"messages\[0\].tool_calls\[0\].function.arguments is no JSON text"),
        ([answer(call("[1]"))], r"function.arguments is no JSON object"),
        ([answer(call('{"a":' * 200 + "1" + "}" * 200))], r"function.arguments is nested deeper"),
        ([answer(call('{"a":' * 100_000))], r"function.arguments is no JSON text"),
        ([{"role": "tool", "tool_call_id": 3, "content": "a"}], r"messages\[0\].tool_call_id"),
    ],
)
def test_mistakes_are_named(messages, message):
    with pytest.raises(ValueError, match=message):
        template_messages(messages, TEXT)


def facts_of(template: str) -> TemplateFacts:
    return probe_template(chat_tokenizer("hermes"), template)


LOOP = "{% for m in messages %}<{{ m.role }}>CONTENT{% for c in m.tool_calls or [] %}CALL{% endfor %}{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.mark.parametrize(
    "template, expected",
    [
        (LOOP.replace("CONTENT", "{{ m.content }}"), TemplateFacts()),
        (LOOP.replace("CONTENT", "{{ m.content }}") + PROMPT, TemplateFacts(generation_prompt="<assistant>")),
        (
            LOOP.replace("CONTENT", "{% for p in m.content %}{{ p.text }}{% endfor %}"),
            TemplateFacts(takes_text=False, takes_parts=True),
        ),
        (
            "{% if messages[0].role == 'developer' %}{% endif %}" + LOOP.replace("CONTENT", "{{ m.content }}"),
            TemplateFacts(knows_developer=True),
        ),
        ("{{ raise_exception('no') }}", TemplateFacts()),
        ("{{ ''.__class__.__mro__ }}", TemplateFacts()),
    ],
)
def test_facts_are_found_by_probes(template, expected):
    assert facts_of(template.replace("CALL", "")) == expected


def test_a_template_that_wants_arguments_as_text():
    as_text = LOOP.replace("CONTENT", "{{ m.content }}").replace("CALL", "CALL {{ c.function.arguments }}")
    assert facts_of(as_text).arguments_as_text
    assert not facts_of(as_text.replace("arguments }}", "arguments | tojson }}")).arguments_as_text
    assert facts_of(as_text.replace("{{ c.f", "{{ 'x' + c.f")).arguments_as_text
