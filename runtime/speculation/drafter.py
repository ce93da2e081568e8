"""The contract of drafters, and a guard that lets no drafter do harm."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Protocol, runtime_checkable

from ..requests.request import Request

logger = logging.getLogger(__name__)


class Drafter(Protocol):
    """Proposes tokens that may follow a request's. Wrong ones cost time only: a draft is accepted where the request's
    own draw yields it. What a drafter remembers of a request may be approximate or lost.

    Attributes:
        name: of its figures.
        expected: probability that its first drafts are accepted, before any was tried.
    """

    name: str
    expected: float

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """Return up to ``most`` token ids, maybe none."""

    def settled(self, request: Request, tokens: Sequence[int]) -> None:
        """Take note of tokens that were appended to the request's output."""

    def finished(self, request: Request) -> None:
        """Forget a request that ends; its blocks are freed afterwards."""


@runtime_checkable
class BatchDrafter(Drafter, Protocol):
    """Computes its drafts for all requests of a step in one batch; ``propose`` returns what that has computed.

    Attributes:
        most: most drafts of a request.
        holds_blocks: drafts are computed in the blocks of the request's step, which have to be there before. Where
            copies fill some of them, there are none in that step.
    """

    most: int
    holds_blocks: bool

    def propose_all(self, requests: Sequence[Request], most: int) -> None:
        """Compute up to ``most`` drafts for each request. Called while a step is planned, when the tokens of all
        requests are settled."""

    def seconds_of(self, count: int, length: int) -> float:
        """Return about how long ``propose_all`` takes for ``length`` drafts of ``count`` requests."""

    def reset(self) -> None:
        """Forget all requests, whatever state an interrupted call left behind."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafts for a request.

    Attributes:
        ids: at least one.
        drafter: name of the drafter.
    """

    ids: tuple[int, ...]
    drafter: str

    def cut(self, count: int) -> Proposal | None:
        """Return the first ``count`` drafts; None if that leaves none."""
        return self if count >= len(self.ids) else Proposal(self.ids[:count], self.drafter) if count else None


class Drafters:
    """Asks drafters in their order; the first that proposes something is taken.

    A drafter that raises, or returns anything but ids of the vocabulary, proposes nothing in that step.

    Attributes:
        num_failed: calls that raised or returned no ids.
    """

    def __init__(self, drafters: Sequence[Drafter], vocab_size: int) -> None:
        self.drafters = list(drafters)
        self.num_failed = 0
        self._vocab_size = vocab_size
        self._reported: set[str] = set()

    def propose_all(self, drafter: BatchDrafter, requests: Sequence[Request], most: int) -> bool:
        """Have a drafter compute up to ``most`` drafts for each request; returns whether it did."""
        try:
            drafter.propose_all(requests, most)
        except Exception as error:
            self._report(drafter, repr(error))
            return False
        return True

    def propose(self, request: Request, most: int, resting: frozenset[str]) -> Proposal | None:
        """Return up to ``most`` drafts of the first drafter that has some, without those that are ``resting``."""
        for drafter in self.drafters:
            if drafter.name in resting:
                continue
            try:
                found = list(drafter.propose(request, most))[:most]
            except Exception as error:
                self._report(drafter, repr(error))
                continue
            if not all([isinstance(token, Integral) and 0 <= token < self._vocab_size for token in found]):
                self._report(drafter, f"{found} are not ids of {self._vocab_size} tokens")
            elif found:
                return Proposal(tuple(map(int, found)), drafter.name)
        return None

    def settled(self, request: Request, tokens: Sequence[int]) -> None:
        """Tell all drafters of new tokens."""
        for drafter in self.drafters:
            try:
                drafter.settled(request, tokens)
            except Exception as error:
                self._report(drafter, repr(error))

    def finished(self, request: Request) -> None:
        """Tell all drafters that a request has ended."""
        for drafter in self.drafters:
            try:
                drafter.finished(request)
            except Exception as error:
                self._report(drafter, repr(error))

    def _report(self, drafter: Drafter, what: str) -> None:
        self.num_failed += 1
        if drafter.name not in self._reported:
            self._reported.add(drafter.name)
            logger.warning("drafter %s fails, and drafts nothing where it does: %s", drafter.name, what)
