"""The queue of waiting requests, in the order of a policy; it stays fast at any length."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from ..requests.request import Request


class WaitingQueue:
    """Requests by rank, lowest first: O(log n) to add and to take the first, O(1) to remove any.

    A request removed from the middle stays in the heap until it comes up, or until such leftovers outnumber the rest.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int], int, Request]] = []
        self._entry: dict[Request, int] = {}  # request → number of its valid entry
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._entry)

    def __contains__(self, request: Request) -> bool:
        return request in self._entry

    def __iter__(self) -> Iterator[Request]:
        """Iterate over all requests, first one first; O(n log n)."""
        return iter(sorted(self._entry, key=lambda request: request.rank))

    def push(self, request: Request) -> None:
        """Add a request that is not in the queue."""
        self._numbers += 1
        self._entry[request] = self._numbers
        heapq.heappush(self._heap, (request.rank, self._numbers, request))

    def remove(self, request: Request) -> None:
        """Remove a request from the queue, wherever it is."""
        del self._entry[request]
        if len(self._heap) > 2 * len(self._entry) + 64:
            self._heap = [item for item in self._heap if self._entry.get(item[2]) == item[1]]
            heapq.heapify(self._heap)

    def first(self) -> Request | None:
        """Return the request with the lowest rank, or None."""
        self._drop_leftovers()
        return self._heap[0][2] if self._heap else None

    def leading(self, count: int) -> list[Request]:
        """Return the first ``count`` requests, in order; O(count log n)."""
        taken: list[tuple[tuple[float, int], int, Request]] = []
        while len(taken) < count:
            self._drop_leftovers()
            if not self._heap:
                break
            taken.append(heapq.heappop(self._heap))
        for item in taken:
            heapq.heappush(self._heap, item)
        return [item[2] for item in taken]

    def clear(self) -> None:
        """Remove all requests."""
        self._heap.clear()
        self._entry.clear()

    def _drop_leftovers(self) -> None:
        while self._heap and self._entry.get(self._heap[0][2]) != self._heap[0][1]:
            heapq.heappop(self._heap)
