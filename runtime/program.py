"""The contract between the compiler and the runtime: a compiled model and the caches that it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from .step import StepMetadata

KVCache = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class CacheSpec:
    """What one attention layer stores per token.

    Attributes:
        num_kv_heads: KV heads, un-repeated (GQA).
        key_dim: size of one key head.
        value_dim: size of one value head; differs from ``key_dim`` in MLA models.
        dtype: of the stored keys and values.
        sliding_window: tokens that the layer looks back over, 0 when unlimited.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    sliding_window: int = 0


class Program(Protocol):
    """A model compiled for flat steps over paged KV caches.

    Attributes:
        caches: one entry per (key, value) pair of caches, in the order that ``bind`` expects.
        vocab_size: columns of the logits.
        max_model_len: positions that the model supports, or None when it does not say.
        restart_length: a sequence that grows beyond so many tokens is computed anew from its first one, because
            all of its keys change (longrope in Phi-3); None when that never happens.
        device: where inputs must live.
    """

    caches: list[CacheSpec]
    vocab_size: int
    max_model_len: int | None
    restart_length: int | None
    device: torch.device

    def bind(self, kv_cache: KVCache) -> None:
        """Give the program its caches: per entry of ``caches`` a key and a value tensor, each
        ``[num_blocks, block_size, num_kv_heads, dim]`` in the entry's dtype."""

    def __call__(self, input_ids: torch.Tensor, position_ids: torch.Tensor, step: StepMetadata) -> torch.Tensor:
        """Run one flat step: ids and positions ``[1, T]`` int64 → logits ``[R, vocab_size]`` of the asked rows."""
