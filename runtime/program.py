"""The contract between the compiler and the runtime: a compiled model and the caches that it needs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from .step_metadata import StepMetadata

KVCache = list[tuple[torch.Tensor, ...]]
"""Per layer its keys and values, and in int8 the scales of both, or its state. Dim 0 of every tensor counts blocks,
or slots of states."""


@dataclass(frozen=True)
class CacheSpec:
    """Keys and values that one attention layer stores per token.

    Attributes:
        num_kv_heads: KV heads, un-repeated (GQA).
        key_dim: size of one key head.
        value_dim: size of one value head; differs from ``key_dim`` in MLA models. 0: there are only keys, of an
            indexer that chooses among them.
        dtype: of the stored keys and values. int8 goes with a float32 scale per token and head for either.
        sliding_window: tokens that the layer looks back over, 0 when unlimited.
        group: layers of one group share their block tables; there is one group for each length of window.
        by_token: one token's heads lie together in memory (``[num_blocks, block_size, heads, dim]`` contiguous), as
            Ascend's operators read them; else one head's tokens of a block do.
        scales_by_head: scales are ``[num_blocks, heads, block_size]`` contiguous, as Ascend's attention reads them.
        head_ranks: ranks among which the layer's heads are divided, each with the next ``num_kv_heads``; 1: each has
            all of them; 0: they are divided in another way.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    sliding_window: int = 0
    group: int = 0
    by_token: bool = False
    scales_by_head: bool = False
    head_ranks: int = 1

    def elsewhere(self) -> CacheSpec:
        """The same layer in a process that holds none of its heads: it takes no memory."""
        return replace(self, num_kv_heads=0)

    @property
    def has_scales(self) -> bool:
        """True if keys and values are stored with scales."""
        return self.dtype is torch.int8

    def parts(self) -> tuple[CachePart, ...]:
        """The tensors that the layer's entry of a ``KVCache`` consists of, in order."""
        heads = self.num_kv_heads
        dims = {"key_cache": self.key_dim, "value_cache": self.value_dim}
        parts = tuple(CachePart(name, (heads, dim), self.dtype) for name, dim in dims.items() if dim)
        if not self.has_scales:
            return parts
        scales = (
            CachePart(name, (heads,), torch.float32, by_head=self.scales_by_head)
            for name in ("key_scale", "value_scale")
        )
        return (*parts, *scales)


@dataclass(frozen=True)
class StateSpec:
    """State that one operator keeps per sequence, whatever its length.

    That is the matrices of a recurrence, or the last inputs of a convolution.

    Attributes:
        name: one of ``STATE_NAMES``.
        shape: of one sequence's state.
        dtype: of its elements.
        group: the group that all states of a program form: a sequence has one slot in all of them. It comes behind
            those of keys and values.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    group: int = 0

    def elsewhere(self) -> StateSpec:
        """The same operator in a process that does not hold its state, which takes no memory."""
        return replace(self, shape=(0,))

    @property
    def has_scales(self) -> bool:
        """False: states are not rounded to integers."""
        return False

    def parts(self) -> tuple[CachePart, ...]:
        """The one tensor that the operator's entry of a ``KVCache`` consists of."""
        return (CachePart(self.name, self.shape, self.dtype),)


@dataclass(frozen=True)
class CachePart:
    """One tensor of a layer's cache.

    Attributes:
        name: argument of the operator that it is for.
        unit_shape: what it holds per token, or of a ``StateSpec`` per sequence; it is
            ``[num_blocks, *block_shape(block_size)]``, or ``[num_slots, *unit_shape]``.
        dtype: of its elements.
        by_head: the tokens of a block stand behind the heads; see ``CacheSpec.scales_by_head``.
    """

    name: str
    unit_shape: tuple[int, ...]
    dtype: torch.dtype
    by_head: bool = False

    @property
    def unit_bytes(self) -> int:
        """Bytes per token, or per sequence."""
        return math.prod(self.unit_shape) * self.dtype.itemsize

    def block_shape(self, block_size: Any) -> tuple[Any, ...]:
        """Sizes of one block of so many tokens."""
        if not self.by_head:
            return (block_size, *self.unit_shape)
        heads, *dims = self.unit_shape
        return (heads, block_size, *dims)


