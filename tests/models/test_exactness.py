"""Whole models served from the paged cache, in the ways that a scheduler can cut them up, against HF.

Each model is compiled once, without the self-check, so that nothing but the pipeline under test decides; several
engines with different limits then run its program, in float32 the one that a second start takes from the store.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from transformers import PreTrainedModel

from torch_pagoda.compiler import CompileOptions, compile_program
from torch_pagoda.compiler import compile as compile_module
from torch_pagoda.compiler.build import build_program
from torch_pagoda.compiler.warm_start.file import ProgramStore
from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.program import Program
from torch_pagoda.runtime.requests.outputs import RequestOutput
from torch_pagoda.runtime.requests.sampling_params import SamplingParams

from hf_reference import forced
from tiny_models import build_tiny_model

MODELS = (
    *(
        "llama",
        "qwen2",
        "qwen3",
        "mistral",
        "gemma2",
        "gemma3_text",
        "phi3",
        "gpt2",
        "gpt_neox",
        "opt",
        "bloom",
    ),
    *("falcon", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "glm4", "olmo2", "cohere", "starcoder2"),
    "granite",
    # With state: gated delta rule, delta rule per channel and MLA, Mamba-2 beside attention, Mamba-1, convolutions.
    *("qwen3_5_text", "kimi_linear", "falcon_h1", "jamba", "lfm2_moe"),
)
COMPILED_BY_INDUCTOR = ("llama", "gemma2", "qwen3_moe")
MAX_TOKENS = 12
TOLERANCE = 1e-4
"""Largest error of a float32 log-probability; the kernels' summation order alone gives about 1e-5."""

GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=8)


@dataclass(frozen=True)
class Served:
    """A model and the program compiled from it."""

    model: PreTrainedModel
    program: Program

    def run(
        self, lengths: tuple[int, ...], params: SamplingParams = GREEDY, **limits: int
    ) -> tuple[Engine, list[RequestOutput]]:
        """Serve random prompts of these lengths in one batch."""
        engine = Engine(self.program, block_size=4, **limits)
        outputs = engine.generate([prompt_of(length) for length in lengths], params)
        engine.block_manager.check()
        assert engine.stats()["blocks_used"] == 0
        return engine, outputs


def compile_tiny(model_type: str, dtype: torch.dtype = torch.float32, codegen: str = "none") -> Served:
    model = build_tiny_model(model_type, dtype=dtype)
    options = CompileOptions(verify="off", codegen=codegen)
    return Served(model, build_program(model, options))


def prompt_of(length: int) -> list[int]:
    return torch.randint(3, 250, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def assert_equal_to_transformers(served: Served, outputs: list[RequestOutput]) -> None:
    """Tokens equal and log-probabilities close, each prompt against the module that runs it alone."""
    for output in outputs:
        completion = output.outputs[0]
        prompt = output.prompt_token_ids
        assert completion.finish_reason == "length", completion.error
        assert len(completion.token_ids) == MAX_TOKENS
        expected = forced(served.model, prompt, completion.token_ids)
        assert completion.token_ids == expected.tokens, f"prompt of {len(prompt)} tokens"
        assert completion.logprobs is not None
        error = expected.largest_error(completion.token_ids, completion.logprobs)
        assert error < TOLERANCE, f"prompt of {len(prompt)} tokens: log-probabilities off by {error:.1e}"


@pytest.fixture(scope="module", params=MODELS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model and its program, which was stored and loaded again."""
    store = ProgramStore(tmp_path_factory.mktemp("store") / "programs")
    options = CompileOptions(verify="off", codegen="none")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_module, "open_store", lambda: store)
        compile_program(build_tiny_model(request.param), options)
        model = build_tiny_model(request.param)
        program = compile_program(model, options)
    assert program.report.stored
    yield Served(model, program)
    torch._dynamo.reset()


def test_prompts_of_different_lengths(served: Served) -> None:
    engine, outputs = served.run((5, 9, 14, 40), num_blocks=64)
    assert_equal_to_transformers(served, outputs)
    assert engine.stats()["preemptions"] == 0


def test_chunked_prefill(served: Served) -> None:
    engine, outputs = served.run((40, 5, 23), num_blocks=64, max_num_seqs=2, max_num_batched_tokens=7)
    assert_equal_to_transformers(served, outputs)
    assert engine.stats()["steps"] > 40 // 7 + MAX_TOKENS


def test_preemption_by_too_few_blocks(served: Served) -> None:
    engine, outputs = served.run((9, 14, 13, 11), num_blocks=16)
    # A window lets its blocks go as it passes: then so few suffice.
    slides = all(group.window for group in engine.block_manager.groups)
    assert slides or engine.stats()["preemptions"] > 0
    assert sum(output.metrics.num_preemptions for output in outputs) == engine.stats()["preemptions"]
    assert_equal_to_transformers(served, outputs)


def test_batch_mates_of_very_different_lengths(served: Served) -> None:
    _, outputs = served.run((1, 90, 2, 33), num_blocks=64, max_num_batched_tokens=32)
    assert_equal_to_transformers(served, outputs)


@pytest.mark.parametrize("model_type", MODELS)
def test_bfloat16_logits(model_type: str) -> None:
    """As close to the answer in float32 as transformers in bfloat16 is.

    In mixtures of experts rounding sends a token to another expert now and then, in both; there the typical
    error is compared, elsewhere the root of the mean square, which a single wrong row would raise.
    """
    served = compile_tiny(model_type, torch.bfloat16)
    exact = build_tiny_model(model_type, dtype=torch.bfloat16).float()
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=8)
    _, outputs = served.run((5, 23, 60), params, num_blocks=64, max_num_batched_tokens=16)
    ours: list[float] = []
    theirs: list[float] = []
    for output in outputs:
        completion = output.outputs[0]
        assert completion.logprobs is not None
        truth = forced(exact, output.prompt_token_ids, completion.token_ids).logprobs
        rounded = forced(served.model, output.prompt_token_ids, completion.token_ids).logprobs
        for row, rounded_row, reported in zip(truth, rounded, completion.logprobs, strict=True):
            ours += [entry.logprob - float(row[token_id]) for token_id, entry in reported.items()]
            theirs += [float(rounded_row[token_id] - row[token_id]) for token_id in reported]
    has_experts = any("experts" in name for name, _ in served.model.named_modules())
    error, allowed = (
        float(torch.tensor(errors).abs().median() if has_experts else torch.tensor(errors).square().mean().sqrt())
        for errors in (ours, theirs)
    )
    # Which tokens a router sends elsewhere is chance, so the medians of two runs differ more than the roots do.
    assert error < (2.5 if has_experts else 1.4) * allowed + 0.002


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("model_type", COMPILED_BY_INDUCTOR)
def test_compiled_by_inductor(model_type: str) -> None:
    served = compile_tiny(model_type, codegen="inductor")
    _, outputs = served.run((40, 5, 23), num_blocks=20, max_num_seqs=3, max_num_batched_tokens=11)
    assert_equal_to_transformers(served, outputs)
