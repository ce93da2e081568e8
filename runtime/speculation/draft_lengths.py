"""Chooses how many drafts a step verifies, and whose: by what steps cost here and what drafts were worth."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

from ..requests.request import Request
from .drafter import Proposal
from .step_seconds import StepSeconds

HYSTERESIS: Final = 1.05
"""Drafts, or another length of them, must promise so many times the tokens per second."""

WINDOW: Final = 8
"""Steps that are judged together."""

LOSSES: Final = 3
"""Windows in a row that were slower than without drafts, after which a drafter rests."""

REST: Final = 64
"""Steps until it is tried again; twice as many after each try that fails, up to ``LONGEST_REST``."""

LONGEST_REST: Final = 1024

TOLERATED: Final = 0.01
"""What a drafter may lose, as a share of the time: it rests until its last losses are no more than that."""

PROBED: Final = 4
"""Requests whose drafts are tried after a rest."""

MOST_RECORDED_ROWS: Final = 64
"""Steps with more rows are not recorded, so that they need not have few sizes."""

RECORDED_AFTER: Final = 2
"""Steps of a size that take longer: the second one is recorded, further ones are replayed."""

REPEATS: Final = 8
"""Steps of a size that have to be worth its recording."""

_FORGETTING = 0.2  # weight of the newest outcome
_MOST_SLOWNESS = 4.0


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
    lost: float = 0.0  # seconds since its last rest
    losses: int = 0
    declined: int = 0  # steps in a row in which its drafts were not worth a try
    rest: int = 0  # steps left
    next_rest: int = REST
    is_probed: bool = False  # its next drafts are tried, whatever is expected of them
    slowness: float = 1.0  # seconds of its drafts, relative to what it says
    by_request: WeakKeyDictionary[Request, Acceptance] = field(default_factory=WeakKeyDictionary)

    def take_a_rest(self, plain: float) -> None:
        """Rest, longer the next time; ``plain``: seconds of a step without drafts."""
        self.rest = min(max(self.next_rest, math.ceil(self.lost / (TOLERATED * plain))), LONGEST_REST)
        self.next_rest = min(2 * self.next_rest, LONGEST_REST)
        # The probe decides about the next one.
        self.losses, self.steps, self.gain, self.declined = LOSSES - 1, WINDOW - 1, 0.0, WINDOW - 1
        self.lost, self.is_probed = 0.0, True


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request with drafts.

    Attributes:
        request: the request.
        proposal: its drafts.
        known: tokens that the step computes of it anyway.
        room: most rows that it may have.
        fills: fewer drafts are filled up to the length.
        worth: of a token that is accepted, see ``token_worths``.
    """

    request: Request
    proposal: Proposal
    known: int
    room: int
    fills: bool
    worth: float = 1.0

    def rows(self, length: int) -> int:
        """Return its rows where the step verifies ``length`` drafts."""
        drafts = self.num_drafts(length)
        if drafts < 1:
            return self.known
        return min(1 + length, self.room) if self.fills else self.known + drafts

    def num_drafts(self, length: int) -> int:
        """Return its drafts among them."""
        return min(len(self.proposal.ids), min(1 + length, self.room) - self.known)


@dataclass(frozen=True, slots=True)
class Asking:
    """A request that drafts may be computed for.

    Attributes:
        request: the request.
        room: most drafts that it may have.
        worth: see ``Candidate``.
    """

    request: Request
    room: int
    worth: float = 1.0


class _Share(NamedTuple):
    """What drafts of a request promise, and the rows that they take; ``place``: of the request."""

    gain: float
    rows: int
    place: int


class _Option(NamedTuple):
    """A length, the requests that have drafts of it, and the tokens per second that this promises."""

    speed: float
    length: int
    picked: list[int]


