"""The format of a model: by name, by the tokenizer's own template, by what its chat template writes."""

from __future__ import annotations

from copy import copy
from typing import Any

import pytest

from torch_pagoda.serving.formats import (
    ContentDelta,
    Format,
    ReasoningDelta,
    ToolCall,
    check_tools,
    merge_events,
    reasoning_parsers,
    render,
    resolve,
    tool_parsers,
)
from torch_pagoda.serving.formats.families import REASONING_PARSER_ALIASES, REASONING_PARSERS, TOOL_PARSERS
from torch_pagoda.serving.formats.library import TemplateFormat

from chat_families import EOS, chat_template, chat_tokenizer

PROPERTIES = {"x": {"anyOf": [{"type": "string"}, {"type": "integer"}]}, "n": {"type": "integer"}}
TOOLS = check_tools(
    [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": PROPERTIES}}}]
)
USER = [{"role": "user", "content": "what is <think>?"}]
THINKS = chat_template("hermes").replace(
    "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}"
)


def tokenizer_with(family: str, **attributes: Any) -> Any:
    tokenizer = copy(chat_tokenizer(family))
    for name, value in attributes.items():
        setattr(tokenizer, name, value)
    return tokenizer


def test_names():
    names = "qwen3_coder qwen3_xml minimax_m2 minimax_m3 glm45 glm47 mistral kimi_k2 lfm2 gemma4 hy_v3 step3p5 hermes"
    names += " qwen3 deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 llama3_json phi4_mini_json granite"
    assert set(names.split()) <= set(tool_parsers())
    assert {"qwen3", "deepseek_r1", "deepseek_v3", "glm45", "mistral", "granite"} <= set(reasoning_parsers())
    for name in tool_parsers():
        found = resolve(name, chat_tokenizer("hermes"), reasoning_parser="none")
        assert isinstance(found, Format) and found.calls_tools and found.reasoning is None
    for name in reasoning_parsers():
        found = resolve("none", chat_tokenizer("hermes"), reasoning_parser=name)
        assert isinstance(found, Format) and not found.calls_tools and found.reasoning_end
    with pytest.raises(ValueError, match="--tool-call-parser hermse is not known; use one of"):
        resolve("hermse", chat_tokenizer("hermes"))
    with pytest.raises(ValueError, match="--reasoning-parser x is not known"):
        resolve(None, chat_tokenizer("hermes"), reasoning_parser="x")
    assert resolve("none", chat_tokenizer("hermes"), reasoning_parser="none") is None


def test_nothing_is_known_of_a_plain_template():
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    found = resolve(None, tokenizer_with("phi4_mini_json", chat_template=plain), plain)
    assert found is None or not found.calls_tools
    assert resolve(None, tokenizer_with("phi4_mini_json", chat_template=None), plain) == found


@pytest.mark.parametrize(
    "end, is_open",
    [
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n<think>\nI was", True),
        ("<|im_start|>assistant\n<think>\nI was</think>So", False),
        ("<|im_start|>user\nwhat is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\nThe tag <think> means", False),
        ("<|im_start|>assistant\nThe tag is <think>", False),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\nThe tag <think> means", False),
        ("<|im_start|>assistant\n</think>\n\n<think>\nI was", True),
        ("<|im_start|>assistant\nHi<|im_end|>\n<think>\n", True),
    ],
)
def test_whether_reasoning_is_open_follows_from_the_prompt(end, is_open):
    found = resolve(None, chat_tokenizer("hermes"), THINKS)
    assert isinstance(found, Format)
    assert found.answer_begins == "<|im_start|>assistant"
    prompt = render(chat_tokenizer("hermes"), USER) + end
    assert found.reasoning_open(prompt) is is_open
    assert found.parser(prompt, TOOLS).reasoning_open is is_open
    assert found.reasoning_end == ("</think>",)
    assert found.reasoning_ahead(prompt) == ("</think>" if is_open else None)


@pytest.mark.parametrize("family", ["hermes", "gemma4", "mistral", "minimax_m3", "llama3_json"])
def test_a_prefill_that_talks_about_marks_is_text_and_so_is_what_follows(family):
    found = resolve(None, chat_tokenizer(family))
    assert isinstance(found, Format) and found.reasoning is not None
    opened, closed = found.reasoning.open[0].rstrip(), found.reasoning.close[0]
    head = "<|im_start|>assistant\n"
    for prefill in (f"The mark {opened} means", f"The mark is {opened}", f"{closed}\nThe mark {opened} means"):
        assert not found.reasoning_open(head + prefill), prefill
        parser = found.parser(head + prefill, TOOLS)
        assert merge_events([*parser.feed(" what"), *parser.finish()]) == [ContentDelta(" what")]
    parser = found.parser(head + f"{opened}I was", TOOLS)
    assert merge_events([*parser.feed(f" on{closed}Hi"), *parser.finish()]) == [
        ReasoningDelta(" on"),
        ContentDelta("Hi"),
    ]


@pytest.mark.parametrize(
    ("family", "text"), [("hermes", "<think> opens it."), ("llama3_json", '{"name": "f", "parameters": {}}')]
)
def test_what_only_an_answer_begins_with_is_text_behind_a_prefill(family, text):
    found = resolve(None, chat_tokenizer(family))
    assert isinstance(found, Format)
    for prefill, is_text in (("The mark", True), ("", False), ("Hi<|im_end|>\n", False)):
        parser = found.parser(f"<|im_start|>assistant\n{prefill}", TOOLS)
        events = merge_events([*parser.feed(text), *parser.finish()])
        assert (events == [ContentDelta(text)]) is is_text, prefill


def test_a_grammar_that_waits_waits_for_one_end():
    found = resolve("granite", chat_tokenizer("granite"), None, reasoning_parser="granite")
    prompt = "<|im_start|>assistant\nHere is my thought process:"
    assert isinstance(found, Format) and found.reasoning_ahead(prompt) == "Here is my response:"
    text = "Hm. Here's my response: no. Here is my response: yes"
    for awaits, thought, said in ((False, "Hm.", "no. Here is my response: yes"), (True, text[:27], "yes")):
        parser = found.parser(prompt, awaits_answer=awaits)
        events = merge_events([*parser.feed(text), *parser.finish()])
        assert events == [ReasoningDelta(thought), ContentDelta(said)]


def test_text_that_spells_a_special_token_is_part_of_an_answer():
    found = resolve(None, chat_tokenizer("hermes"))
    assert isinstance(found, Format)
    parser = found.parser("", TOOLS)
    assert merge_events([*parser.feed(f"a{EOS} b"), *parser.finish()]) == [ContentDelta(f"a{EOS} b")]


@pytest.mark.parametrize(
    ("family", "kept"),
    [
        ("mistral", ["[CALL_ID]", "[THINK]"]),
        ("phi4_mini_json", ["<|/tool_call|>", "<|tool_call|>"]),
        ("granite", ["<tool_call>"]),
        ("hermes", ["<think>", "</think>"]),
    ],
)
def test_special_tokens_that_have_text(family, kept):
    texts = ["<|im_end|>", *kept, "<|eom|>"]
    reasoning = REASONING_PARSERS.get(REASONING_PARSER_ALIASES.get(family, family))
    found = Format(family, TOOL_PARSERS[family], reasoning, special_tokens=dict(enumerate(texts)))
    assert found.kept_special_token_ids() == list(range(1, 1 + len(kept)))
    assert found.kept_special_token_ids(["\n<|eom|>", "x"]) == list(range(1, 2 + len(kept)))


def test_calls_are_text_where_there_are_no_tools():
    found = resolve(None, chat_tokenizer("hermes"))
    assert isinstance(found, Format)
    parser = found.parser("")
    text = ' \n<tool_call>{"name": "f"}</tool_call> '
    assert merge_events([*parser.feed(text), *parser.finish()]) == [ContentDelta(text)]


OWN = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<call>(?P<name>\w+)?",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"\s*<\|im_end\|>", "content": "text"},
    },
}
KEYED = {
    "open_pattern": r"<call>(?P<name>\w+)",
    "close": "</call>",
    "repeats": True,
    "content": "xml-inline",
    "content_args": {"tag_pattern": r"<(?P<key>\w)>(?P<value>.*?)</>"},
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
}


