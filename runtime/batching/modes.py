"""Batches that are formed once and run to their end, as servers did before sequences could join at any step.

They are kept for comparison. The default is continuous batching, which forms no batches: see ``Batcher``.
"""

from __future__ import annotations

from typing import Protocol

from ..requests.checks import check_at_least
from ..requests.request import Request
from .waiting import WaitingQueue


class Batches(Protocol):
    """Chooses the next batch when no request is running."""

    def form(self, waiting: WaitingQueue, max_num_seqs: int, now: float) -> list[Request]:
        """Return the next batch, in order.

        Args:
            waiting: the queue, not empty; it is not modified.
            max_num_seqs: most requests in the batch.
            now: seconds on the batcher's clock.

        Returns:
            At least one request, or an empty list to wait for more.
        """


class StaticBatches:
    """Takes as many of the first requests of the queue as may run."""

    def form(self, waiting: WaitingQueue, max_num_seqs: int, now: float) -> list[Request]:
        return waiting.leading(max_num_seqs)


class PaddedBatches:
    """Takes requests of similar length, as many as fit when each is padded to the longest.

    Args:
        max_padded_tokens: most tokens of a batch: n requests, the longest of which may reach t tokens, count n times
            t.
        max_wait: seconds that the first request waits for others to fill its batch.
        lookahead: number of requests at the head of the queue that are searched for similar lengths.

    Raises:
        ValueError: a value is out of range.
    """

    def __init__(self, max_padded_tokens: int = 8192, max_wait: float = 0.0, lookahead: int = 256) -> None:
        check_at_least(1, "use a positive value", max_padded_tokens=max_padded_tokens, lookahead=lookahead)
        if not max_wait >= 0:
            raise ValueError(f"max_wait={max_wait} is not a number of seconds; use 0 not to wait")
        self.max_padded_tokens = max_padded_tokens
        self.max_wait = max_wait
        self.lookahead = lookahead

    def form(self, waiting: WaitingQueue, max_num_seqs: int, now: float) -> list[Request]:
        first, *others = waiting.leading(self.lookahead)
        batch, longest = [first], first.longest
        # The sort is stable: equally long requests keep their order.
        for request in sorted(others, key=lambda request: abs(request.longest - first.longest)):
            padded = max(longest, request.longest)
            if len(batch) == max_num_seqs or (len(batch) + 1) * padded > self.max_padded_tokens:
                # Full; a shorter request further on might still fit, but its length differs too much.
                return sorted(batch, key=lambda request: request.rank)
            batch.append(request)
            longest = padded
        is_full = len(batch) == max_num_seqs or (len(batch) + 1) * longest > self.max_padded_tokens
        arrived = first.arrival_time if first.arrival_time is not None else now
        if not is_full and now < arrived + self.max_wait:
            return []
        return sorted(batch, key=lambda request: request.rank)