class DraftLengths:
    """Chooses the length of the drafts of each step, and which requests have them: what promises most tokens per
    second, no drafts included.

    Those that promise most have drafts: one, two, four, … of them or all, so that the numbers of rows are few and
    recorded steps repeat. A size that is new must earn its recording, too.

    Args:
        lengths: those that may be chosen, ascending, 0 among them.
        expected: of each drafter by name, see ``Drafter.expected``.
        all_or_none: drafts are for all that have some, or for nobody.

    Attributes:
        seconds: what steps take.
        lengths: as given.
        current: the one that was chosen last.
    """

    def __init__(self, lengths: Sequence[int], expected: dict[str, float], *, all_or_none: bool = False) -> None:
        self.seconds = StepSeconds()
        self.lengths = tuple(lengths)
        self.current = self.lengths[-1]
        self._all_or_none = all_or_none
        self._sizes: Counter[tuple[int, int]] = Counter()
        self._slowness_of_new = 1.5
        self._plain = 1.0  # seconds of a step without drafts
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
            if own.rest:
                own.rest -= 1

    def choose(
        self,
        rows: int,
        others: int,
        candidates: Sequence[Candidate],
        budget: int,
        num_fillers: Callable[[int, int, int], int] = lambda rows, count, length: 0,
    ) -> tuple[int, Sequence[Candidate]]:
        """Return the length for a step, and those that have drafts.

        Args:
            rows: of the step without drafts.
            others: sequences of the step that get a token and have no drafts.
            candidates: those that have drafts.
            budget: most rows to add.
            num_fillers: how many of ``others`` get as many rows as the length, in a step of so many rows with the
                drafts of so many candidates.
        """
        drafters = sorted({c.proposal.drafter for c in candidates})

        def shares(length: int) -> list[_Share]:
            return [
                _Share(c.worth * self._expected(c, length), c.rows(length) - c.known, i)
                for i, c in enumerate(candidates)
                if c.num_drafts(length) > 0
            ]

        sequences = others + len(candidates)
        found = self._best(rows, sequences, budget, self.lengths, self.current, shares, num_fillers)
        self.current = found.length
        probed = [own for own in map(self._drafters.__getitem__, drafters) if own.is_probed]
        for own in probed:
            own.is_probed = False
        if found.length:
            for name in drafters:
                self._drafters[name].declined = 0
        elif probed and (tried := candidates if self._all_or_none else candidates[:PROBED]) and len(tried) <= budget:
            return self.lengths[1], tried
        else:
            self.decline(drafters)
        return found.length, [candidates[i] for i in found.picked]

    def to_compute(
        self,
        drafter: str,
        asking: Sequence[Asking],
        rows: int,
        others: int,
        budget: int,
        most: int,
        seconds_of: Callable[[int, int], float],
    ) -> tuple[int, Sequence[Request]]:
        """Return how many drafts a drafter should compute, and for which requests; 0 is counted as ``decline``.

        Args:
            drafter: its name.
            asking: those that it may draft for.
            rows: of the step without drafts.
            others: further sequences of the step that get a token.
            budget: most rows to add.
            most: of each.
            seconds_of: what it says that it takes to compute drafts for so many requests, so many for each.
        """
        own = self._drafters[drafter]

        def shares(length: int) -> list[_Share]:
            return [
                _Share(a.worth * self.acceptance(a.request, drafter).expected(min(length, a.room)), length, i)
                for i, a in enumerate(asking)
            ]

        lengths = [length for length in self.lengths if length <= most]
        sequences = others + len(asking)

        def seconds(count: int, length: int) -> float:
            return own.slowness * seconds_of(count, length)

        found = self._best(rows, sequences, budget, lengths, own.length, shares, _none, seconds)
        own.length = found.length
        if found.length:
            # Further rows would have none of its drafts.
            self.current = found.length
        elif own.is_probed:
            tried = asking if self._all_or_none else asking[:PROBED]
            return lengths[1], [a.request for a in tried]
        else:
            self.decline([drafter])
        return found.length, [asking[i].request for i in found.picked]

    def _best(
        self,
        rows: int,
        sequences: int,
        budget: int,
        lengths: Sequence[int],
        current: int,
        shares: Callable[[int], list[_Share]],
        num_fillers: Callable[[int, int, int], int],
        seconds_of: Callable[[int, int], float] = lambda count, length: 0.0,
    ) -> _Option:
        """Return what promises most tokens per second; see ``choose``.

        A step that computes prompts, too, is judged by what further rows of it cost: its tokens are worth what they
        cost in a step without prompts.
        """
        plain = self.seconds.of(sequences)
        before = self.seconds.of(rows) - plain
        best = own = _Option(sequences / plain, 0, [])  # no drafts
        for length in lengths[1:]:
            each = sorted(shares(length), key=lambda share: (-share.gain, share.place))
            gains = [0.0, *accumulate([share.gain for share in each])]
            added = [0, *accumulate([share.rows for share in each])]
            for count in self._counts(len(each)):
                if added[count] > budget:
                    break
                total = rows + added[count]
                total += length * num_fillers(total, count, length)
                took = self._seconds(sequences, total) - before + seconds_of(count, length)
                speed = (sequences + gains[count]) / took
                if speed > best.speed or (length == current and speed > own.speed):
                    option = _Option(speed, length, sorted([s.place for s in each[:count]]))
                    best = max(best, option)
                    own = max(own, option) if length == current else own
        return best if best.speed > own.speed * HYSTERESIS else own

    def _counts(self, most: int) -> list[int]:
        """How many of ``most`` requests may have drafts."""
        if self._all_or_none or not most:
            return [most] if most else []
        return [*[1 << i for i in range((most - 1).bit_length())], most]

    def _seconds(self, sequences: int, rows: int) -> float:
        """Seconds of a step, with a share of what it takes to record one of its size."""
        seconds = self.seconds.of(rows)
        if rows > MOST_RECORDED_ROWS or self._sizes[sequences, rows] >= RECORDED_AFTER:
            return seconds
        return seconds * (1.0 + (self._slowness_of_new - 1.0) * RECORDED_AFTER / REPEATS)

    def measure(self, sequences: int, rows: int, seconds: float) -> None:
        """Record the seconds of a step."""
        size = sequences, rows
        if rows <= MOST_RECORDED_ROWS and self._sizes[size] < RECORDED_AFTER:
            self._sizes[size] += 1
            slowness = min(max(seconds / self.seconds.of(rows), 1.0), _MOST_SLOWNESS)
            self._slowness_of_new += _FORGETTING * (slowness - self._slowness_of_new)
        self.seconds.measure(rows, seconds)

    def slowness(self, drafter: str) -> float:
        """Return the seconds that a drafter's drafts take, relative to what it says."""
        return self._drafters[drafter].slowness

    def measure_drafting(self, drafter: str, said: float, seconds: float) -> None:
        """Record how long a drafter took, beside what it said."""
        own = self._drafters[drafter]
        slowness = min(max(seconds / max(said, 1e-9), 1 / _MOST_SLOWNESS), _MOST_SLOWNESS)
        own.slowness += _FORGETTING * (slowness - own.slowness)

    def decline(self, drafters: Iterable[str]) -> None:
        """Record that drafters were asked for nothing."""
        for own in [self._drafters[name] for name in drafters]:
            own.declined += 1
            if own.declined >= WINDOW:
                own.take_a_rest(self._plain)

    def _expected(self, candidate: Candidate, length: int) -> float:
        return self.acceptance(candidate.request, candidate.proposal.drafter).expected(candidate.num_drafts(length))

    def acceptance(self, request: Request, drafter: str) -> Acceptance:
        """Return how often a request's drafts were accepted."""
        own = self._drafters[drafter]
        found = own.by_request.get(request)
        if found is None:
            found = own.by_request[request] = Acceptance(own.acceptance.by_place)
        return found

    def note(self, request: Request, drafter: str, count: int, accepted: int) -> None:
        """Record how many of a request's ``count`` drafts were accepted."""
        own = self._drafters[drafter]
        own.acceptance.note(count, accepted)
        self.acceptance(request, drafter).note(count, accepted)

    def idle(self, drafters: Iterable[str], seconds: float, plain: float) -> None:
        """Record a step without drafts in which drafters were asked: they rest until what that took is little.

        Args:
            drafters: they.
            seconds: that asking them took.
            plain: that the step took.
        """
        self._plain = plain
        for own in [self._drafters[name] for name in drafters]:
            own.rest = max(own.rest, min(int(seconds / (TOLERATED * plain)), REST))

    def judge(self, drafters: Iterable[str], tokens: float, plain_tokens: int, seconds: float, plain: float) -> None:
        """Record what a step with drafts was worth.

        Args:
            drafters: those that were asked.
            tokens: that it gave, by their worth.
            plain_tokens: that it would have given without drafts.
            seconds: that it and its drafts took.
            plain: that it would have taken without them.
        """
        self._plain = plain
        share = max(tokens, 1) / max(plain_tokens, 1)
        gain = math.log(share * plain / max(seconds, 1e-9))
        for own in [self._drafters[name] for name in drafters]:
            own.steps += 1
            own.gain += gain
            own.lost = max(own.lost + seconds - plain * share, 0.0)
            if own.steps < WINDOW:
                continue
            own.losses = own.losses + 1 if own.gain < 0 else 0
            if not own.losses:
                own.next_rest = REST
            own.steps, own.gain = 0, 0.0
            if own.losses >= LOSSES:
                own.take_a_rest(plain)


def _none(rows: int, count: int, length: int) -> int:
    return 0
