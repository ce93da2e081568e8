"""Tokens of a text, at a cost that is bounded by how many of them can run."""

from __future__ import annotations

from typing import Any

from .detokenizer import Tokenizer

_CHARACTERS_PER_TOKEN = 10
"""More than tokenizers make of text on average, so that one piece shows what is too long."""


def tokenise(text: str, tokenizer: Tokenizer, limit: int, *, ends: bool = False, **options: Any) -> list[int]:
    """Token ids of ``text``; of a text that has more than ``cut_above(limit)`` tokens, those of a beginning that has.

    A beginning has as many tokens as it has within the whole text, but for the word that it is cut in: twice the
    limit leaves no doubt.

    Args:
        text: to tokenise.
        tokenizer: to ask.
        limit: most tokens that can be used.
        ends: of a text that is too long, an end is tokenised instead of a beginning.
        options: for the tokenizer.
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
    """Number of tokens above which ``tokenise`` may have left some out."""
    return 2 * limit
