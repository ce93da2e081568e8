"""`LLM(batch_invariant=True)`: the same bits alone, in any batch, at any chunking, with any number of threads."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import torch_pagoda as pagoda
from torch_pagoda.compiler.options import CompileOptions
from torch_pagoda.runtime.ops.native import load_kernels

from tiny_models import build_tiny_model

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="there are no C++ kernels")

LENGTHS = (5, 40, 17, 70, 3, 33, 64, 65, 9, 100)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 250, (length,), generator=generator).tolist() for length in LENGTHS]


def serve(model_type: str, dtype: torch.dtype, **options: Any) -> pagoda.LLM:
    model = build_tiny_model(model_type, dtype=dtype)
    return pagoda.LLM(model, num_blocks=256, block_size=16, codegen="none", **options)


def answers(llm: pagoda.LLM, given: list[list[int]]) -> list[Any]:
    """Tokens and log-probabilities, to the last bit."""
    params = pagoda.SamplingParams(max_tokens=6, temperature=0, logprobs=3, ignore_eos=True)
    return [(found.outputs[0].token_ids, found.outputs[0].logprobs) for found in llm.generate(given, params)]


@pytest.mark.parametrize(
    ("model_type", "dtype", "batches"),
    [
        ("llama", torch.bfloat16, 10),
        ("gpt2", torch.float32, 3),  # transposed weights
        ("gemma2", torch.float32, 3),  # a window, softcaps
        ("qwen2_moe", torch.float32, 3),  # experts, and how they are chosen
        ("minimax", torch.float32, 3),  # a recurrence, whose state goes on from step to step and from cached prefixes
        ("lfm2_moe", torch.float32, 3),  # short convolutions likewise
    ],
    ids=lambda x: str(x).removeprefix("torch."),
)
def test_answers_are_the_same_alone_and_in_any_batch(model_type, dtype, batches, two_threads):
    given = prompts()[: 1 + batches]
    # Steps of 64 tokens cut prompts into chunks, at places that depend on who else is there; the first answers
    # leave prefixes behind that later ones find.
    llm = serve(model_type, dtype, batch_invariant=True, max_num_batched_tokens=64)
    alone = [answers(llm, [prompt])[0] for prompt in given]
    draw = random.Random(0)
    for batch in range(batches):
        torch.set_num_threads(1 + batch % 2)
        if batch % 3 == 0:
            llm.reset_prefix_cache()
        chosen = draw.sample(range(len(given)), 2 + batch % (len(given) - 1))
        for found, i in zip(answers(llm, [given[i] for i in chosen]), chosen, strict=True):
            assert found == alone[i], (batch, i)


def test_answers_without_it_change_with_the_batch(two_threads):
    """The comparison sees what it is for."""
    llm = serve("llama", torch.float32, max_num_batched_tokens=64, verify="off")
    assert [answers(llm, [prompt])[0] for prompt in prompts()] != answers(llm, prompts())


def test_what_cannot_be_kept_is_refused():
    with pytest.raises(ValueError, match="batch_invariant=True cannot be used with codegen='inductor'"):
        CompileOptions(batch_invariant=True, codegen="inductor")
    with pytest.raises(ValueError, match="batch_invariant=True cannot be used with target='npu'"):
        CompileOptions(batch_invariant=True, target="npu").for_device("cpu")
    with pytest.raises(ValueError, match="batch_invariant='yes'"):
        CompileOptions(batch_invariant="yes")


def test_no_list_of_passes_takes_the_promise_back():
    from torch_pagoda.compiler.options import selected_passes

    for passes in ({"skip": ["make_batch_invariant"]}, {"only": ["remove_noops"]}):
        options = CompileOptions(batch_invariant=True, target="cpu", passes=passes)
        assert "make_batch_invariant" in [entry.name for entry in selected_passes(options)]
    assert "make_batch_invariant" not in [entry.name for entry in selected_passes(CompileOptions(target="cpu"))]
