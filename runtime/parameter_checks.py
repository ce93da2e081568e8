"""Checks of single values that a user sets: numbers in a range, and token ids."""

from __future__ import annotations

import math
from numbers import Integral, Real


def whole_number(name: str, value: object, lowest: int, remedy: str) -> int:
    """``value`` as an int.

    Raises:
        ValueError: it is no whole number (a bool is none), or below ``lowest``; one line ending in ``remedy``.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < lowest:
        raise ValueError(f"{name}={value!r} is not a whole number >= {lowest}; {remedy}")
    return int(value)


def real_number(
    name: str, value: object, lowest: float, highest: float, remedy: str, *, open_low: bool = False
) -> float:
    """``value`` as a finite float.

    Raises:
        ValueError: it is no number within the bounds (``lowest`` itself excluded with ``open_low``); one line
            ending in ``remedy``.
    """
    if not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value):
        number = float(value)
        if (number > lowest if open_low else number >= lowest) and number <= highest:
            return number
    low, high = "(" if open_low else "[", ")" if math.isinf(highest) else "]"
    raise ValueError(f"{name}={value!r} is not a number in {low}{lowest:g}, {highest:g}{high}; {remedy}")


def token_ids(name: str, value: object) -> tuple[int, ...]:
    """``value`` as token ids.

    Raises:
        ValueError: it is no sequence of whole numbers >= 0; one line.
    """
    if isinstance(value, (str, bytes, dict)) or not hasattr(value, "__iter__"):
        raise ValueError(f"{name}={value!r} is not a list of token ids; use a list such as [2]")
    ids = []
    for entry in value:
        if isinstance(entry, bool) or not isinstance(entry, Integral) or entry < 0:
            raise ValueError(f"{name}={value!r} holds {entry!r}; use token ids, whole numbers >= 0")
        ids.append(int(entry))
    return tuple(ids)


def texts(name: str, value: object) -> tuple[str, ...]:
    """``value``, a string or a sequence of them, as a tuple of non-empty strings.

    Raises:
        ValueError: it is something else; one line.
    """
    entries = (value,) if isinstance(value, str) else value
    if isinstance(entries, bytes) or not hasattr(entries, "__iter__"):
        raise ValueError(f"{name}={value!r} is not text; use a string or a list of strings")
    result = []
    for entry in entries:
        if not isinstance(entry, str) or not entry:
            raise ValueError(f"{name}={value!r} holds {entry!r}; use non-empty strings")
        result.append(entry)
    return tuple(result)
