"""Orders of requests; each rank is fixed when a request arrives, so that no request starves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from ..requests.checks import real_number, whole_number
from ..requests.request import Request

_FEW = 64
"""Number of clients above which tags are checked and dropped if they no longer matter."""

Rank = tuple[float, int]
"""Lower comes first; the second number is the order of arrival, so ranks are unique."""


class Policy(Protocol):
    """An order in which requests are admitted and continued, and in reverse preempted.

    A rank never changes. The first request can therefore take the blocks of all others and always progresses, and
    later arrivals overtake a waiting request a bounded number of times: a policy grants a bounded head start in time
    or in service, not a class of its own. This is ageing without reordering the queue.

    Attributes:
        lookahead: number of waiting requests, from the first on, that are compared for the longest prefix in the
            cache; 1 takes them strictly in order.
    """

    lookahead: int

    def rank(self, request: Request, now: float) -> Rank:
        """Return the request's rank; called once, when it arrives at ``now`` (seconds)."""

    def admitted(self, request: Request) -> None:
        """Handle the start of a request, for the first time or again."""

    def forget(self, request: Request) -> None:
        """Handle the end of a request."""


class _InOrder:
    """An order that depends only on the requests themselves."""

    lookahead = 1

    def admitted(self, request: Request) -> None:
        return

    def forget(self, request: Request) -> None:
        return


class FirstComeFirstServed(_InOrder):
    """Orders requests by arrival."""

    def rank(self, request: Request, now: float) -> Rank:
        return float(request.arrival), request.arrival


class ByPriority(_InOrder):
    """Orders requests by ``Request.priority``, lowest first, as in vLLM.

    Args:
        ageing_seconds: a request of the next better priority overtakes another only if it arrives at most this much
            later.
    """

    def __init__(self, ageing_seconds: float = 10.0) -> None:
        self.ageing_seconds = _positive("ageing_seconds", ageing_seconds)

    def rank(self, request: Request, now: float) -> Rank:
        return now + request.priority * self.ageing_seconds, request.arrival


class ShortestJobFirst(_InOrder):
    """Orders requests by their prompt tokens plus the most that may be generated, fewest first.

    Args:
        seconds_per_token: a request that is n tokens shorter overtakes another only if it arrives at most n times
            this later.
    """

    def __init__(self, seconds_per_token: float = 0.01) -> None:
        self.seconds_per_token = _positive("seconds_per_token", seconds_per_token)

    def rank(self, request: Request, now: float) -> Rank:
        return now + request.longest * self.seconds_per_token, request.arrival


class FairByClient:
    """Gives every client with requests the same service: start-time fair queueing (Goyal et al., SIGCOMM
    1996).

    Each request gets a start tag: the virtual time, or the end tag of its client's previous request if that is later.
    Its end tag is its number of tokens after that. Virtual time is the greatest start tag admitted so far, and
    advances with the clock. So clients share the engine by tokens, and an idle client accumulates no credit.

    Args:
        tokens_per_second: speed of virtual time. Clients whose first request starts at the virtual time can overtake
            a request of a client that is n tokens ahead only if they arrive at most n divided by this later.
    """

    lookahead = 1

    def __init__(self, tokens_per_second: float = 10.0) -> None:
        self.tokens_per_second = _positive("tokens_per_second", tokens_per_second)
        self._time = 0.0
        self._now = -math.inf
        self._most_ends = _FEW
        self._ends: dict[str, float] = {}  # client → end tag of its last request, while ahead of virtual time
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
    """Takes, among the first of the queue, the request with the longest cached prefix (SGLang's cache-aware
    order).

    Args:
        lookahead: number of requests compared. A request is overtaken a few times at most, see ``shared_prefixes``.
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
"""Name → class, for ``LLM(policy=…)``."""


def make_policy(name: str) -> Policy:
    """Return the policy of that name.

    Raises:
        ValueError: the name is unknown.
    """
    if not isinstance(name, str) or name not in POLICIES:
        raise ValueError(f"policy={name!r} is not known; use one of {', '.join(map(repr, POLICIES))}")
    return POLICIES[name]()


def _positive(name: str, value: float) -> float:
    return real_number(name, value, 0, math.inf, "use a positive value, or requests starve", open_low=True)
