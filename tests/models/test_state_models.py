"""Models that keep state, under what moves sequences about: forks, swapping, prefix caching, against HF."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, Qwen3_5ForConditionalGeneration

from torch_pagoda import LLM
from torch_pagoda.compiler import CompileOptions
from torch_pagoda.compiler.build import build_program
from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.program import Program, StateSpec
from torch_pagoda.runtime.requests.sampling_params import SamplingParams

from hf_reference import forced
from tiny_models import build_tiny_model, tiny_config

MAX_TOKENS = 10
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build_tiny_model("qwen3_5_text")


@pytest.fixture(scope="module")
def program(model: PreTrainedModel) -> Program:
    return build_program(model, CompileOptions(codegen="none"))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 200, (length,), generator=torch.Generator().manual_seed(1000 * seed + length)).tolist()


def assert_right(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> None:
    assert tokens == forced(model, prompt, tokens).tokens


def test_states_are_in_a_group_of_their_own(program: Program) -> None:
    states = [spec for spec in program.caches if isinstance(spec, StateSpec)]
    assert [spec.name for spec in states] == ["conv_state", "recurrent_state"] * 2
    assert {spec.group for spec in states} == {1 + max(s.group for s in program.caches if s not in states)}
    assert all(spec.dtype is torch.float32 for spec in states)


def test_prompts_that_begin_alike(model: PreTrainedModel, program: Program) -> None:
    """The first two leave states behind, later ones go on from them, as from keys and values."""
    engine = Engine(program, block_size=4, num_blocks=256, max_num_batched_tokens=64, enable_prefix_caching=True)
    prefix = prompt_of(96)
    for seed, rounds in enumerate((1, 1, 2)):
        prompts = [prefix + prompt_of(7, seed * 10 + i + 1) for i in range(rounds)]
        for output in engine.generate(prompts, GREEDY):
            assert_right(model, output.prompt_token_ids, list(output.outputs[0].token_ids))
    assert engine.stats()["cached_tokens"] > 2 * 80
    again = prefix + prompt_of(7, 1)
    (output,) = engine.generate([again], GREEDY)
    assert_right(model, again, list(output.outputs[0].token_ids))
    engine.block_manager.check()


def test_several_samples_of_one_prompt(model: PreTrainedModel, program: Program) -> None:
    engine = Engine(program, block_size=4, num_blocks=128, max_num_batched_tokens=32)
    params = SamplingParams(temperature=1.0, n=3, seed=5, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=8)
    (output,) = engine.generate([prompt_of(21)], params)
    assert len({tuple(c.token_ids) for c in output.outputs}) > 1
    for completion in output.outputs:
        expected = forced(model, output.prompt_token_ids, completion.token_ids)
        assert completion.logprobs is not None
        assert expected.largest_error(completion.token_ids, completion.logprobs) < 1e-3
    engine.block_manager.check()


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_too_few_blocks(model: PreTrainedModel, program: Program, preemption: str) -> None:
    engine = Engine(program, block_size=4, num_blocks=14, preemption=preemption, swap_space=1 << 22)
    outputs = engine.generate([prompt_of(n) for n in (9, 14, 13, 11)], GREEDY)
    assert engine.stats()["preemptions"] > 0
    for output in outputs:
        assert_right(model, output.prompt_token_ids, list(output.outputs[0].token_ids))
    engine.block_manager.check()
    assert engine.stats()["blocks_used"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [("qwen3_5_text", {}), ("kimi_linear", {}), ("mamba2", {}), ("falcon_h1", {"mamba_rms_norm": True})],
    ids=str,
)
def test_a_norm_and_its_gate_are_one_operator(
    model_type: str, overrides: dict[str, bool], dtype: torch.dtype
) -> None:
    """In every layer with state, and the self-check finds the logits of HF."""
    program = build_program(build_tiny_model(model_type, dtype=dtype, **overrides), CompileOptions(codegen="none"))
    report = program.report
    assert report.verdict is not None and report.verdict.ok and not report.dropped_passes
    (record,) = [record for record in report.passes if record.name == "recognize_gated_norm"]
    states = [spec for spec in program.caches if isinstance(spec, StateSpec) and spec.name == "recurrent_state"]
    assert record.matches == len(states)
    assert not record.rejections


def test_the_text_part_of_a_multimodal_checkpoint(tmp_path: Path) -> None:
    config = tiny_config("qwen3_5")
    sizes = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
    for name, size in {**sizes, "out_hidden_size": config.text_config.hidden_size}.items():
        setattr(config.vision_config, name, size)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        whole = Qwen3_5ForConditionalGeneration(config).eval()
        for parameter in whole.parameters():
            parameter.normal_(0, 0.05)
    whole.save_pretrained(tmp_path)
    llm = LLM(tmp_path, codegen="none")
    prompt = prompt_of(80)
    (output,) = llm.generate([prompt], GREEDY)
    assert_right(whole, prompt, list(output.outputs[0].token_ids))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "nemotron_h"])
def test_sizes_that_people_run(model_type: str) -> None:
    """Heads of 128, a vocabulary of 150,000, prompts beyond every chunk, blocks of 16, a prefix that is shared."""
    sizes: dict[str, dict[str, int]] = {
        "qwen3_5_text": {
            **{"hidden_size": 512, "head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 2},
            **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
            **{"linear_num_key_heads": 4, "linear_num_value_heads": 8},
        },
        "nemotron_h": {
            **{"hidden_size": 512, "head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 2},
            **{"mamba_num_heads": 16, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 4, "chunk_size": 128},
        },
    }
    model = build_tiny_model(model_type, vocab_size=151_936, max_position_embeddings=8192, **sizes[model_type])
    program = build_program(model, CompileOptions(codegen="none"))
    engine = Engine(program, block_size=16, num_blocks=1024, max_num_batched_tokens=512, enable_prefix_caching=True)
    draw = torch.Generator().manual_seed(0)
    shared, *ends = (torch.randint(3, 151_000, (n,), generator=draw).tolist() for n in (1500, 600, 33, 260, 7))
    prompts = [shared + ends[0], ends[1], shared + ends[2], shared + ends[3]]
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=8)
    for prompt in prompts:
        (output,) = engine.generate([prompt], params)
        completion = output.outputs[0]
        expected = forced(model, prompt, completion.token_ids)
        assert completion.logprobs is not None
        assert expected.largest_error(completion.token_ids, completion.logprobs) < 1e-3
        assert_right(model, prompt, list(completion.token_ids))
    assert engine.stats()["cached_tokens"] >= 1488
    engine.block_manager.check()
