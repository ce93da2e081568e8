"""Texts that stand in a grammar as they are, and end-of-sequence tokens that the vocabulary lacks."""

from __future__ import annotations

from typing import Any

import pytest

from torch_pagoda.runtime.structured.asked import read_structured_outputs
from torch_pagoda.runtime.structured.grammar import compile_grammar
from torch_pagoda.runtime.structured.vocabulary import vocabulary_of

from toy_program import character_tokenizer


@pytest.mark.parametrize(
    "text", ["\x7f", "\x01", "\x1b", "\b\f\r\t\n", "\u0085", "\u2028", "\ufeff", "😀", 'a"b', "a\\n", "//"]
)
def test_a_choice_is_exactly_its_text(text: str) -> None:
    tokenizer: Any = character_tokenizer()
    grammar = compile_grammar(read_structured_outputs({"choice": [text]}), vocabulary_of(tokenizer))
    state, ids = grammar.start(), tokenizer(text, add_special_tokens=False).input_ids
    assert [state.consume(token) for token in ids] == [False] * (len(ids) - 1) + [True]


def test_an_end_that_the_vocabulary_lacks_is_left_out() -> None:
    vocabulary = vocabulary_of(character_tokenizer(), 258, [256, 100_000])
    assert vocabulary.eos_token_ids == {256}
