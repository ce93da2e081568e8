from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from torch_pagoda.runtime.requests.request import Request
from torch_pagoda.runtime.requests.sampling_params import SamplingParams
from torch_pagoda.runtime.sampling import sampler as sampler_module
from torch_pagoda.runtime.sampling.sampler import Sampler, seeded_uniform


def make_request(prompt=(1,), output=(), **params):
    return Request("r", list(prompt), SamplingParams(**params), output_token_ids=list(output))


def randn(*shape, seed=0, scale=3.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def sweep(logits, points=1500, **params):
    """Distribution that the sampler draws from, found by drawing at evenly spaced uniform numbers."""

    class Evenly(Sampler):
        def _uniforms(self, requests):
            return (torch.arange(len(requests), dtype=torch.float64) + 0.5) / len(requests)

    requests = [make_request(**params)] * points
    tokens = Evenly().sample(logits.expand(points, -1), requests).token_ids
    return torch.bincount(torch.tensor(tokens), minlength=logits.shape[-1]) / points


def hf_distribution(logits, params):
    """What HuggingFace's processors leave, in vLLM's order (min_p before top_k and top_p)."""
    p = SamplingParams(**params)
    steps = LogitsProcessorList([TemperatureLogitsWarper(p.temperature)])
    if p.min_p:
        steps.append(MinPLogitsWarper(p.min_p))
    if 0 < p.top_k < logits.shape[-1]:
        steps.append(TopKLogitsWarper(p.top_k))
    if p.top_p < 1:
        steps.append(TopPLogitsWarper(p.top_p))
    return steps(torch.LongTensor([[0]]), logits[None]).softmax(-1)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_is_argmax_also_among_equals(dtype):
    logits = randn(64, 1000, scale=0.5).to(dtype)
    logits[:, 500] = logits[:, 20] = logits.amax(-1)
    before = logits.clone()
    requests = [make_request(temperature=0)] * 63 + [make_request(temperature=1e-6, seed=3)]
    out = Sampler().sample(logits, requests)
    first = [int((row == row.max()).nonzero()[0]) for row in logits]
    assert out.token_ids == first == logits.argmax(-1).tolist()
    assert out.logprobs == [None] * 64 and out.failed == []
    assert torch.equal(logits, before)


def test_greedy_stays_greedy_in_a_mixed_batch():
    logits = randn(4, 200)
    requests = [make_request(temperature=0), make_request(), make_request(temperature=0, logprobs=1)]
    requests.append(make_request(temperature=0, min_tokens=1, top_k=3, top_p=0.1, min_p=0.9))
    tokens = Sampler().sample(logits, requests).token_ids
    best = logits.argmax(-1).tolist()
    assert [tokens[i] for i in (0, 2, 3)] == [best[i] for i in (0, 2, 3)]


CASES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": -1},
    {"top_k": 10_000},
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"top_p": 1e-9},
    {"top_p": 0.999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.7},
    {"top_k": 400, "top_p": 0.95, "temperature": 1.7},
    {"top_k": 3, "min_p": 0.2, "temperature": 0.7},
    {"top_p": 0.8, "min_p": 0.05, "temperature": 1.3},
    {"top_k": 7, "top_p": 0.6, "min_p": 0.01, "temperature": 2.0},
]


@pytest.mark.parametrize("params", CASES, ids=str)
@pytest.mark.parametrize("vocab", [37, 700, 1024])
def test_distribution_equals_huggingface(vocab, params):
    logits = randn(vocab, seed=vocab, scale=1.5)
    ours, theirs = sweep(logits, **params), hf_distribution(logits, params)
    assert not ours[theirs == 0].any()
    # An even sweep hits each token floor or ceil of its share, up to rounding.
    assert (ours - theirs).abs().max() < 1.01 / 1500


@pytest.mark.parametrize("params", [{"top_p": 0.9}, {"top_p": 0.5, "top_k": 30}, {"top_k": 2, "top_p": 0.5}])
@pytest.mark.parametrize("candidates", [2, 5, 256])
def test_looking_at_few_candidates_first_changes_nothing(monkeypatch, candidates, params):
    logits = (randn(64, 500, scale=2.0) * 2).round() / 2  # many equals
    logits[:8] = 0
    logits[8:16, 3] = 9
    requests = [make_request(seed=i, **params) for i in range(64)]
    expected = Sampler().sample(logits, requests).token_ids
    monkeypatch.setattr(sampler_module, "_FIRST_CANDIDATES", 500)
    assert Sampler().sample(logits, requests).token_ids == expected
    monkeypatch.setattr(sampler_module, "_FIRST_CANDIDATES", candidates)
    assert Sampler().sample(logits, requests).token_ids == expected


