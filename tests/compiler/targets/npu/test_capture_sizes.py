"""Sizes of captured steps: the least padding, against brute force; budgets; the default mix of steps."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_pagoda.compiler.targets.npu.sizes.capture_sizes import (
    most_padding,
    padded_size,
    plan_capture_sizes,
    request_mix,
    wasted,
)
from torch_pagoda.compiler.targets.npu.sizes.graph_resources import CAPTURES_PER_GRAPH

MOST = 40
MIXES = st.dictionaries(st.integers(1, MOST), st.integers(0, 9), max_size=25)


def test_padded_size():
    assert [padded_size(n, (2, 4, 9)) for n in (1, 2, 3, 4, 5, 9, 10)] == [2, 2, 4, 4, 9, 9, None]
    assert padded_size(1, ()) is None


def test_most_padding():
    assert most_padding((2, 4, 9)) == 4
    assert most_padding((5,)) == 4
    assert most_padding((1, 2, 3)) == most_padding(()) == 0


def test_wasted_counts_tokens_by_weight():
    assert wasted({1: 2, 3: 1, 4: 5, 8: 0.5}, (4, 9)) == 2 * 3 + 1 + 0 + 0.5
    with pytest.raises(ValueError, match="ends below the step of 8 in mix"):
        wasted({8: 1}, (4,))


@given(st.dictionaries(st.integers(1, 9), st.integers(0, 5)), st.integers(0, 3), st.integers(1, 5))
def test_no_choice_wastes_less(mix, beyond, limit):
    most = max(mix, default=1) + beyond
    found = plan_capture_sizes(mix, most, limit)
    choices = (c for k in range(limit) for c in itertools.combinations(range(1, most), k))
    assert wasted(mix, found) == min(wasted(mix, (*choice, most)) for choice in choices)


@given(MIXES, st.integers(1, 12))
def test_a_plan_covers_all_steps_within_the_limit(mix, limit):
    sizes = plan_capture_sizes(mix, MOST, limit)
    assert list(sizes) == sorted(set(sizes)) and sizes[0] >= 1 and sizes[-1] == MOST
    assert len(sizes) <= limit
    assert set(sizes) <= {size for size, weight in mix.items() if weight} | {MOST}


@given(MIXES, st.integers(1, 12))
def test_more_sizes_never_waste_more(mix, limit):
    fewer, more = (wasted(mix, plan_capture_sizes(mix, MOST, n)) for n in (limit, limit + 1))
    assert more < fewer or more == fewer == 0


@given(MIXES, st.integers(1, MOST))
def test_powers_of_two_waste_no_less(mix, most):
    mix = {size: weight for size, weight in mix.items() if size <= most}
    powers = sorted({2**k for k in range(most.bit_length()) if 2**k < most} | {most})
    assert wasted(mix, plan_capture_sizes(mix, most, len(powers))) <= wasted(mix, powers)


@settings(max_examples=20)
@given(st.dictionaries(st.integers(1, 3000), st.floats(0, 1e6), max_size=60), st.integers(1, CAPTURES_PER_GRAPH))
def test_fractions_and_gaps(mix, limit):
    sizes = plan_capture_sizes(mix, 3000, limit)
    assert len(sizes) <= limit and sizes[-1] == 3000
    even = sorted({-(-3000 * (i + 1) // limit) for i in range(limit)})
    assert wasted(mix, sizes) <= wasted(mix, even) * (1 + 1e-9) + 1e-6


def test_known_plans():
    assert plan_capture_sizes({}, 7) == (7,)
    assert plan_capture_sizes({1: 1, 2: 1, 3: 1, 4: 1}, 4, 2) == (2, 4)
    assert plan_capture_sizes({1: 100, 2: 1, 3: 1, 4: 1}, 4, 2) == (1, 4)
    assert plan_capture_sizes({5: 1, 6: 1}, 6) == (5, 6)
    assert len(plan_capture_sizes(dict.fromkeys(range(1, 2049), 1), 2048)) == CAPTURES_PER_GRAPH


@pytest.mark.parametrize(
    ("mix", "most", "limit", "words"),
    [
        ({9: 1}, 8, 2, r"mix\[9\]=1 is not a step of 1 to 8"),
        ({0: 1}, 8, 2, r"mix\[0\]=1"),
        ({3: -1}, 8, 2, r"mix\[3\]=-1"),
        ({3: float("nan")}, 8, 2, r"mix\[3\]=nan"),
        ({}, 0, 2, "max_size=0"),
        ({}, 8, 0, "limit=0"),
    ],
)
def test_plans_that_cannot_be(mix, most, limit, words):
    with pytest.raises(ValueError, match=words):
        plan_capture_sizes(mix, most, limit)


@given(st.integers(1, 300), st.integers(1, 4000), st.floats(0, 1))
def test_request_mix_is_a_distribution_up_to_the_budget(seqs, tokens, share):
    mix = request_mix(seqs, tokens, decode_share=share)
    assert sum(mix.values()) == pytest.approx(1)
    assert min(mix.values()) >= 0 and min(mix) == 1 and max(mix) == tokens
    decode = sum(weight for size, weight in mix.items() if size <= seqs)
    assert decode == pytest.approx(share if tokens > seqs else 1)
    assert set(range(1, min(seqs, tokens) + 1)) <= set(mix)


def test_request_mix_of_the_defaults():
    mix = request_mix(64, 2048)
    assert mix[1] == mix[64] == pytest.approx(0.9 / 64)
    assert mix[2048] > 0.05 and mix[2032] == mix[80] < 0.001
    for arguments in ((0, 8), (8, 0)):
        with pytest.raises(ValueError, match="must be at least 1"):
            request_mix(*arguments)
    with pytest.raises(ValueError, match=r"decode_share=1\.5"):
        request_mix(8, 8, decode_share=1.5)
