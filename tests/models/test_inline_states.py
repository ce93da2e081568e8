"""Models whose own code spells out what they keep of earlier tokens, under what moves sequences about, against HF."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from torch_pagoda.compiler import CompileOptions
from torch_pagoda.compiler.build import build_program
from torch_pagoda.passes import UnsupportedModel
from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.program import Program, StateSpec
from torch_pagoda.runtime.requests.sampling_params import SamplingParams

from hf_reference import assert_served
from tiny_models import build_tiny_model

MAX_TOKENS = 10
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=8)
MODELS: dict[str, dict[str, Any]] = {
    "minimax": {"block_size": 16},
    "zaya": {},
    "zaya with biases": {"attention_bias": True},
    "inkling_text": {},
    "inkling_text with scaled logits": {"log_scaling_n_floor": 8, "log_scaling_alpha": 0.5},
}
"""Architecture → what differs from its tiny model. Prompts of 150 tokens are longer than many blocks of MiniMax."""
STATES = {
    "minimax": ["recurrent_state"],
    "zaya": ["conv_state"] * 6,
    "inkling_text": ["conv_state"] * 8,
}


@pytest.fixture(scope="module", params=MODELS)
def served(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, Program]:
    model = build_tiny_model(request.param.split()[0], **MODELS[request.param])
    return model, build_program(model, CompileOptions(codegen="none"))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 200, (length,), generator=torch.Generator().manual_seed(1000 * seed + length)).tolist()


def test_what_is_kept(served: tuple[PreTrainedModel, Program]) -> None:
    model, program = served
    states = [spec for spec in program.caches if isinstance(spec, StateSpec)]
    assert [spec.name for spec in states] == STATES[model.config.model_type]
    assert program.report.dropped_passes == []  # type: ignore[attr-defined]


def test_chunked_prompts_of_different_lengths(served: tuple[PreTrainedModel, Program]) -> None:
    model, program = served
    engine = Engine(program, block_size=4, num_blocks=96, max_num_seqs=3, max_num_batched_tokens=11)
    assert_served(model, engine.generate([prompt_of(n) for n in (5, 9, 14, 40, 150)], GREEDY))
    engine.block_manager.check()


def test_prompts_that_begin_alike(served: tuple[PreTrainedModel, Program]) -> None:
    model, program = served
    engine = Engine(program, block_size=4, num_blocks=256, max_num_batched_tokens=64, enable_prefix_caching=True)
    prefix = prompt_of(96)
    prompts = [prefix + prompt_of(7, seed) for seed in range(3)]
    for _ in range(2):
        for prompt in prompts:
            assert_served(model, engine.generate([prompt], GREEDY))
    assert engine.stats()["cached_tokens"] > 4 * 80
    engine.block_manager.check()


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_too_few_blocks(served: tuple[PreTrainedModel, Program], preemption: str) -> None:
    model, program = served
    engine = Engine(program, block_size=4, num_blocks=14, preemption=preemption, swap_space=1 << 22)
    outputs = engine.generate([prompt_of(n) for n in (9, 14, 13, 11)], GREEDY)
    assert engine.stats()["preemptions"] > 0
    assert_served(model, outputs)
    engine.block_manager.check()


def test_half_precision() -> None:
    """The self-check compares the logits."""
    for name in STATES:
        program = build_program(build_tiny_model(name, **MODELS[name]).bfloat16(), CompileOptions(codegen="none"))
        assert program.report.verdict is not None and program.report.verdict.ok  # type: ignore[attr-defined]
        assert program.report.dropped_passes == []  # type: ignore[attr-defined]


def test_many_layers_compiled_as_a_few() -> None:
    """Slopes differ from layer to layer, though the layers are alike."""
    kinds = ["linear_attention", "full_attention"]
    # Rounding grows in ten random layers; what each adds is made smaller than what it is added to.
    damped = {f"{part}_beta_factor": 0.3 for part in ("linear_attn", "full_attn", "mlp")}
    model = build_tiny_model("minimax", num_hidden_layers=10, layer_types=kinds * 5, block_size=16, **damped)
    program = build_program(model, CompileOptions(codegen="none"))
    assert program.report.layers_compiled == 6  # type: ignore[attr-defined]
    engine = Engine(program, block_size=4, num_blocks=96)
    assert_served(model, engine.generate([prompt_of(60)], GREEDY), 1e-3)
    with torch.no_grad():
        model.model.layers[8].self_attn.slope_rate.mul_(1.05)  # one of those that were not traced
    with pytest.raises(UnsupportedModel, match=r"layers\.8\.self_attn .* does not compute what its class says"):
        build_program(model, CompileOptions(codegen="none"))


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "hidden_size": 512}

INKLING = {
    **{**HEADS, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 128},
    **{"sliding_window_size": 512, "rel_extent": 1024, "log_scaling_n_floor": 600},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "sizes"), [("minimax", {**HEADS, "block_size": 256}), ("zaya", HEADS), ("inkling_text", INKLING)]
)
def test_sizes_that_people_run(model_type: str, sizes: dict[str, Any]) -> None:
    """Heads of 128, blocks of 256, a vocabulary of 150,000, prompts of 1500 and more, a prefix that is shared."""
    model = build_tiny_model(model_type, vocab_size=151_936, max_position_embeddings=8192, **sizes)
    program = build_program(model, CompileOptions(codegen="none"))
    engine = Engine(program, block_size=16, num_blocks=1024, max_num_batched_tokens=512, enable_prefix_caching=True)
    draw = torch.Generator().manual_seed(0)
    shared, *ends = (torch.randint(3, 151_000, (n,), generator=draw).tolist() for n in (1500, 700, 33, 260))
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=8)
    for prompt in [shared + ends[0], ends[0], shared + ends[1], shared + ends[2]]:
        assert_served(model, engine.generate([prompt], params), 1e-3)
    assert engine.stats()["cached_tokens"] >= 1488
    engine.block_manager.check()
