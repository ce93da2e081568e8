"""Models whose attention reads keys that an indexer chooses, under what moves sequences about, against HF."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from torch_pagoda.compiler import CompileOptions
from torch_pagoda.compiler.build import build_program
from torch_pagoda.passes import UnsupportedModel
from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.program import CacheSpec, Program
from torch_pagoda.runtime.requests.sampling_params import SamplingParams

from hf_reference import assert_served
from tiny_models import build_tiny_model

MAX_TOKENS = 10
TOPK = 8
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=8)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """Two layers with indexers and two that take over their choices."""
    model = build_tiny_model("hy_v4")
    assert model.config.index_topk == TOPK
    return model


@pytest.fixture(scope="module")
def program(model: PreTrainedModel) -> Program:
    return build_program(model, CompileOptions(codegen="none"))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 200, (length,), generator=torch.Generator().manual_seed(1000 * seed + length)).tolist()


def test_keys_of_indexers_lie_in_the_blocks_of_the_others(program: Program) -> None:
    specs = [spec for spec in program.caches if isinstance(spec, CacheSpec)]
    assert [spec.value_dim for spec in specs].count(0) == 2
    assert len(specs) == 6 and {spec.group for spec in specs} == {0}


def test_chunked_prompts_of_different_lengths(model: PreTrainedModel, program: Program) -> None:
    engine = Engine(program, block_size=4, num_blocks=96, max_num_seqs=3, max_num_batched_tokens=11)
    assert_served(model, engine.generate([prompt_of(n) for n in (5, 9, 14, 40, 150)], GREEDY))
    engine.block_manager.check()


def test_prompts_that_begin_alike(model: PreTrainedModel, program: Program) -> None:
    engine = Engine(program, block_size=4, num_blocks=256, max_num_batched_tokens=64, enable_prefix_caching=True)
    prefix = prompt_of(96)
    prompts = [prefix + prompt_of(7, seed) for seed in range(3)]
    for _ in range(2):
        for prompt in prompts:
            assert_served(model, engine.generate([prompt], GREEDY))
    assert engine.stats()["cached_tokens"] >= 5 * 96
    engine.block_manager.check()


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_too_few_blocks(model: PreTrainedModel, program: Program, preemption: str) -> None:
    engine = Engine(program, block_size=4, num_blocks=14, preemption=preemption, swap_space=1 << 22)
    outputs = engine.generate([prompt_of(n) for n in (9, 14, 13, 11)], GREEDY)
    assert engine.stats()["preemptions"] > 0
    assert_served(model, outputs)
    engine.block_manager.check()


def test_steps_of_sizes_that_came_before(model: PreTrainedModel, program: Program) -> None:
    """Small steps are recorded while nothing is left out, and made again when something is."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=8)
    engine = Engine(program, block_size=16, num_blocks=32)
    for length in (1, 2, 1):
        assert_served(model, engine.generate([prompt_of(length), prompt_of(length, 1)], params))


def test_what_cannot_be_had() -> None:
    model = build_tiny_model("deepseek_v32")
    with pytest.raises(UnsupportedModel, match="batch_invariant=True is not possible"):
        build_program(model, CompileOptions(codegen="none", verify="off", batch_invariant=True))
    half = build_tiny_model("deepseek_v32", dtype=torch.bfloat16)
    with pytest.raises(
        UnsupportedModel, match=r"no operator of Ascend910B3 chooses keys .* of 128 dims; use target="
    ):
        build_program(half, CompileOptions(target="npu", verify="off"))


def test_int8_caches_round_no_key_of_an_indexer(model: PreTrainedModel) -> None:
    program = build_program(model, CompileOptions(codegen="none", kv_cache_dtype="int8"))
    kept = [spec for spec in program.caches if isinstance(spec, CacheSpec) and not spec.value_dim]
    assert {spec.dtype for spec in kept} == {torch.float32}
    engine = Engine(program, block_size=4, num_blocks=96, max_num_batched_tokens=11)
    (output,) = engine.generate([prompt_of(60)], GREEDY)
    assert output.outputs[0].finish_reason == "length"


HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 512}
LATENT = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 256, "q_lora_rank": 256}
INDEXER = {"index_n_heads": 32, "index_head_dim": 128, "index_topk": 512}
SINKS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "hidden_size": 512}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        ("deepseek_v32", {**HEADS, **LATENT, **INDEXER}),
        ("hy_v4", {**HEADS, **LATENT, **INDEXER}),
        ("granite_swa", {**SINKS, "sliding_window": 512}),
    ],
)
def test_sizes_that_people_run(model_type: str, sizes: dict[str, Any]) -> None:
    """Heads of 128, a vocabulary of 150,000, prompts of which most keys are left out, a prefix that is shared.

    Of 2,000 scores some differ by less than float32's rounding: a key that is nearly tied with the last one chosen
    may take its place.
    """
    model = build_tiny_model(model_type, vocab_size=151_936, max_position_embeddings=8192, **sizes)
    program = build_program(model, CompileOptions(codegen="none"))
    engine = Engine(program, block_size=16, num_blocks=1024, max_num_batched_tokens=512, enable_prefix_caching=True)
    draw = torch.Generator().manual_seed(0)
    shared, *ends = (torch.randint(3, 151_000, (n,), generator=draw).tolist() for n in (1500, 600, 33, 260))
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=8)
    for prompt in [shared + ends[0], ends[1], shared + ends[1], shared + ends[2]]:
        assert_served(model, engine.generate([prompt], params), 1e-2 if "index_topk" in sizes else 1e-3)
    assert engine.stats()["cached_tokens"] >= 2 * 1488
    engine.block_manager.check()
