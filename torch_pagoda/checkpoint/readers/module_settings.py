"""Settings of single modules in a config that override the settings of all."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .parts import BadTensor

_OF_PATTERNS = frozenset("*+?^$()[]{}|\\")
"""Characters that mark a pattern in ``extra_config``; in a plain name, dots are literal."""
_UNQUANTIZED = (16, 32)
"""Bits of modules that ``extra_config`` excludes."""


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


def is_left_out(settings: Mapping[str, Any], name: str) -> bool:
    """Return True if the config excludes a module from quantization, in ``dynamic`` (GPTQModel), ``extra_config``
    (AutoRound) or ``modules_to_not_convert`` (transformers).

    Args:
        settings: the config's settings of the method.
        name: name of the module.

    Raises:
        BadTensor: a pattern in them is not a regular expression.
    """
    _, excluded = _in_dynamic(settings.get("dynamic"), name)
    if excluded or _in_extra_config(settings.get("extra_config"), name).get("bits") in _UNQUANTIZED:
        return True
    listed = settings.get("modules_to_not_convert")
    return any(
        name.endswith(entry) or pattern_of("modules_to_not_convert", entry).match(name)
        for entry in map(str, listed if isinstance(listed, list) else ())
    )


def _of_dynamic(said: Any, name: str) -> Mapping[str, Any]:
    own, excluded = _in_dynamic(said, name)
    return {} if excluded else own


def _in_dynamic(said: Any, name: str) -> tuple[Mapping[str, Any], bool]:
    """Return the entry of the first pattern that the name begins with, and whether it excludes modules (``-:``, not
    ``+:``)."""
    for pattern, own in said.items() if isinstance(said, Mapping) else ():
        if pattern_of("dynamic", pattern.removeprefix("-:").removeprefix("+:")).match(name):
            return own if isinstance(own, Mapping) else {}, pattern.startswith("-:")
    return {}, False


def _of_extra_config(said: Any, name: str) -> Mapping[str, Any]:
    own = _in_extra_config(said, name)
    return {} if own.get("bits") in _UNQUANTIZED else own


def _in_extra_config(said: Any, name: str) -> Mapping[str, Any]:
    """Return the entry of the name or its end, else of the first matching pattern."""
    if not isinstance(said, Mapping):
        return {}
    found = said.get(name)
    if found is None:
        found = next((own for key, own in said.items() if name.endswith(f".{key}")), None)
    if found is None:
        patterns = (key for key in said if not _OF_PATTERNS.isdisjoint(key))
        found = next((said[key] for key in patterns if pattern_of("extra_config", key).search(name)), None)
    return found if isinstance(found, Mapping) else {}


def pattern_of(entry: str, pattern: str) -> re.Pattern[str]:
    """Compile a pattern of a config's entry.

    Raises:
        BadTensor: it is not a regular expression.
    """
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
