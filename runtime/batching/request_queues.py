"""The waiting queue, the running list, and the paused requests: every unfinished request has one place."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable

from ..requests.request import Request, RequestStatus
from .policies import Policy
from .shared_prefixes import SharedPrefixes
from .waiting import WaitingQueue


class RequestQueues:
    """Every unfinished request, in exactly one place: waiting, running or paused.

    Args:
        policy: is told who begins to run.
        prefixes: likewise.

    Attributes:
        requests: all, by id.
        waiting: the queue.
        running: those that hold blocks, by rank.
        paused: those that were paused and then lost their blocks.
        unsent_tables: ids of running ones whose tables have not been handed out as they are now.
    """

    def __init__(self, policy: Policy, prefixes: SharedPrefixes) -> None:
        self.policy = policy
        self.prefixes = prefixes
        self.requests: dict[str, Request] = {}
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self.paused: set[Request] = set()
        self.unsent_tables: set[str] = set()
        self._deadlines: list[tuple[float, int, Request]] = []

    @property
    def num_waiting(self) -> int:
        """Requests without blocks."""
        return len(self.waiting) + len(self.paused)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of the requests without blocks, prompt and output; O(requests)."""
        return sum(r.num_tokens for r in self.requests.values() if r.status is RequestStatus.WAITING)

    def holds(self, request: Request) -> bool:
        """True if it is one of the unfinished requests."""
        return self.requests.get(request.request_id) is request

    def add(self, request: Request) -> None:
        """Take in a new request; it has no place yet."""
        self.requests[request.request_id] = request
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.arrival, request))

    def enqueue(self, request: Request) -> None:
        """Let a request that has no place wait; a paused one stays out of the queue until it is resumed."""
        request.status = RequestStatus.WAITING
        if request.is_paused:
            self.paused.add(request)
        else:
            self.waiting.push(request)

    def resume(self, request: Request) -> None:
        """Let a paused request be scheduled again."""
        request.is_paused = False
        if request in self.paused:
            self.paused.remove(request)
            self.waiting.push(request)

    def start_running(self, request: Request) -> None:
        """Let a request that has no place run."""
        request.status = RequestStatus.RUNNING
        bisect.insort(self.running, request, key=lambda r: r.rank)
        self.unsent_tables.add(request.request_id)
        self.prefixes.admitted(request, self.waiting)
        self.policy.admitted(request)

    def stop_running(self, request: Request) -> None:
        """Remove a request from the running ones; it has no place then."""
        at = bisect.bisect_left(self.running, request.rank, key=lambda r: r.rank)
        if at < len(self.running) and self.running[at] is request:
            del self.running[at]
        self.unsent_tables.discard(request.request_id)

    def remove(self, request: Request) -> None:
        """Forget a request that has ended."""
        request.is_paused = False
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.paused:
            self.paused.remove(request)
        else:
            self.stop_running(request)
        self.prefixes.forget(request)
        self.policy.forget(request)
        del self.requests[request.request_id]
        if len(self._deadlines) > 2 * len(self.requests) + 64:
            self._collect_deadlines()

    def expired(self, now: float) -> list[Request]:
        """Unfinished requests whose deadline has passed; each is named once."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heapq.heappop(self._deadlines)[2]
            if self.holds(request):
                expired.append(request)
        return expired

    def requeue_all(self) -> None:
        """Let all wait again, from whatever state an interrupted call left behind; none is paused any more."""
        self.running.clear()
        self.waiting.clear()
        self.paused.clear()
        self.unsent_tables.clear()
        self.requests = {name: request for name, request in self.requests.items() if not request.is_finished}
        self.prefixes.keep(self.requests.values())
        for request in self.requests.values():
            request.is_paused = False
            request.num_computed_tokens = request.num_output_placeholders = 0
            self.enqueue(request)
        self._collect_deadlines()

    def check(self) -> None:
        """Verify that everybody has one place, and the right one.

        Raises:
            RuntimeError: not so; the message says who.
        """
        waiting, running = set(self.waiting), set(self.running)
        if any(request.is_paused for request in waiting) or not all(request.is_paused for request in self.paused):
            raise RuntimeError("a paused request is in the queue, or one that is not paused is kept out of it")
        if waiting & self.paused:
            raise RuntimeError("a request waits twice")
        waiting |= self.paused
        if set(self.requests.values()) != waiting | running or waiting & running:
            raise RuntimeError("an unfinished request neither waits nor runs, or does both, or a finished one does")
        ranks = [request.rank for request in self.running]
        if ranks != sorted(ranks) or len(running) != len(self.running):
            raise RuntimeError(f"running requests are out of order, or one runs twice: {ranks}")
        _check_status(waiting, RequestStatus.WAITING)
        _check_status(running, RequestStatus.RUNNING)

    def _collect_deadlines(self) -> None:
        """Forget the deadlines of those who ended, and recall all others."""
        self._deadlines = [(r.deadline, r.arrival, r) for r in self.requests.values() if r.deadline is not None]
        heapq.heapify(self._deadlines)


def _check_status(requests: Iterable[Request], status: RequestStatus) -> None:
    for request in requests:
        if request.status is not status:
            raise RuntimeError(f"{status.value} request {request.request_id!r} is not marked so")
