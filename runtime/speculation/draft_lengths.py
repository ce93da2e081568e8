"""Chooses how many drafts a step verifies, by what steps cost on this machine and what drafts were worth."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final
from weakref import WeakKeyDictionary

from ..requests.request import Request
from .drafter import Proposal

HYSTERESIS: Final = 1.05
"""Another length must promise so many times the tokens per second."""

WINDOW: Final = 8
"""Steps with drafts that are judged together."""

LOSSES: Final = 3
"""Windows in a row that were slower than without drafts, after which a drafter rests."""

REST: Final = 64
"""Steps until it is tried again; twice as many after each try that fails, up to ``LONGEST_REST``."""

LONGEST_REST: Final = 1024

_SMOOTHING = 0.1  # weight of the newest duration
_FIRST = 6  # durations of a size whose least one counts
_FORGETTING = 0.2  # weight of the newest outcome
_GUESS = 0.1  # cost of a further row, of the first one's, before any was measured
_MOST_ROWS = 256  # of steps whose duration tells what rows cost


class StepSeconds:
    """Seconds of a step by its rows: the tokens that it computes, of however many sequences.

    Durations also depend on the length of the sequences and on what else the machine does. So one moves those of
    all numbers of rows by the same factor, and that of its own by more.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._rows: list[int] = []
        self._seen: dict[int, int] = {}

    def measure(self, rows: int, seconds: float, *, is_settled: bool = False) -> None:
        """Record a step.

        Args:
            rows: of the step.
            seconds: that it took.
            is_settled: it is not one of the first two of its size, in which kernels are recorded.
        """
        if rows > _MOST_ROWS or seconds <= 0:
            return
        self._seen[rows] = seen = self._seen.get(rows, 0) + 1
        if seen <= 2 and not is_settled:
            return
        if rows not in self._seconds:
            insort(self._rows, rows)
            self._seconds[rows] = seconds
        if seen <= _FIRST:
            self._seconds[rows] = min(self._seconds[rows], seconds)
            return
        error = math.log(seconds / self._seconds[rows])
        factor = math.exp(_SMOOTHING * min(max(error, -1.0), 1.0))
        for known in self._rows:
            self._seconds[known] *= factor
        self._seconds[rows] *= factor

    def of(self, rows: int) -> float:
        """Return the seconds of a step of so many rows: measured, between two that were, or a guess.

        That is not more than a step of more rows took: then something else took the time.
        """
        known = self._rows
        if not known:
            return 1.0 + _GUESS * (rows - 1)
        place = bisect_left(known, rows)
        if place == len(known):
            low = known[-1]
            return self._seconds[low] * (1.0 + _GUESS * (rows - low) / low)
        most = min([self._seconds[more] for more in known[place:]])
        high = known[place]
        if high == rows:
            return most
        if place == 0:
            return most / (1.0 + _GUESS * (high - rows) / rows)
        low = known[place - 1]
        least = min(self._seconds[low], most)
        return least + (rows - low) / (high - low) * (most - least)

    def table(self) -> dict[int, float]:
        """Return the seconds by rows that were measured."""
        return {rows: self._seconds[rows] for rows in self._rows}


class Acceptance:
    """Probabilities that drafts are accepted, by place: of each one, if those before it were.

    Attributes:
        by_place: of the first draft, of the second, …; places without an outcome yet have that of the one before.
    """

    def __init__(self, by_place: Sequence[float]) -> None:
        self.by_place = list(by_place)

    def expected(self, count: int) -> float:
        """Return how many of ``count`` drafts are expected to be accepted."""
        total, together = 0.0, 1.0
        for probability in self.by_place[:count]:
            together *= probability
            total += together
        return total

    def note(self, count: int, accepted: int) -> None:
        """Record that ``accepted`` of ``count`` drafts were accepted."""
        for place in range(min(count, accepted + 1)):
            hit = float(place < accepted)
            self.by_place[place] += _FORGETTING * (hit - self.by_place[place])