def test_equals_of_the_kth_token_stay_and_top_p_takes_the_lower_ids():
    logits = torch.full((50,), -5.0)
    logits[[7, 20, 30, 40]] = 2.0
    assert sweep(logits, top_k=2).nonzero().flatten().tolist() == [7, 20, 30, 40]
    assert sweep(logits, top_k=2, top_p=0.5).nonzero().flatten().tolist() == [7, 20]
    assert sweep(logits, top_k=2, top_p=0.51).nonzero().flatten().tolist() == [7, 20, 30]


def test_rows_with_different_parameters_do_not_mix():
    logits = randn(len(CASES), 700)
    requests = [make_request(seed=11, **case) for case in CASES]
    together = Sampler().sample(logits, requests).token_ids
    assert together == [Sampler().sample(logits[i : i + 1], [requests[i]]).token_ids[0] for i in range(len(CASES))]
    backwards = Sampler().sample(logits.flip(0), requests[::-1]).token_ids
    assert backwards == together[::-1]


def test_a_seeded_draw_depends_on_seed_and_output_index_only():
    logits = randn(1, 5000).expand(40, -1)
    sampler = Sampler()
    requests = [make_request(seed=5, prompt=range(1, 2 + i), output=[4] * 3) for i in range(40)]
    tokens = sampler.sample(logits, requests).token_ids
    assert len(set(tokens)) == 1
    assert Sampler().sample(logits[:1], requests[:1]).token_ids == tokens[:1]
    by_index = [make_request(seed=5, output=[4] * i) for i in range(40)]
    by_seed = [make_request(seed=i, output=[4] * 3) for i in range(40)]
    for others in (by_index, by_seed):
        assert len(set(sampler.sample(logits, others).token_ids)) > 10


def test_seeded_uniforms_are_uniform_and_uncorrelated():
    grid = np.array([[seeded_uniform(seed, i) for i in range(200)] for seed in range(200)])
    assert grid.min() >= 0 and grid.max() < 1
    counts = np.histogram(grid, bins=50, range=(0, 1))[0]
    assert ((counts - 800) ** 2 / 800).sum() < 94  # chi-squared, 49 degrees of freedom, p = 1e-4
    centred = grid - 0.5
    for a, b in (
        (centred[:-1], centred[1:]),
        (centred[:, :-1], centred[:, 1:]),
        (centred[1:, :-1], centred[:-1, 1:]),
    ):
        assert abs((a * b).mean() * 12) < 4 / np.sqrt(a.size)
    assert len(np.unique(grid)) == grid.size
    assert seeded_uniform(-1, 0) == seeded_uniform(2**64 - 1, 0)


def test_unseeded_draws_follow_torchs_global_seed():
    logits = randn(16, 500)
    requests = [make_request()] * 16

    def two_steps():
        sampler = Sampler()
        return [sampler.sample(logits, requests).token_ids for _ in range(2)]

    torch.manual_seed(3)
    first = two_steps()
    torch.manual_seed(3)
    assert two_steps() == first and first[0] != first[1]
    assert two_steps() != first


def test_unseeded_draws_have_the_right_frequencies():
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    counts = Counter(Sampler(seed=1).sample(logits.expand(8000, -1), [make_request()] * 8000).token_ids)
    expected = np.array([4000, 2000, 1000, 1000])
    observed = np.array([counts[i] for i in range(4)])
    assert ((observed - expected) ** 2 / expected).sum() < 21  # chi-squared, 3 degrees of freedom, p = 1e-4


def test_a_token_without_probability_is_never_drawn():
    logits = torch.full((1, 300), -torch.inf)
    logits[0, [5, 299]] = torch.tensor([0.0, -200.0])
    for params in ({}, {"top_k": 50}, {"top_p": 0.99}):
        assert sweep(logits[0], **params)[5] == 1


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 1e6])
def test_extreme_temperatures_and_logits_stay_finite(temperature):
    logits = randn(1, 400, scale=1e4)
    logits[0, 7] = 3e38
    logits[0, 8] = -3e38
    out = Sampler().sample(logits, [make_request(temperature=temperature, seed=0)])
    assert out.failed == [] and out.token_ids == [7]


def test_penalized_rows_do_not_touch_their_neighbors():
    logits = randn(3, 50)
    requests = [
        make_request(temperature=0, logprobs=0),
        make_request(prompt=range(50), temperature=0, repetition_penalty=9.0),
        make_request(temperature=0, logprobs=0),
    ]
    tokens = Sampler().sample(logits, requests).token_ids
    assert [tokens[0], tokens[2]] == logits.argmax(-1)[[0, 2]].tolist()


