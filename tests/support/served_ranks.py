"""What several ranks serve in all modes, compared with one process and with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import torch_pagoda as pagoda
from torch_pagoda import SamplingParams

from hf_reference import greedy_without_cache
from tiny_models import build_tiny_model

SIZES: dict[str, Any] = {"block_size": 4, "num_blocks": 24, "max_num_seqs": 4, "max_num_batched_tokens": 32}
LENGTHS = (4, 70, 21, 9, 40)
"""Of prompts: some are cut into chunks, and not all fit into the cache together."""
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, 250, (n,), generator=generator).tolist() for n in LENGTHS]


def tokens(outputs: list[Any]) -> list[list[list[int]]]:
    return [[list(completion.token_ids) for completion in output.outputs] for output in outputs]


def served(folder: Path, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    """Greedy tokens, samples of two and beams of all prompts, one of them twice more; and figures of the engine."""
    with pagoda.LLM(folder, **{**SIZES, **options}) as llm:
        greedy = tokens(llm.generate(prompts(), GREEDY))
        again = [tokens(llm.generate(prompts()[1:2], GREEDY)) for _ in range(2)]
        sampled = SamplingParams(max_tokens=6, temperature=1.0, seed=5, n=2, ignore_eos=True)
        pairs = tokens(llm.generate(prompts()[:2], sampled))
        beams = llm.beam_search(prompts()[2:4], pagoda.BeamSearchParams(beam_width=2, max_tokens=5, ignore_eos=True))
        found = [list(sequence.token_ids) for output in beams for sequence in output.sequences]
        return [greedy, again, pairs, found], llm.stats()


def check_ranks(kind: str, folder: Path, ranks: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Compare ranks with transformers and with one process; returns the figures of their engine.

    Args:
        kind: the architecture.
        folder: its checkpoint.
        ranks: the options that ask for several ranks.
        options: the others.
    """
    found, stats = served(folder, **ranks, **options)
    alone, _ = served(folder, **options)
    assert found == alone
    if not options.get("kv_cache_dtype"):
        model = build_tiny_model(kind)
        assert found[0] == [[greedy_without_cache(model, prompt, GREEDY.max_tokens).tokens] for prompt in prompts()]
    assert stats["ranks"] == ranks.get("tensor_parallel_size", 1) * ranks.get("pipeline_parallel_size", 1)
    return stats
