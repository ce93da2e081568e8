"""Tokens, log-probabilities and ends are the same with and without drafts, whatever a drafter proposes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from drafters import Oracle, Raising, draft
from queued_device import QueuedProgram
from toy_state_program import ToyStateProgram

from torch_pagoda.runtime.batching import snapshots
from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.requests.outputs import RequestOutput
from torch_pagoda.runtime.requests.sampling_params import SamplingParams

from toy_program import ToyProgram, character_tokenizer

PROMPTS = [[5, 6, 7], [8], list(range(20, 45)), [30, 31], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]
TOKENIZER: Any = character_tokenizer()

PROGRAMS: dict[str, Callable[[], Any]] = {
    "dense": lambda: ToyProgram(dtype=torch.float64),
    "windows": lambda: ToyProgram(windows=(0, 6), dtype=torch.float64),
    "hybrid": ToyStateProgram,
    "state": lambda: ToyStateProgram(with_kv=False),
}
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"top_p": 0.9, "temperature": 1.3},
    "penalties": {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "min_tokens": 4},
    "seeded penalties": {"frequency_penalty": 0.7, "logit_bias": {5: 1.5, 17: -2}},
    "several": {"n": 3, "temperature": 1.0},
    "logprobs": {"temperature": 0, "logprobs": 2, "prompt_logprobs": 1},
    "stops": {"temperature": 0, "stop_token_ids": [9, 17, 31, 55]},
    "grammar": {"structured_outputs": {"regex": "[a-h]{3}(xyz){2}-[ab]*"}},
}
SIZES: dict[str, dict[str, Any]] = {
    "ample": {"num_blocks": 256},
    "chunks": {"num_blocks": 64, "max_num_batched_tokens": 9},
    "tight": {"num_blocks": 22, "block_size": 3, "max_num_batched_tokens": 9},
    "swapping": {"num_blocks": 22, "block_size": 3, "swap_space": 1 << 15, "preemption": "swap"},
}
DRAFTERS = {"right": 1.0, "mixed": 0.7, "wrong": 0.0, "raises": -1.0}


@pytest.fixture(autouse=True)
def snapshots_of_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "WORTH", 8)


def vocabulary(kind: str) -> int:
    return 61 if kind in ("hybrid", "state") else 97


def params(kind: str, number: int) -> SamplingParams:
    return SamplingParams(seed=number, max_tokens=10 + 3 * number, **PARAMS[kind])


def make_engine(program: str, kind: str, sizes: str, *, ahead: bool = False) -> Engine:
    made = PROGRAMS[program]() if kind != "grammar" else ToyProgram(vocab_size=258, dtype=torch.float64)
    options = {"block_size": 4, "max_num_seqs": 4, "max_model_len": 60, "draft_forced_tokens": False, **SIZES[sizes]}
    return Engine(QueuedProgram(made) if ahead else made, TOKENIZER, async_scheduling=ahead, **options)


def run(engine: Engine, kind: str) -> list[Any]:
    """All prompts, and then each again with its answer and more behind it: a second turn."""
    first = engine.generate(PROMPTS, [params(kind, number) for number in range(len(PROMPTS))])
    turns = [[*prompt, *output.outputs[0].token_ids, 11, 12] for prompt, output in zip(PROMPTS, first, strict=True)]
    second = engine.generate(turns[:3], [params(kind, number) for number in range(3)])
    engine.batcher.check()
    assert getattr(engine.runner.program, "mistakes", []) == []
    assert engine.block_manager.num_used_blocks == 0
    return [shown(output) for output in (*first, *second)]


def shown(output: RequestOutput) -> Any:
    return [
        (each.token_ids, each.text, each.finish_reason, each.stop_reason, each.logprobs, each.error)
        for each in output.outputs
    ] + [output.prompt_logprobs, output.prompt_token_ids]


@cache
def expected(program: str, kind: str, sizes: str) -> tuple[list[Any], dict[str, Any]]:
    engine = make_engine(program, kind, sizes)
    return run(engine, kind), engine.stats()


def answers(found: Sequence[Any], kind: str) -> dict[Any, list[int]]:
    """By prompt and seed, as ``drafters.key_of`` says."""
    known = {}
    for number, (*completions, _, prompt) in enumerate(found):
        for index, completion in enumerate(completions):
            seed = params(kind, number % len(PROMPTS)).completion(index).seed
            known[tuple(prompt), seed] = completion[0]
    return known


def compare(program: str, kind: str, sizes: str, drafter: str, *, ahead: bool = False) -> dict[str, Any]:
    want, plain = expected(program, kind, sizes)
    engine = make_engine(program, kind, sizes, ahead=ahead)
    right, vocab = DRAFTERS[drafter], engine.limits.vocab_size
    oracle = Raising({}, 0, vocab) if right < 0 else Oracle(answers(want, kind), right, vocab)
    lengths = iter([7, 3, 1, 3, 0, 7] * 1000)
    drafting = draft(engine, oracle, lambda: next(lengths))
    assert run(engine, kind) == want
    stats = engine.stats()
    assert stats["generated_tokens"] == plain["generated_tokens"]
    assert stats["spec_decode_num_accepted_tokens"] <= stats["spec_decode_num_draft_tokens"]
    if sizes == "ample" and program in ("dense", "windows"):  # states have few slots for snapshots
        assert stats["cached_tokens"] == plain["cached_tokens"]
    assert oracle.told == {} and oracle.asked
    if right < 0:
        assert drafting.drafters.num_failed and not stats["spec_decode_num_drafts"]
    elif right > 0:
        assert stats["spec_decode_num_accepted_tokens"]
    if right == 1 and kind != "stops":
        assert stats["steps"] < plain["steps"]
    return stats


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("sizes", SIZES)
def test_tokens_are_those_without_drafts(program: str, kind: str, sizes: str, drafter: str) -> None:
    if kind == "grammar" and program != "dense":
        pytest.skip("the other programs have too few tokens for a text")
    compare(program, kind, sizes, drafter)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("kind", ["greedy", "seeded", "logprobs"])
def test_the_same_one_step_ahead(program: str, kind: str) -> None:
    stats = compare(program, kind, "ample", "mixed", ahead=True)
    assert stats["synchronous_steps_drafts"]
