"""Orders of requests, each fixed when a request arrives, so that nobody starves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from ..requests.checks import real_number, whole_number
from ..requests.request import Request

_FEW = 64
"""Clients whose tags are kept without looking whether they still matter."""

Rank = tuple[float, int]
"""Lower comes first; the second number is the order of arrival, so that no two are equal."""


class Policy(Protocol):
    """An order in which requests are admitted, continued and, from its end, preempted.

    A rank never changes. Whoever stands first can therefore take the blocks of all others and always progresses, and
    whatever arrives later overtakes a waiting request only so often: what a policy prefers is a bounded head start in
    time or in service, not a class of its own. That is ageing without touching the queue.

    Attributes:
        lookahead: how many waiting requests, from the first on, are compared for the longest prefix in the cache; 1
            to take them strictly in order.
    """

    lookahead: int

    def rank(self, request: Request, now: float) -> Rank:
        """The request's place in the order, asked once, when it arrives at ``now`` (seconds)."""

    def admitted(self, request: Request) -> None:
        """The request begins to run, for the first time or again."""

    def forget(self, request: Request) -> None:
        """The request has ended."""


class _InOrder:
    """An order that depends on nothing but the requests themselves."""

    lookahead = 1

    def admitted(self, request: Request) -> None:
        return

    def forget(self, request: Request) -> None:
        return


class FirstComeFirstServed(_InOrder):
    """In order of arrival."""

    def rank(self, request: Request, now: float) -> Rank:
        return float(request.arrival), request.arrival


class ByPriority(_InOrder):
    """The lowest ``Request.priority`` first, as in vLLM.

    Args:
        ageing_seconds: a request is overtaken by one of the next better priority only if that arrives at most so much
            later.
    """

    def __init__(self, ageing_seconds: float = 10.0) -> None:
        self.ageing_seconds = _positive("ageing_seconds", ageing_seconds)

    def rank(self, request: Request, now: float) -> Rank:
        return now + request.priority * self.ageing_seconds, request.arrival


class ShortestJobFirst(_InOrder):
    """The fewest tokens first, prompt and the most that may be generated.

    Args:
        seconds_per_token: a request is overtaken by one that is n tokens shorter only if that arrives at most n times
            this later.
    """

    def __init__(self, seconds_per_token: float = 0.01) -> None:
        self.seconds_per_token = _positive("seconds_per_token", seconds_per_token)

    def rank(self, request: Request, now: float) -> Rank:
        return now + request.longest * self.seconds_per_token, request.arrival


class FairByClient:
    """Every client gets the same service while it has requests: start-time fair queueing (Goyal et al., SIGCOMM
    1996).

    Each request gets a start tag: the virtual time, or where its client's previous request ends if that is later; it
    ends its number of tokens after that. Virtual time is the greatest start tag that was admitted, and runs on with
    the clock. So clients take turns by tokens, and one that was idle saves nothing up.

    Args:
        tokens_per_second: of virtual time. Clients whose first request starts at the virtual time can overtake a
            request of one that is n tokens ahead only if they arrive at most n divided by this later.
    """

    lookahead = 1

    def __init__(self, tokens_per_second: float = 10.0) -> None:
        self.tokens_per_second = _positive("tokens_per_second", tokens_per_second)
        self._time = 0.0
        self._now = -math.inf
        self._most_ends = _FEW
        self._ends: dict[str, float] = {}  # client → end tag of its last request, while it lies ahead of the time
        self._starts: dict[Request, float] = {}

    def rank(self, request: Request, now: float) -> Rank:
        if now > self._now:
            self._time += (now - self._now) * self.tokens_per_second if math.isfinite(self._now) else 0.0
            self._now = now
        if len(self._ends) > self._most_ends:
            self._ends = {client: end for client, end in self._ends.items() if end > self._time}
            self._most_ends = 2 * len(self._ends) + _FEW
        start = max(self._time, self._ends.get(request.client, 0.0))
        self._ends[request.client] = start + request.longest
        self._starts[request] = start
        return start, request.arrival

    def admitted(self, request: Request) -> None:
        self._time = max(self._time, self._starts.get(request, 0.0))

    def forget(self, request: Request) -> None:
        self._starts.pop(request, None)
        if self._ends.get(request.client, math.inf) <= self._time:
            del self._ends[request.client]


class LongestPrefixFirst(FirstComeFirstServed):
    """Among the first of the queue, whoever finds most of its tokens in the prefix cache (SGLang's cache-aware
    order).

    Args:
        lookahead: how many are compared. A request is overtaken a few times at most, see ``shared_prefixes``.
    """

    def __init__(self, lookahead: int = 32) -> None:
        self.lookahead = whole_number("lookahead", lookahead, 1, "compare at least the first request")


POLICIES: dict[str, Callable[[], Policy]] = {
    "fcfs": FirstComeFirstServed,
    "priority": ByPriority,
    "sjf": ShortestJobFirst,
    "fair": FairByClient,
    "prefix": LongestPrefixFirst,
}
"""Name → class, as ``LLM(policy=…)`` takes it."""


def make_policy(name: str) -> Policy:
    """The policy of that name.

    Raises:
        ValueError: there is none.
    """
    if not isinstance(name, str) or name not in POLICIES:
        raise ValueError(f"policy={name!r} is not known; use one of {', '.join(map(repr, POLICIES))}")
    return POLICIES[name]()


def _positive(name: str, value: float) -> float:
    return real_number(name, value, 0, math.inf, "nobody may wait for ever", open_low=True)
