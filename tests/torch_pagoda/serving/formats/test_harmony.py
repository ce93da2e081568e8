"""Harmony messages, the notation of gpt-oss: read whole and in every cut, and held by grammars."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import pytest
from harmony_family import MARKS, TEMPLATE, harmony_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_pagoda.serving.formats import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCall,
    ToolChoice,
    check_tools,
    merge_events,
    render,
    resolve,
)
from torch_pagoda.serving.formats.format import Format
from torch_pagoda.serving.formats.harmony import HarmonyFormat, one_text_before_call

from chat_families import chat_tokenizer

NUMBER = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = check_tools(
    [{"type": "function", "function": {"name": name, "parameters": NUMBER}} for name in ("f", "browser.open")]
)
PROMPT = "<|start|>user<|message|>what is <|channel|>?<|end|><|start|>assistant"
NEXT = "<|end|><|start|>assistant"
THOUGHT = f"<|channel|>analysis<|message|>Hm.{NEXT}"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
CALLED = ("f", '{"a": 1}')
F = ToolCall("f#0", *CALLED)


@cache
def harmony() -> HarmonyFormat:
    found = resolve(None, harmony_tokenizer())
    assert isinstance(found, HarmonyFormat)
    return found


def parsed(pieces: list[str], prompt: str = PROMPT, tools: Any = TOOLS, **options: Any) -> tuple[list[Event], int]:
    parser = harmony().parser(prompt, tools, make_id=lambda name, index: f"{name}#{index}", **options)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return merge_events([*events, *parser.finish()]), parser.malformed


def check(text: str, expected: list[str | list[str] | ToolCall], malformed: int = 0, **options: Any) -> None:
    """The events of the text, however it is cut: strings are content, lists of one string reasoning."""
    kinds = {str: ContentDelta, list: lambda entry: ReasoningDelta(entry[0])}
    wanted = ([kinds.get(type(entry), lambda call: call)(entry) for entry in expected], malformed)  # type: ignore
    assert parsed([text], **options) == wanted
    draw = random.Random(0)
    cuts = [sorted(draw.randrange(len(text) + 1) for _ in range(5)) for _ in range(10)]
    splits = [[text[a:b] for a, b in zip([0, *c], [*c, len(text)], strict=True)] for c in cuts]
    for pieces in (list(text), *([text[:i], text[i:]] for i in range(len(text))), *splits):
        assert parsed(pieces, **options) == wanted, pieces


@pytest.mark.parametrize(
    "text, expected",
    [
        (f"{THOUGHT}<|channel|>final<|message|>Four.<|return|>", [["Hm."], "Four."]),
        (f"{THOUGHT}<|channel|>final<|message|>Four.", [["Hm."], "Four."]),
        ("<|channel|>final <|constrain|>json<|message|>{}", ["{}"]),
        (f"<|channel|>final<|message|> a\n {NEXT}<|channel|>final<|message|>b", [" a\n \nb"]),
        (f"{THOUGHT}{THOUGHT}<|channel|>final<|message|>b", [["Hm.\nHm."], "b"]),
        (f"{THOUGHT}{CALL}<|call|>", [["Hm."], F]),
        (CALL, [F]),
        (CALL.replace(" <|constrain|>json", ""), [F]),
        (CALL.replace(" <|constrain|>json", " code"), [F]),
        (CALL.replace("commentary", "analysis"), [F]),
        (CALL.replace("functions.", ""), [F]),
        (' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>', [F]),
        (f'{THOUGHT} to=functions.f<|channel|>commentary json<|message|>{{"a": 1}}', [["Hm."], F]),
        (f"<|channel|>commentary<|message|>Plan.{NEXT}{CALL}<|call|>", ["Plan.", F]),
        ("<|channel|>commentary to=functions.now<|message|><|call|>", [ToolCall("now#0", "now", "{}")]),
        (CALL.replace("s.f", "s.browser.open"), [ToolCall("browser.open#0", "browser.open", F.arguments)]),
        (f"{CALL}<|call|><|start|>assistant{CALL}{NEXT}{CALL}", [ToolCall(f"f#{i}", *CALLED) for i in range(3)]),
        # As models err: a bracket too many, ends left out, channels named twice, none at all, words in a header.
        (CALL + "}<|call|>", [F]),
        ("<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>b", [["Hm."], "b"]),
        ("<|channel|>analysis<|message|>Hm.<|start|>assistant<|channel|>final<|message|>b", [["Hm."], "b"]),
        ("<|channel|>analysis<|message|>Hm.<|end|>\n<|channel|>final<|message|>b", [["Hm."], "b"]),
        ("<|channel|>commentary to=assistant<|channel|>commentary<|message|>b", ["b"]),
        ("<|message|>b", ["b"]),
        ("  plain <text>", ["  plain <text>"]),
        (f"<|channel|>? oh{NEXT}<|channel|>final<|message|>b", [["? oh"], "b"]),
        ("<|channel|>final<|end|>b<|end|>c", ["b<|end|>c"]),
        # Text about marks, and other roles.
        ("<|message|>a <|end|> b <|start|> <|channel|>x<|call|>.", ["a <|end|> b <|start|> <|channel|>x<|call|>."]),
        (f"{THOUGHT[:-9]}user<|message|>I<|end|><|start|>assistant<|channel|>final<|message|>b", [["Hm.\nI"], "b"]),
        # What was cut off.
        ("", []),
        ("<|channel|>fin", []),
        (THOUGHT, [["Hm."]]),
        ("<|channel|>analysis<|message|>Hm", [["Hm"]]),
    ],
)  # fmt: skip
def test_messages(text, expected):
    check(text, expected)


@pytest.mark.parametrize(
    "text, expected",
    [
        (CALL[:-1], [CALL[:-1]]),
        (CALL[: CALL.index("{")], [CALL[: CALL.index("{")]]),
        (CALL[: CALL.index(" <|con")], [CALL[: CALL.index(" <|con")]]),
        (CALL.replace("1", "NaN") + "<|call|>", [CALL.replace("1", "NaN")]),
        (f"{THOUGHT}{CALL} So.{NEXT}<|channel|>final<|message|>b", [["Hm."], f"{CALL} So.\nb"]),
        (CALL.replace('{"a": 1}', "[1]"), [CALL.replace('{"a": 1}', "[1]")]),
        (f"<|start|>assistant{CALL[:-1]}", [CALL[:-1]]),
        ("<|channel|>analysis to=python code<|message|>print(1)<|call|>", [["print(1)"]]),
    ],
)
def test_a_call_that_cannot_be_read_is_text(text, expected):
    check(text, expected, malformed=1)


def test_which_functions_may_be_called():
    other = CALL.replace("functions.f", "functions.g")
    check(other, [ToolCall("g#0", "g", F.arguments)])
    check(other, [other], 1, known_only=True)
    check(CALL, [F], known_only=True)
    check(CALL, [CALL], tools=())
    check(CALL.replace("functions.f", "functions.f<g>"), [CALL.replace("functions.f", "functions.f<g>")], 1)


PREFILLS = {
    "<|start|>assistant": (False, True),
    "<|start|>assistant<|channel|>final<|message|>The <|channel|> of <think>": (False, False),
    "<|start|>assistant<|channel|>analysis<|message|>I": (True, True),
    "<|start|>assistant<|channel|>commentary<|message|>I": (False, True),
    "<|start|>user<|message|>hi<|end|>": (False, True),
    "hi": (False, True),
}


@pytest.mark.parametrize("prompt", PREFILLS)
def test_where_a_prompt_ends(prompt):
    is_reasoning, is_ahead = PREFILLS[prompt]
    assert harmony().reasoning_open(prompt) is is_reasoning
    assert harmony().parser(prompt).reasoning_open is is_reasoning
    assert harmony().reasoning_ahead(prompt) == (("<|channel|>final", "<|message|>") if is_ahead else None)
    rest = f" x{NEXT}<|channel|>final<|message|>b"
    begun = prompt.rpartition("<|message|>")[2].endswith(("I", "<think>"))
    if begun:
        check(rest, [[" x"], "b"] if is_reasoning else [" x\nb"], prompt=prompt)
    check(
        "<|start|>assistant<|channel|>final<|message|>b",
        ["\nb" if begun and not is_reasoning else "b"],
        prompt=prompt,
    )


def test_before_an_awaited_answer_everything_is_reasoning():
    text = f"<|channel|>commentary<|message|>Plan.{NEXT}{CALL}{NEXT}<|channel|>final<|message|>{{}}"
    check(text, [['Plan.\n{"a": 1}'], "{}"], awaits_answer=True)


def test_reasoning_may_be_left_in_the_content():
    found = resolve("openai", harmony_tokenizer(), reasoning_parser="none")
    assert isinstance(found, HarmonyFormat)
    parser = found.parser(PROMPT, TOOLS)
    events = merge_events([*parser.feed(f"{THOUGHT}<|channel|>final<|message|>b"), *parser.finish()])
    assert events == [ContentDelta("Hm.\nb")]


TEXTS = st.text(st.sampled_from(list('ab <|>\n{}"é🙂')), max_size=8).map(lambda text: f"x{text}.")
MESSAGES = st.lists(
    st.tuples(st.sampled_from(["analysis", "commentary", "final"]), TEXTS)
    | st.tuples(st.just("f"), st.dictionaries(TEXTS, TEXTS | st.integers(), max_size=2)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=40, deadline=None)
@given(messages=MESSAGES, data=st.data())
def test_any_messages_come_back_however_the_text_is_cut(messages, data):
    written, content, reasoning, calls = [], [], [], []
    for kind, value in messages:
        if kind == "f":
            arguments = json.dumps(value, ensure_ascii=False)
            written.append(f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{arguments}")
            calls.append(arguments)
        else:
            written.append(f"<|channel|>{kind}<|message|>{value}")
            (reasoning if kind == "analysis" else content).append(value)
    text = NEXT.join(written)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    for pieces in ([text], [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)], list(text)):
        events, malformed = parsed(pieces)
        assert "".join(event.text for event in events if isinstance(event, ContentDelta)) == "\n".join(content)
        assert "".join(event.text for event in events if isinstance(event, ReasoningDelta)) == "\n".join(reasoning)
        assert [event.arguments for event in events if isinstance(event, ToolCall)] == calls
        assert malformed == 0


def test_no_text_is_read_often():
    for text in (
        "<|end|>" * 5_000,
        "<|start|>assistant" * 2_500,
        "<|channel|>" * 5_000,
        f"{CALL[:-1]}<|end|>" * 1_000,
    ):
        for pieces in ([text], [text[i : i + 40] for i in range(0, len(text), 40)]):
            parsed(pieces)


def test_names_and_what_fits_together():
    for name in ("gpt_oss", "gpt-oss", "openai", "harmony", "openai_gptoss"):
        assert isinstance(resolve(name, chat_tokenizer("hermes")), HarmonyFormat)
        assert isinstance(resolve(None, harmony_tokenizer(), reasoning_parser=name), HarmonyFormat)
    silent = resolve("none", harmony_tokenizer(), reasoning_parser="gpt_oss")
    assert isinstance(silent, HarmonyFormat) and not silent.calls_tools
    assert isinstance(resolve("none", harmony_tokenizer()), HarmonyFormat)
    for names in (("hermes", "gpt_oss"), ("gpt_oss", "qwen3")):
        with pytest.raises(ValueError, match="do not read the same text; use gpt_oss for both"):
            resolve(names[0], harmony_tokenizer(), reasoning_parser=names[1])
    without_calls = TEMPLATE.replace("m.tool_calls %}", "false %}")
    assert isinstance(resolve(None, harmony_tokenizer(), without_calls), HarmonyFormat)
    plain = resolve(None, chat_tokenizer("hermes"))
    assert type(plain) is Format and plain.end_token_ids == ()
    tokenizer = harmony_tokenizer()
    assert harmony().end_token_ids == tuple(tokenizer.convert_tokens_to_ids(["<|return|>", "<|call|>"]))
    assert harmony().kept_special_token_ids() == sorted(tokenizer.convert_tokens_to_ids(list(MARKS)))


def test_one_text_stands_before_a_call():
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    message = {"role": "assistant", "content": "Plan.", "tool_calls": [call], "reasoning": "Hm."}
    folded = one_text_before_call(message)
    assert folded == {**message, "content": "", "reasoning_content": "Hm.\nPlan."}
    assert one_text_before_call({**message, "content": ""}) == {**message, "content": ""}
    without = {"role": "assistant", "content": "b", "reasoning": "Hm."}
    assert one_text_before_call(without) == without
    history = [{"role": "user", "content": "?"}, {**folded, "thinking": folded["reasoning_content"]}]
    text = render(harmony_tokenizer(), history)
    assert parsed([text.partition("?<|end|><|start|>assistant")[2]])[0] == [ReasoningDelta("Hm.\nPlan."), F]


llguidance = pytest.importorskip("llguidance")

PARTS = {
    "thought": THOUGHT,
    "plan": f"<|channel|>commentary<|message|>Plan.{NEXT}",
    "call": CALL,
    "call, its recipient first": ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}',
    "call in analysis": CALL.replace("commentary", "analysis"),
    "bad": CALL.replace("1", '"x"'),
    "bad in analysis": CALL.replace("1", '"x"').replace("commentary", "analysis"),
    "unknown": CALL.replace("functions.f", "functions.g"),
    "answer": "<|channel|>final<|message|>{}",
    "typed answer": "<|channel|>final <|constrain|>json<|message|>{}",
    "called answer": '<|channel|>final to=functions.f<|message|>{"a": "x"}',
    "rest": f"on.{NEXT}",
}


@cache
def vocabulary() -> Any:
    from llguidance.hf import from_tokenizer

    return from_tokenizer(harmony_tokenizer())


@pytest.mark.parametrize(
    ("mode", "parts", "is_taken"),
    [
        ("required", ["call"], True),
        ("required", ["call, its recipient first"], True),
        ("required", ["thought", "thought", "call in analysis"], True),
        ("required", ["thought"], False),
        ("required", ["answer"], False),
        ("required", ["plan", "call"], False),
        ("required", ["bad"], False),
        ("required", ["bad in analysis"], False),
        ("required", ["unknown"], False),
        ("auto", ["answer"], True),
        ("auto", ["thought", "typed answer"], True),
        ("auto", ["thought", "plan", "call"], True),
        ("auto", ["thought", "bad"], False),
        ("auto", ["bad in analysis"], False),
        ("auto", ["unknown"], False),
        ("auto", ["called answer"], False),
        ("auto", ["thought"], False),
        ("auto", [], False),
    ],
)
def test_what_a_grammar_of_calls_takes(mode, parts, is_taken):
    compact = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
    text = "".join(PARTS[part] for part in parts)
    for prompt, written in ((PROMPT, text), (f"{PROMPT}<|channel|>final<|message|>I", PARTS["rest"] + text)):
        grammar = harmony().grammar(TOOLS, ToolChoice(mode), prepare=lambda s: {**compact, **s}, prompt_text=prompt)
        assert grammar is not None
        matcher = llguidance.LLMatcher(vocabulary(), llguidance.LLMatcher.grammar_from_lark(grammar))
        tokens = harmony_tokenizer().encode(written, add_special_tokens=False)
        assert (matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()) is is_taken
    if is_taken and "call" in parts[-1]:
        assert isinstance(parsed([text], is_held=True)[0][-1], ToolCall)


def test_no_grammar_without_tools():
    assert harmony().grammar([], ToolChoice("auto")) is None
    assert harmony().grammar(TOOLS, ToolChoice("none")) is None
