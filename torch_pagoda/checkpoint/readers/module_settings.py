"""What a config says of a single module, where it says something else of that than of all."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .parts import BadTensor

_OF_PATTERNS = frozenset("*+?^$()[]{}|\\")
"""What tells a pattern of ``extra_config`` from a name, whose dots stand for themselves."""


def settings_of(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The settings of a module: what ``dynamic`` (GPTQModel) or ``extra_config`` (AutoRound) says of it goes before
    what is said of all.

    Args:
        settings: what the config says of the method.
        name: of the module.

    Raises:
        BadTensor: a pattern in them is none.
    """
    own = _of_dynamic(settings.get("dynamic"), name) or _of_extra_config(settings.get("extra_config"), name)
    return {**settings, **own} if own else settings


def _of_dynamic(said: Any, name: str) -> Mapping[str, Any]:
    """Of the first pattern that the name begins with; ``-:`` leaves modules out, ``+:`` says the same as nothing."""
    for pattern, own in said.items() if isinstance(said, Mapping) else ():
        if _pattern("dynamic", pattern.removeprefix("-:").removeprefix("+:")).match(name):
            return own if isinstance(own, Mapping) and not pattern.startswith("-:") else {}
    return {}


def _of_extra_config(said: Any, name: str) -> Mapping[str, Any]:
    """Of the name or the end of it, else of the first pattern that is found in it; 16 bits leave modules out."""
    if not isinstance(said, Mapping):
        return {}
    found = said.get(name)
    if found is None:
        found = next((own for key, own in said.items() if name.endswith(f".{key}")), None)
    if found is None:
        patterns = (key for key in said if not _OF_PATTERNS.isdisjoint(key))
        found = next((said[key] for key in patterns if _pattern("extra_config", key).search(name)), None)
    return found if isinstance(found, Mapping) and found.get("bits") not in (16, 32) else {}


def _pattern(entry: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise BadTensor(f"its config has the pattern {pattern!r} in {entry}, which is none: {error}") from error


def one_of(settings: Mapping[str, Any], *keys: str, default: str) -> str:
    """What a config says by any of several names of an entry, in lower case.

    Raises:
        BadTensor: two of them say something else.
    """
    said = {key: str(settings[key]).lower() for key in keys if settings.get(key)}
    if len(set(said.values())) > 1:
        entries = " and ".join(f"{key}={value!r}" for key, value in said.items())
        raise BadTensor(
            f"its config has {entries}; set the one that the weights are stored as, and take the other out"
        )
    return next(iter(said.values()), default)
