"""Checks of single values that a user sets: numbers in a range, and token ids."""

from __future__ import annotations

import math
from numbers import Integral, Real

from ..shown import shown
from .request_limits import MAX_TOKEN_IDS, MAX_WHOLE_NUMBER


def whole_number(name: str, value: object, lowest: int, remedy: str, *, highest: int = MAX_WHOLE_NUMBER) -> int:
    """``value`` as an int.

    Raises:
        ValueError: it is no whole number (a bool is none), below ``lowest`` (one line ending in ``remedy``) or above
            ``highest``.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < lowest:
        raise ValueError(f"{name}={shown(value)} is not a whole number >= {lowest}; {remedy}")
    if int(value) > highest:
        raise ValueError(f"{name}={shown(value)} is above the limit of {highest}; lower it")
    return int(value)


def check_at_least(lowest: int, remedy: str, **values: object) -> None:
    """Check several values, by their names, as ``whole_number`` does.

    Raises:
        ValueError: one is no whole number, or below ``lowest``.
    """
    for name, value in values.items():
        whole_number(name, value, lowest, remedy)


def check_bool(name: str, value: object) -> None:
    """Refuse what is neither True nor False.

    Raises:
        ValueError: it is something else, 0 and 1 included; one line.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name}={shown(value)} is not a bool; use True or False")


def is_finite(value: Real) -> bool:
    """True if a float can stand for it."""
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


def real_number(
    name: str, value: object, lowest: float, highest: float, remedy: str, *, open_low: bool = False
) -> float:
    """``value`` as a finite float.

    Raises:
        ValueError: it is no number within the bounds (``lowest`` itself excluded with ``open_low``); one line
            ending in ``remedy``.
    """
    if not isinstance(value, bool) and isinstance(value, Real) and is_finite(value):
        number = float(value)
        if (number > lowest if open_low else number >= lowest) and number <= highest:
            return number
    low, high = "(" if open_low else "[", ")" if math.isinf(highest) else "]"
    raise ValueError(f"{name}={shown(value)} is not a number in {low}{lowest:g}, {highest:g}{high}; {remedy}")


def token_ids(name: str, value: object) -> tuple[int, ...]:
    """``value`` as token ids.

    Raises:
        ValueError: it is no sequence of whole numbers >= 0, or has more than ``MAX_TOKEN_IDS``; one line.
    """
    if isinstance(value, (str, bytes, dict)) or not hasattr(value, "__iter__"):
        raise ValueError(f"{name}={shown(value)} is not a list of token ids; use a list such as [2]")
    ids: list[int] = []
    for entry in value:
        if isinstance(entry, bool) or not isinstance(entry, Integral) or entry < 0:
            raise ValueError(f"{name}={shown(value)} holds {shown(entry)}; use token ids, whole numbers >= 0")
        if len(ids) == MAX_TOKEN_IDS:
            raise ValueError(f"{name} has more than {MAX_TOKEN_IDS} entries; give fewer, each token once")
        ids.append(int(entry))
    return tuple(ids)


def texts(name: str, value: object, *, most: int, most_characters: int) -> tuple[str, ...]:
    """``value``, a string or a sequence of them, as a tuple of non-empty strings.

    Raises:
        ValueError: it is something else, or has more than ``most`` strings or ``most_characters`` in all; one line.
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
            raise ValueError(f"{name}={shown(value)} has more than {what}; give fewer or shorter ones")
        result.append(entry)
    return tuple(result)
