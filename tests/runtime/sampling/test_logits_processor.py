from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from torch_pagoda.runtime.requests.request import Request
from torch_pagoda.runtime.requests.sampling_params import SamplingParams
from torch_pagoda.runtime.sampling.logits_processor import LogitsProcessor
from torch_pagoda.runtime.sampling.sampler import Sampler

VOCAB = 80


def make_request(prompt=(1,), output=(), words=None, **params):
    if words is not None:
        params["bad_words"] = ["some"]
    own = SamplingParams(**params)
    if words is not None:
        own = own.with_bad_words_token_ids(words)
    return Request("r", list(prompt), own, output_token_ids=list(output))


def randn(*shape, seed=0, scale=3.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def processed(logits, requests, processor=None):
    changed = logits.clone()
    (processor or LogitsProcessor()).apply(changed, requests)
    return changed


@pytest.mark.parametrize("penalty", [1.3, 0.7])
@pytest.mark.parametrize("array", [list, np.array])
def test_repetition_penalty_equals_huggingface(penalty, array):
    logits = randn(4, 80)
    prompts = [[3, 3, 9, 70], [5], [1], [79, 0, 0]]
    outputs: list[list[int]] = [[9, 11, 11], [6], [], [5, 79]]
    expected = logits.clone()
    for row in (0, 2, 3):
        seen = torch.tensor([prompts[row] + outputs[row]])
        expected[row] = RepetitionPenaltyLogitsProcessor(penalty)(seen, logits[row : row + 1].clone())[0]
    requests = [
        Request(
            "r",
            array(prompts[row]),
            SamplingParams(temperature=0, repetition_penalty=1.0 if row == 1 else penalty),
            output_token_ids=outputs[row],
        )
        for row in range(4)
    ]
    assert torch.equal(processed(logits, requests), expected)
    assert Sampler().sample(logits, requests).token_ids == expected.argmax(-1).tolist()


def test_repetition_penalty_follows_the_growing_output():
    logits = randn(1, 300, scale=1.0).abs()
    sampler = Sampler()
    request = make_request(prompt=[2, 2], temperature=0, repetition_penalty=1e4)
    processor = RepetitionPenaltyLogitsProcessor(1e4)
    for _ in range(200):
        expected = int(processor(torch.tensor([[2, 2, *request.output_token_ids]]), logits.clone()).argmax())
        assert sampler.sample(logits, [request]).token_ids == [expected]
        request.output_token_ids.append(expected)
    assert len(set(request.output_token_ids)) > 50
    last = request.output_token_ids.pop()  # as after an interrupted step
    del request.output_token_ids[-3:]
    expected = int(processor(torch.tensor([[2, 2, *request.output_token_ids]]), logits.clone()).argmax())
    assert sampler.sample(logits, [request]).token_ids == [expected] != [last]


def test_min_tokens_holds_back_eos_and_stop_ids():
    logits = torch.zeros(1, 10)
    logits[0, [4, 5, 6]] = torch.tensor([9.0, 8.0, 7.0])
    sampler = Sampler(eos_token_ids=[4, 99])

    def first(**params):
        return sampler.sample(logits, [make_request(temperature=0, **params)]).token_ids[0]

    assert first() == 4
    assert first(min_tokens=1) == 5
    assert first(min_tokens=1, stop_token_ids=[5, 1000]) == 6
    assert first(min_tokens=1, stop_token_ids=[5], ignore_eos=True) == 6  # ignored or not
    reached = make_request(output=[1], temperature=0, min_tokens=1)
    assert sampler.sample(logits, [reached]).token_ids == [4]


@pytest.mark.parametrize("presence", [0.0, 0.7, -2.0])
@pytest.mark.parametrize("frequency", [0.0, 1.1, -0.4])
def test_presence_and_frequency_penalty_count_the_output_only(presence, frequency):
    logits = randn(3, VOCAB)
    outputs: list[list[int]] = [[9, 11, 11, 11, 79], [], [0]]
    requests = [
        make_request(prompt=[11, 3], output=output, presence_penalty=presence, frequency_penalty=frequency)
        for output in outputs
    ]
    expected = logits.clone()
    for row, output in enumerate(outputs):
        for token in set(output):
            expected[row, token] -= torch.tensor(frequency) * output.count(token)
            expected[row, token] -= presence
    assert torch.equal(processed(logits, requests), expected)


def test_penalties_follow_the_growing_output_and_forget_what_is_taken_back():
    processor = LogitsProcessor()
    request = make_request(presence_penalty=0.5, frequency_penalty=0.25)
    generator = np.random.default_rng(0)
    logits = torch.zeros(1, VOCAB)

    def check():
        counts = torch.bincount(torch.tensor(request.output_token_ids, dtype=torch.int64), minlength=VOCAB)
        assert torch.equal(processed(logits, [request], processor)[0], -0.25 * counts - 0.5 * (counts > 0))

    for _ in range(150):
        check()
        request.output_token_ids += generator.integers(VOCAB, size=generator.integers(1, 4)).tolist()
    del request.output_token_ids[100:]
    check()
    request.output_token_ids += [5, 5]
    check()


def test_logit_bias_equals_huggingface():
    logits = randn(3, VOCAB)
    biases = [{4: 2.5, 79: -100.0}, {}, {0: 100.0}]
    expected = logits.clone()
    for row in (0, 2):
        theirs = SequenceBiasLogitsProcessor([[[token], bias] for token, bias in biases[row].items()])
        expected[row] = theirs(torch.tensor([[1]]), logits[row : row + 1].clone())[0]
    assert torch.equal(processed(logits, [make_request(logit_bias=bias) for bias in biases]), expected)


def test_allowed_tokens_are_what_huggingface_leaves():
    logits = randn(3, VOCAB)
    allowed = [[4, 79], None, [0]]
    expected = logits.clone()
    for row in (0, 2):
        others = [token for token in range(VOCAB) if token not in (allowed[row] or ())]
        expected[row] = SuppressTokensLogitsProcessor(others)(torch.tensor([[1]]), logits[row : row + 1].clone())[0]
    assert torch.equal(processed(logits, [make_request(allowed_token_ids=ids) for ids in allowed]), expected)


tokens = st.integers(0, 5)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(tokens, min_size=1, max_size=4), min_size=1, max_size=6),
    st.lists(st.lists(tokens, max_size=12), min_size=1, max_size=4),
)
def test_bad_words_equal_huggingface(words, outputs):
    logits = randn(len(outputs), 6)
    # HuggingFace looks for words in the prompt too, vLLM in the output alone: give it that.
    theirs = NoBadWordsLogitsProcessor([list(word) for word in {tuple(word) for word in words}])
    expected = logits.clone()
    for row, output in enumerate(outputs):
        if output:
            expected[row] = theirs(torch.tensor([output]), logits[row : row + 1].clone())[0]
        else:
            expected[row, [word[0] for word in words if len(word) == 1]] = -torch.inf
    requests = [make_request(prompt=[0, 1, 2], output=output, words=words) for output in outputs]
    assert torch.equal(processed(logits, requests), expected)


