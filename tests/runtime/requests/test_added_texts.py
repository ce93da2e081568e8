"""Texts that tokens add: together they are the text, whatever the tokenizer and however the tokens come."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from word_tokenizers import KINDS, word_tokenizer

from torch_pagoda.runtime.requests.detokenizer import Detokenizer
from torch_pagoda.runtime.requests.stop_strings import StopStrings


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(max_size=20), prompt=st.text(max_size=3), seed=st.integers(0, 99), skips=st.booleans())
@settings(max_examples=40)
def test_they_join_to_the_text(kind: str, text: str, prompt: str, seed: int, skips: bool) -> None:
    tokenizer, rng = word_tokenizer(kind), random.Random(seed)
    tokens = tokenizer.encode(text) + [rng.randrange(len(tokenizer)) for _ in range(rng.randrange(4))]
    options = {"skip_special_tokens": skips}
    whole = Detokenizer(tokenizer, tokenizer.encode(prompt), **options)
    whole.append(tokens)
    whole.finish()
    marked = Detokenizer(tokenizer, tokenizer.encode(prompt), **options, marks_ends=True)
    found: list[str] = []
    while len(found) < len(tokens):
        count = rng.randint(1, 3)
        marked.append(tokens[len(found) : len(found) + count])
        at_end = len(found) + count >= len(tokens)
        if at_end:
            marked.finish()
        found += marked.added_texts(len(found), min(len(found) + count, len(tokens)), at_end=at_end)
    assert marked.text == whole.text == "".join(found)


def test_a_character_belongs_to_the_token_that_completes_it() -> None:
    tokenizer = word_tokenizer("byte-level")
    detokenizer = Detokenizer(tokenizer, [], marks_ends=True)
    detokenizer.append(tokenizer.encode("a😀b", add_special_tokens=False))
    assert detokenizer.added_texts(0, 6, at_end=False) == ["a", "", "", "", "😀", "b"]
    detokenizer.append(tokenizer.encode("😀", add_special_tokens=False)[:2])
    assert detokenizer.added_texts(6, 8, at_end=False) == ["", ""]
    detokenizer.finish()
    assert detokenizer.added_texts(8, 9, at_end=True) == ["\ufffd"], "the token that ended it has what is left"


def test_text_behind_a_stop_string_belongs_to_no_token() -> None:
    tokenizer = word_tokenizer("byte-level")
    detokenizer = Detokenizer(tokenizer, [], StopStrings(["ef"]), marks_ends=True)
    for token in tokenizer.encode("abcdefgh", add_special_tokens=False):
        detokenizer.append((token,))
    assert detokenizer.text == "abcd" == "".join(detokenizer.added_texts(0, 9, at_end=True))
