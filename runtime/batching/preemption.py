"""Costs of preempting a sequence: recomputing it, or copying it to host memory and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .schedule import ScheduledRequest

PreemptionMode = Literal["auto", "recompute", "swap"]

PREEMPTION_MODES: tuple[PreemptionMode, ...] = ("auto", "recompute", "swap")

_SMOOTHING = 0.1  # weight of the newest measurement


def preemption_mode(name: str) -> PreemptionMode:
    """Return the mode of that name.

    Raises:
        ValueError: the name is unknown.
    """
    for mode in PREEMPTION_MODES:
        if mode == name:
            return mode
    raise ValueError(f"preemption={name!r} is not known; use one of {', '.join(map(repr, PREEMPTION_MODES))}")


@dataclass(slots=True)
class PreemptionCost:
    """Speeds of this machine, measured while it serves.

    Attributes:
        bytes_per_token: bytes of a token's keys and values, in all layers.
        state_bytes: bytes of a sequence's state, in all layers.
        tokens_per_second: speed of computing prompts.
        bytes_per_second: speed of copying blocks between device and host.
    """

    bytes_per_token: int
    tokens_per_second: float = 1e3
    bytes_per_second: float = 4e9
    state_bytes: int = 0

    def measure_step(self, scheduled: Sequence[ScheduledRequest], seconds: float) -> None:
        """Record the seconds of a step; if it consists mostly of prompts, it measures how fast these are computed."""
        tokens = sum(item.num_tokens - item.num_draft_rows for item in scheduled)
        if tokens > 2 * len(scheduled) and seconds > 0:
            self.tokens_per_second += _SMOOTHING * (tokens / seconds - self.tokens_per_second)

    def measure_copies(self, num_bytes: int, seconds: float) -> None:
        """Record that copying ``num_bytes`` took ``seconds`` from start to end."""
        if num_bytes > 0 and seconds > 0:
            self.bytes_per_second = num_bytes / seconds

    def cheaper(self, num_tokens: int) -> Literal["recompute", "swap"]:
        """Return the cheaper way to preempt a sequence with ``num_tokens`` computed tokens."""
        recompute = num_tokens / self.tokens_per_second
        swap = 2 * (num_tokens * self.bytes_per_token + self.state_bytes) / self.bytes_per_second
        return "swap" if swap < recompute else "recompute"
