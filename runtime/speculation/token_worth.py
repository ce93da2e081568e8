"""What it is worth that a request is given a token sooner."""

from __future__ import annotations

from collections.abc import Sequence

from ..requests.request import Request


def is_draining(running: Sequence[Request], num_waiting: int) -> bool:
    """Return True if nobody waits, and nobody came while others of the running requests were answered."""
    if num_waiting:
        return False
    arrivals = [request.arrival_time for request in running]
    answered = [request.first_token_time for request in running if request.first_token_time is not None]
    last = max([time for time in arrivals if time is not None], default=None)
    return last is not None and None not in arrivals and bool(answered) and last <= min(answered)


def token_worths(left: Sequence[int], paces: Sequence[float], growing: float) -> list[float]:
    """Return what an accepted draft of each request is worth while a batch drains: 1.0 is the share of a step that a
    request has.

    Where others follow, each token counts alike: a request that ends sooner makes room for the next. A batch that
    drains is done when the last of its requests is. Those that end before save the rows that later steps need not
    compute for them, and no step. Steps are saved by those that would end, without drafts, behind the last one with
    its drafts: they share what a step costs besides its rows.

    Args:
        left: tokens that each request may still be given.
        paces: tokens per step that each may have with drafts.
        growing: part of a step's seconds that grows with its rows.
    """
    end = max([tokens / pace for tokens, pace in zip(left, paces, strict=True)])
    decisive = [tokens > end for tokens in left]
    step = (1.0 - growing) * len(left) / max(sum(decisive), 1)
    return [growing + step * decides for decides in decisive]
