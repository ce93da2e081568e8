"""What followed earlier: of a request's own tokens and of others', and who sees what of whom."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_pagoda.runtime.requests.request import Request
from torch_pagoda.runtime.requests.sampling_params import SamplingParams
from torch_pagoda.runtime.speculation.config import SpeculativeConfig, read_speculative_config
from torch_pagoda.runtime.speculation.suffix_tree import SharedTrees, SuffixDrafter, SuffixTree, own_match

NGRAM = read_speculative_config({"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4})
SUFFIX = SpeculativeConfig("suffix")


def request(
    name: str, prompt: Sequence[int], output: Sequence[int] = (), salt: str = "", client: str = ""
) -> Request:
    made = Request(name, list(prompt), SamplingParams(max_tokens=100), client=client, cache_salt=salt)
    made.output_token_ids += output
    return made


def naive(ids: Sequence[int], config: SpeculativeConfig, most: int) -> list[int]:
    """The latest occurrence of the longest suffix, and what followed."""
    for length in range(min(config.longest_match, len(ids) - 1), config.least_match - 1, -1):
        tail = list(ids[-length:])
        for end in range(len(ids) - 1, length - 1, -1):
            if list(ids[end - length : end]) == tail:
                return list(ids[end : end + most])
    return []


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 7))
def test_prompt_lookup_takes_the_latest_of_the_longest_matches(ids: list[int], most: int) -> None:
    assert own_match(np.array(ids), NGRAM, most).ids == naive(ids, NGRAM, most)


@given(st.lists(st.integers(0, 2), min_size=4, max_size=40), st.integers(1, 7))
def test_the_index_finds_what_a_comparison_of_all_places_finds(ids: list[int], most: int) -> None:
    tree = SuffixTree(3)
    tree.add(ids[:-3])
    found = tree.match(ids[-3:], SUFFIX, most)
    whole = own_match(np.array([*ids[:-3], 9, *ids[-3:]]), SUFFIX, most)
    if found.ids:
        assert len(found.ids) <= found.length <= 3 <= whole.length
        places = [end for end in range(3, len(ids) - 2) if ids[end - 3 : end] == ids[-3:]]
        assert any(ids[end : min(end + len(found.ids), len(ids) - 3)] == found.ids for end in places)


def test_the_most_frequent_continuation_is_drafted() -> None:
    ids = [1, 2, 3, 5, 6, 0, 1, 2, 3, 4, 6, 0, 1, 2, 3, 4, 7, 9, 1, 2, 3]
    assert own_match(np.array(ids), SUFFIX, 7).ids == [4, 7, 9]  # as many as tokens match
    picky = SpeculativeConfig("suffix", least_probability=0.5)
    assert own_match(np.array(ids), picky, 7).ids == [4]


def test_a_request_drafts_from_its_prompt_and_output() -> None:
    drafter = SuffixDrafter(SUFFIX)
    made = request("r", [1, 2, 3, 4, 5, 6])
    assert drafter.propose(made, 7) == []
    made.output_token_ids += [1, 2, 3]
    assert drafter.propose(made, 7) == [4, 5, 6]
    assert drafter.propose(made, 2) == [4, 5]
    made.output_token_ids += [4, 9, 9, 9, 9]
    assert drafter.propose(made, 7) == [9, 9, 9][:3] or drafter.propose(made, 7) == [9]
    del made.output_token_ids[3:]  # an interrupt
    made.output_token_ids.append(4)
    assert drafter.propose(made, 7)[0] == 5


def test_no_more_is_drafted_than_was_asked_for() -> None:
    drafter = SuffixDrafter(read_speculative_config({"method": "suffix", "num_speculative_tokens": 2}))
    assert drafter.propose(request("r", [1, 2, 3, 4, 5, 6, 1, 2, 3]), 7) == [4, 5]


ANSWER = [40, 41, 42, 43, 44, 45]


@pytest.mark.parametrize(
    ("salt", "client", "is_seen"), [("s", "c", True), ("t", "c", False), ("s", "d", False), ("", "", False)]
)
def test_answers_are_seen_by_their_owner_only(salt: str, client: str, is_seen: bool) -> None:
    drafter = SuffixDrafter(SUFFIX)
    drafter.finished(request("first", [7, 8, 9], ANSWER, "s", "c"))
    again = request("again", [7, 8, 9], (), salt, client)
    assert drafter.propose(again, 7) == (ANSWER[:3] if is_seen else [])
    again.output_token_ids += ANSWER[:2]
    assert drafter.propose(again, 7) == (ANSWER[2:] if is_seen else [])


def test_ngram_sees_nobody_else() -> None:
    drafter = SuffixDrafter(NGRAM)
    drafter.finished(request("first", [7, 8, 9], ANSWER))
    assert drafter.propose(request("again", [7, 8, 9], ANSWER[:2]), 7) == []


def test_memory_is_bounded_and_what_was_used_last_stays() -> None:
    trees = SharedTrees(3, 240 * 1000)
    for owner in range(6):
        for text in range(60):  # more than a half holds
            trees.add((str(owner), ""), [owner * 1000 + text * 10 + i for i in range(9)])
            counted = sum(len(tree) for halves in trees._trees.values() for tree in halves)
            assert trees.num_bytes == 240 * counted <= 240 * 1000
    assert trees.match(("5", ""), [5290, 5291, 5292], SUFFIX, 3).ids == [5293, 5294, 5295]
    assert not trees.match(("0", ""), [0, 1, 2], SUFFIX, 3).ids
    trees.add(("9", ""), range(100_000))
    assert trees.num_bytes <= 240 * 1000
    assert trees.match(("9", ""), [99_990, 99_991, 99_992], SUFFIX, 3).ids


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "method None is not known"),
        ({"method": "medusa"}, "method 'medusa' is not known; use 'suffix', 'ngram', 'draft_model' or 'mtp'"),
        ({"method": "mtp", "model": ""}, "model='' names no head; use a checkpoint folder or hub id"),
        ({"method": "mtp", "tree": 3}, "key 'tree' is not one of 'mtp'; use method, num_speculative_tokens, model"),
        ({"method": "draft_model"}, "model=None names no draft model; use a checkpoint folder or hub id"),
        ({"method": "draft_model", "model": 3}, "model=3 names no draft model"),
        ({"method": "draft_model", "model": "x", "prompt_lookup_max": 3}, "key 'prompt_lookup_max' is not one of"),
        ({"method": "ngram", "model": "small"}, "key 'model' is not one of 'ngram'; use method, num_spec"),
        ({"method": "suffix", "prompt_lookup_max": 3}, "key 'prompt_lookup_max' is not one of 'suffix'"),
        ({"method": "suffix", "num_speculative_tokens": 0}, "num_speculative_tokens=0 is not a whole number from 1"),
        ({"method": "suffix", "num_speculative_tokens": True}, "num_speculative_tokens=True is not"),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 2}, "prompt_lookup_min=5 is above"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 2}, "suffix_decoding_min_token_prob=2 is not"),
    ],
    ids=str,
)
def test_bad_settings_are_refused_by_name(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as error:
        read_speculative_config(given)
    assert str(error.value).startswith("speculative_config: ") and message in str(error.value)


def test_defaults_of_prompt_lookup_are_vllms() -> None:
    def limits(**keys: int) -> tuple[int, int]:
        read = read_speculative_config({"method": "ngram", **keys})
        return read.least_match, read.longest_match

    assert limits() == (5, 5)
    assert limits(prompt_lookup_max=3) == (3, 3)
    assert limits(prompt_lookup_min=2) == (2, 2)
    assert limits(prompt_lookup_min=1, prompt_lookup_max=4) == (1, 4)
