from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from torch_pagoda.runtime.requests.outputs import Logprob
from torch_pagoda.runtime.sampling import logprobs as logprobs_module
from torch_pagoda.runtime.sampling.logprobs import PromptLogprobs, prompt_logprobs, top_logprobs


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.fixture(scope="module")
def prompt_and_logits():
    """A prompt of 23 tokens and a tiny model's logits at each of them."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = LlamaForCausalLM(config).eval()
    model.lm_head.weight.data *= 40
    prompt = torch.randint(61, (23,)).tolist()
    with torch.inference_mode():
        return prompt, model(torch.tensor([prompt])).logits[0]


@pytest.mark.parametrize("count", [0, 1, 5, 100])
def test_prompt_logprobs_equal_huggingface(prompt_and_logits, count):
    prompt, logits = prompt_and_logits
    expected = logits.log_softmax(-1)
    entries = prompt_logprobs(logits, prompt, 0, count)
    assert len(entries) == len(prompt) - 1
    for row, token, entry in zip(expected, prompt[1:], entries, strict=False):
        order = row.argsort(descending=True).tolist()
        assert list(entry) == [token, *(i for i in order[:count] if i != token)]
        for i, item in entry.items():
            assert (item.logprob, item.rank) == (float(row[i]), order.index(i) + 1)


@pytest.mark.parametrize("cuts", [[], [1], [22], [7, 8, 15], list(range(1, 23))])
@pytest.mark.parametrize("work", [61, 200, 10**6])
def test_chunks_of_a_prompt_give_the_same(monkeypatch, prompt_and_logits, cuts, work):
    prompt, logits = prompt_and_logits
    whole = prompt_logprobs(logits, prompt, 0, 3)
    monkeypatch.setattr(logprobs_module, "_WORK_ELEMENTS", work)
    collected = PromptLogprobs(np.array(prompt), 3)
    for start, end in zip([0, *cuts], [*cuts, len(prompt)], strict=True):
        assert collected.is_complete == (start == 22), "the last row says nothing of the prompt"
        collected.add(logits[start:end], start)
    assert collected.entries == [None, *whole]
    assert collected.is_complete


def test_positions_that_are_computed_again_count_once(prompt_and_logits):
    """As after a preemption, with other chunks."""
    prompt, logits = prompt_and_logits
    collected = PromptLogprobs(prompt, 0)
    for start, end in ((0, 10), (0, 4), (4, 13), (13, 23), (0, 23)):
        collected.add(logits[start:end], start)
    assert collected.entries == [None, *prompt_logprobs(logits, prompt, 0, 0)]


def test_rows_that_do_not_belong_to_the_prompt_are_refused(prompt_and_logits):
    prompt, logits = prompt_and_logits
    for start in (-1, 1, 23):
        with pytest.raises(ValueError, match=f"start={start} .*23 tokens"):
            prompt_logprobs(logits, prompt, start, 0)
    collected = PromptLogprobs(prompt, 0)
    collected.add(logits[:5], 0)
    with pytest.raises(ValueError, match="start=6 skips rows from 5 on"):
        collected.add(logits[6:9], 6)


def test_a_prompt_of_one_token_has_nothing_to_report():
    collected = PromptLogprobs([4], 2)
    assert collected.is_complete
    collected.add(randn(1, 9), 0)
    assert collected.entries == [None]


def test_bfloat16_rows_are_read_in_float32(prompt_and_logits):
    prompt, logits = prompt_and_logits
    half = logits.bfloat16()
    assert prompt_logprobs(half, prompt, 0, 2) == prompt_logprobs(half.float(), prompt, 0, 2)


def test_unusable_rows_are_nan_and_leave_the_others_alone():
    logits = randn(4, 70)
    prompt = [1, 2, 3, 4]
    expected = prompt_logprobs(logits, prompt, 0, 2)
    logits[1, 5] = torch.nan
    entries = prompt_logprobs(logits, prompt, 0, 2)
    assert (entries[0], entries[2]) == (expected[0], expected[2])
    assert all(np.isnan(item.logprob) for item in entries[1].values())


def test_top_logprobs():
    logits = randn(3, 50)
    logits[1] = 0
    logits[1, [40, 4, 9]] = 2.0
    ids, values = top_logprobs(logits.double(), 3)
    assert ids[1].tolist() == [4, 9, 40]
    expected = logits.log_softmax(-1)
    assert torch.equal(values, expected.sort(descending=True).values[:, :3])
    assert torch.equal(values, expected.gather(-1, ids))
    ids, values = top_logprobs(logits, 90)
    assert ids.shape == values.shape == (3, 50)


def test_of_equal_tokens_those_with_the_lowest_ids_are_reported():
    logits = torch.zeros(2, 300)
    logits[:, 200] = 1.0
    (entry,) = prompt_logprobs(logits, [0, 299], 0, 2)
    assert [(i, item.rank) for i, item in entry.items()] == [(299, 300), (200, 1), (0, 2)]


def test_a_logprob_has_no_text_of_its_own():
    assert Logprob(-1.0, 2).decoded_token is None
