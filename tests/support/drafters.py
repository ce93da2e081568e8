"""Drafters that know what follows, or that do not, for tests and benchmarks of speculative decoding."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from torch_pagoda.runtime.engine.draft_setup import draft_with
from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.requests.request import Request
from torch_pagoda.runtime.speculation.draft_lengths import Asking, Candidate
from torch_pagoda.runtime.speculation.drafting import Drafting
from torch_pagoda.runtime.speculation.mtp import MtpDrafter

WRONG = 0
"""Added to a token that follows, it makes another one."""


class Oracle:
    """Proposes what is known to follow, some of it wrong.

    Args:
        answers: (prompt, seed) → tokens of the output.
        right: share of proposals that are.
        vocab_size: ids are below it.
    """

    name = "oracle"
    expected = 0.9

    def __init__(self, answers: Mapping[Any, Sequence[int]], right: float, vocab_size: int) -> None:
        self.answers, self.right, self.vocab_size = answers, right, vocab_size
        self.draws = random.Random(1)
        self.asked = 0
        self.told: dict[Request, list[int]] = {}

    def propose(self, request: Request, most: int) -> Sequence[int]:
        self.asked += 1
        known = self.answers.get(key_of(request), ())
        ids = list(known[request.num_output_tokens : request.num_output_tokens + most]) or [1]
        return [i if self.draws.random() < self.right else (i + 1) % self.vocab_size for i in ids]

    def settled(self, request: Request, tokens: Sequence[int]) -> None:
        told = self.told.setdefault(request, [])
        told += tokens
        assert told == request.output_token_ids[-len(told) :], "a token was told twice, or not"

    def finished(self, request: Request) -> None:
        self.told.pop(request, None)


class Raising(Oracle):
    """Raises, or returns what are no ids."""

    name = "raising"

    def propose(self, request: Request, most: int) -> Sequence[int]:
        self.asked += 1
        if self.asked % 3 == 0:
            raise RuntimeError("no draft")
        return [None, self.vocab_size, -1][self.asked % 3 :]  # type: ignore[return-value]

    def settled(self, request: Request, tokens: Sequence[int]) -> None:
        raise RuntimeError("no ears")


def key_of(request: Request) -> tuple[Any, ...]:
    return tuple(map(int, request.prompt_token_ids)), request.params.seed


def noted_drafts(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, ...], list[int]]:
    """Tokens of a request → the drafts that a head computed behind them."""
    noted = {}
    compute = MtpDrafter.propose_all

    def propose_all(self: MtpDrafter, requests: Sequence[Request], most: int) -> None:
        compute(self, requests, most)
        for request in requests:
            noted[tuple(request.tokens(0, request.num_tokens))] = self._drafts.get(request, [])

    monkeypatch.setattr(MtpDrafter, "propose_all", propose_all)
    return noted


def draft(
    engine: Engine, drafter: Oracle, length: int | Callable[[], int] | None = 3, *, num_planned: int = 0
) -> Drafting:
    """Have an engine ask a drafter.

    Args:
        engine: any.
        drafter: it.
        length: drafts of every step, or a function that says how many; None: as measured costs say.
        num_planned: see ``draft_with``.
    """
    ahead = engine._core.steps.stats() != {}
    drafting = draft_with(engine._core.state, [drafter], runs_ahead=ahead, num_planned=num_planned)
    assert drafting is not None
    if length is not None:
        always(drafting, length)
    return drafting


def always(drafting: Drafting, length: int | Callable[[], int]) -> None:
    """Have all requests of each step verify so many drafts, whatever they cost; a function says how many."""
    lengths = drafting.lengths

    def choose(
        rows: int, others: int, candidates: Sequence[Candidate], budget: int, num_fillers: object
    ) -> tuple[int, Sequence[Candidate]]:
        wanted = length() if callable(length) else length
        fits = [k for k in (7, 3, 1, 0) if k <= wanted and sum(c.rows(k) - c.known for c in candidates) <= budget]
        return fits[0], candidates

    def to_compute(
        drafter: str, asking: Sequence[Asking], rows: int, others: int, budget: int, most: int, seconds_of: object
    ) -> tuple[int, Sequence[Request]]:
        wanted = length() if callable(length) else length
        return wanted, [each.request for each in asking]

    lengths.choose, lengths.to_compute = choose, to_compute  # type: ignore[method-assign]
    lengths.judge = lengths.decline = lengths.idle = lambda *given: None  # type: ignore[method-assign]