def test_a_word_that_begins_in_the_prompt_is_not_held_against_the_output():
    logits = torch.zeros(1, 6)
    request = make_request(prompt=[3, 4], words=[[4, 5], [3, 4, 5]])
    assert torch.equal(processed(logits, [request]), logits)
    request.output_token_ids.append(4)
    assert processed(logits, [request])[0].tolist() == [0.0] * 5 + [-torch.inf]


def test_bad_words_that_nobody_tokenized_are_an_error():
    with pytest.raises(ValueError, match=r"bad_words=\['x'\]"):
        processed(torch.zeros(1, 6), [make_request(bad_words=["x"])])


def test_min_tokens_equals_huggingface():
    logits = randn(2, VOCAB)
    theirs = MinNewTokensLengthLogitsProcessor(1, 3, [4, 5, 9])
    for length in range(5):
        request = make_request(output=[1] * length, min_tokens=3, stop_token_ids=[9])
        changed = processed(logits[:1], [request], LogitsProcessor([4, 5]))
        assert torch.equal(changed, theirs(torch.tensor([[1] * (1 + length)]), logits[:1].clone()))


def test_min_tokens_holds_back_an_end_that_is_ignored():
    logits = randn(1, VOCAB)
    request = make_request(min_tokens=3, stop_token_ids=[9], ignore_eos=True)
    held_back = processed(logits, [request], LogitsProcessor([4, 5])).isinf()[0].nonzero()[:, 0].tolist()
    assert held_back == [4, 5, 9]
    request.params = request.params.with_own_ends()
    assert request.params.ignore_eos
    held_back = processed(logits, [request], LogitsProcessor([4, 5])).isinf()[0].nonzero()[:, 0].tolist()
    assert held_back == [9]


def test_the_rules_come_in_vllms_order():
    logits = randn(1, VOCAB)
    prompt, output = [3, 9, 20], [9, 9, 30]
    bias = {9: 7.0, 20: -8.0, 30: -9.0, 40: 50.0, 41: 60.0, 4: 70.0}
    request = make_request(
        prompt=prompt,
        output=output,
        words=[[41], [30, 42]],
        allowed_token_ids=[*range(2, 40), 41, 42],
        min_tokens=9,
        stop_token_ids=[4],
        logit_bias=bias,
        repetition_penalty=1.7,
        frequency_penalty=0.3,
        presence_penalty=0.2,
    )
    expected = logits.clone()
    expected[0, [0, 1, *range(40, VOCAB)]] = -torch.inf
    for token, value in bias.items():
        expected[0, token] += value
    expected = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.7)])(torch.tensor([prompt + output]), expected)
    expected[0, 9] -= torch.tensor(0.3) * 2
    expected[0, 30] -= 0.3
    expected[0, [9, 30]] -= 0.2
    expected[0, [4, 5]] = -torch.inf
    assert torch.equal(processed(logits, [request], LogitsProcessor([5])), expected)


def test_each_rule_stays_in_its_row_and_requests_without_one_are_untouched():
    logits = randn(6, VOCAB)
    plain = make_request(temperature=0.5, top_p=0.5, logprobs=3)
    everywhere = list(range(VOCAB + 20))  # ids beyond the vocabulary must not reach the next row
    ruled = [
        make_request(output=range(VOCAB), presence_penalty=1.0, frequency_penalty=1.0, repetition_penalty=3.0),
        make_request(logit_bias=dict.fromkeys(everywhere, 1.0), allowed_token_ids=everywhere),
        make_request(words=[[token] for token in everywhere], min_tokens=1, stop_token_ids=everywhere),
    ]
    changed = processed(logits, [plain, ruled[0], plain, ruled[1], plain, ruled[2]])
    assert torch.equal(changed[::2], logits[::2])
    assert not (changed[1] == logits[1]).any()
    assert torch.equal(changed[3], logits[3] + 1) and changed[5].isneginf().all()


def test_a_request_that_is_gone_is_forgotten():
    processor = LogitsProcessor()
    request = make_request(presence_penalty=1.0)
    processed(torch.zeros(1, VOCAB), [request, make_request()], processor)
    assert len(processor._states) == 1
    del request
    gc.collect()
    assert not processor._states