@dataclass(slots=True)
class _Judgement:
    """How a drafter does."""

    acceptance: Acceptance
    length: int  # of the drafts that it computed last
    steps: int = 0
    gain: float = 0.0  # log of the speed relative to that without drafts, summed up over the window
    losses: int = 0
    declined: int = 0  # steps in a row in which its drafts were not worth a try
    rest: int = 0  # steps left
    next_rest: int = REST
    is_probed: bool = False  # its next drafts are tried, whatever is expected of them
    by_request: WeakKeyDictionary[Request, Acceptance] = field(default_factory=WeakKeyDictionary)

    def take_a_rest(self) -> None:
        """Rest, longer the next time."""
        self.rest, self.next_rest = self.next_rest, min(2 * self.next_rest, LONGEST_REST)
        # The probe decides about the next one.
        self.losses, self.steps, self.gain, self.declined = LOSSES - 1, WINDOW - 1, 0.0, WINDOW - 1
        self.is_probed = True


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request with drafts.

    Attributes:
        request: the request.
        proposal: its drafts.
        known: tokens that the step computes of it anyway.
        room: most rows that it may have.
        fills: fewer drafts are filled up to the length.
    """

    request: Request
    proposal: Proposal
    known: int
    room: int
    fills: bool

    def rows(self, length: int) -> int:
        """Return its rows where the step verifies ``length`` drafts."""
        drafts = self.num_drafts(length)
        if drafts < 1:
            return self.known
        return min(1 + length, self.room) if self.fills else self.known + drafts

    def num_drafts(self, length: int) -> int:
        """Return its drafts among them."""
        return min(len(self.proposal.ids), min(1 + length, self.room) - self.known)


class DraftLengths:
    """Chooses the length of the drafts of each step: the one with most expected tokens per second, 0 included.

    Args:
        lengths: those that may be chosen, ascending, 0 among them.
        expected: of each drafter by name, see ``Drafter.expected``.

    Attributes:
        seconds: what steps take.
        lengths: as given.
        current: the one that was chosen last.
    """

    def __init__(self, lengths: Sequence[int], expected: dict[str, float]) -> None:
        self.seconds = StepSeconds()
        self.lengths = tuple(lengths)
        self.current = self.lengths[-1]
        self._drafters = {
            name: _Judgement(Acceptance([probability] * self.lengths[-1]), length=self.lengths[-1])
            for name, probability in expected.items()
        }

    def resting(self) -> frozenset[str]:
        """Return the drafters that rest."""
        return frozenset([name for name, own in self._drafters.items() if own.rest])

    def begin_step(self) -> None:
        """Count a step that could have had drafts."""
        for own in self._drafters.values():
            own.rest = max(own.rest - 1, 0)

    def choose(
        self,
        rows: int,
        others: int,
        candidates: Sequence[Candidate],
        budget: int,
        num_fillers: Callable[[int, int, int], int] = lambda rows, count, length: 0,
    ) -> int:
        """Return the length for a step.

        Args:
            rows: of the step without drafts.
            others: sequences of the step that get a token and have no drafts.
            candidates: those that have drafts.
            budget: most rows to add.
            num_fillers: how many of ``others`` get as many rows as the length, in a step of so many rows with the
                drafts of so many candidates.
        """
        best, best_speed, current_speed = 0, 0.0, 0.0
        for length in self.lengths:
            added = sum([c.rows(length) - c.known for c in candidates])
            if added > budget:
                break
            tokens = others + len(candidates) + sum([self._expected(c, length) for c in candidates])
            if length:
                drafted = sum([c.num_drafts(length) > 0 for c in candidates])
                added += length * num_fillers(rows + added, drafted, length)
            speed = tokens / self.seconds.of(rows + added)
            if length == self.current:
                current_speed = speed
            if speed > best_speed:
                best, best_speed = length, speed
        if best_speed > current_speed * HYSTERESIS:
            self.current = best
        drafters = sorted({c.proposal.drafter for c in candidates})
        probed = [own for own in map(self._drafters.__getitem__, drafters) if own.is_probed]
        for own in probed:
            own.is_probed = False
        if probed and not self.current and len(candidates) <= budget:
            return self.lengths[1]
        if self.current:
            for name in drafters:
                self._drafters[name].declined = 0
        else:
            self.decline(drafters)
        return self.current

    def to_compute(
        self,
        drafter: str,
        requests: Sequence[Request],
        rows: int,
        others: int,
        most: int,
        seconds_of: Callable[[int], float],
    ) -> int:
        """Return how many drafts a drafter should compute for each of the requests; 0 is counted as ``decline``.

        Args:
            drafter: its name.
            requests: those that it drafts for.
            rows: of the step without drafts.
            others: further sequences of the step that get a token.
            most: of each.
            seconds_of: what it takes to compute so many.
        """
        own, count = self._drafters[drafter], len(requests)
        best, best_speed, own_speed = 0, 0.0, 0.0
        lengths = [length for length in self.lengths if length <= most]
        for length in lengths:
            tokens = others + count + sum([self._acceptance(r, drafter).expected(length) for r in requests])
            speed = tokens / (self.seconds.of(rows + count * length) + seconds_of(length))
            if length == own.length:
                own_speed = speed
            if speed > best_speed:
                best, best_speed = length, speed
        if best_speed > own_speed * HYSTERESIS:
            own.length = best
        if not own.length and own.is_probed:
            return lengths[1]
        if own.length:
            # Further rows would have none of its drafts.
            self.current = own.length
        else:
            self.decline([drafter])
        return own.length

    def decline(self, drafters: Iterable[str]) -> None:
        """Record that drafters were asked for nothing."""
        for own in [self._drafters[name] for name in drafters]:
            own.declined += 1
            if own.declined >= WINDOW:
                own.take_a_rest()

    def _expected(self, candidate: Candidate, length: int) -> float:
        return self._acceptance(candidate.request, candidate.proposal.drafter).expected(candidate.num_drafts(length))

    def _acceptance(self, request: Request, drafter: str) -> Acceptance:
        own = self._drafters[drafter]
        found = own.by_request.get(request)
        if found is None:
            found = own.by_request[request] = Acceptance(own.acceptance.by_place)
        return found

    def note(self, request: Request, drafter: str, count: int, accepted: int) -> None:
        """Record how many of a request's ``count`` drafts were accepted."""
        own = self._drafters[drafter]
        own.acceptance.note(count, accepted)
        self._acceptance(request, drafter).note(count, accepted)
        if accepted:
            own.next_rest = REST

    def judge(self, drafters: Sequence[str], tokens: int, plain_tokens: int, seconds: float, plain: float) -> None:
        """Record what a step with drafts was worth.

        Args:
            drafters: whose drafts it verified.
            tokens: that it gave.
            plain_tokens: that it would have given without drafts.
            seconds: that it took.
            plain: that it would have taken without them.
        """
        gain = math.log(max(tokens, 1) / max(plain_tokens, 1) * plain / max(seconds, 1e-9))
        for own in [self._drafters[name] for name in drafters]:
            own.steps += 1
            own.gain += gain
            if own.steps < WINDOW:
                continue
            own.losses = own.losses + 1 if own.gain < 0 else 0
            own.steps, own.gain = 0, 0.0
            if own.losses >= LOSSES:
                own.take_a_rest()
