"""``skip_special_tokens`` and ``include_stop_str_in_output``: what of the output tokens is text, as in vLLM."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.requests.sampling_params import SamplingParams

from toy_program import ToyProgram, character_tokenizer

TOKENIZER: Any = character_tokenizer()
END, BEGIN = 256, 257
SCRIPT = [*TOKENIZER("xab").input_ids, BEGIN, *TOKENIZER("cdefg").input_ids, END, *TOKENIZER("hi").input_ids]
"""What is generated after the prompt "x": ``ab<s>cdefg</s>hi``."""


@pytest.fixture(scope="module")
def engine() -> Engine:
    program = ToyProgram(vocab_size=258)
    following = dict(pairwise(SCRIPT))

    def recite(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        chosen = torch.tensor([following[int(token)] for token in tokens])
        return torch.nn.functional.one_hot(chosen, logits.shape[-1]).float()

    program.change_logits = recite
    return Engine(program, TOKENIZER, block_size=4, num_blocks=16, eos_token_ids=[END])


def generated(engine: Engine, **options: Any) -> tuple[str, int]:
    """Text and number of tokens; the pieces of a stream make up the same text."""
    params = SamplingParams(temperature=0, **{"max_tokens": 11, **options})
    output = engine.generate("x", params)[0].outputs[0]
    pieces = list(engine.stream("x", params))
    assert "".join(piece.text for piece in pieces) == output.text
    return output.text, len(output.token_ids)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ("abcdefg", 9)),
        ({"skip_special_tokens": False}, ("ab<s>cdefg", 9)),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, ("ab<s>cdefg</s>", 9)),
        ({"include_stop_str_in_output": True}, ("abcdefg", 9)),  # </s> is special
        ({"kept_special_token_ids": []}, ("abcdefg", 9)),
        ({"kept_special_token_ids": [BEGIN], "ignore_eos": True}, ("ab<s>cdefghi", 11)),
        ({"kept_special_token_ids": [END], "include_stop_str_in_output": True}, ("abcdefg</s>", 9)),
        ({"kept_special_token_ids": [BEGIN], "stop": "<s>c"}, ("ab", 4)),
        (
            {"kept_special_token_ids": [BEGIN], "skip_special_tokens": False, "ignore_eos": True},
            ("ab<s>cdefg</s>hi", 11),
        ),
        ({"ignore_eos": True}, ("abcdefghi", 11)),
        ({"ignore_eos": True, "skip_special_tokens": False}, ("ab<s>cdefg</s>hi", 11)),
        ({"stop": "de"}, ("abc", 6)),
        ({"stop": "de", "include_stop_str_in_output": True}, ("abcde", 6)),
        ({"stop": ["<s>c"], "skip_special_tokens": False}, ("ab", 4)),
        ({"stop": ["<s>c"], "skip_special_tokens": False, "include_stop_str_in_output": True}, ("ab<s>c", 4)),
        ({"stop": ["b<"], "skip_special_tokens": False, "include_stop_str_in_output": True}, ("ab<", 3)),
        ({"stop_token_ids": [SCRIPT[5]]}, ("abc", 5)),
        ({"stop_token_ids": [SCRIPT[5]], "include_stop_str_in_output": True}, ("abcd", 5)),
    ],
)
def test_what_is_text(engine: Engine, options: dict[str, Any], expected: tuple[str, int]) -> None:
    assert generated(engine, **options) == expected


def test_a_stop_string_that_is_kept_holds_no_text_back(engine: Engine) -> None:
    def pieces(**options: Any) -> list[str]:
        params = SamplingParams(temperature=0, max_tokens=5, stop="abcQ", **options)
        return [piece.text for piece in engine.stream("x", params)]

    assert pieces()[:2] == ["", ""]  # it may be the beginning of the stop string, which is no text then
    assert pieces(include_stop_str_in_output=True)[:2] == ["a", "b"]  # it is text, whatever follows


def test_kept_special_tokens_are_token_ids() -> None:
    with pytest.raises(ValueError, match="kept_special_token_ids='<s>' is not a list of token ids"):
        SamplingParams(kept_special_token_ids="<s>")  # type: ignore[arg-type]


@pytest.mark.parametrize("stop", ["cde", "fgQ", "gX"])
def test_no_output_holds_what_may_begin_a_stop_string(engine: Engine, stop: str) -> None:
    engine.submit("x", SamplingParams(temperature=0, max_tokens=11, stop=stop))
    texts = []
    while engine.has_unfinished():
        texts += [output.outputs[0].text for output in engine.step()]
    held_back = {"cde": {3, 4}, "fgQ": {6, 7}, "gX": {7}}[stop]
    # "ab", a special token, then "cdefg".
    whole = [("abcdefg")[:count] for count in (1, 2, 2, 3, 4, 5, 6, 7)]
    expected = [text[: text.index(stop[0])] if len(text) in held_back else text for text in whole]
    end = "ab" if stop == "cde" else "abcdefg"
    assert texts == [*(expected[:5] if stop == "cde" else expected), end]


@pytest.mark.parametrize("name", ["skip_special_tokens", "include_stop_str_in_output"])
def test_only_bools_are_taken(name: str) -> None:
    for value in (None, 1, "yes"):
        with pytest.raises(ValueError, match=f"{name}={value!r} is not a bool"):
            SamplingParams(**{name: value})
