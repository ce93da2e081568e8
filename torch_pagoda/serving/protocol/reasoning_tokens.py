"""Estimates the tokens of reasoning from its text: the engine counts all tokens of a completion alike."""

from __future__ import annotations

from typing import Any

MOST_CHARACTERS = 32 * 1024
"""Maximum characters to tokenize; a longer text counts in proportion, so that no stream waits."""


def count_reasoning_tokens(tokenizer: Any, text: str) -> int:
    """Tokens of the text by itself, without the marks around it."""
    if not text or tokenizer is None:
        return 0
    head = text[:MOST_CHARACTERS]
    count = len(tokenizer(head, add_special_tokens=False)["input_ids"])
    return round(count * len(text) / len(head))
