"""The length of drafts by what rows cost and what drafts were worth."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from torch_pagoda.runtime.requests.request import Request
from torch_pagoda.runtime.requests.sampling_params import SamplingParams
from torch_pagoda.runtime.speculation.draft_lengths import (
    LONGEST_REST,
    LOSSES,
    PROBED,
    REST,
    TOLERATED,
    WINDOW,
    Acceptance,
    Asking,
    Candidate,
    DraftLengths,
)
from torch_pagoda.runtime.speculation.drafter import Proposal
from torch_pagoda.runtime.speculation.step_seconds import StepSeconds

CHEAP = {1: 1.0, 2: 1.01, 4: 1.05, 8: 1.16}
"""Rows on a processor with AMX."""
DEAR = {1: 1.0, 2: 1.97, 4: 3.8, 8: 7.6}
"""int8 on one without VNNI."""


def make_request(name: str = "r") -> Request:
    return Request(name, [1], SamplingParams(max_tokens=1000))


def make_lengths(seconds: dict[int, float], expected: float = 0.5) -> DraftLengths:
    lengths = DraftLengths((0, 1, 3, 7), {"d": expected})
    for rows, each in seconds.items():
        lengths.seconds.measure(rows, each, is_settled=True)
    return lengths


def candidate(request: Request, count: int = 7, *, fills: bool = True) -> Candidate:
    return Candidate(request, Proposal((5,) * count, "d"), 1, 8, fills)


def serve(lengths: DraftLengths, costs: dict[int, float], right: float, steps: int) -> tuple[float, list[int]]:
    """Decode one request; returns tokens per second relative to none, and the lengths."""
    request, draws = make_request(), random.Random(0)
    tokens, seconds, chosen = 0, 0.0, []
    for _ in range(steps):
        lengths.begin_step()
        length = 0 if lengths.resting() else lengths.choose(1, 0, [candidate(request)], 100)[0]
        accepted = 0
        while accepted < length and draws.random() < right:
            accepted += 1
        took = costs[1 + length]
        if length:
            lengths.note(request, "d", length, accepted)
            lengths.judge(["d"], 1 + accepted, 1, took, lengths.seconds.of(1))
        lengths.measure(1, 1 + length, took)
        tokens, seconds = tokens + 1 + accepted, seconds + took
        chosen.append(length)
    return tokens / seconds, chosen


@pytest.mark.parametrize("costs", [CHEAP, DEAR], ids=["cheap rows", "dear rows"])
def test_wrong_drafts_are_given_up_and_tried_seldom(costs: dict[int, float]) -> None:
    speed, chosen = serve(make_lengths(costs), costs, 0.0, 4000)
    assert speed > 0.98
    late = [step for step, length in enumerate(chosen) if length and step > 200]
    assert 1 <= len(late) <= 30
    assert all(b - a >= REST for a, b in pairwise(late))


def test_right_drafts_are_long_where_rows_are_cheap() -> None:
    speed, chosen = serve(make_lengths(CHEAP), CHEAP, 0.95, 300)
    assert speed > 4 and chosen.count(7) > 250


def test_no_drafts_where_a_row_costs_a_step() -> None:
    speed, chosen = serve(make_lengths(DEAR), DEAR, 0.7, 3000)
    assert speed > 0.98 and chosen.count(0) > 2800


def test_drafts_that_become_right_are_found_again() -> None:
    lengths = make_lengths(CHEAP)
    serve(lengths, CHEAP, 0.0, 300)
    assert lengths.resting() or not lengths.current
    _, chosen = serve(lengths, CHEAP, 0.9, 1500)
    assert chosen[-200:].count(7) > 150


def test_expectations_of_one_request_are_not_those_of_another() -> None:
    lengths = make_lengths(CHEAP)
    good, bad = make_request("good"), make_request("bad")
    for _ in range(20):
        lengths.note(good, "d", 7, 7)
        lengths.note(bad, "d", 7, 0)
    assert lengths._expected(candidate(good), 7) > 6
    assert lengths._expected(candidate(bad), 7) < 0.1


def test_a_length_is_kept_unless_another_is_better_by_a_twentieth() -> None:
    request = make_request()
    lengths = DraftLengths((0, 1, 3), {"d": 0.0})
    lengths.current = 0
    lengths._drafters["d"].acceptance.by_place[:] = [0.04, 0.0, 0.0]
    for rows in (1, 2, 4):
        lengths.seconds.measure(rows, 1.0, is_settled=True)
        for _ in range(2):
            lengths.measure(1, rows, 1.0)
    assert lengths.choose(1, 0, [candidate(request)], 100)[0] == 0
    lengths.acceptance(request, "d").by_place[0] = 0.06
    assert lengths.choose(1, 0, [candidate(request)], 100)[0] in (1, 3)


def test_the_budget_of_a_step_bounds_the_length() -> None:
    lengths = make_lengths(CHEAP, expected=0.99)
    found = [candidate(make_request(str(i))) for i in range(4)]
    for budget, chosen in {12: (3, found), 3: (3, found[:1]), 0: (0, [])}.items():
        assert lengths.choose(4, 0, found, budget) == chosen


def test_rows_that_fill_a_step_up_are_paid_for() -> None:
    lengths = DraftLengths((0, 1), {"d": 0.9})
    for rows, each in {5: 1.0, 8: 1.1, 9: 2.0}.items():
        lengths.seconds.measure(rows, each, is_settled=True)
    found = [candidate(make_request(str(i))) for i in range(3)]
    assert lengths.choose(5, 2, found, 100) == (1, found)
    assert lengths.choose(5, 2, found, 100, lambda *step: int(step == (8, 3, 1))) == (1, found[:2])


@pytest.mark.parametrize(("fills", "rows"), [(True, 8), (False, 4)])
def test_short_drafts_are_filled_up(fills: bool, rows: int) -> None:
    assert candidate(make_request(), 3, fills=fills).rows(7) == rows


def test_seconds_between_and_beyond_the_measured_rows() -> None:
    seconds = StepSeconds()
    assert seconds.of(8) > seconds.of(1)
    seconds.measure(2, 1.0, is_settled=True)
    seconds.measure(4, 2.0, is_settled=True)
    assert seconds.of(3) == 1.5 and seconds.of(8) > 2.0 and seconds.of(1) < 1.0
    for _ in range(2):
        seconds.measure(8, 50.0)  # kernels are recorded
    assert seconds.of(8) < 5.0
    for took in (9.0, 4.0, 7.0):  # something else may have taken time
        seconds.measure(8, took)
    assert seconds.of(8) == 4.0
    seconds.measure(6, 50.0, is_settled=True)  # something else took the time
    assert seconds.of(6) == 4.0
    for _ in range(200):  # all becomes slower, as contexts grow
        seconds.measure(2, 3.0)
    assert seconds.of(2) == pytest.approx(3.0, rel=0.01) and seconds.of(4) > 3.0


def step_seconds(table: dict[int, float]) -> StepSeconds:
    seconds = StepSeconds()
    for rows, each in table.items():
        seconds.measure(rows, each, is_settled=True)
    return seconds


def test_further_rows_cost_what_the_last_ones_did_or_a_little() -> None:
    assert step_seconds({2: 1.0, 4: 2.0}).of(8) == 4.0
    assert step_seconds({2: 1.0, 4: 1.0}).of(8) == pytest.approx(1.1)
    assert step_seconds({2: 5.0, 4: 1.0}).of(3) == 1.0, "the first was held up"
    assert step_seconds({2: 1.0, 300: 9.0}).table() == {2: 1.0}, "too large to tell"


def test_a_duration_moves_those_of_all_sizes_and_its_own_by_more() -> None:
    seconds = step_seconds({2: 1.0, 4: 2.0})
    for _ in range(5):
        seconds.measure(4, 2.0)
    seconds.measure(4, 1000.0)  # as if it were e times as long
    assert seconds.table() == {2: pytest.approx(math.exp(0.1)), 4: pytest.approx(2 * math.exp(0.2))}


def test_the_part_of_a_step_that_fewer_rows_save() -> None:
    seconds = step_seconds({1: 1.0, 4: 2.0})
    assert seconds.growing(4) == pytest.approx(2 / 3) and seconds.growing(1) == 0.0
    assert step_seconds({1: 1.0, 4: 100.0}).growing(4) == 1.0
    assert step_seconds({1: 2.0, 4: 1.0}).growing(4) == 0.0


def test_probabilities_are_by_place() -> None:
    acceptance = Acceptance([0.5, 0.5, 0.5])
    for _ in range(60):
        acceptance.note(3, 1)
    assert acceptance.by_place[0] > 0.99 and acceptance.by_place[1] < 0.01 and acceptance.by_place[2] == 0.5
    assert acceptance.expected(3) == pytest.approx(1.0, abs=0.02)


def test_those_whose_drafts_are_right_have_some() -> None:
    lengths = DraftLengths((0, 1, 3, 7), {"d": 0.5})
    for rows in (1, 2, 4, 8, 16, 32, 64):
        lengths.seconds.measure(rows, 10.0 + rows / 2, is_settled=True)
    found = [candidate(make_request(str(i))) for i in range(8)]
    for _ in range(30):
        for i, each in enumerate(found):
            lengths.note(each.request, "d", 7, 7 if i in (2, 5) else 0)
    length, picked = lengths.choose(8, 0, found, 100)
    assert length == 7 and picked == [found[2], found[5]]
    asking = [Asking(each.request, 7) for each in found]
    free = lengths.to_compute("d", asking, 8, 0, 100, 7, lambda count, length: 0.0)
    assert free == (7, [found[2].request, found[5].request])
    dear = lengths.to_compute("d", asking, 8, 0, 100, 7, lambda count, length: 4.0 * length)
    assert dear == (0, [])
    for _ in range(40):
        lengths.measure_drafting("d", 1.0, 0.01)  # it says four times as much as it takes
    cheap = lengths.to_compute("d", asking, 8, 0, 100, 7, lambda count, length: 4.0 * length)
    assert cheap[0] > 0


def test_a_step_with_prompts_makes_no_draft_worth_more_or_less() -> None:
    lengths = make_lengths({1: 1.0, 2: 2.0, 100: 100.0, 101: 101.0}, expected=0.6)
    lengths.current = 0
    assert lengths.choose(100, 0, [candidate(make_request())], 100)[0] == 0
    lengths = make_lengths({1: 1.0, 100: 10.0, 101: 10.1, 107: 10.7}, expected=0.8)
    assert lengths.choose(100, 0, [candidate(make_request())], 100)[0] == 7


def test_the_numbers_of_those_with_drafts_are_few() -> None:
    lengths = make_lengths(CHEAP, expected=0.9)
    counts = set()
    for number in range(1, 33):
        found = [candidate(make_request(str(i)), 1) for i in range(number)]
        counts.add(len(lengths.choose(32, 32 - number, found, 1000)[1]) - number)
    assert 0 in counts
    assert lengths._counts(8) == [1, 2, 4, 8] and lengths._counts(6) == [1, 2, 4, 6] and lengths._counts(1) == [1]
    planned = DraftLengths((0, 3), {"d": 0.9}, all_or_none=True)
    assert planned._counts(6) == [6]


def test_a_size_that_is_new_must_earn_its_recording() -> None:
    lengths = make_lengths({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0}, expected=0.0)
    lengths.current = 0
    lengths._slowness_of_new = 4.0
    lengths._drafters["d"].acceptance.by_place[0] = 0.5
    assert lengths.choose(1, 0, [candidate(make_request())], 100)[0] == 0
    for _ in range(2):
        lengths.measure(1, 2, 1.0)
    assert lengths.choose(1, 0, [candidate(make_request())], 100)[0] == 1


def test_a_drafter_rests_until_its_losses_are_a_hundredth() -> None:
    lengths = make_lengths(CHEAP)
    for _ in range(WINDOW * LOSSES):
        lengths.judge(["d"], 1.0, 1, 1.1, 1.0)  # a tenth of a step is lost, each time
    assert lengths._drafters["d"].rest == pytest.approx(WINDOW * LOSSES * 0.1 / TOLERATED, abs=1)
    others = make_lengths(CHEAP)
    others.idle(["d"], 0.05, 1.0)
    assert others._drafters["d"].rest == 5
    others.idle(["d"], 0.005, 1.0)
    assert others._drafters["d"].rest == 5


def judge_windows(lengths: DraftLengths, *speeds: float) -> None:
    """Windows of steps that take a second without drafts; with them they are so many times as fast."""
    for speed in speeds:
        for _ in range(WINDOW):
            lengths.judge(["d"], max(speed, 1.0), 1, 1.0 / min(speed, 1.0), 1.0)


SLOW, FAST = 1 / 1.1, 2.0


@pytest.mark.parametrize(
    ("speeds", "rest"),
    [
        ([SLOW, SLOW, FAST, SLOW], 0),  # not in a row
        ([SLOW, SLOW, FAST, SLOW, SLOW, SLOW], 240),  # what was lost before was won again
        ([FAST, 0.99, 0.99, 0.99], REST),
        ([0.01, 0.01, 0.01], LONGEST_REST),
    ],
)
def test_losses_in_a_row_cost_a_rest(speeds: list[float], rest: int) -> None:
    lengths = make_lengths(CHEAP)
    judge_windows(lengths, *speeds)
    assert lengths._drafters["d"].rest == pytest.approx(rest, abs=1)


def test_one_step_after_a_rest_decides() -> None:
    lengths = make_lengths(CHEAP)
    own = lengths._drafters["d"]
    judge_windows(lengths, SLOW, SLOW, SLOW)
    for speed, rest in ((SLOW, 2 * REST), (FAST, 0)):
        own.rest = 0
        lengths.judge(["d"], max(speed, 1.0), 1, 1.0 / min(speed, 1.0), 1.0)
        assert own.rest == rest
    judge_windows(lengths, 0.99, 0.99, 0.99)
    assert own.rest == REST, "as long as at first"


def test_drafts_that_are_never_worth_a_try_cost_a_rest() -> None:
    lengths = make_lengths(CHEAP, expected=0.9)
    for _ in range(WINDOW - 1):
        lengths.decline(["d"])
    assert lengths.choose(1, 0, [candidate(make_request())], 100)[0] == 7
    for place in range(WINDOW):
        assert not lengths.resting(), place
        lengths.decline(["d"])
    assert lengths.resting()


def test_drafts_are_computed_for_those_who_need_them_and_have_room() -> None:
    def to_compute(lengths: DraftLengths, asking: list[Asking], others: int) -> tuple[int, Sequence[Request]]:
        rows = others + len(asking)
        return lengths.to_compute("d", asking, rows, others, 100, 7, lambda count, length: 0.0)

    lengths = make_lengths(CHEAP | {3: 1.02, 9: 1.2, 16: 1.3}, expected=0.9)
    idle, busy = make_request("idle"), make_request("busy")
    assert to_compute(lengths, [Asking(idle, 7, 0.0), Asking(busy, 7)], 0) == (7, [busy])
    assert to_compute(lengths, [Asking(busy, 1)], 0) == (1, [busy])
    dear = make_lengths({1: 1.0, 8: 4.0, 9: 4.1}, expected=0.9)
    assert to_compute(dear, [Asking(busy, 1)], 7) == (0, []), "seven others would wait for it"
    hopeless = make_lengths(CHEAP, expected=0.0)
    asking = [Asking(make_request(str(number)), 7) for number in range(PROBED + 2)]
    assert to_compute(hopeless, asking, 0) == (0, [])
    hopeless._drafters["d"].is_probed = True
    assert to_compute(hopeless, asking, 0) == (1, [each.request for each in asking[:PROBED]])


def test_a_length_is_left_as_soon_as_it_is_slower_than_none() -> None:
    lengths = make_lengths({1: 1.0, 2: 1.5}, expected=0.0)
    lengths.current = 1
    own = lengths._drafters["d"].acceptance.by_place
    own[0] = 0.52
    for _ in range(2):
        lengths.measure(1, 2, 1.5)
    assert lengths.choose(1, 0, [candidate(make_request())], 1)[0] == 1  # 1.3 % faster
    own[0] = 0.49
    assert lengths.choose(1, 0, [candidate(make_request())], 1)[0] == 0
