"""Batches that are formed once and run to their end: how servers batched before sequences could join at any step.

They are kept for comparison. The default, continuous batching, forms none: see ``Batcher``.
"""

from __future__ import annotations

from typing import Protocol

from ..requests.checks import check_at_least
from ..requests.request import Request
from .waiting import WaitingQueue


class Batches(Protocol):
    """Chooses who runs together when nobody runs."""

    def form(self, waiting: WaitingQueue, max_num_seqs: int, now: float) -> list[Request]:
        """The next batch, in order.

        Args:
            waiting: the queue, not empty; it is left as it is.
            max_num_seqs: most requests in it.
            now: seconds on the batcher's clock.

        Returns:
            At least one request, or nothing to wait for more.
        """


class StaticBatches:
    """The first requests of the queue, as many as may run, at once."""

    def form(self, waiting: WaitingQueue, max_num_seqs: int, now: float) -> list[Request]:
        return waiting.leading(max_num_seqs)


class PaddedBatches:
    """Requests of like length, as many as fit when each is padded to the longest.

    Args:
        max_padded_tokens: a batch of n requests of which the longest may reach t tokens has n times t of them.
        max_wait: seconds that the first of the queue waits for others to fill its batch.
        lookahead: how many of the queue, from the first on, are looked at for such of its length.

    Raises:
        ValueError: a value is out of range.
    """

    def __init__(self, max_padded_tokens: int = 8192, max_wait: float = 0.0, lookahead: int = 256) -> None:
        check_at_least(1, "use a positive one", max_padded_tokens=max_padded_tokens, lookahead=lookahead)
        if not max_wait >= 0:
            raise ValueError(f"max_wait={max_wait} is not a number of seconds; use 0 to wait for nobody")
        self.max_padded_tokens = max_padded_tokens
        self.max_wait = max_wait
        self.lookahead = lookahead

    def form(self, waiting: WaitingQueue, max_num_seqs: int, now: float) -> list[Request]:
        first, *others = waiting.leading(self.lookahead)
        batch, longest = [first], first.longest
        # The sort is stable: of equally long ones those that stand first.
        for request in sorted(others, key=lambda request: abs(request.longest - first.longest)):
            padded = max(longest, request.longest)
            if len(batch) == max_num_seqs or (len(batch) + 1) * padded > self.max_padded_tokens:
                # Full; who is shorter and further off might fit still, but is not of like length.
                return sorted(batch, key=lambda request: request.rank)
            batch.append(request)
            longest = padded
        is_full = len(batch) == max_num_seqs or (len(batch) + 1) * longest > self.max_padded_tokens
        arrived = first.arrival_time if first.arrival_time is not None else now
        if not is_full and now < arrived + self.max_wait:
            return []
        return sorted(batch, key=lambda request: request.rank)
