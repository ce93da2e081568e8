"""``max_tokens=0``: a prompt is computed, and scored if that is asked for, and nothing is generated."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.requests.beam_search_params import BeamSearchParams
from torch_pagoda.runtime.requests.outputs import RequestOutput
from torch_pagoda.runtime.requests.sampling_params import SamplingParams

from toy_program import ToyProgram

PROMPTS = [[5, 6, 7], [8], list(range(20, 45)), [60, 61], list(range(1, 11))]
SCORE = SamplingParams(max_tokens=0, prompt_logprobs=0)


def make_engine(program: ToyProgram | None = None, **options: Any) -> Engine:
    return Engine(program or ToyProgram(), **{"block_size": 4, "num_blocks": 64, "max_num_seqs": 8, **options})


def check_scores(output: RequestOutput) -> None:
    prompt = output.prompt_token_ids
    rows = ToyProgram().dense_logits(prompt).log_softmax(-1)
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    found = [
        entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True) if entry
    ]
    want = rows[torch.arange(len(prompt) - 1), prompt[1:]].tolist() if len(prompt) > 1 else []
    assert found == pytest.approx(want, abs=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 3},
        {"max_num_batched_tokens": 7, "max_num_seqs": 2},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 5},
    ],
)
def test_prompts_are_scored_and_nothing_is_sampled(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(**options)
    monkeypatch.setattr(engine.sampler, "sample", lambda *args: pytest.fail("something is sampled"))
    for output in engine.generate(PROMPTS, SCORE):
        (completion,) = output.outputs
        assert (completion.token_ids, completion.text, completion.finish_reason) == ([], "", "length")
        assert output.finished and output.metrics.num_generated_tokens == 0
        assert output.metrics.first_token_time is None and output.metrics.ttft is None
        assert output.metrics.e2e_latency is not None and output.metrics.tpot is None
        check_scores(output)
    stats = engine.stats()
    assert stats["generated_tokens"] == 0 and stats["finished_length"] == len(PROMPTS)
    assert stats["prompt_tokens"] == sum(map(len, PROMPTS)) == stats["computed_tokens"]
    assert engine.block_manager.num_used_blocks == 0
    assert engine.profile().num_requests == len(PROMPTS)


def test_beside_others_and_under_preemption() -> None:
    engine = make_engine(num_blocks=8, max_num_batched_tokens=6)
    greedy = SamplingParams(temperature=0, max_tokens=12)
    params = [greedy, SCORE, SCORE, greedy, greedy]
    outputs = engine.generate(PROMPTS, params)
    assert engine.stats()["preemptions"] > 0
    for prompt, output, asked in zip(PROMPTS, outputs, params, strict=True):
        if asked is SCORE:
            check_scores(output)
        else:
            assert output.outputs[0].token_ids == ToyProgram().dense_greedy(prompt, 12)


def test_it_warms_the_prefix_cache() -> None:
    engine = make_engine(enable_prefix_caching=True)
    prompt = list(range(20, 45))
    for cached in (0, 24):
        (output,) = engine.generate([prompt], SamplingParams(max_tokens=0))
        assert output.prompt_logprobs is None and output.num_cached_tokens == cached
        assert output.outputs[0].finish_reason == "length"
    (output,) = engine.generate([prompt], SamplingParams(max_tokens=3, temperature=0))
    assert output.num_cached_tokens == 24
    assert output.outputs[0].token_ids == ToyProgram().dense_greedy(prompt, 3)


def test_a_prompt_may_fill_the_context() -> None:
    engine = make_engine(num_blocks=8)
    assert engine.max_model_len == 32
    (output,) = engine.generate([list(range(32))], SCORE)
    check_scores(output)
    (piece,) = engine.stream(list(range(32)), SCORE)
    assert piece.finished and piece.prompt_logprobs == output.prompt_logprobs
    engine.submit(list(range(32)), SCORE)
    (piece,) = engine.step_pieces()
    assert piece.finish_reason == "length" and piece.metrics is not None
    for params in (SamplingParams(max_tokens=1), SamplingParams(max_tokens=None), None):
        with pytest.raises(ValueError, match="no room for a new one"):
            engine.submit(list(range(32)), params)
    with pytest.raises(ValueError, match="has 33 tokens, which is above max_model_len=32"):
        engine.submit(list(range(33)), SCORE)


def test_an_interrupted_step_scores_the_prompt_again() -> None:
    program = ToyProgram()
    engine = make_engine(program, max_num_batched_tokens=10)
    calls = 0

    def interrupt(tokens: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt

    program.before_call = interrupt
    engine.submit(list(range(20, 45)), SCORE)
    outputs = []
    while engine.has_unfinished():
        try:
            outputs += engine.step()
        except KeyboardInterrupt:
            engine.batcher.check()
    assert calls == 5 and [output.finished for output in outputs] == [True]
    check_scores(outputs[0])


def test_what_it_cannot_go_with_is_refused() -> None:
    with pytest.raises(ValueError, match="n=2 with max_tokens=0 computes the same prompt several times"):
        SamplingParams(max_tokens=0, n=2)
    with pytest.raises(ValueError, match="best_of=3 with max_tokens=0"):
        SamplingParams(max_tokens=0, best_of=3)
    with pytest.raises(ValueError, match="min_tokens=1 is above max_tokens=0"):
        SamplingParams(max_tokens=0, min_tokens=1)
    with pytest.raises(ValueError, match="max_tokens=0"):
        BeamSearchParams(beam_width=2, max_tokens=0)


def test_a_prompt_whose_step_fails_ends_with_an_error() -> None:
    program = ToyProgram()

    def fail(tokens: torch.Tensor) -> None:
        if 9 in tokens:
            raise ArithmeticError("nine")

    program.before_call = fail
    good, bad = make_engine(program).generate([[5, 6], [9, 8]], SCORE)
    check_scores(good)
    assert bad.outputs[0].finish_reason == "error" and "nine" in (bad.outputs[0].error or "")
    assert math.isfinite(good.metrics.e2e_latency or math.inf)
