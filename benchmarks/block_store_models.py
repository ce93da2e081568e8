"""Tiny models for block_store_soak.py, compiled once, and what they answer without a store."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torch_pagoda import LLM, SamplingParams
from torch_pagoda.block_fingerprint import block_fingerprint
from torch_pagoda.options import split_options
from torch_pagoda.runtime.cache.cache_specs import has_state
from torch_pagoda.runtime.engine.engine import Engine

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("llama", {}),
    "dense, int8 cache": ("llama", {"kv_cache_dtype": "int8"}),
    "windows": ("gemma3_text", {}),
    "windows, int8 cache": ("gemma3_text", {"kv_cache_dtype": "int8"}),
    "windows, sinks, experts": ("gpt_oss", {}),
    "experts": ("mixtral", {}),
    "latents (MLA)": ("deepseek_v3", {}),
    "indexer (DSA)": ("deepseek_v32", {}),
    "states (delta rule)": ("qwen3_5_text", {}),
    "states (Mamba-2), experts": ("granitemoehybrid", {}),
    "states alone": ("mamba", {}),
}
"""Kind of model → architecture and options of ``LLM``."""
BLOCK_SIZE = 4
MAX_TOKENS = 8
SNAPSHOTS = (70, 140)
"""Tokens that prompts share where states are kept: a snapshot has to be worth it."""


@dataclass
class Model:
    """A compiled model, and another one of the same shape.

    Attributes:
        program: the model; each engine gets a copy of it with a cache of its own.
        embedding: a weight of it. With its rows in another order the program is the other model.
        fingerprints: of the two.
        shared: least and most tokens that prompts share.
        answers: of one engine without a store, by prompt.
    """

    program: Any
    embedding: torch.Tensor
    fingerprints: tuple[bytes, bytes]
    shared: tuple[int, int] = (8, 60)
    answers: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def copy(self) -> Any:
        """The program for one more engine, beside others."""
        made = copy(self.program)
        if hasattr(made, "linkage"):
            made._args = list(made._args)
            made._recorded = made._records(made._run, made.linkage)
        return made

    @contextmanager
    def changed(self) -> Iterator[None]:
        """The other model, for a while."""
        with torch.no_grad():
            self.embedding.copy_(self.embedding.roll(1, 0))
            try:
                yield
            finally:
                self.embedding.copy_(self.embedding.roll(-1, 0))

    def right(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        """The answers of one engine without a store and without a prefix cache."""
        if missing := [prompt for prompt in prompts if tuple(prompt) not in self.answers]:
            engine = Engine(self.copy(), block_size=BLOCK_SIZE, num_blocks=512, enable_prefix_caching=False)
            for prompt, output in zip(missing, engine.generate(missing, greedy()), strict=True):
                self.answers[tuple(prompt)] = list(output.outputs[0].token_ids)
            engine.shutdown()
        return [self.answers[tuple(prompt)] for prompt in prompts]


def greedy() -> SamplingParams:
    return SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True)


def compiled(architecture: str, options: dict[str, Any], folder: Path) -> Model:
    """A tiny model of an architecture; the checkpoints whose fingerprints it needs lie in the folder meanwhile."""
    from tiny_models import build_tiny_model

    module = build_tiny_model(architecture)
    llm = LLM(module, block_size=BLOCK_SIZE, num_blocks=8, **options)
    model = Model(llm.program, module.get_input_embeddings().weight, (b"", b""))
    if has_state(llm.program.caches):
        model.shared = SNAPSHOTS
    loading, _, compiling = split_options(options, owns_weights=True)

    def fingerprint(name: str) -> bytes:
        module.save_pretrained(folder / name)
        return block_fingerprint(folder / name, loading, compiling)

    own = fingerprint("own")
    with model.changed():
        model.fingerprints = own, fingerprint("other")
    return model
