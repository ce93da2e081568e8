"""How well a paged program and transformers predict text: the measure of what rounding costs."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import torch
from quantized_oracle import inputs_as_made
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from torch_pagoda.runtime.cache.kv_cache import allocate_kv_cache
from torch_pagoda.runtime.program import Program
from torch_pagoda.runtime.step_metadata import StepMetadata


def loss_per_token(program: Program, windows: torch.Tensor, chunk: int = 32, block_size: int = 16) -> float:
    """Mean cross-entropy in nats of every token but each window's first, given those before it in the window.

    Each window is a sequence that is computed in chunks, so that most keys and values are read from the cache; the
    exponential of the result is the perplexity.

    Args:
        program: gets a small cache of its own.
        windows: ``[N, L]`` int64 token ids.
        chunk: tokens of each sequence per step.
        block_size: of the cache.
    """
    count, length = windows.shape
    width = -(-length // block_size)
    program.bind(allocate_kv_cache(program.caches, width * count, block_size, program.device))
    table = torch.randperm(width * count, generator=torch.Generator().manual_seed(0)).view(count, width).int()
    total = 0.0
    for first in range(0, length, chunk):
        end = min(first + chunk, length)
        positions = torch.arange(first, end)
        slots = table[:, positions // block_size].long() * block_size + positions % block_size
        tokens = count * len(positions)
        step = StepMetadata(
            slot_mapping=slots.flatten(),
            block_table=table,
            query_start_loc=torch.arange(0, tokens + 1, len(positions), dtype=torch.int32),
            seq_lens=torch.full((count,), end, dtype=torch.int32),
            logits_rows=torch.arange(tokens),
            token_lengths=torch.full((tokens,), length),
        )
        logits = program(windows[:, first:end].reshape(1, -1), positions.repeat(1, count), step)
        logits = logits.float().view(count, len(positions), -1)[:, : length - 1 - first]
        targets = windows[:, first + 1 : end + 1]
        total += F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
    return total / (count * (length - 1))


@torch.inference_mode()
def loss_of_transformers(folder: Path, dtype: torch.dtype, windows: torch.Tensor, stored: nn.Module | None) -> float:
    """The same of transformers over what a quantized checkpoint means.

    Args:
        folder: a float checkpoint.
        dtype: that it is loaded in.
        windows: as above.
        stored: the same model over the quantized checkpoint, as which inputs are read; None: as they are.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with nullcontext() if stored is None else inputs_as_made(model, stored):
        logits = torch.cat([model(input_ids=part, use_cache=False).logits for part in windows.split(8)])
    return float(F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), windows[:, 1:].flatten()))