@pytest.mark.parametrize("count", [0, 1, 4, 100])
def test_logprobs_are_those_of_the_raw_distribution(count):
    logits = randn(6, 90)
    requests = [make_request(seed=i, temperature=2.0, logprobs=count) for i in range(5)]
    requests.append(make_request(temperature=0, logprobs=count, repetition_penalty=5.0, prompt=range(90)))
    out = Sampler().sample(logits, requests)
    for row, token, entry in zip(logits.log_softmax(-1), out.token_ids, out.logprobs, strict=True):
        assert entry is not None
        order = row.argsort(descending=True).tolist()
        top = order[:count]
        assert list(entry) == [token, *(i for i in top if i != token)]
        for i, item in entry.items():
            assert item.rank == order.index(i) + 1
            assert item.logprob == pytest.approx(float(row[i]), abs=1e-6)
            assert item.decoded_token is None


def test_ranks_among_equals_follow_the_token_id():
    logits = torch.zeros(1, 400)
    logits[0, 300] = 1.0
    for seed in range(10):
        out = Sampler().sample(logits, [make_request(seed=seed, logprobs=3)])
        entry, token = out.logprobs[0], out.token_ids[0]
        assert {300: 1, 0: 2, 1: 3}.items() <= {i: item.rank for i, item in entry.items()}.items()
        assert entry[token].rank == (1 if token == 300 else token + 2 - (token > 300))


def test_ranks_of_unlikely_equals():
    logits = torch.zeros(1, 400)
    logits[0, 100:140] = torch.arange(40) * 0.01 + 0.1
    tokens = set()
    for seed in range(20):
        out = Sampler().sample(logits, [make_request(seed=seed, logprobs=1)])
        entry, token = out.logprobs[0], out.token_ids[0]
        expected = 140 - token if 100 <= token < 140 else 41 + token - 40 * (token >= 140)
        assert (entry[token].rank, entry[139].rank) == (expected, 1)
        tokens.add(token)
    assert min(tokens) < 100 and max(tokens) >= 140


def test_only_those_who_ask_get_logprobs():
    out = Sampler().sample(randn(3, 20), [make_request(), make_request(logprobs=2), make_request(temperature=0)])
    assert [entry is None for entry in out.logprobs] == [True, False, True]


def test_unusable_rows_fail_alone():
    logits = randn(7, 600)
    logits[1, 5] = torch.nan
    logits[2, 5] = torch.inf
    logits[3] = -torch.inf
    logits[4, 9:] = -torch.inf  # unlikely tokens may well be at -inf
    banned = {"min_tokens": 1, "stop_token_ids": list(range(600)), "logprobs": 2, "top_p": 0.5}
    for params in ({"temperature": 0}, {"seed": 1}, {"seed": 1, "top_p": 0.9, "logprobs": 1}):
        requests = [make_request(**params)] * 6 + [make_request(**banned)]
        out = Sampler().sample(logits, requests)
        assert out.failed == [1, 2, 3, 6]
        assert [out.token_ids[i] for i in out.failed] == [-1] * 4
        assert [out.logprobs[i] for i in out.failed] == [None] * 4
        good = [0, 4, 5]
        alone = Sampler().sample(logits[good], [requests[i] for i in good])
        assert [out.token_ids[i] for i in good] == alone.token_ids
        assert [out.logprobs[i] for i in good] == alone.logprobs


def test_a_penalty_that_overflows_fails_its_row_only():
    logits = randn(2, 50).abs()
    for params in ({"temperature": 0}, {"seed": 1}):
        requests = [make_request(repetition_penalty=1e-45, **params), make_request(**params)]
        out = Sampler().sample(logits, requests)
        assert out.failed == [0] and out.token_ids[1] >= 0


def test_working_in_parts_changes_nothing(monkeypatch):
    logits = randn(23, 300)
    requests = [make_request(seed=i, top_k=i, logprobs=i % 3 or None) for i in range(23)]
    expected = Sampler().sample(logits, requests)
    monkeypatch.setattr(sampler_module, "_WORK_ELEMENTS", 900)
    parts = Sampler().sample(logits, requests)
    assert (parts.token_ids, parts.logprobs, parts.failed) == (expected.token_ids, expected.logprobs, [])


DRAWING: list[dict[str, Any]] = [
    {"temperature": 0},
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"top_k": 5},
    {"min_p": 0.05},
]
RULES: list[dict[str, Any]] = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.8},
    {"frequency_penalty": -1.0, "presence_penalty": 2.0},
    {"repetition_penalty": 1.4},
    {"logit_bias": {0: 30.0, 5: -100.0, 39: 4.0}},
    {"allowed_token_ids": [1, 2, 30]},
    {"bad_words": ["x"]},
    {"min_tokens": 3, "stop_token_ids": [7, 8]},
    {"logprobs": 3},
]


