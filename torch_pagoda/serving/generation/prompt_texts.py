"""Splits the text of a prompt among its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise, takewhile
from typing import Any

from ...runtime.requests.detokenizer import Detokenizer
from ...runtime.requests.special_tokens import special_tokens

_MAX_ADDED = 8
"""Special tokens that a tokenizer prepends to a text."""


def prompt_texts(tokenizer: Any, token_ids: Sequence[int], text: str | None) -> list[str]:
    """The text of each token of a prompt.

    Args:
        tokenizer: a HuggingFace tokenizer.
        token_ids: the prompt's.
        text: source of the token ids; None: the client sent the ids.

    Returns:
        Texts that join to the prompt's; "" for special tokens that the tokenizer added. Texts of token ids are their
        decoded text, special tokens included.
    """
    detokenizer = Detokenizer(tokenizer, [], skip_special_tokens=False, marks_ends=True)
    detokenizer.append(token_ids)
    detokenizer.finish()
    texts = detokenizer.added_texts(0, len(token_ids), at_end=True)
    if text is None:
        return texts
    return _cut(texts, text, tokenizer, token_ids) or _by_offsets(tokenizer, token_ids, text) or texts


def _cut(texts: list[str], text: str, tokenizer: Any, token_ids: Sequence[int]) -> list[str] | None:
    """The texts without those of the special tokens around the prompt; None if they do not join to it."""
    joined, special = "".join(texts), special_tokens(tokenizer)
    starts = [0, *accumulate(map(len, texts))]
    added = list(takewhile(special.__contains__, token_ids[:_MAX_ADDED]))
    for count in range(len(added), -1, -1):
        # Behind a special token the space of Metaspace is not stripped.
        for start in (starts[count], starts[count] + joined.startswith(" ", starts[count])):
            end = start + len(text)
            behind = (token for token, begin in zip(token_ids, starts, strict=False) if begin >= end)
            if joined.startswith(text, start) and (end == len(joined) or all(token in special for token in behind)):
                bounds = [min(max(place, start), end) for place in starts]
                return [joined[begin:stop] for begin, stop in pairwise(bounds)]
    return None


def _by_offsets(tokenizer: Any, token_ids: Sequence[int], text: str) -> list[str] | None:
    """The texts by the tokenizer's offsets, for one that normalizes; None if it has none for these tokens."""
    if not getattr(tokenizer, "is_fast", False):
        return None
    for adds_special in (True, False):
        encoded = tokenizer(text, add_special_tokens=adds_special, return_offsets_mapping=True)
        if list(encoded.input_ids) == list(token_ids):
            ends = list(accumulate((end for _, end in encoded.offset_mapping), max))
            ends[-1] = len(text)
            return [text[begin:end] for begin, end in pairwise([0, *ends])]
    return None
