"""Special tokens of a tokenizer: those that ``skip_special_tokens`` leaves out of a text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

_known: WeakKeyDictionary[Any, Mapping[int, str]] = WeakKeyDictionary()


def special_tokens(tokenizer: Any) -> Mapping[int, str]:
    """Return the text of each special token by its id; a HuggingFace tokenizer is read only once."""
    found = _known.get(tokenizer)
    if found is None:
        names = zip(
            getattr(tokenizer, "all_special_ids", ()), getattr(tokenizer, "all_special_tokens", ()), strict=True
        )
        added = getattr(tokenizer, "added_tokens_decoder", {}).items()
        found = {int(token_id): str(text) for token_id, text in names if token_id is not None}
        found |= {int(token_id): token.content for token_id, token in added if token.special}
        _known[tokenizer] = found
    return found
