from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from torch_pagoda.runtime.sampling_params import SEED_MAX, SamplingParams


def test_defaults_are_vllms():
    p = SamplingParams()
    assert (p.max_tokens, p.min_tokens, p.temperature, p.top_k, p.top_p, p.min_p) == (16, 0, 1.0, 0, 1.0, 0.0)
    assert (p.seed, p.stop_strings, p.stop_ids, p.ignore_eos, p.logprobs, p.n) == (
        None,
        (),
        (),
        False,
        None,
        1,
    )
    assert p.repetition_penalty == 1.0
    assert not p.is_greedy and not p.is_plain


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_tokens", [0, -1, 1.5, True, None, "3", math.nan]),
        ("min_tokens", [-1, 0.5, False, None, 17]),
        ("temperature", [-0.1, math.nan, math.inf, "1", None, True]),
        ("top_k", [-2, 1.0, True, None]),
        ("top_p", [0, -0.1, 1.0001, math.nan, True]),
        ("min_p", [-0.1, 1.1, math.nan, None]),
        ("seed", [1.5, True, "0", 2**64, -(2**63) - 1]),
        ("stop", ["", [""], [3], 3, ["a", None]]),
        ("stop_token_ids", [[-1], [1.5], [True], 3, "12"]),
        ("ignore_eos", [1, None]),
        ("logprobs", [-1, True, 1.0]),
        ("n", [0, True, 2.0]),
        ("repetition_penalty", [0, -1.0, math.inf, math.nan]),
    ],
)
def test_bad_values_are_refused_in_one_line_that_names_them(name, values):
    for value in values:
        with pytest.raises(ValueError, match=name) as caught:
            SamplingParams(**{name: value})
        message = str(caught.value)
        assert "\n" not in message and repr(value) in message


@pytest.mark.parametrize(
    "good",
    [
        {"top_k": -1},
        {"top_p": 1e-6},
        {"min_p": 1.0},
        {"temperature": 0},
        {"seed": SEED_MAX},
        {"seed": -1},
        {"max_tokens": np.int64(3)},
        {"temperature": np.float32(0.5)},
        {"min_tokens": 16},
        {"logprobs": 0},
        {"stop_token_ids": np.array([1, 2])},
    ],
)
def test_edge_values_are_accepted(good):
    params = SamplingParams(**good)
    for name, given in good.items():
        assert list(np.ravel(getattr(params, name))) == list(np.ravel(given))


def test_stop_becomes_a_tuple():
    assert SamplingParams(stop="end").stop_strings == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams(stop_token_ids=[3, 4]).stop_ids == (3, 4)


def test_frozen_and_hashable():
    p = SamplingParams(stop=["a"], stop_token_ids=[1])
    assert p == SamplingParams(stop="a", stop_token_ids=(1,)) and len({p, p}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.n = 2  # type: ignore[misc]


def test_greedy_and_plain():
    assert SamplingParams(temperature=0).is_plain
    assert SamplingParams(temperature=1e-6).is_greedy
    assert not SamplingParams(temperature=1e-4).is_greedy
    for asks in ({"logprobs": 0}, {"repetition_penalty": 1.1}, {"min_tokens": 1}):
        p = SamplingParams(temperature=0, **asks)
        assert p.is_greedy and not p.is_plain


def test_completions_differ_in_their_seed_only():
    p = SamplingParams(n=3, seed=7, top_k=5)
    assert [p.completion(i).seed for i in range(3)] == [7, 8, 9]
    assert p.completion(1) == SamplingParams(seed=8, top_k=5)
    assert SamplingParams(n=2).completion(1).seed is None
    assert SamplingParams(n=2, seed=SEED_MAX).completion(1).seed == 0
