"""Checks of single values that a user sets: numbers in a range, and token ids."""

from __future__ import annotations

import math
from numbers import Integral, Real

from ..shown import shown
from .request_limits import MAX_TOKEN_IDS, MAX_WHOLE_NUMBER


def whole_number(name: str, value: object, lowest: int, remedy: str, *, highest: int = MAX_WHOLE_NUMBER) -> int:
    """Return ``value`` as an int.

    Raises:
        ValueError: ``value`` is not an integer (a bool is not one), or is below ``lowest`` (one line ending in
            ``remedy``) or above ``highest``.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < lowest:
        raise ValueError(f"{name}={shown(value)} is not an integer >= {lowest}; {remedy}")
    if int(value) > highest:
        raise ValueError(f"{name}={shown(value)} is above the limit of {highest}; lower it")
    return int(value)


def check_at_least(lowest: int, remedy: str, **values: object) -> None:
    """Check several values, given by name, as ``whole_number`` does.

    Raises:
        ValueError: a value is not an integer, or is below ``lowest``.
    """
    for name, value in values.items():
        whole_number(name, value, lowest, remedy)


def check_bool(name: str, value: object) -> None:
    """Check that ``value`` is a bool.

    Raises:
        ValueError: ``value`` is not a bool (0 and 1 are not); one line.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name}={shown(value)} is not a bool; use True or False")


def is_finite(value: Real) -> bool:
    """Return True if a finite float can represent the value."""
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the range of floats
        return False


def real_number(
    name: str, value: object, lowest: float, highest: float, remedy: str, *, open_low: bool = False
) -> float:
    """Return ``value`` as a finite float.

    Raises:
        ValueError: ``value`` is not a number within the bounds (``open_low`` excludes ``lowest`` itself); one line
            ending in ``remedy``.
    """
    if not isinstance(value, bool) and isinstance(value, Real) and is_finite(value):
        number = float(value)
        if (number > lowest if open_low else number >= lowest) and number <= highest:
            return number
    low, high = "(" if open_low else "[", ")" if math.isinf(highest) else "]"
    raise ValueError(f"{name}={shown(value)} is not a number in {low}{lowest:g}, {highest:g}{high}; {remedy}")


def token_ids(name: str, value: object) -> tuple[int, ...]:
    """Return ``value`` as a tuple of token ids.

    Raises:
        ValueError: ``value`` is not a sequence of integers >= 0, or has more than ``MAX_TOKEN_IDS``; one line.
    """
    if isinstance(value, (str, bytes, dict)) or not hasattr(value, "__iter__"):
        raise ValueError(f"{name}={shown(value)} is not a list of token ids; use a list such as [2]")
    ids: list[int] = []
    for entry in value:
        if isinstance(entry, bool) or not isinstance(entry, Integral) or entry < 0:
            raise ValueError(f"{name}={shown(value)} holds {shown(entry)}; token ids are integers >= 0")
        if len(ids) == MAX_TOKEN_IDS:
            raise ValueError(f"{name} has more than {MAX_TOKEN_IDS} entries; pass fewer, each token once")
        ids.append(int(entry))
    return tuple(ids)


def texts(name: str, value: object, *, most: int, most_characters: int) -> tuple[str, ...]:
    """Return ``value``, a string or a sequence of strings, as a tuple of non-empty strings.

    Raises:
        ValueError: ``value`` is neither, an entry is empty, or there are more than ``most`` strings or more than
            ``most_characters`` characters in all; one line.
    """
    entries = (value,) if isinstance(value, str) else value
    if isinstance(entries, bytes) or not hasattr(entries, "__iter__"):
        raise ValueError(f"{name}={shown(value)} is not text; use a string or a list of strings")
    result: list[str] = []
    characters = 0
    for entry in entries:
        if not isinstance(entry, str) or not entry:
            raise ValueError(f"{name}={shown(value)} holds {shown(entry)}; use non-empty strings")
        characters += len(entry)
        if len(result) == most or characters > most_characters:
            what = f"{most} strings" if len(result) == most else f"{most_characters} characters in all"
            raise ValueError(f"{name}={shown(value)} has more than {what}; pass fewer or shorter ones")
        result.append(entry)
    return tuple(result)
