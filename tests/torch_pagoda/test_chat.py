"""``LLM.chat``: the tokenizer's template makes the prompts, and special tokens come once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

import torch_pagoda as pagoda

TEMPLATE = (
    "</s>{% if tools %}{{ tools[0].name }};{% endif %}{% if mood %}{{ mood }};{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments.values() | join }}{% endfor %}"
    "{% if not loop.last or not continue_final_message %} ;{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
GREEDY = pagoda.SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
ASKS = [{"role": "user", "content": "the cat"}]


@pytest.fixture
def llm(checkpoint: Path, fast: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> pagoda.LLM:
    own = copy.deepcopy(tokenizer)
    own.chat_template = TEMPLATE
    return pagoda.LLM(checkpoint, own, **fast)


def test_one_conversation_or_several(llm: pagoda.LLM) -> None:
    other = [*ASKS, {"role": "assistant", "content": "sat"}, {"role": "user", "content": "on the mat"}]
    first, second = llm.chat([ASKS, other], GREEDY)
    assert first.prompt == "</s>user: the cat ;assistant:"
    assert second.prompt == "</s>user: the cat ;assistant: sat ;user: on the mat ;assistant:"
    assert first.prompt_token_ids == llm.tokenizer(first.prompt, add_special_tokens=False).input_ids
    assert first.prompt_token_ids.count(0) == 1  # </s>
    (alone,) = llm.chat(ASKS, GREEDY)
    assert alone.outputs == first.outputs
    assert alone.outputs[0].token_ids == llm.generate([first.prompt_token_ids], GREEDY)[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"add_generation_prompt": False}, "</s>user: the cat ;"),
        ({"add_generation_prompt": False, "continue_final_message": True}, "</s>user: the cat"),
        ({"tools": [{"name": "look"}]}, "</s>look;user: the cat ;assistant:"),
        ({"chat_template_kwargs": {"mood": "glad"}}, "</s>glad;user: the cat ;assistant:"),
        ({"chat_template": "{{ messages[0].content }}"}, "the cat"),
    ],
)
def test_options_reach_the_template(llm: pagoda.LLM, options: dict[str, Any], expected: str) -> None:
    assert llm.chat(ASKS, GREEDY, **options)[0].prompt == expected


def test_openais_forms_are_made_plain(llm: pagoda.LLM) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "the"}, {"type": "text", "text": "cat"}]}]
    assert llm.chat(parts, GREEDY)[0].prompt == "</s>user: the\ncat ;assistant:"
    call = {"function": {"name": "look", "arguments": '{"x": "mat"}'}}
    calls = [*ASKS, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert "assistant: look mat ;" in str(llm.chat(calls, GREEDY)[0].prompt)


@pytest.mark.parametrize(
    ("messages", "options", "words"),
    [
        (ASKS, {"continue_final_message": True}, ["add_generation_prompt=False"]),
        ("hello", {}, ["messages='hello'"]),
        ([], {}, ["messages=[]"]),
        ([ASKS, []], {}, ["not a conversation"]),
        ([{"content": "x"}], {}, ["messages[0][0]"]),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, ["image_url", "text"]),
        ([{"role": "user", "content": 3}], {}, ["content", "3"]),
        (ASKS, {"chat_template": "{{ raise_exception('only tools') }}"}, ["messages[0]", "only tools"]),
    ],
)
def test_what_is_refused(
    llm: pagoda.LLM,
    messages: Any,
    options: dict[str, Any],
    words: list[str],
    one_line: Callable[[BaseException], str],
) -> None:
    with pytest.raises(ValueError) as error:
        llm.chat(messages, GREEDY, **options)
    assert all(word in one_line(error.value) for word in words), error.value


def test_without_a_template_the_error_names_the_remedy(checkpoint: Path, fast: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no chat template; pass chat_template="):
        pagoda.LLM(checkpoint, **fast).chat(ASKS, GREEDY)
