"""Refusals that cost the engine nothing: the queue is full, too many tokens wait, the engine is not there."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping

from ..engine_process.client import EngineClient, EngineUnavailable
from ..http.errors import ApiError
from ..settings import Settings

_RATE_WINDOW = 256
"""Latest completions whose ends tell the rate."""


class Admission:
    """Counts what is under way, and says when nothing more fits.

    All of it is known here, so a refusal takes no hop to the engine, whose own limit is the same and final.

    Args:
        settings: the limits.
        client: the engine.
    """

    def __init__(self, settings: Settings, client: EngineClient) -> None:
        self._settings, self._client = settings, client
        self.is_draining = False
        """Nothing new is taken."""
        self.num_requests = 0
        """Requests under way."""
        self.num_completions = 0
        """Completions under way, waiting ones included."""
        self.num_places = 0
        """Requests that are made ready for the engine; each will be one completion or more."""
        self._ends: deque[float] = deque(maxlen=_RATE_WINDOW)
        self._stats: Mapping[str, int | float] | None = None
        self._tokens_since_stats = 0

    def check_open(self) -> None:
        """Refuse everything while draining, loading or dead.

        Raises:
            ApiError: 503.
        """
        if self.is_draining:
            raise unavailable("draining", "The server shuts down and takes nothing new.", self._drain_seconds())
        self.check_loaded()

    def check_loaded(self) -> None:
        """Refuse what needs to know the engine.

        Raises:
            ApiError: 503; it loads, or is dead.
        """
        if self._client.state != "ready":
            raise engine_unavailable(self._client.state)

    def check_room(self, completions: int = 1, prompt_tokens: int = 1) -> None:
        """Refuse what does not fit beside what is under way, or is made ready.

        Args:
            completions, prompt_tokens: of the request; every one has these at least.

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
                f"{taken} completions are under way, which with {completions} more is above the limit of {most}; "
                "come back later, or start with --max-queue",
            )
        self._read_stats()
        limit = self._settings.max_queued_tokens
        waiting = self._waiting_tokens()
        if limit is not None and waiting and waiting + prompt_tokens > limit:
            raise self._full(
                "too_many_tokens_queued",
                f"{waiting} prompt tokens wait, which with {prompt_tokens} more is above the limit of {limit}; come "
                "back later, or start with --max-queued-tokens",
            )

    def reserve(self) -> Place:
        """Keep room for one completion of a request that is going to be made ready.

        Raises:
            ApiError: 429 with Retry-After, or 503.
        """
        self.check_room()
        return Place(self)

    def enter(self, completions: int, prompt_tokens: int, place: Place | None = None) -> Ticket:
        """Let a request in; its ticket is to be closed at its end.

        Args:
            completions, prompt_tokens: of the request.
            place: that was kept for it; it is given up, whatever comes of this.

        Raises:
            ApiError: 429 with Retry-After, or 503.
        """
        if place is not None:
            place.close()
        self.check_room(completions, prompt_tokens)
        self._tokens_since_stats += prompt_tokens
        return Ticket(self, completions, prompt_tokens)

    def refused_by_engine(self, message: str) -> ApiError:
        """The answer where the engine's own queue was full."""
        return self._full("queue_full", message)

    def retry_after(self) -> int:
        """Seconds after which the queue should be shorter, 1 to 60: what is under way by the rate of its ends."""
        if len(self._ends) < 2:
            return 1
        seconds = max(time.monotonic() - self._ends[0], 1e-3)
        rate = len(self._ends) / seconds
        waiting = max(self.num_completions - self._client.hello.max_num_seqs, 1)
        return min(max(math.ceil(waiting / rate), 1), 60)

    def count_end(self) -> None:
        """A completion has ended."""
        self._ends.append(time.monotonic())

    def give_back(self, prompt_tokens: int, since: object) -> None:
        """Tokens of a request that the engine did not take; ``since``: ``tokens_known`` when it was let in."""
        if since is self._stats:
            self._tokens_since_stats = max(self._tokens_since_stats - prompt_tokens, 0)

    @property
    def tokens_known(self) -> object:
        """The figures of the engine that tokens are counted since."""
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
    """Room for one completion of a request that is made ready."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        admission.num_places += 1
        self._is_closed = False

    def close(self) -> None:
        """Keep it no longer."""
        if not self._is_closed:
            self._is_closed = True
            self._admission.num_places -= 1


class Ticket:
    """One request's share of what is under way."""

    def __init__(self, admission: Admission, completions: int, prompt_tokens: int = 0) -> None:
        self._admission, self._left = admission, completions
        self._prompt_tokens, self._since = prompt_tokens, admission.tokens_known
        admission.num_requests += 1
        admission.num_completions += completions
        self._is_closed = False

    def not_taken(self) -> None:
        """The engine refused the request: its prompt waits nowhere."""
        self._admission.give_back(self._prompt_tokens, self._since)

    def completion_ended(self) -> None:
        """One completion less."""
        if self._left:
            self._left -= 1
            self._admission.num_completions -= 1
            self._admission.count_end()

    def close(self) -> None:
        """The request has ended; what had not is counted as gone."""
        if not self._is_closed:
            self._is_closed = True
            self._admission.num_requests -= 1
            self._admission.num_completions -= self._left
            self._left = 0


def engine_unavailable(state: str) -> ApiError:
    """The answer while the engine loads, or where it is dead."""
    if state == "loading":
        return unavailable("loading", "The model is being loaded.", 5)
    return unavailable("engine_dead", "The engine has ended; the server's log says more.", 10)


def of_unavailable(error: EngineUnavailable) -> ApiError:
    """The same from the client's error."""
    return engine_unavailable(error.state)


def unavailable(code: str, message: str, seconds: int) -> ApiError:
    """A 503 that names the seconds after which to come back."""
    return ApiError(503, code, message, headers={"retry-after": str(seconds)})
