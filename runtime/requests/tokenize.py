"""Tokenizes a text at a cost bounded by the number of tokens that can run."""

from __future__ import annotations

from typing import Any

from .detokenizer import Tokenizer

_CHARACTERS_PER_TOKEN = 10
"""More characters than tokens of real text have on average, so that one piece shows that a text is too long."""


def tokenize(text: str, tokenizer: Tokenizer, limit: int, *, ends: bool = False, **options: Any) -> list[int]:
    """Return the token ids of ``text``, or of only its beginning if that has more than ``cut_above(limit)`` tokens.

    A beginning has the same tokens alone as within the whole text, except for the word that the cut splits, so twice
    the limit is a safe margin.

    Args:
        text: text to tokenize.
        tokenizer: a HuggingFace tokenizer.
        limit: most tokens that can be used.
        ends: tokenize the end of a text that is too long instead of its beginning.
        options: arguments of the tokenizer.
    """
    size = _CHARACTERS_PER_TOKEN * limit
    while size < len(text):
        part = text[-size:] if ends else text[:size]
        token_ids = [int(token) for token in tokenizer(part, **options).input_ids]
        if len(token_ids) > cut_above(limit):
            return token_ids
        size *= 4
    return [int(token) for token in tokenizer(text, **options).input_ids]


def cut_above(limit: int) -> int:
    """Return the number of tokens above which ``tokenize`` may have left some out."""
    return 2 * limit
