"""Numbers as JSON values."""

from __future__ import annotations

import math

__all__ = ["number", "plain"]


def plain(number: float) -> float | str:
    """The number; "infinite" or "nan" if JSON cannot represent it."""
    if math.isnan(number):
        return "nan"
    return number if math.isfinite(number) else "infinite"


def number(plain: float | str) -> float:
    """The number for comparisons; infinity if it is not a number."""
    return float("inf") if isinstance(plain, str) else float(plain)
