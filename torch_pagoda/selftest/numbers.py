"""Numbers as JSON has them."""

from __future__ import annotations

import math

__all__ = ["plain"]


def plain(number: float) -> float | str:
    """The number; "infinite" or "nan" where JSON has none."""
    if math.isnan(number):
        return "nan"
    return number if math.isfinite(number) else "infinite"
