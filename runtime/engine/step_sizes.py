"""Counts steps by their number of tokens."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Bounds of the sizes that are told apart: vLLM's for tokens of an iteration."""

FIGURES = {bound: f"steps_up_to_{bound}" for bound in STEP_TOKENS}
"""Bound → name in ``Engine.stats``."""


class StepSizes:
    """Counts steps by their tokens."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts = [0] * (len(STEP_TOKENS) + 1)

    def count(self, tokens: int) -> None:
        """Count a step of so many tokens."""
        self._counts[bisect_left(STEP_TOKENS, tokens)] += 1

    def stats(self) -> dict[str, int]:
        """Steps of at most as many tokens as each of ``STEP_TOKENS``, under the names of ``FIGURES``."""
        return dict(zip(FIGURES.values(), accumulate(self._counts), strict=False))