def is_cache_input(name: str) -> bool:
    """True if a graph input of this name receives a tensor of a cache, such as ``key_cache_0``."""
    return name.startswith(CACHE_INPUTS)


STATE_NAMES = ("conv_state", "recurrent_state")
"""Names of a ``StateSpec``."""
CACHE_INPUTS = (
    *("key_cache_", "value_cache_", "key_scale_", "value_scale_"),
    *(f"{name}_" for name in STATE_NAMES),
)
"""What the names of such inputs start with."""


class Program(Protocol):
    """A model compiled for flat steps over paged KV caches.

    One whose steps are compiled or captured at planned sizes also has ``warm_up()``, which does so for all of them
    once caches are bound, uses no blocks but its own (``reserve``) and raises ``DeviceLost`` alone; and
    ``graph_stats()``, figures about them for ``Engine.stats``. One that is a part of several ranks' may have
    ``mode(step)``, the name of the way in which a step is going to run, which has to be the same on all of them, and
    an attribute ``group``, which is set to the ranks.

    One that runs a stage of a pipeline has ``whole_caches``, those of all stages, by which sequences are planned; of
    its own ``caches`` those that other stages hold are empty.

    One of several ranks (``parallel.leader.LeaderProgram``) also has ``cache_counts(sizes)``, ``let_wait(…)`` and
    ``copier(…)``, which stand for the functions ``cache_counts`` and ``with_sampled`` and the class ``BlockCopier``,
    ``start_again()``, which makes it usable after ``DeviceLost``, if it returns True, and ``close()``.

    Attributes:
        caches: one entry per layer's caches, in the order that ``bind`` expects.
        vocab_size: columns of the logits.
        max_model_len: positions that the model supports, or None when it does not say.
        restart_length: a sequence that grows beyond so many tokens is computed anew from its first one, because
            all of its keys change (longrope in Phi-3); None when that never happens.
        rope_switch: longer prompts get other keys (longrope); None where keys do not depend on the length.
        device: where its caches must live. What a step brings lives on the host; the program moves it.
        block_size: tokens per cache block that it was compiled for; None for any.
    """

    caches: list[CacheSpec | StateSpec]
    vocab_size: int
    max_model_len: int | None
    restart_length: int | None
    rope_switch: int | None
    device: torch.device
    block_size: int | None

    def reserve(self, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, num_drafts: int = 0) -> int:
        """Announce the largest steps and sequences, before ``bind``.

        Args:
            max_num_seqs: sequences of a step.
            max_num_batched_tokens: tokens of a step.
            max_model_len: tokens of a sequence.
            num_drafts: tokens behind the newest one of each sequence that a step verifies; 0: there are none.

        Returns:
            how many blocks at the end of each cache the program needs for itself: sequences must not get them.
        """

    def bind(self, kv_cache: KVCache) -> None:
        """Give the program its caches: per ``CacheSpec`` a key and a value tensor, each
        ``[num_blocks, block_size, num_kv_heads, dim]`` in the entry's dtype, and with int8 their scales, each
        ``[num_blocks, block_size, num_kv_heads]`` float32, or with ``scales_by_head`` ``[num_blocks, num_kv_heads,
        block_size]``; per ``StateSpec`` one tensor ``[num_slots, *shape]``."""

    def __call__(self, input_ids: torch.Tensor, position_ids: torch.Tensor, step: StepMetadata) -> torch.Tensor:
        """Run one flat step: ids and positions ``[1, T]`` int64 → logits ``[R, vocab_size]`` of the asked rows.

        They hold until the next call.
        """


class TappedProgram(Program, Protocol):
    """A program that leaves behind what its head read.

    Attributes:
        hidden: of the latest step, ``[T, hidden_size]`` of all its tokens; it holds until the next call.
        hidden_form: ``(hidden_size, dtype)``.
    """

    hidden: torch.Tensor | None
    hidden_form: tuple[int, torch.dtype] | None
