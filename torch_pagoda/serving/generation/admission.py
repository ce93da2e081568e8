"""Admission control in the API process: queue limits, token limits, engine availability."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping

from ..engine_process.client import EngineClient, EngineUnavailable
from ..http.errors import ApiError
from ..settings import Settings

_RATE_WINDOW = 256
"""Number of latest completions that the rate is computed from."""


class Admission:
    """Counts requests in progress, and refuses more than fit.

    The API process has all the numbers, so a refusal needs no message to the engine, whose own limit is the same and
    final.

    Args:
        settings: the limits.
        client: the engine.
    """

    def __init__(self, settings: Settings, client: EngineClient) -> None:
        self._settings, self._client = settings, client
        self.is_draining = False
        """True while draining: refuse new requests."""
        self.num_requests = 0
        """Requests in progress."""
        self.num_completions = 0
        """Completions in progress, waiting ones included."""
        self.num_places = 0
        """Requests in preparation for the engine, one completion or more each."""
        self._ends: deque[float] = deque(maxlen=_RATE_WINDOW)
        self._stats: Mapping[str, int | float] | None = None
        self._tokens_since_stats = 0

    def check_open(self) -> None:
        """Refuse everything while draining, loading or dead.

        Raises:
            ApiError: 503.
        """
        if self.is_draining:
            raise unavailable(
                "draining", "The server is shutting down and accepts no new requests.", self._drain_seconds()
            )
        self.check_loaded()

    def check_loaded(self) -> None:
        """Refuse requests that need facts about the engine.

        Raises:
            ApiError: 503; the engine is loading or dead.
        """
        if self._client.state != "ready":
            raise engine_unavailable(self._client.state)

    def check_room(self, completions: int = 1, prompt_tokens: int = 1) -> None:
        """Refuse what exceeds the limits together with the requests in progress and in preparation.

        Args:
            completions, prompt_tokens: of the request, at least.

        Raises:
            ApiError: 429 with Retry-After, or 503.
        """
        self.check_open()
        hello = self._client.hello
        max_queue = self._settings.max_queue
        if max_queue is None:
            max_queue = 4 * hello.max_num_seqs
        most = hello.max_num_seqs + max_queue
        taken = self.num_completions + self.num_places
        if taken + completions > most:
            raise self._full(
                "queue_full",
                f"{completions} more completions would exceed the limit of {most} ({taken} are in progress); retry "
                "later, or raise --max-queue",
            )
        self._read_stats()
        limit = self._settings.max_queued_tokens
        waiting = self._waiting_tokens()
        if limit is not None and waiting and waiting + prompt_tokens > limit:
            raise self._full(
                "too_many_tokens_queued",
                f"{prompt_tokens} more prompt tokens would exceed the limit of {limit} ({waiting} are queued); retry "
                "later, or raise --max-queued-tokens",
            )

    def reserve(self) -> Place:
        """Reserve room for one completion of a request in preparation.

        Raises:
            ApiError: 429 with Retry-After, or 503.
        """
        self.check_room()
        return Place(self)

    def enter(self, completions: int, prompt_tokens: int, place: Place | None = None) -> Ticket:
        """Admit a request; close its ticket at the end of the request.

        Args:
            completions, prompt_tokens: of the request.
            place: its reservation, which is released in any case.

        Raises:
            ApiError: 429 with Retry-After, or 503.
        """
        if place is not None:
            place.close()
        self.check_room(completions, prompt_tokens)
        self._tokens_since_stats += prompt_tokens
        return Ticket(self, completions, prompt_tokens)

    def refused_by_engine(self, message: str) -> ApiError:
        """The error for a full queue of the engine's own."""
        return self._full("queue_full", message)

    def retry_after(self) -> int:
        """Seconds until the queue should be shorter, 1 to 60: completions in progress divided by the rate of ends."""
        if len(self._ends) < 2:
            return 1
        seconds = max(time.monotonic() - self._ends[0], 1e-3)
        rate = len(self._ends) / seconds
        waiting = max(self.num_completions - self._client.hello.max_num_seqs, 1)
        return min(max(math.ceil(waiting / rate), 1), 60)

    def count_end(self) -> None:
        """Count the end of a completion."""
        self._ends.append(time.monotonic())

    def give_back(self, prompt_tokens: int, since: object) -> None:
        """Release the tokens of a request that the engine refused; ``since``: ``tokens_known`` at its admission."""
        if since is self._stats:
            self._tokens_since_stats = max(self._tokens_since_stats - prompt_tokens, 0)

    @property
    def tokens_known(self) -> object:
        """The engine statistics since which tokens are counted."""
        return self._stats

    def _full(self, code: str, message: str) -> ApiError:
        return ApiError(429, code, message, headers={"retry-after": str(self.retry_after())})

    def _waiting_tokens(self) -> int:
        return int(self._client.stats.get("queue_tokens", 0)) + self._tokens_since_stats

    def _read_stats(self) -> None:
        stats = self._client.stats
        if stats is not self._stats:
            self._stats, self._tokens_since_stats = stats, 0

    def _drain_seconds(self) -> int:
        return max(math.ceil(self._settings.shutdown_timeout), 1)


class Place:
    """A reservation for one completion of a request in preparation."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        admission.num_places += 1
        self._is_closed = False

    def close(self) -> None:
        """Release the reservation."""
        if not self._is_closed:
            self._is_closed = True
            self._admission.num_places -= 1


class Ticket:
    """The share of one request in the totals."""

    def __init__(self, admission: Admission, completions: int, prompt_tokens: int = 0) -> None:
        self._admission, self._left = admission, completions
        self._prompt_tokens, self._since = prompt_tokens, admission.tokens_known
        admission.num_requests += 1
        admission.num_completions += completions
        self._is_closed = False

    def not_taken(self) -> None:
        """The engine refused the request, so its prompt is not queued."""
        self._admission.give_back(self._prompt_tokens, self._since)

    def completion_ended(self) -> None:
        """Count one completion less."""
        if self._left:
            self._left -= 1
            self._admission.num_completions -= 1
            self._admission.count_end()

    def close(self) -> None:
        """End the request; unfinished completions no longer count."""
        if not self._is_closed:
            self._is_closed = True
            self._admission.num_requests -= 1
            self._admission.num_completions -= self._left
            self._left = 0


def engine_unavailable(state: str) -> ApiError:
    """The error while the engine is loading or dead."""
    if state == "loading":
        return unavailable("loading", "The model is loading.", 5)
    return unavailable("engine_dead", "The engine has ended; see the server log.", 10)


def of_unavailable(error: EngineUnavailable) -> ApiError:
    """The same from the client's error."""
    return engine_unavailable(error.state)


def unavailable(code: str, message: str, seconds: int) -> ApiError:
    """A 503 with the seconds until a retry."""
    return ApiError(503, code, message, headers={"retry-after": str(seconds)})
