"""Grammars take exactly the calls that fit the schemas, in each family's notation."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from typing import Any

import jsonschema
import pytest

from torch_pagoda.serving.formats import Format, Tool, ToolCall, ToolChoice, check_tools, render, resolve

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


class Held:
    """A format, a vocabulary and tools: which calls the parser finds in what the grammar takes."""

    def __init__(self, found: Format, vocabulary: Any, tokenizer: Any, tools: list[Tool], mode: str) -> None:
        grammar = found.grammar(tools, ToolChoice(mode), prepare=lambda s: {**COMPACT, **s})  # type: ignore[arg-type]
        assert grammar is not None
        self._matcher = llguidance.LLMatcher(vocabulary, llguidance.LLMatcher.grammar_from_lark(grammar))
        assert not self._matcher.is_error(), self._matcher.get_error()
        self._found, self._tokenizer, self._tools = found, tokenizer, tools

    def calls(self, text: str) -> list[ToolCall] | None:
        """The calls of a text; None where the grammar does not take it."""
        self._matcher.reset()
        tokens = self._tokenizer.encode(text, add_special_tokens=False)
        if self._matcher.try_consume_tokens(tokens) != len(tokens) or not self._matcher.is_accepting():
            return None
        parser = self._found.parser("", self._tools, is_held=True)
        return [event for event in [*parser.feed(text), *parser.finish()] if isinstance(event, ToolCall)]


OTHER_OPENERS = {
    "qwen3_coder": [("<tool_call>\n", ""), ("<tool_call>", "")],
    "phi4_mini_json": [("functools[", "<|tool_call|>[")],
    "granite": [("<|tool_call|>[", "<tool_call>["), ("<|tool_call|>[", "[")],
}


@pytest.mark.parametrize("has_added_tokens", [True, False])
@pytest.mark.parametrize("family", [family for family in WITH if family != "llama3_json"])
def test_no_call_evades_the_grammar_by_its_spelling(family, has_added_tokens):
    found, vocabulary = format_and_vocabulary(family)
    tokenizer = chat_tokenizer(family)
    if not has_added_tokens:
        tokenizer = chat_tokenizer("phi4_mini_json")  # which has none but those of conversations
        found, vocabulary = replace(found, added_tokens={}), format_and_vocabulary("phi4_mini_json")[1]
    ways = [("", ""), ("\n", ""), ("\n", " "), (" ", ""), *OTHER_OPENERS.get(family, [])]
    held = Held(found, vocabulary, tokenizer, TOOLS, "auto")
    schemas = {tool.name: tool.parameters for tool in TOOLS}
    num_called = 0
    for calls in ([GOOD[1]], [GOOD[1], GOOD[2]], *([call] for call in BAD), *([GOOD[1], call] for call in BAD)):
        for old, new in ways:
            text = written(family, calls)
            text = text.replace(old, new) if old else text
            for whole in (text, "Well. " + text, text + " So."):
                for call in held.calls(whole) or []:
                    num_called += 1
                    jsonschema.validate(json.loads(call.arguments), schemas[call.name])
    assert num_called > 0


TAGGED = ("qwen3_coder", "glm45", "glm47", "minimax_m2", "hy_v3", "deepseek_v32", "deepseek_v4")


@pytest.mark.parametrize("family", TAGGED)
def test_no_value_holds_what_comes_after_it(family):
    """Text that looks like the end of its own argument is that end, for the grammar as for the parser."""
    found, vocabulary = format_and_vocabulary(family)
    held = [Held(found, vocabulary, chat_tokenizer(family), TOOLS, "auto")]
    plain, vocabulary = chat_tokenizer("phi4_mini_json"), format_and_vocabulary("phi4_mini_json")[1]
    held.append(Held(replace(found, added_tokens={}), vocabulary, plain, TOOLS, "auto"))
    good, bad = (written(family, [("weather", {"city": "K", "days": days})]) for days in (3, "x"))
    cut = good.index("K") + 1
    for ending in (bad[cut:], bad[cut:].replace("\n", ""), bad[cut:].replace("\n", " ")):
        assert [way.calls(good[:cut] + ending + good[cut:]) for way in held] == [None, None]
    assert [way.calls(good.replace("</", "", 1)) for way in held] == [None, None]


@pytest.mark.parametrize("family", TAGGED)
def test_a_missing_end_of_a_value_is_not_mended_where_a_grammar_takes_it_for_text(family):
    found, vocabulary = format_and_vocabulary(family)
    plain, vocabulary = chat_tokenizer("phi4_mini_json"), format_and_vocabulary("phi4_mini_json")[1]
    held = Held(replace(found, added_tokens={}), vocabulary, plain, TOOLS, "auto")
    good, other = (written(family, [("weather", {"city": "K", "days": days})]) for days in (3, 77))
    cut, end = good.index("K") + 1, other.index("77") + 2
    text = good[:cut] + re.sub("</[^k]*?>", "", other[cut:end], count=1) + good[cut:]
    (call,) = held.calls(text) or []
    assert "77" in json.loads(call.arguments)["city"] and json.loads(call.arguments)["days"] == 3


REFERRED = {"$defs": {"color": {"enum": ["red", "blue"], "type": "string"}, "loop": {"$ref": "#/$defs/loop"}}}
VALUES: list[Any] = [
    "a",
    "ab",
    "red",
    "null",
    "12",
    "1.5",
    "true",
    '{"a": 1}',
    "[1]",
    "",
    None,
    12,
    1.5,
    True,
    {"a": 1},
]


@pytest.mark.parametrize("family", TAGGED)
@pytest.mark.parametrize(
    ("schema", "left_out", "taken"),
    [
        ({}, "", ["a", "null", "12"]),
        (True, "", ["a"]),
        (False, "false", []),
        ({"type": "string", "title": "X", "description": "pattern", "x-order": 1}, "", ["a", "", "12", "null"]),
        ({"type": "string", "pattern": "^a$", "maxLength": 1}, "pattern maxLength", ["ab"]),
        ({"type": ["string", "null"]}, "", ["a", "null"]),
        ({"type": ["string", "integer"], "minimum": 13}, "minimum", ["12"]),
        ({"type": ["string", "array"], "items": {"type": "string"}}, "items", ["[1]"]),
        ({"type": "string", "format": "date"}, "format", ["a"]),
        ({"type": "string", "enum": ["a", "ab"]}, "", ["a", "ab"]),
        ({"enum": ["a", 12, None, True, {"a": 1}]}, "", ["a", 12, None, True, {"a": 1}]),
        ({"enum": ["a", "ab"], "maxLength": 1}, "maxLength", ["ab"]),
        ({"enum": ["a", "ab"], "const": "a"}, "enum const", ["12"]),
        ({"type": "string", "enum": ["a", 12]}, "type", ["a"]),
        ({"type": ["string", "number"], "enum": ["a", 12]}, "", ["a", 12]),
        ({"$ref": "#/$defs/color"}, "", ["red"]),
        ({"$ref": "#/$defs/loop"}, "$ref", ["a"]),
        ({"$ref": "#/$defs/nowhere"}, "$ref", ["a"]),
        ({"anyOf": [{"$ref": "#/$defs/color"}, {"type": "null"}], "default": None}, "", ["red", None]),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "", ["a", "null"]),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "object"}]}, "", ["a", "12", '{"a": 1}']),
        ({"anyOf": [{"type": "string"}, {"enum": [13]}]}, "anyOf", ["12"]),
        ({"anyOf": [{"$ref": "#/$defs/color"}, {"type": "integer"}]}, "anyOf", ["a"]),
        ({"anyOf": [{"type": "string", "maxLength": 1}, {"type": "null"}]}, "maxLength", ["ab"]),
        ({"anyOf": [{"type": "string"}, {"type": "object", "required": ["b"]}]}, "required", ['{"a": 1}']),
        ({"anyOf": [{"anyOf": [{"type": "string"}]}, {"type": "null"}]}, "anyOf", ["a"]),
        ({"oneOf": [{"type": "string"}, {}]}, "oneOf", ["a"]),
        ({"not": {"const": "a"}}, "not", ["a"]),
        ({"type": "integer"}, "", [12]),
    ],
    ids=str,
)
def test_bare_text_fits_its_schema_but_for_what_is_said(family, schema, left_out, taken):
    parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"], **REFERRED}
    tools = check_tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    found, vocabulary = format_and_vocabulary(family)
    assert found.left_out(tools[0]) == [f"{word} of 'x'" for word in left_out.split()]
    held = Held(found, vocabulary, chat_tokenizer(family), tools, "required")
    for value in VALUES:
        calls = held.calls(written(family, [("f", {"x": value})]))
        assert calls or value not in taken, value
        if calls and not left_out:
            jsonschema.validate(json.loads(calls[0].arguments), parameters)


@pytest.mark.parametrize(
    ("root", "left_out"),
    [
        ({"type": "object", "properties": {}, "required": ["x"], "additionalProperties": False}, ["false of 'x'"]),
        ({"properties": {"x": {"type": "string"}}, "additionalProperties": {"type": "string"}, "title": "T"}, []),
        ({"anyOf": [{"required": ["x"]}], "minProperties": 1}, ["anyOf", "minProperties"]),
        ({"patternProperties": {"x": {}}, "$ref": "#"}, ["patternProperties", "$ref"]),
    ],
)
def test_parts_of_the_arguments_schema_that_tags_do_not_say(root, left_out):
    found, _ = format_and_vocabulary("glm47")
    (tool,) = check_tools([{"type": "function", "function": {"name": "f", "parameters": root}}])
    assert found.left_out(tool) == left_out
