"""Numbers as JSON has them."""

from __future__ import annotations

import math

__all__ = ["number", "plain"]


def plain(number: float) -> float | str:
    """The number; "infinite" or "nan" where JSON has none."""
    if math.isnan(number):
        return "nan"
    return number if math.isfinite(number) else "infinite"


def number(plain: float | str) -> float:
    """The number for comparisons; infinity for what is none."""
    return float("inf") if isinstance(plain, str) else float(plain)