@st.composite
def asked_for(draw):
    """Parameters of one request: a way to draw and any of the rules."""
    params = dict(draw(st.sampled_from(DRAWING)), seed=draw(st.integers(0, 50)), max_tokens=20)
    for rule in draw(st.lists(st.sampled_from(RULES), max_size=4)):
        params |= rule
    return params


@settings(max_examples=25, deadline=None)
@given(st.lists(asked_for(), min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_no_request_sees_its_batch_mates(batch, random):
    """Each step takes a random part of the batch in a random order; the tokens are those of each request alone."""
    table = randn(40, 40, seed=2)  # the distribution after each token
    words = [[3], [9, 4], [1, 2, 30], [2, 2]]

    def run(indices, steps):
        sampler = Sampler(eos_token_ids=[6])
        requests = {}
        entries = {i: [] for i in indices}
        for i in indices:
            params = SamplingParams(**batch[i]).with_bad_words_token_ids(words if "bad_words" in batch[i] else [])
            requests[i] = Request(str(i), [i + 1, 2], params)
        for step in steps:
            rows = [requests[i] for i in step]
            logits = torch.stack([table[(r.output_token_ids or [r.prompt_token_ids[0]])[-1]] for r in rows])
            out = sampler.sample(logits, rows)
            assert not out.failed
            for i, token, entry in zip(step, out.token_ids, out.logprobs, strict=True):
                requests[i].output_token_ids.append(token)
                entries[i].append(entry)
        return {i: (requests[i].output_token_ids, entries[i]) for i in indices}

    everybody = list(range(len(batch)))
    steps = [random.sample(everybody, random.randint(1, len(batch))) for _ in range(14)]
    together = run(everybody, steps)
    for i in everybody:
        alone = run([i], [[i]] * sum(i in step for step in steps))
        assert alone[i] == together[i]


def test_working_in_parts_applies_the_rules_to_the_right_rows(monkeypatch):
    logits = randn(23, 300)
    rules = [{"logit_bias": {7: 50.0}}, {}, {"allowed_token_ids": [3, 4]}, {"presence_penalty": 2.0}]
    requests = [make_request(output=[i], temperature=0, **rules[i % 4]) for i in range(23)]
    expected = Sampler().sample(logits, requests).token_ids
    monkeypatch.setattr(sampler_module, "_WORK_ELEMENTS", 900)
    assert Sampler().sample(logits, requests).token_ids == expected
    assert expected[::4] == [7] * 6 and set(expected[2::4]) <= {3, 4}


def test_bfloat16_logits_are_sampled_in_float32():
    logits = randn(20, 900).bfloat16()
    requests = [make_request(seed=i, top_p=0.9, logprobs=2) for i in range(20)]
    a, b = Sampler().sample(logits, requests), Sampler().sample(logits.float(), requests)
    assert (a.token_ids, a.logprobs) == (b.token_ids, b.logprobs)


def test_no_rows_and_wrong_shapes():
    assert Sampler().sample(torch.empty(0, 10), []).token_ids == []
    for logits in (torch.zeros(2, 10), torch.zeros(10)):
        with pytest.raises(ValueError, match="1 requests"):
            Sampler().sample(logits, [make_request()])


def test_requests_that_take_the_same_row_choose_as_if_each_had_its_own():
    """Completions of one prompt: some greedy, some drawn, in an order of their own, in batches of two."""
    logits = randn(3, 50)
    requests = [
        make_request(temperature=0.0),
        *(make_request(temperature=1.0, seed=seed, logprobs=2) for seed in range(5)),
        make_request(temperature=0.0, logit_bias={7: 100.0}),
    ]
    taken = [2, 0, 0, 0, 1, 2, 0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler_module, "_WORK_ELEMENTS", 2 * 50)
        found = Sampler(seed=0).sample(logits, requests, taken)
    expected = Sampler(seed=0).sample(logits[taken], requests)
    assert found == expected and found.token_ids[-1] == 7


def test_a_row_for_each_request_unless_rows_are_named():
    with pytest.raises(ValueError, match=r"\(3, 50\) do not match 2 requests"):
        Sampler().sample(randn(3, 50), [make_request(), make_request()])


def test_completions_share_the_arrays_of_their_rules():
    params = SamplingParams(n=3, allowed_token_ids=[1, 2, 3], logit_bias={4: 1.0})
    own = params.completion(2)
    assert own.allowed_ids is params.allowed_ids and own.biased_ids is params.biased_ids
    assert own.biases is params.biases and params.allowed_ids.tolist() == [1, 2, 3]


def test_a_top_p_of_zero_takes_the_likeliest_token():
    logits = randn(64, 1000)
    found = Sampler().sample(logits, [make_request(top_p=0, seed=i) for i in range(64)]).token_ids
    assert list(found) == logits.argmax(-1).tolist()
