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
        by_token: one token's heads lie together in memory (``[num_blocks, block_size, heads, dim]`` contiguous), as
            Ascend's operators read them; else one head's tokens of a block do.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    sliding_window: int = 0
    by_token: bool = False


class Program(Protocol):
    """A model compiled for flat steps over paged KV caches.

    Attributes:
        caches: one entry per (key, value) pair of caches, in the order that ``bind`` expects.
        vocab_size: columns of the logits.
        max_model_len: positions that the model supports, or None when it does not say.
        restart_length: a sequence that grows beyond so many tokens is computed anew from its first one, because
            all of its keys change (longrope in Phi-3); None when that never happens.
        device: where its caches must live. What a step brings lives on the host; the program moves it.
        block_size: tokens per cache block that it was compiled for; None for any.
    """

    caches: list[CacheSpec]
    vocab_size: int
    max_model_len: int | None
    restart_length: int | None
    device: torch.device
    block_size: int | None

    def reserve(self, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> int:
        """Announce the largest steps and sequences, before ``bind``.

        Returns:
            how many blocks at the end of each cache the program needs for itself: sequences must not get them.
        """

    def bind(self, kv_cache: KVCache) -> None:
        """Give the program its caches: per entry of ``caches`` a key and a value tensor, each
        ``[num_blocks, block_size, num_kv_heads, dim]`` in the entry's dtype."""

    def __call__(self, input_ids: torch.Tensor, position_ids: torch.Tensor, step: StepMetadata) -> torch.Tensor:
        """Run one flat step: ids and positions ``[1, T]`` int64 → logits ``[R, vocab_size]`` of the asked rows.

        They hold until the next call.
        """
