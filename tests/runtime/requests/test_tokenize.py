"""What a prompt that is too long costs: a beginning of it is tokenized, not all of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from torch_pagoda.runtime.requests.tokenize import cut_above, tokenize
from torch_pagoda.runtime.requests.validation import PromptLimits, check_prompt

LIMIT = 100
LIMITS = PromptLimits(vocab_size=300, max_model_len=LIMIT, reason="use a model with more positions")


class Words:
    """Tokenizes text into one token for so many characters, and counts what it is given."""

    def __init__(self, characters: int) -> None:
        self.characters = characters
        self.seen = 0

    def __call__(self, text: str, **options: object) -> SimpleNamespace:
        self.seen += len(text)
        return SimpleNamespace(input_ids=[1] * -(-len(text) // self.characters))

    def decode(self, token_ids: object, **options: object) -> str:
        return ""


def test_the_end_of_what_is_far_too_long_is_not_read() -> None:
    tokenizer = Words(4)
    assert len(tokenize("x" * 4_000_000, tokenizer, LIMIT)) > cut_above(LIMIT)
    assert tokenizer.seen < 100 * LIMIT


@pytest.mark.parametrize("characters, length", [(4, 300), (4, 900), (50, 4_000), (1000, 90_000)])
def test_what_fits_or_nearly_does_is_tokenized_whole(characters: int, length: int) -> None:
    tokenizer = Words(characters)
    assert len(tokenize("x" * length, tokenizer, LIMIT)) == -(-length // characters)


@pytest.mark.parametrize("length", [90, 5_000, 100_000])
def test_an_end_has_the_tokens_that_it_has_within_the_whole(length: int) -> None:
    class Numbers(Words):
        def __call__(self, text: str, **options: object) -> SimpleNamespace:
            self.seen += len(text)
            return SimpleNamespace(input_ids=[int(word) for word in text.split()])

    tokenizer = Numbers(4)
    text = " ".join(map(str, range(length)))
    token_ids = tokenize(text, tokenizer, LIMIT, ends=True)
    assert token_ids[-LIMIT:] == list(range(length))[-LIMIT:]
    assert tokenizer.seen < 100 * LIMIT


def test_the_refusal_says_that_there_may_be_more() -> None:
    with pytest.raises(ValueError, match=r"prompt has \d+ tokens or more, which leaves no room"):
        check_prompt("x" * 1_000_000, Words(4), LIMITS)
    with pytest.raises(ValueError, match=r"prompt has 150 tokens, which leaves no room"):
        check_prompt("x" * 600, Words(4), LIMITS)
