"""``explain`` and its report: what the compiler does to a model."""

from __future__ import annotations

from .expected import Expected, expected_matches
from .explain import explain
from .explanation import Explanation
from .recognition import Recognition, recognition

__all__ = [
    "Expected",
    "Explanation",
    "Recognition",
    "expected_matches",
    "explain",
    "recognition",
]
