from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from torch_pagoda.runtime.requests.beam_search_params import BeamSearchParams
from torch_pagoda.runtime.sampling.beam_search import BeamSearch
from torch_pagoda.runtime.sampling.logprobs import top_logprobs

VOCAB = 40


def tiny_model(seed, sharpness):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(config).eval()
    model.lm_head.weight.data *= sharpness
    return model


@torch.inference_mode()
def searched(model, prompt, params, eos):
    """Drives the search with a model that computes every beam from its first token on."""
    search = BeamSearch(params, eos)
    while not search.is_done:
        logits = model(torch.tensor([[*prompt, *beam.token_ids] for beam in search.beams])).logits[:, -1]
        before = search.beams
        for beam in search.advance(*top_logprobs(logits, search.num_candidates)):
            assert before[beam.parent].token_ids == beam.token_ids[:-1]
    assert search.beams == []
    return search.hypotheses


def generated(model, prompt, params, eos):
    """HuggingFace's sequences and scores."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        do_sample=False,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=eos or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    return output.sequences[:, len(prompt) :].tolist(), output.sequences_scores.tolist()


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
def test_equals_huggingface(early_stopping, length_penalty):
    """All hypotheses, in order, with their scores: several models, prompts, widths, lengths, ends."""
    rng = random.Random(f"{early_stopping} {length_penalty}")
    for width in (2, 3, 5):
        model = tiny_model(rng.randrange(100), rng.choice([15.0, 50.0]))
        for max_tokens, num_eos in ((1, 1), (5, 0), (9, 1), (9, 5)):
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 6))]
            eos = rng.sample(range(VOCAB), num_eos)
            params = BeamSearchParams(width, max_tokens, length_penalty=length_penalty, early_stopping=early_stopping)
            found = searched(model, prompt, params, eos)
            sequences, scores = generated(model, prompt, params, eos)
            assert [list(text.token_ids) for text in found] == [
                sequence[: len(text.token_ids)] for sequence, text in zip(sequences, found, strict=True)
            ]
            assert [text.score for text in found] == pytest.approx(scores, rel=1e-4, abs=1e-5)
            for text in found:
                assert (text.finish_reason == "stop") == (text.token_ids[-1] in eos)
                assert text.score == pytest.approx(
                    text.cumulative_logprob / len(text.token_ids) ** length_penalty, rel=1e-5
                )


class CountedSearch(BeamSearch):
    num_steps = 0

    def advance(self, token_ids, logprobs):
        self.num_steps += 1
        return super().advance(token_ids, logprobs)


def table_search(table, params, eos, steps=1000):
    """Runs on a table ``[V, V]`` of log-probabilities given the last token; returns the search."""
    search = CountedSearch(params, eos)
    while not search.is_done and search.num_steps < steps:
        rows = np.stack([table[(beam.token_ids or (0,))[-1]] for beam in search.beams])
        order = np.argsort(-rows, axis=1, kind="stable")[:, : search.num_candidates]
        search.advance(order, np.take_along_axis(rows, order, axis=1))
    return search


def random_table(seed, vocab=8):
    logits = torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed)) * 2
    return logits.log_softmax(-1).numpy()


@pytest.mark.parametrize("seed", range(5))
def test_a_wide_beam_finds_the_best_text_of_all(seed):
    """With room for every prefix the search is exhaustive."""
    table = random_table(seed, vocab=4)
    eos, length = 3, 4
    best = {}
    for text in itertools.product(range(4), repeat=length):
        cut = next((i + 1 for i, token in enumerate(text) if token == eos), length)
        total = sum(table[a, b] for a, b in itertools.pairwise((0, *text[:cut])))
        best[text[:cut]] = total / cut
    params = BeamSearchParams(4**length, length, early_stopping="never")
    found = table_search(table, params, [eos]).hypotheses
    assert {text.token_ids: text.score for text in found} == pytest.approx(best, rel=1e-5)
    assert [text.score for text in found] == sorted((text.score for text in found), reverse=True)


def test_early_stopping_decides_when_the_search_ends():
    """Finished at once with a mean of log 0.2, against a live beam whose mean gets ever better."""
    low = -np.inf
    table = np.full((5, 5), low)
    table[0, [1, 4]] = np.log([0.75, 0.2])
    table[1, [1, 4]] = np.log([0.9, 0.05])
    steps = {}
    for early in (True, False, "never"):
        params = BeamSearchParams(2, 30, early_stopping=early, length_penalty=1.0)
        steps[early] = table_search(table, params, [4]).num_steps
    assert steps[True] == 2 < steps[False] == steps["never"] == 30

    table[:] = low
    table[0, [1, 2]] = np.log(0.5)  # both then finish well and go on badly
    table[1, [1, 4]] = table[2, [2, 4]] = np.log([0.15, 0.8])
    for early in (True, False, "never"):
        params = BeamSearchParams(2, 30, early_stopping=early, length_penalty=3.0)
        steps[early] = table_search(table, params, [4]).num_steps
    assert steps[True] == steps[False] == 2 < steps["never"]


def test_a_beam_of_one_keeps_the_second_best_token_when_the_best_ends():
    low = -np.inf
    table = np.array([[low, -0.9, -0.5], [low, -0.01, -9.0], [low, low, low]])
    found = table_search(table, BeamSearchParams(1, 40, early_stopping="never"), [2]).hypotheses
    assert len(found) == 1 and found[0].token_ids == (1,) * 40
    found = table_search(table, BeamSearchParams(1, 40, early_stopping=True), [2]).hypotheses
    assert [(text.token_ids, text.finish_reason) for text in found] == [((2,), "stop")]


def test_ignoring_eos_runs_to_the_limit():
    for seed in range(5):
        params = BeamSearchParams(3, 9, ignore_eos=True)
        search = table_search(random_table(seed), params, [1, 2])
        assert [len(text.token_ids) for text in search.hypotheses] == [9, 9, 9]
        assert {text.finish_reason for text in search.hypotheses} == {"length"}
        assert search.num_candidates == 6
    assert BeamSearch(BeamSearchParams(3, 9), [1, 2, 2]).num_candidates == 9


def test_many_ends_among_the_best_do_not_crowd_out_the_live_beams():
    """The five most likely tokens of every beam end it."""
    table = np.tile(np.log(np.array([0.02, 0.01, *[0.15] * 5, 0.01])), (8, 1))
    search = table_search(table, BeamSearchParams(3, 10, early_stopping="never"), [2, 3, 4, 5, 6], steps=1)
    assert [beam.token_ids for beam in search.beams] == [(0,), (1,), (7,)]
    assert [text.token_ids for text in search.hypotheses] == [(2,), (3,), (4,)]


def test_tokens_that_may_not_come_never_do_and_may_leave_no_beam():
    table = np.full((4, 4), -np.inf)
    table[0, 1] = table[1, 2] = 0.0
    search = table_search(table, BeamSearchParams(3, 10), [3], steps=2)
    assert [beam.token_ids for beam in search.beams] == [(1, 2)] and not search.is_done
    search.advance([[0, 1, 2, 3]], [[-np.inf] * 4])
    assert search.is_done and search.hypotheses == []


def test_equals_go_to_the_better_parent_and_the_token_that_is_listed_first():
    search = BeamSearch(BeamSearchParams(3, 10))
    search.advance([[5, 2, 9]], [[-1.0, -1.0, -1.0]])
    assert [beam.token_ids for beam in search.beams] == [(5,), (2,), (9,)]
    beams = search.advance([[1, 2], [3, 4], [6, 7]], [[-1.0, -2.0], [-1.0, -1.0], [-0.5, -1.0]])
    assert [(beam.parent, beam.token_ids) for beam in beams] == [(2, (9, 6)), (0, (5, 1)), (1, (2, 3))]


def test_misuse_is_refused():
    search = BeamSearch(BeamSearchParams(2, 1))
    for ids, values in (([[1]], [[-1.0], [-2.0]]), ([[1], [2]], [[-1.0], [-2.0]]), ([1], [-1.0])):
        with pytest.raises(ValueError, match="do not match 1 beams"):
            search.advance(ids, values)
    with pytest.raises(ValueError, match="NaN"):
        search.advance([[1, 2]], [[-1.0, np.nan]])
    search.advance([[1, 2]], [[-1.0, -2.0]])
    assert [text.token_ids for text in search.hypotheses] == [(1,), (2,)]
    with pytest.raises(RuntimeError, match="ended"):
        search.advance([[1, 2]], [[-1.0, -2.0]])


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("beam_width", [0, True, 2.0, None]),
        ("max_tokens", [0, "3"]),
        ("ignore_eos", [1, None]),
        ("length_penalty", [float("nan"), float("inf"), -7.5, 8, "1", None]),
        ("early_stopping", ["always", None, 1.5]),
    ],
)
def test_bad_parameters_are_refused_in_one_line_that_names_them(name, values):
    for value in values:
        with pytest.raises(ValueError, match=name) as caught:
            BeamSearchParams(**{"beam_width": 2, name: value})
        assert "\n" not in str(caught.value) and repr(value) in str(caught.value)


def test_parameters_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        BeamSearchParams(2).beam_width = 3  # type: ignore[misc]
