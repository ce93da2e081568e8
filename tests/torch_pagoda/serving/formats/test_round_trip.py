"""What a family's chat template writes for an assistant message is read back as that message."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_pagoda.runtime.requests.detokenizer import Detokenizer
from torch_pagoda.serving.formats import (
    ContentDelta,
    Event,
    Format,
    ReasoningDelta,
    ToolCall,
    check_tools,
    merge_events,
    probe_template,
    render,
    resolve,
)

from chat_families import EOS, FAMILIES, chat_tokenizer

TOOLS = check_tools(
    [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {
                    "type": "object",
                    "properties": {
                        "text": {"type": "string"},
                        "nullable": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                        "count": {"type": "integer"},
                        "ratio": {"type": ["number", "null"]},
                        "on": {"type": "boolean"},
                        "tags": {"type": "array", "items": {"type": "string"}},
                        "nested": {
                            "type": "object",
                            "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/words"}},
                        },
                    },
                    "$defs": {"words": {"type": "array", "items": {"type": "string"}}},
                },
            },
        }
        for name in ("get_weather", "mcp.files-write")
    ]
)

MESSAGES = [{"role": "user", "content": "what about <think> and <tool_call>?"}]

FORMATS: dict[str, Format] = {}


def format_of(family: str) -> Format:
    """The format that is found for a family's tokenizer."""
    if family not in FORMATS:
        found = resolve(None, chat_tokenizer(family))
        assert isinstance(found, Format)
        FORMATS[family] = found
    return FORMATS[family]


def answer_text(family: str, **message: Any) -> str:
    """The text that the template writes for an answer, up to where generation stops."""
    tokenizer, tools = chat_tokenizer(family), [tool.declaration for tool in TOOLS]
    prompt = render(tokenizer, MESSAGES, tools=tools, add_generation_prompt=True)
    full = render(tokenizer, [*MESSAGES, {"role": "assistant", "content": "", **message}], tools=tools)
    assert full.startswith(prompt)
    return full[len(prompt) : full.rindex(EOS)]


def parsed(family: str, pieces: list[str]) -> tuple[list[Event], int]:
    """Events of a text in pieces, and how many calls were malformed."""
    prompt = render(chat_tokenizer(family), MESSAGES, add_generation_prompt=True)
    parser = format_of(family).parser(prompt, TOOLS, make_id=lambda name, index: f"{name}#{index}")
    events = [event for piece in pieces for event in parser.feed(piece)]
    return merge_events([*events, *parser.finish()]), parser.malformed


def calls_of(family: str, calls: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [
        {"id": f"functions.{name}:{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_family_is_found_from_its_template(family):
    found = format_of(family)
    assert found.name == family
    assert found.reasoning is not None
    assert probe_template(chat_tokenizer(family)).takes_tools


# What formats without quotes cannot hold: text that begins or ends with white space that the format strips, that is a
# value of another type, or that holds the format's own marks.
TEXT = st.text(
    st.sampled_from(list("ab \"'\\\n\t{}[]<>,:=é🙂\u2028\x7f0")) | st.characters(exclude_categories=["Cs", "Cc"]),
    max_size=12,
).filter(lambda text: not any(mark in text for mark in ("<|", "]<]", "</")))
NOT_NULL = TEXT.filter(lambda text: text.strip() not in ("null", "None"))
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": TEXT | st.sampled_from(["12", "null", "true", "[1]", '{"a": 1}', '"quoted"', "1e5", ""]),
        "nullable": st.none() | NOT_NULL,
        "count": st.integers(-(10**20), 10**20),
        "ratio": st.none() | st.floats(allow_nan=False, allow_infinity=False, width=32) | st.integers(-9, 9),
        "on": st.booleans(),
        "tags": st.lists(TEXT, max_size=3),
        "nested": st.fixed_dictionaries({}, optional={"a": st.integers(), "b": st.lists(TEXT, max_size=2)}),
    },
)
"""Arguments as the schema of ``TOOLS`` has them."""


@pytest.mark.parametrize("family", FAMILIES)
def test_special_tokens_that_are_marks_have_text_and_no_others(family):
    tokenizer = chat_tokenizer(family, special_marks=True)
    found = resolve(None, tokenizer)
    assert isinstance(found, Format) and found.name == family
    calls = calls_of(family, [("get_weather", {"text": "a", "count": 1}), ("get_weather", {"tags": ["b"]})])
    text = answer_text(family, content="Hi", reasoning_content="hm", tool_calls=calls)
    middle = text.index("Hi")
    begin, spelled, end = text[:middle], ("<", "|im_start|>"), text[middle:]  # not that token, but its text
    ids = [
        tokenizer(part, add_special_tokens=False).input_ids for part in (begin, *spelled, "<|im_start|>", end, EOS)
    ]
    kept = found.kept_special_token_ids()
    detokenizer = Detokenizer(tokenizer, [], kept_special_token_ids=kept)
    for token in [token for part in ids for token in part]:
        detokenizer.append([token])
    assert detokenizer.text == "".join((begin, *spelled, end))


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_calls_come_back_however_the_text_is_cut(family, data):
    calls = data.draw(
        st.lists(st.tuples(st.sampled_from([tool.name for tool in TOOLS]), ARGUMENTS), min_size=1, max_size=3)
    )
    content = data.draw(st.sampled_from(["", "Let me see < [ {x", "two\n\nlines"]))
    reasoning = data.draw(st.sampled_from(["", "hm\n\n<b> {"]))
    text = answer_text(family, content=content, reasoning_content=reasoning, tool_calls=calls_of(family, calls))
    if family == "llama3_json" and content:
        return  # calls are known by their place only
    expected: list[Event] = [ReasoningDelta(reasoning)] if reasoning else []
    expected += [ContentDelta(content)] if content else []
    ids = ["functions.{}:{}" if family == "kimi_k2" else "{}#{}"] * len(calls)
    expected += [
        ToolCall(ids[i].format(name, i), name, json.dumps(a, ensure_ascii=False)) for i, (name, a) in enumerate(calls)
    ]
    assert parsed(family, [text]) == (expected, 0)
    assert parsed(family, list(text)) == (expected, 0)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    assert parsed(family, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == (expected, 0)
