from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from torch_pagoda.runtime.requests.sampling_params import SEED_MAX, SamplingParams


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
    assert (p.presence_penalty, p.frequency_penalty, p.logit_bias, p.bad_words) == (0.0, 0.0, None, ())
    assert (p.allowed_token_ids, p.prompt_logprobs) == (None, None)
    assert not p.is_greedy and not p.is_plain


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_tokens", [-1, 1.5, True, "3", math.nan]),
        ("min_tokens", [-1, 0.5, False, None, 17]),
        ("temperature", [-0.1, math.nan, math.inf, "1", None, True]),
        ("top_k", [-2, 1.0, True, None]),
        ("top_p", [-0.1, 1.0001, math.nan, True]),
        ("min_p", [-0.1, 1.1, math.nan, None]),
        ("seed", [1.5, True, "0", 2**64, -(2**63) - 1]),
        ("stop", ["", [""], [3], 3, ["a", None]]),
        ("stop_token_ids", [[-1], [1.5], [True], 3, "12"]),
        ("ignore_eos", [1, None]),
        ("logprobs", [-1, True, 1.0]),
        ("n", [0, True, 2.0]),
        ("repetition_penalty", [0, -1.0, math.inf, math.nan]),
        ("presence_penalty", [-2.01, 2.01, math.nan, True, "1", None]),
        ("frequency_penalty", [-2.01, 2.01, math.nan, True, "1", None]),
        ("logit_bias", [3, [1, 2], "1"]),
        ("bad_words", ["", ["a", ""], [3], 3, b"a"]),
        ("allowed_token_ids", [[], [-1], [1.5], [True], 3, "12", {3: 1}]),
        ("prompt_logprobs", [-1, True, 1.0]),
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
        {"seed": -2},
        {"max_tokens": np.int64(3)},
        {"temperature": np.float32(0.5)},
        {"min_tokens": 16},
        {"logprobs": 0},
        {"stop_token_ids": np.array([1, 2])},
        {"presence_penalty": -2, "frequency_penalty": np.float32(2)},
        {"allowed_token_ids": np.array([5, 2])},
        {"prompt_logprobs": 0},
        {"logit_bias": {np.int64(3): -100, 0: np.float32(100)}},
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


@pytest.mark.parametrize("bias", [-100.5, 101, math.nan, True, "1", None])
def test_a_bad_bias_is_refused_with_its_token(bias):
    with pytest.raises(ValueError, match=r"logit_bias\[7\]=.*-100 and 100"):
        SamplingParams(logit_bias={3: 1.0, 7: bias})


@pytest.mark.parametrize("token", [-1, 1.0, "5", True])
def test_a_bias_of_no_token_is_refused(token):
    with pytest.raises(ValueError, match=r"logit_bias=.* holds .*integers"):
        SamplingParams(logit_bias={token: 1.0})


def test_what_is_given_twice_counts_once_and_what_the_caller_changes_later_does_not_count():
    assert SamplingParams(bad_words=["b", "a", "b"]).bad_words == ("b", "a")
    assert SamplingParams(bad_words="ab").bad_words == ("ab",)
    assert SamplingParams(allowed_token_ids=[4, 2, 4]).allowed_token_ids == (4, 2)
    bias = {1: 2.0}
    p = SamplingParams(logit_bias=bias)
    bias[1] = 3.0
    assert p.logit_bias == {1: 2.0}


def test_the_tokens_of_bad_words_survive_in_completions():
    p = SamplingParams(n=2, bad_words=["a b"], seed=1)
    with pytest.raises(ValueError, match="tokenize"):
        _ = p.completion(1).bad_words_token_ids
    known = p.with_bad_words_token_ids([[1, 2], [3]])
    assert known == p and p._bad_words is None
    assert known.completion(1).bad_words_token_ids == known.bad_words_token_ids == ((1, 2), (3,))
    assert SamplingParams().bad_words_token_ids == ()


def test_one_completion_reports_the_prompt_for_all():
    p = SamplingParams(n=3, prompt_logprobs=2)
    assert [p.completion(i).prompt_logprobs for i in range(3)] == [2, None, None]
    assert SamplingParams(prompt_logprobs=2).completion(0).prompt_logprobs == 2


def test_frozen_and_hashable():
    p = SamplingParams(stop=["a"], stop_token_ids=[1], logit_bias={1: 2})
    assert p == SamplingParams(stop="a", stop_token_ids=(1,), logit_bias={1: 2.0}) and len({p, p}) == 1
    assert p != SamplingParams(stop="a", stop_token_ids=(1,), logit_bias={1: 3.0})
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.n = 2  # type: ignore[misc]


def test_greedy_and_plain():
    assert SamplingParams(temperature=0).is_plain
    assert SamplingParams(temperature=1e-6).is_greedy
    assert not SamplingParams(temperature=1e-4).is_greedy
    assert SamplingParams(temperature=0, prompt_logprobs=3, logit_bias={}, bad_words=[]).is_plain
    for asks in (
        {"logprobs": 0},
        {"repetition_penalty": 1.1},
        {"min_tokens": 1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"logit_bias": {0: 1.0}},
        {"bad_words": ["a"]},
        {"allowed_token_ids": [1]},
    ):
        p = SamplingParams(temperature=0, **asks)
        assert p.is_greedy and not p.is_plain
        assert p.changes_logits == ("logprobs" not in asks)


def test_a_seed_of_minus_one_is_none():
    assert SamplingParams(seed=-1) == SamplingParams()
    assert SamplingParams(seed=-1, n=2).completion(1).seed is None
    assert SamplingParams(seed=-2).seed == -2


def test_completions_differ_in_their_seed_only():
    p = SamplingParams(n=3, seed=7, top_k=5)
    assert [p.completion(i).seed for i in range(3)] == [7, 8, 9]
    assert p.completion(1) == SamplingParams(seed=8, top_k=5)
    assert SamplingParams(n=2).completion(1).seed is None
    assert SamplingParams(n=2, seed=SEED_MAX).completion(1).seed == 0
