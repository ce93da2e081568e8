"""What serving a model takes of its configs, as plain data: kept with its program, so that a start makes neither."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from .compiler import Facts

_OF_GENERATION = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens"),
    *("do_sample", "eos_token_id"),
)
_OF_CONFIG = ("eos_token_id",)


def facts_of(module: Any) -> Facts | None:
    """The facts of a model that was loaded from a checkpoint; None where a config holds something unusual."""
    facts: Facts = {}
    for owner, names in (("generation_config", _OF_GENERATION), ("config", _OF_CONFIG)):
        config = getattr(module, owner, None)
        for name in names:
            value = getattr(config, name, None)
            if isinstance(value, list | tuple):
                value = list(value)
                if not all(type(entry) is int for entry in value):
                    return None
            elif value is not None and type(value) not in (bool, int, float):
                return None
            facts[f"{owner}.{name}"] = value
    return facts


def model_of(facts: Facts) -> Any:
    """An object whose ``config`` and ``generation_config`` say what those of the model said.

    Raises:
        ValueError: the facts are of another version.
    """
    expected = {f"generation_config.{name}" for name in _OF_GENERATION} | {f"config.{name}" for name in _OF_CONFIG}
    if facts.keys() != expected:
        raise ValueError("the facts kept of the model are of another version")
    owners: dict[str, dict[str, Any]] = {"generation_config": {}, "config": {}}
    for place, value in facts.items():
        owner, _, name = place.partition(".")
        owners[owner][name] = value
    return SimpleNamespace(**{owner: SimpleNamespace(**found) for owner, found in owners.items()})
