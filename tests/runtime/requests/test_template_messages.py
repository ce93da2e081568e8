"""Messages come to the template in the form that it takes."""

from __future__ import annotations

import re
from typing import Any

import pytest

from torch_pagoda.runtime.requests.template_facts import TemplateFacts
from torch_pagoda.runtime.requests.template_messages import ConversationError, template_messages

TEXT = TemplateFacts()
PARTS = TemplateFacts(takes_parts=frozenset({"user"}), refuses_text=frozenset({"user"}))
BOTH = TemplateFacts(takes_parts=frozenset({"user"}))
ONE_PART = TemplateFacts(refuses_text=frozenset({"user"}))
AS_TEXT = TemplateFacts(arguments_as_text=True)
PART = {"type": "text", "text": "a"}


def several(messages: list[Any], facts: TemplateFacts = TEXT) -> list[dict[str, Any]]:
    return template_messages(messages, facts, [f"messages[{i}]" for i in range(len(messages))])


def one(message: dict[str, Any], facts: TemplateFacts = TEXT) -> dict[str, Any]:
    return several([message], facts)[0]


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
        ("a", ONE_PART, [PART]),
        ([PART, PART], ONE_PART, [{"type": "text", "text": "a\na"}]),
        ([PART, {"type": "input_text", "text": "b"}], PARTS, [PART, {"type": "text", "text": "b"}]),
        ([PART], BOTH, "a"),
        ([PART, PART], BOTH, [PART, PART]),
        ("a", BOTH, "a"),
        (["a", {"type": "refusal", "refusal": "b"}, {"type": "output_text", "text": "c"}], TEXT, "a\nb\nc"),
    ],
)
def test_content(content, facts, expected):
    assert one({"role": "user", "content": content}, facts) == {"role": "user", "content": expected}


def test_the_forms_of_one_role_are_not_those_of_another():
    assert one({"role": "system", "content": [PART, PART]}, PARTS)["content"] == "a\na"


def test_what_is_null_or_empty_is_left_out():
    dumped = {"role": "assistant", "content": "a", "tool_calls": [], "refusal": None, "audio": None}
    assert one(dumped) == {"role": "assistant", "content": "a"}
    assert one(answer()) == {"role": "assistant", "content": ""}
    assert one(answer(call()))["content"] == ""
    assert one({"role": "assistant", "content": None, "refusal": "no"})["content"] == "no"
    assert one({"role": "user", "content": "a", "mood": "glad"})["mood"] == "glad"


def test_developer_is_the_system_where_the_template_does_not_know_it():
    message = {"role": "developer", "content": "a"}
    assert one(message)["role"] == "system"
    assert one(message, TemplateFacts(knows_developer=True))["role"] == "developer"


@pytest.mark.parametrize(
    "given, as_object, as_text",
    [
        ('{"a": "é"}', {"a": "é"}, '{"a": "é"}'),
        ({"a": 1}, {"a": 1}, '{"a": 1}'),
        ("", {}, "{}"),
        (None, {}, "{}"),
        ('{"city": "Ul', {}, '{"city": "Ul'),
        ("[1]", {}, "[1]"),
        ([1], {}, "{}"),
        ('{"a":' * 200 + "1" + "}" * 200, {}, '{"a":' * 200 + "1" + "}" * 200),
        ('{"a":' * 100_000, {}, '{"a":' * 100_000),
    ],
    ids=range(9),
)
def test_arguments_are_objects_or_text(given, as_object, as_text):
    assert one(answer(call(given)))["tool_calls"][0]["function"]["arguments"] == as_object
    assert one(answer(call(given)), AS_TEXT)["tool_calls"][0]["function"]["arguments"] == as_text


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_is_passed_under_every_name(field):
    message = one({"role": "assistant", "content": "a", field: "hm"})
    assert (message["reasoning_content"], message["reasoning"], message["thinking"]) == ("hm",) * 3


def test_a_tool_message_gets_the_name_of_its_function():
    tool = {"role": "tool", "tool_call_id": "c2", "content": [PART]}
    messages = several([answer(call(), call(name="g", call_id="c2")), tool])
    assert messages[1] == {"role": "tool", "content": "a", "tool_call_id": "c2", "name": "g"}


def test_ids_are_made_short_alike_in_a_call_and_its_result():
    tool = {"role": "tool", "tool_call_id": "call_abcdef", "content": "a"}
    called, result = several([answer(call(call_id="call_abcdef")), tool], TemplateFacts(short_ids=True))
    made = called["tool_calls"][0]["id"]
    assert re.fullmatch("[0-9A-Za-z]{9}", made) and result["tool_call_id"] == made
    assert result["name"] == "f"
    kept = one(answer(call(call_id="Abcdef123")), TemplateFacts(short_ids=True))
    assert kept["tool_calls"][0]["id"] == "Abcdef123"


@pytest.mark.parametrize(
    "messages, field, words",
    [
        ([3], "messages[0]", "not a message"),
        ([{"role": ["user"]}], "messages[0]", "not a message"),
        ([{"role": "user"}], "messages[0].content", "missing"),
        ([{"role": "user", "content": []}], "messages[0].content", "no parts"),
        ([{"role": "user", "content": 3}], "messages[0].content", "neither"),
        ([{"role": "user", "content": [PART, {"type": "image_url"}]}], "messages[0].content[1]", "'image_url'"),
        ([{"role": "user", "content": [{"type": ["text"]}]}], "messages[0].content[0]", "['text']"),
        (
            [{"role": "user", "content": [{"type": "text", "text": 3}]}],
            "messages[0].content[0].text",
            "=3 is not a string",
        ),
        ([{"role": "assistant", "reasoning": 3}], "messages[0].reasoning", "not a string"),
        ([answer(3)], "messages[0].tool_calls[0]", "not a call"),
        ([answer(*[call()] * 513)], "messages[0].tool_calls", "at most 512"),
        ([answer(call(call_id=3))], "messages[0].tool_calls[0].id", "not a string"),
        ([{"role": "tool", "tool_call_id": 3, "content": "a"}], "messages[0].tool_call_id", "not a string"),
    ],
)
def test_mistakes_are_named(messages, field, words):
    with pytest.raises(ConversationError) as caught:
        several(messages)
    assert caught.value.field == field
    assert str(caught.value).startswith(field) and words in str(caught.value)
