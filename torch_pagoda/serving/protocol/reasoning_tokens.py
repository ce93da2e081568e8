"""How many tokens a reasoning took, by its text: the engine counts all tokens of a completion alike."""

from __future__ import annotations

from typing import Any

MOST_CHARACTERS = 32 * 1024
"""Of a text that is tokenized; a longer one counts in proportion, so that no stream waits for it."""


def count_reasoning_tokens(tokenizer: Any, text: str) -> int:
    """Tokens of the text when tokenized by itself: the marks around it are left out."""
    if not text or tokenizer is None:
        return 0
    head = text[:MOST_CHARACTERS]
    count = len(tokenizer(head, add_special_tokens=False)["input_ids"])
    return round(count * len(text) / len(head))