@pytest.mark.parametrize(
    "template, text, expected, malformed",
    [
        (
            OWN,
            '<think>\nhm\n</think>\n\nHi \n<call>f{"x": "7"}</call> and <call>f{}</call><|im_end|>',
            [
                ReasoningDelta("hm"),
                ContentDelta("Hi"),
                ToolCall("0", "f", '{"x": "7"}'),
                ContentDelta(" and"),
                ToolCall("1", "f", "{}"),
            ],
            0,
        ),
        (OWN, "Hi <call>f{x</call> there", [ContentDelta("Hi <call>f{x</call> there")], 1),
        (OWN, "Hi <call>f{", [ContentDelta("Hi <call>f{</call>")], 1),
        (OWN, "Hi <call>{}</call>", [ContentDelta("Hi <call>{}</call>")], 1),
        (
            {**OWN, "fields": {**OWN["fields"], "tool_calls": KEYED}},
            "<call>f<x>a</><n>3</></call>",
            [ToolCall("0", "f", '{"x": "a", "n": 3}')],
            0,
        ),
    ],
)
def test_a_template_that_the_tokenizer_brings(template, text, expected, malformed):
    found = resolve(None, tokenizer_with("hermes", response_template=template))
    assert isinstance(found, TemplateFormat) and found.calls_tools
    for pieces in ([text], list(text), *([text[:i], text[i:]] for i in range(len(text)))):
        parser = found.parser("<|im_start|>assistant\n", TOOLS, make_id=lambda name, index: str(index))
        events = [event for piece in pieces for event in parser.feed(piece)]
        assert (merge_events([*events, *parser.finish()]), parser.malformed) == (expected, malformed)
    parser = found.parser("<|im_start|>assistant\n<think>\n", TOOLS)
    assert parser.reasoning_open
    assert found.reasoning_ahead("<|im_start|>assistant\n<think>\n") == "</think>"
    for ended in ("", "<think>\n</think>\n"):
        assert found.reasoning_ahead(f"<|im_start|>assistant\n{ended}") is None
    assert parser.feed("hm") == [ReasoningDelta("hm")]


def test_a_flag_comes_before_the_tokenizers_template_and_a_broken_one_is_passed_over():
    assert isinstance(resolve("hermes", tokenizer_with("hermes", response_template=OWN)), Format)
    assert isinstance(resolve(None, tokenizer_with("hermes", response_template={"fields": {}})), Format)
