"""What serving a model takes of its configs, kept with its program, so that a start makes neither."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

_NAMES = {
    "generation_config": (
        *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens"),
        *("do_sample", "eos_token_id"),
    ),
    "config": ("eos_token_id",),
}

Facts = dict[str, dict[str, Any]]
"""Config → name → value."""


def facts_of(model: Any) -> Facts | None:
    """The facts of a model; None where a config holds something unusual."""
    facts = {
        owner: {name: getattr(getattr(model, owner, None), name, None) for name in names}
        for owner, names in _NAMES.items()
    }
    return facts if all(_is_plain(value) for found in facts.values() for value in found.values()) else None


def model_of(facts: Facts) -> Any:
    """An object whose ``config`` and ``generation_config`` say what those of the model said."""
    return SimpleNamespace(**{owner: SimpleNamespace(**found) for owner, found in facts.items()})


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(type(entry) is int for entry in value)
    return type(value) in (type(None), bool, int, float)
