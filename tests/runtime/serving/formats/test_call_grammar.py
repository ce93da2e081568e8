"""Grammars take exactly the calls that fit the schemas, in each family's notation."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from torch_pagoda.runtime.serving.formats import Format, ToolCall, ToolChoice, check_tools, render, resolve

from chat_families import EOS, FAMILIES, chat_tokenizer

llguidance = pytest.importorskip("llguidance")
from llguidance.hf import from_tokenizer  # noqa: E402

WITHOUT = ("minimax_m3", "lfm2", "gemma4")
WITH = tuple(family for family in FAMILIES if family not in WITHOUT)

TOOLS = check_tools(
    [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "city": {"type": "string"},
                        "unit": {"type": "string", "enum": ["C", "F"]},
                        "days": {"type": "integer"},
                        "more": {"$ref": "#/$defs/more"},
                    },
                    "required": ["city", "days"],
                    "additionalProperties": False,
                    "$defs": {"more": {"type": "array", "items": {"type": "boolean"}}},
                },
            },
        },
        {"type": "function", "function": {"name": "now"}},
    ]
)
GOOD: list[tuple[str, dict[str, Any]]] = [
    ("weather", {"city": 'Kö"ln\n<x>', "unit": "C", "days": 3, "more": [True, False]}),
    ("weather", {"city": "", "days": -1}),
    ("now", {}),
]
BAD: list[tuple[str, dict[str, Any]]] = [
    ("other", {}),
    ("weather", {"city": "K"}),
    ("weather", {"city": "K", "days": "x"}),
    ("weather", {"city": "K", "unit": "K", "days": 3}),
    ("weather", {"city": "K", "days": 3, "more": [1]}),
    ("weather", {"city": "K", "days": 3, "else": 1}),
    ("now", {"x": 1}),
]
COMPACT = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}


@cache
def format_and_vocabulary(family: str) -> tuple[Format, Any]:
    found = resolve(None, chat_tokenizer(family))
    assert isinstance(found, Format)
    return found, from_tokenizer(chat_tokenizer(family))


def written(family: str, calls: list[tuple[str, dict[str, Any]]], content: str = "") -> str:
    """The calls as the family's template writes them, behind content."""
    messages = [{"role": "user", "content": "?"}]
    tool_calls = [
        {"id": f"functions.{name}:{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    tokenizer = chat_tokenizer(family)
    prompt = render(tokenizer, messages, add_generation_prompt=True)
    answer = {"role": "assistant", "content": content, "tool_calls": tool_calls}
    text = render(tokenizer, [*messages, answer])[len(prompt) :]
    return text[: text.rindex(EOS)].lstrip("\n")


def takes(
    family: str,
    text: str,
    mode: str = "required",
    names: tuple[str, ...] | None = None,
    once: bool = False,
    **options: Any,
) -> bool:
    """Whether the grammar takes the whole text and may end there."""
    found, vocabulary = format_and_vocabulary(family)
    grammar = found.grammar(TOOLS, ToolChoice(mode, names, once), prepare=lambda s: {**COMPACT, **s}, **options)  # type: ignore[arg-type]
    assert grammar is not None
    compiled = llguidance.LLMatcher.grammar_from_lark(grammar)
    assert llguidance.LLMatcher.validate_grammar(compiled, vocabulary) == ""
    matcher = llguidance.LLMatcher(vocabulary, compiled)
    tokens = chat_tokenizer(family).encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("family", WITH)
def test_required_calls(family):
    for call in GOOD:
        assert takes(family, written(family, [call])), written(family, [call])
    for call in BAD:
        assert not takes(family, written(family, [call])), written(family, [call])
    both = written(family, [GOOD[1], GOOD[2]])
    assert takes(family, both)
    assert not takes(family, both, parallel=False)
    assert not takes(family, "Hello")
    assert not takes(family, "")


@pytest.mark.parametrize("family", WITH)
def test_a_named_call(family):
    assert takes(family, written(family, [("now", {})]), names=("now",))
    assert not takes(family, written(family, [GOOD[1]]), names=("now",))
    # Who names the function wants one call of it; who allows only that one may want several.
    twice = written(family, [("now", {}), ("now", {})])
    assert takes(family, twice, names=("now",))
    assert takes(family, written(family, [("now", {})]), names=("now",), once=True)
    assert not takes(family, twice, names=("now",), once=True)


@pytest.mark.parametrize("family", [family for family in WITH if family != "llama3_json"])
def test_calls_within_text(family):
    assert takes(family, "Hello < there", "auto")
    for call in GOOD:
        assert takes(family, written(family, [call], "Hello"), "auto")
    assert takes(family, written(family, [GOOD[0], GOOD[2]], "Hello"), "auto")
    for call in BAD:
        assert not takes(family, written(family, [call], "Hello"), "auto")


@pytest.mark.parametrize("family", WITH)
def test_what_the_grammar_takes_is_what_the_parser_reads(family):
    found, vocabulary = format_and_vocabulary(family)
    grammar = found.grammar(TOOLS, ToolChoice("required"), parallel=False, prepare=lambda s: {**COMPACT, **s})
    matcher = llguidance.LLMatcher(vocabulary, llguidance.LLMatcher.grammar_from_lark(grammar))
    tokenizer, tokens = chat_tokenizer(family), []
    while not matcher.is_stopped() and len(tokens) < 400:
        # The end if it is allowed, else a mark of the format, else the first byte.
        mask = matcher.compute_logit_bias()
        token = min((t for t in range(len(mask)) if mask[t]), key=lambda t: (t != tokenizer.eos_token_id, t < 256, t))
        if token == tokenizer.eos_token_id:
            break
        assert matcher.consume_token(token)
        tokens.append(token)
    text = tokenizer.decode(tokens)
    parser = found.parser("", TOOLS)
    events = [*parser.feed(text), *parser.finish()]
    assert [type(event) for event in events] == [ToolCall], text
    assert parser.malformed == 0


@pytest.mark.parametrize(
    "schema, texts",
    [
        ({"enum": 5, "const": "a"}, {"a": True, "b": False}),
        ({"enum": 5, "anyOf": [{"const": "a"}]}, {"a": True, "b": True}),
        ({"enum": [], "anyOf": [{"const": "a"}]}, {"a": True, "b": True}),
        ({"type": 5}, {"a": True, "[1]": True}),
    ],
)
def test_a_schema_that_says_nonsense_says_nothing(schema, texts):
    found, vocabulary = format_and_vocabulary("glm47")
    declared = {"name": "f", "parameters": {"type": "object", "properties": {"x": schema}, "required": ["x"]}}
    tools = check_tools([{"type": "function", "function": declared}])
    grammar = found.grammar(tools, ToolChoice("required"))
    matcher = llguidance.LLMatcher(vocabulary, llguidance.LLMatcher.grammar_from_lark(grammar))
    for text, is_taken in texts.items():
        written = f"<tool_call>f<arg_key>x</arg_key><arg_value>{text}</arg_value></tool_call>"
        tokens = chat_tokenizer("glm47").encode(written, add_special_tokens=False)
        matcher.reset()
        assert (matcher.try_consume_tokens(tokens) == len(tokens)) is is_taken, text


@pytest.mark.parametrize("family", WITHOUT)
def test_formats_without_a_grammar_say_so(family):
    found, _ = format_and_vocabulary(family)
    assert found.grammar(TOOLS, ToolChoice("required")) is None


def test_no_grammar_without_tools():
    found, _ = format_and_vocabulary("hermes")
    assert found.grammar(TOOLS, ToolChoice("none")) is None
    assert found.grammar([], ToolChoice("auto")) is None
