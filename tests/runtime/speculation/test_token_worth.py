"""What a saved token is worth: to a batch that drains, and where others follow."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from torch_pagoda.runtime.requests.request import Request
from torch_pagoda.runtime.requests.sampling_params import SamplingParams
from torch_pagoda.runtime.speculation.draft_lengths import Candidate, DraftLengths
from torch_pagoda.runtime.speculation.drafter import Proposal
from torch_pagoda.runtime.speculation.token_worth import is_draining, token_worths


def request(name: str, arrival: float | None = 0.0, first: float | None = 1.0) -> Request:
    made = Request(name, [1], SamplingParams(max_tokens=1000))
    made.arrival_time, made.first_token_time = arrival, first
    return made


def cost(rows: int) -> float:
    """Most of a step is spent on weights, whatever its rows."""
    return 10.0 + rows / 2


def drain(rights: Sequence[float], length: int, *, weighs: bool) -> tuple[float, float]:
    """Decode a batch of one length, drafts of each request being right as often; returns seconds without drafts and
    with."""
    lengths = DraftLengths((0, 1, 3, 7), {"d": 0.5})
    for rows in (1, 2, 4, 8, 16, 32, 64):
        lengths.seconds.measure(rows, cost(rows), is_settled=True)
    draws, left = random.Random(1), {request(str(i)): length for i in range(len(rights))}
    right = dict(zip(left, rights, strict=True))
    plain, seconds = length * cost(len(left)), 0.0
    while left:
        worths, expected = [1.0] * len(left), [lengths.acceptance(r, "d").expected(7) for r in left]
        growing = lengths.seconds.growing(len(left))
        if weighs:
            worths = token_worths(list(left.values()), [1.0 + each for each in expected], growing)
        found = [
            Candidate(r, Proposal((5,) * 7, "d"), 1, min(8, left[r]), True, worth)
            for r, worth in zip(left, worths, strict=True)
        ]
        count, picked = lengths.choose(len(left), 0, found, 1000)
        rows, given = len(left), dict.fromkeys(left, 1)
        for each in picked:
            drafts = each.num_drafts(count)
            rows += each.rows(count) - 1
            while given[each.request] <= drafts and draws.random() < right[each.request]:
                given[each.request] += 1
            given[each.request] = min(given[each.request], 1 + drafts)
            if drafts:
                lengths.note(each.request, "d", drafts, given[each.request] - 1)
        lengths.measure(len(left), rows, cost(rows))
        seconds += cost(rows)
        left = {r: tokens - given[r] for r, tokens in left.items() if tokens > given[r]}
    return plain, seconds


def test_a_batch_drains_when_its_last_request_ends() -> None:
    plain, weighed = drain([0.7] * 7 + [0.0], 200, weighs=True)
    _, unweighed = drain([0.7] * 7 + [0.0], 200, weighs=False)
    assert weighed - plain < 8 * cost(8)  # until it is known whose drafts are wrong
    assert unweighed - plain > 2 * (weighed - plain)


def test_a_batch_that_can_be_hurried_is() -> None:
    plain, seconds = drain([0.8] * 8, 200, weighs=True)
    assert seconds < 0.75 * plain


def test_a_single_request_is_what_a_batch_waits_for() -> None:
    assert token_worths([50], [1.5], 0.0) == [1.0]
    plain, seconds = drain([0.9], 200, weighs=True)
    assert seconds < 0.6 * plain


def test_worths_share_a_step() -> None:
    worths = token_worths([100, 100, 40, 90], [1.0, 1.0, 3.0, 1.0], 0.5)
    assert worths == [0.5, 0.5, 0.5, 0.5], "the last ones have no drafts that could be right"
    worths = token_worths([100, 100, 40, 90], [1.25, 1.25, 3.0, 1.0], 0.5)
    assert worths == [1.5, 1.5, 0.5, 0.5] and sum(worths) == 4
    assert token_worths([100] * 3, [2.0] * 3, 0.2) == pytest.approx([1.0] * 3)


def test_a_batch_drains_where_nobody_follows() -> None:
    batch = [request("a"), request("b", first=2.0), request("c", first=None)]
    assert is_draining(batch, 0)
    assert not is_draining(batch, 1)
    assert not is_draining([*batch, request("late", arrival=1.5, first=None)], 0)
    assert not is_draining([request("a", first=None)], 0), "nobody was answered yet"
    assert not is_draining([*batch, request("unknown", arrival=None)], 0)
