"""Whole models give the same tokens with and without drafts: windows, sinks, MLA, states, int8 caches."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from drafters import Oracle, always, draft

from torch_pagoda.compiler import CompileOptions
from torch_pagoda.compiler.build import build_program
from torch_pagoda.runtime.batching import snapshots
from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.requests.sampling_params import SamplingParams

from tiny_models import build_tiny_model

MODELS = (
    *("llama", "gemma3_text", "gpt_oss", "deepseek_v3", "deepseek_v32", "qwen3_5_text", "nemotron_h", "mamba"),
    *("lfm2", "qwen3_moe", "gpt2", "falcon"),
)
LENGTHS = (9, 40, 21)
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"seed": 3, "top_p": 0.9},
    "penalties": {"temperature": 0, "repetition_penalty": 1.2, "logprobs": 2},
    "several": {"seed": 5, "n": 3},
}
SIZES: dict[str, dict[str, Any]] = {
    "chunks": {"num_blocks": 96, "max_num_batched_tokens": 16, "max_num_seqs": 16},
    "tight": {"num_blocks": 20, "max_num_batched_tokens": 16},
    "swapping": {"num_blocks": 20, "swap_space": 1 << 22, "preemption": "swap"},
}


@cache
def program(model: str, kv_cache_dtype: str) -> Any:
    return build_program(build_tiny_model(model), CompileOptions(codegen="none", kv_cache_dtype=kv_cache_dtype))


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(3, 200, (length,), generator=generator).tolist() for length in LENGTHS]


def run(engine: Engine, params: SamplingParams, values: Any = None) -> tuple[list[Any], int]:
    first = engine.generate(prompts(), params)
    before = engine.stats()["cached_tokens"]
    turns = [[*o.prompt_token_ids, *o.outputs[0].token_ids, 7] for o in first]
    outputs = [*first, *(engine.generate([turn], params)[0] for turn in turns)]
    engine.batcher.check()
    shown = [[(c.token_ids, c.finish_reason, (values or _values)(c.logprobs)) for c in o.outputs] for o in outputs]
    return [[o.prompt_token_ids, own] for o, own in zip(outputs, shown, strict=True)], int(
        engine.stats()["cached_tokens"] - before
    )


def _values(logprobs: Any) -> Any:
    """Of another number of rows, they are rounded otherwise."""
    return logprobs and [
        {token: pytest.approx(entry.logprob, abs=1e-4) for token, entry in each.items()} for each in logprobs
    ]


def _numbers(logprobs: Any) -> Any:
    return logprobs and [{token: entry.logprob for token, entry in each.items()} for each in logprobs]


def check(model: str, kind: str, sizes: str, right: float, kv_cache_dtype: str = "auto") -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True, **PARAMS[kind])
    options = {"block_size": 4, "max_num_seqs": 4, **SIZES[sizes]}
    expected, cached = run(Engine(program(model, kv_cache_dtype), **options), params)
    answers = {
        (tuple(prompt), params.completion(i).seed): own[0] for prompt, each in expected for i, own in enumerate(each)
    }
    engine = Engine(program(model, kv_cache_dtype), **options)
    lengths = iter([3, 7, 1, 3] * 1000)
    draft(engine, Oracle(answers, right, engine.limits.vocab_size), lambda: next(lengths))
    found, cached_with_drafts = run(engine, params, _numbers)
    assert found == expected
    if sizes == "chunks":
        assert cached_with_drafts == cached
    assert bool(engine.stats()["spec_decode_num_accepted_tokens"]) == (right > 0)


@pytest.fixture(autouse=True)
def snapshots_of_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "WORTH", 8)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("kind", "right"), [("greedy", 0.7), ("seeded", 1.0), ("penalties", 0.7), ("several", 0.7)])
@pytest.mark.parametrize("sizes", SIZES)
def test_tokens_are_those_without_drafts(model: str, kind: str, right: float, sizes: str) -> None:
    check(model, kind, sizes, right)


@pytest.mark.parametrize("model", MODELS)
def test_wrong_drafts_change_nothing(model: str) -> None:
    check(model, "greedy", "chunks", 0.0)


@pytest.mark.parametrize("model", ["llama", "gemma3_text", "qwen3_5_text"])
def test_caches_of_int8(model: str) -> None:
    """Rows that were rejected are written over with their scales."""
    check(model, "greedy", "chunks", 0.6, "int8")


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("model", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_moe", "gpt2"])
def test_a_model_that_drafts_for_itself_is_always_right(model: str, kv_cache_dtype: str) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0)
    options: dict[str, Any] = {"block_size": 4, "max_num_seqs": 4, **SIZES["chunks"]}
    expected, _ = run(Engine(program(model, kv_cache_dtype), **options), params)
    drafts = build_program(build_tiny_model(model), CompileOptions(codegen="none", kv_cache_dtype=kv_cache_dtype))
    config = {"method": "draft_model", "model": model}
    engine = Engine(program(model, kv_cache_dtype), draft_program=drafts, speculative_config=config, **options)
    drafting = engine._core.state.drafting
    assert drafting is not None
    always(drafting, 3)
    found, _ = run(engine, params)
    assert found == expected
    stats = engine.stats()
    assert stats["spec_decode_num_accepted_tokens"] > 0.97 * stats["spec_decode_num_draft_tokens"] > 0
