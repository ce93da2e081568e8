"""Dict prompts and ``max_tokens=None``, wherever prompts are taken, as in vLLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import torch_pagoda as pagoda

GREEDY = pagoda.SamplingParams(max_tokens=4, temperature=0)
BEAMS = pagoda.BeamSearchParams(2, max_tokens=4)
TO_THE_END = pagoda.SamplingParams(max_tokens=None, temperature=0, ignore_eos=True)


@pytest.fixture
def llm(checkpoint: Path, fast: dict[str, Any]) -> pagoda.LLM:
    return pagoda.LLM(checkpoint, max_model_len=20, **fast)


def last_of(llm: pagoda.LLM, request_id: str) -> pagoda.RequestOutput:
    last = {output.request_id: output for _ in range(40) if llm.has_unfinished() for output in llm.step()}
    return last[request_id]


def test_dict_prompts_are_what_they_hold(llm: pagoda.LLM) -> None:
    text, ids = llm.generate(["the cat", [5, 6, 7]], GREEDY)
    found = llm.generate([{"prompt": "the cat"}, {"prompt_token_ids": [5, 6, 7]}], GREEDY)
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in (text, ids)]
    assert [o.prompt for o in found] == ["the cat", None]
    assert found[1].prompt_token_ids == [5, 6, 7]

    both = {"prompt": "how it was written", "prompt_token_ids": [5, 6, 7], "multi_modal_data": None}
    (single,) = llm.generate(both, GREEDY)
    assert single.prompt == "how it was written" and single.prompt_token_ids == [5, 6, 7]
    assert single.outputs[0].token_ids == ids.outputs[0].token_ids
    streamed = [token for piece in llm.stream(both, GREEDY) for token in piece.token_ids]
    assert streamed == ids.outputs[0].token_ids
    submitted = last_of(llm, llm.submit(both, GREEDY))
    assert submitted.prompt == "how it was written" and submitted.outputs[0].token_ids == ids.outputs[0].token_ids
    assert llm.beam_search(both, BEAMS)[0].sequences == llm.beam_search([5, 6, 7], BEAMS)[0].sequences


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ({"prompt": "x", "multi_modal_data": {"image": 1}}, ["multi_modal_data", "prompt_token_ids"]),
        ({"prompt": "x", "cache_salt": "s"}, ["cache_salt"]),
        ({}, ["prompt_token_ids"]),
        ({"prompt": None}, ["prompt_token_ids"]),
        ({"prompt": [1, 2]}, ["'prompt'", "[1, 2]", "text"]),
        ({"prompt_token_ids": "x"}, ["'prompt_token_ids'", "'x'"]),
        ({"prompt_token_ids": [999]}, ["999", "vocabulary"]),
        ({"prompt_token_ids": [1], "prompt": 7}, ["'prompt'", "7"]),
        ({"prompt_token_ids": {"prompt": "x"}}, ["'prompt_token_ids'"]),
    ],
)
def test_dict_prompts_that_are_refused(
    llm: pagoda.LLM, prompt: Any, words: list[str], one_line: Callable[[BaseException], str]
) -> None:
    calls: list[Callable[[], object]] = [
        lambda: llm.generate([[5, 6], prompt], GREEDY),
        lambda: llm.generate(prompt, GREEDY),
        lambda: llm.stream(prompt, GREEDY),
        lambda: llm.submit(prompt, GREEDY),
        lambda: llm.beam_search(prompt, BEAMS),
    ]
    for call in calls:
        with pytest.raises(ValueError) as error:
            call()
        message = one_line(error.value)
        assert all(word in message for word in words), message
    assert not llm.has_unfinished()


def test_max_tokens_none_fills_the_context(llm: pagoda.LLM) -> None:
    (output,) = llm.generate([[5, 6, 7]], TO_THE_END)
    assert len(output.outputs[0].token_ids) == 17 and output.outputs[0].finish_reason == "length"
    pieces = list(llm.stream([5, 6, 7], TO_THE_END))
    assert sum(len(piece.token_ids) for piece in pieces) == 17
    assert last_of(llm, llm.submit([5, 6, 7], TO_THE_END)).outputs[0].token_ids == output.outputs[0].token_ids
    both = llm.generate([[5, 6, 7]], pagoda.SamplingParams(max_tokens=None, n=2, seed=0, ignore_eos=True))
    assert [len(completion.token_ids) for completion in both[0].outputs] == [17, 17]
    found = llm.beam_search([5, 6, 7], pagoda.BeamSearchParams(2, max_tokens=None, ignore_eos=True))
    assert {len(text.token_ids) for text in found[0].sequences} == {17}


def test_max_tokens_none_keeps_bad_words_and_min_tokens(llm: pagoda.LLM) -> None:
    (output,) = llm.generate(["the cat"], TO_THE_END)
    word = llm.tokenizer.decode(output.outputs[0].token_ids[:1])
    params = pagoda.SamplingParams(
        max_tokens=None, min_tokens=30, temperature=0, ignore_eos=True, bad_words=[word.strip() or word]
    )
    (changed,) = llm.generate(["the cat"], params)
    assert changed.outputs[0].token_ids[0] != output.outputs[0].token_ids[0]
    assert len(changed.prompt_token_ids) + len(changed.outputs[0].token_ids) == 20
    several = pagoda.SamplingParams(max_tokens=None, min_tokens=30, n=2, seed=1, ignore_eos=True)
    assert [len(c.token_ids) for c in llm.generate([[5, 6, 7]], several)[0].outputs] == [17, 17]


@pytest.mark.parametrize("policy", ["sjf", "fair", "prefix"])
def test_every_policy_takes_open_ended_requests(checkpoint: Path, fast: dict[str, Any], policy: str) -> None:
    llm = pagoda.LLM(checkpoint, max_model_len=12, policy=policy, **fast)
    outputs = llm.generate([[5, 6, 7], [8]], TO_THE_END)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 11]
