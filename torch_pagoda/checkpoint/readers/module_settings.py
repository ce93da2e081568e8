"""Settings of single modules in a config that override the settings of all."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .parts import BadTensor

_OF_PATTERNS = frozenset("*+?^$()[]{}|\\")
"""Characters that mark a pattern in ``extra_config``; in a plain name, dots are literal."""


def settings_of(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the settings of a module: entries of ``dynamic`` (GPTQModel) or ``extra_config`` (AutoRound) override
    the common ones.

    Args:
        settings: the config's settings of the method.
        name: name of the module.

    Raises:
        BadTensor: a pattern in them is not a regular expression.
    """
    own = _of_dynamic(settings.get("dynamic"), name) or _of_extra_config(settings.get("extra_config"), name)
    return {**settings, **own} if own else settings


def _of_dynamic(said: Any, name: str) -> Mapping[str, Any]:
    """Return the entry of the first pattern that the name begins with; ``-:`` excludes modules, ``+:`` does not."""
    for pattern, own in said.items() if isinstance(said, Mapping) else ():
        if _pattern("dynamic", pattern.removeprefix("-:").removeprefix("+:")).match(name):
            return own if isinstance(own, Mapping) and not pattern.startswith("-:") else {}
    return {}


def _of_extra_config(said: Any, name: str) -> Mapping[str, Any]:
    """Return the entry of the name or its end, else of the first matching pattern; 16 bits exclude modules."""
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
        raise BadTensor(f"its config has an invalid pattern {pattern!r} in {entry}: {error}") from error


def one_of(settings: Mapping[str, Any], *keys: str, default: str) -> str:
    """Return a config value that may have any of several names, in lower case.

    Raises:
        BadTensor: two of them have different values.
    """
    said = {key: str(settings[key]).lower() for key in keys if settings.get(key)}
    if len(set(said.values())) > 1:
        entries = " and ".join(f"{key}={value!r}" for key, value in said.items())
        raise BadTensor(f"its config has {entries}; set the one that matches the weights, and remove the other")
    return next(iter(said.values()), default)
