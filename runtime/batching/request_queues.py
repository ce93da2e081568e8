"""The waiting queue, the running list and the paused requests; each unfinished request is in one of them."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable

from ..requests.request import Request, RequestStatus
from .policies import Policy
from .shared_prefixes import SharedPrefixes
from .waiting import WaitingQueue


class RequestQueues:
    """All unfinished requests, each of them waiting, running or paused.

    Args:
        policy: notified when a request begins to run.
        prefixes: notified likewise.

    Attributes:
        requests: all requests, by id.
        waiting: the queue.
        running: requests that hold blocks, by rank.
        paused: requests that were paused and then lost their blocks.
        unsent_tables: ids of running requests whose current tables have not been handed out yet.
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
        """Number of requests without blocks."""
        return len(self.waiting) + len(self.paused)

    @property
    def num_waiting_tokens(self) -> int:
        """Number of tokens of the requests without blocks, prompt and output; O(requests)."""
        return sum(r.num_tokens for r in self.requests.values() if r.status is RequestStatus.WAITING)

    def holds(self, request: Request) -> bool:
        """Return True if it is one of the unfinished requests."""
        return self.requests.get(request.request_id) is request

    def add(self, request: Request) -> None:
        """Register a new request; it neither waits nor runs yet."""
        self.requests[request.request_id] = request
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.arrival, request))

    def enqueue(self, request: Request) -> None:
        """Let a request wait that is in no list; a paused one stays out of the queue until it is resumed."""
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
        """Let a request run that is in no list."""
        request.status = RequestStatus.RUNNING
        bisect.insort(self.running, request, key=lambda r: r.rank)
        self.unsent_tables.add(request.request_id)
        self.prefixes.admitted(request, self.waiting)
        self.policy.admitted(request)

    def stop_running(self, request: Request) -> None:
        """Remove a request from the running ones; it is then in no list."""
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
        """Return the unfinished requests whose deadline has passed; each is returned once."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heapq.heappop(self._deadlines)[2]
            if self.holds(request):
                expired.append(request)
        return expired

    def requeue_all(self) -> None:
        """Let all requests wait again, whatever state an interrupted call left behind; none is paused any more."""
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
        """Verify that each request is in exactly one list, and in the right one.

        Raises:
            RuntimeError: an invariant is broken; the message names it.
        """
        waiting, running = set(self.waiting), set(self.running)
        if any(request.is_paused for request in waiting) or not all(request.is_paused for request in self.paused):
            raise RuntimeError("a paused request is in the queue, or a request that is not paused is kept out of it")
        if waiting & self.paused:
            raise RuntimeError("a request is in the queue twice")
        waiting |= self.paused
        if set(self.requests.values()) != waiting | running or waiting & running:
            raise RuntimeError("an unfinished request is in no list or in two, or a finished one is still in one")
        ranks = [request.rank for request in self.running]
        if ranks != sorted(ranks) or len(running) != len(self.running):
            raise RuntimeError(f"running requests are out of order, or a request is listed twice: {ranks}")
        _check_status(waiting, RequestStatus.WAITING)
        _check_status(running, RequestStatus.RUNNING)

    def _collect_deadlines(self) -> None:
        """Rebuild the deadlines from the unfinished requests."""
        self._deadlines = [(r.deadline, r.arrival, r) for r in self.requests.values() if r.deadline is not None]
        heapq.heapify(self._deadlines)


def _check_status(requests: Iterable[Request], status: RequestStatus) -> None:
    for request in requests:
        if request.status is not status:
            raise RuntimeError(f"{status.value} request {request.request_id!r} has another status")
