"""Sequences that grow past longrope's switch while they are generated, against transformers' cached generate."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel

from torch_pagoda.compiler import CompileOptions
from torch_pagoda.compiler.build import build_program
from torch_pagoda.compiler.link.linker import LinkedProgram
from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.requests.sampling_params import SamplingParams

from hf_reference import greedy_with_cache
from tiny_models import LLAMA_VARIANTS, build_tiny_model

SWITCH = 16
MAX_TOKENS = 14
PROMPTS = [[3 + (7 * i + 5 * n) % 200 for i in range(n)] for n in (2, 9, 13, 15, 16, 17, 30)]
PARAMS = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=4)


@pytest.fixture(scope="module", params=["llama/rope-longrope", "phi3/rope-longrope"])
def served(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, LinkedProgram]:
    variant = LLAMA_VARIANTS[request.param]
    model = build_tiny_model(variant.model_type, **variant.overrides)
    program = build_program(model, CompileOptions(verify="off", codegen="none"))
    # Phi-3's own generate recomputes every key with the long table at the switch; llama keeps its keys.
    assert program.restart_length == (SWITCH if variant.model_type == "phi3" else None)
    assert program.max_model_len == model.config.max_position_embeddings
    return model, program


def largest_error(model: PreTrainedModel, engine: Engine) -> float:
    worst = 0.0
    for prompt, output in zip(PROMPTS, engine.generate(PROMPTS, PARAMS), strict=True):
        completion = output.outputs[0]
        assert completion.logprobs is not None and len(completion.token_ids) == MAX_TOKENS, completion.error
        expected = greedy_with_cache(model, prompt, MAX_TOKENS)
        worst = max(worst, expected.largest_error(completion.token_ids, completion.logprobs))
    engine.block_manager.check()
    engine.batcher.check()
    return worst


@pytest.mark.parametrize(
    ("limits", "preempts"),
    [
        ({"num_blocks": 100}, False),
        ({"num_blocks": 100, "max_num_batched_tokens": 5, "max_num_seqs": 3}, False),
        ({"num_blocks": 24}, True),
    ],
    ids=["together", "chunked", "preempted"],
)
def test_the_switch_is_crossed_exactly(
    served: tuple[PreTrainedModel, LinkedProgram], limits: dict[str, int], preempts: bool
) -> None:
    model, program = served
    engine = Engine(program, block_size=4, **limits)
    assert largest_error(model, engine) < 1e-4
    assert (engine.stats()["preemptions"] > 0) == preempts


def test_without_the_restart_the_numbers_differ(
    served: tuple[PreTrainedModel, LinkedProgram], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, program = served
    monkeypatch.setattr(program, "restart_length", None if program.restart_length else SWITCH)
    assert largest_error(model, Engine(program, block_size=4, num_blocks=100)) > 1e-2
