"""Plans a memory after the weights: KV-cache blocks, concurrent sequences, the longest sequence.

Pure arithmetic on sizes in bytes and tokens. It also covers contiguous allocation, where a sequence reserves
``max_model_len`` tokens when it starts, as engines without paging do (Kwon et al., *Efficient Memory Management for
Large Language Model Serving with PagedAttention*, SOSP 2023, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..runtime.cache.cache_specs import AnySpec, bytes_per_block, bytes_per_slot, token_specs
from ..runtime.cache.pool_plan import PoolPlan, plan_pools
from ..runtime.cache.state_pool import slots_that_fit
from ..runtime.requests.checks import check_at_least

SHORTEST_LISTED = 512
"""First length of ``MemoryPlan.limits`` in tokens; it doubles up to ``max_model_len``."""


@dataclass(frozen=True)
class LengthLimit:
    """The number of sequences of one length that fit in the cache.

    Attributes:
        tokens: of each sequence, prompt and output together.
        sequence_bytes: cache of one sequence in blocks, the unused end of its last block and its state included;
            layers with a sliding window count the window's blocks.
        paged: sequences that fit in blocks.
        contiguous: sequences that fit when each reserves ``max_model_len`` tokens; the same at every length.
        running: sequences that can run at once with the planned pools and ``max_num_seqs``.
        paged_utilization, contiguous_utilization: share of a sequence's slots with tokens.
    """

    tokens: int
    sequence_bytes: int
    paged: int
    contiguous: int
    running: int
    paged_utilization: float
    contiguous_utilization: float


@dataclass(frozen=True)
class MemoryPlan:
    """The division of a memory, and its capacity. Sizes are in bytes.

    Attributes:
        memory: the total.
        weight_bytes: the model's parameters and buffers.
        activation_bytes: activations of a step of ``max_num_batched_tokens`` tokens.
        cache_bytes: the rest, for the KV cache and states; 0 if there is none.
        token_bytes: keys and values of one token in all layers.
        block_size: tokens per block.
        block_bytes: one block in all layers.
        pools: blocks for sequences, for each group of layers; 0 if not even one fits.
        state_bytes: one sequence's state in all layers; 0 if the model has none.
        state_slots: slots for sequences; see ``state_pool.slots_that_fit``.
        spare_blocks: additional blocks, and slots, of each cache that the program reserves.
        max_num_seqs, max_num_batched_tokens, max_model_len: the planned limits.
        contiguous_sequences: sequences that fit when each reserves ``max_model_len`` tokens.
        limits: concurrent sequences by length.
    """

    memory: int
    weight_bytes: int
    activation_bytes: int
    cache_bytes: int
    token_bytes: int
    block_size: int
    block_bytes: int
    pools: tuple[PoolPlan, ...]
    state_bytes: int
    state_slots: int
    spare_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    contiguous_sequences: int
    limits: tuple[LengthLimit, ...]

    @property
    def num_blocks(self) -> int:
        """Blocks of the largest pool: that of layers without a window, if any."""
        return max((pool.num_blocks for pool in self.pools), default=0)

    @property
    def num_tokens(self) -> int:
        """Capacity of these blocks in tokens."""
        return self.num_blocks * self.block_size

    @property
    def longest_sequence(self) -> int:
        """Maximum tokens of a sequence that runs alone."""
        longest = self.max_model_len if self.state_slots or not self.state_bytes else 0
        for pool in self.pools:
            # One block more than the window touches is enough to slide.
            if not pool.window or pool.num_blocks <= -(-pool.window // self.block_size):
                longest = min(longest, pool.num_blocks * self.block_size)
        return longest

    @property
    def contiguous_longest_sequence(self) -> int:
        """Maximum tokens of a sequence that reserves ``max_model_len`` at its start."""
        return self.max_model_len if self.contiguous_sequences else 0

    @property
    def missing_bytes(self) -> int:
        """Missing bytes for weights, activations, a first block and a first state; 0 if the memory suffices."""
        needed = self.weight_bytes + self.activation_bytes + (self.spare_blocks + 1) * self.block_bytes
        needed += (self.spare_blocks + 2) * self.state_bytes
        return max(0, needed - self.memory)

    def to_dict(self) -> dict[str, Any]:
        """All values, ready for ``json.dump``."""
        derived = ("num_blocks", "num_tokens", "longest_sequence", "contiguous_longest_sequence", "missing_bytes")
        return asdict(self) | {name: getattr(self, name) for name in derived}


def plan_memory(
    specs: Sequence[AnySpec],
    *,
    memory: int,
    weight_bytes: int,
    activation_bytes: int,
    block_size: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    spare_blocks: int = 0,
    by_window: bool = False,
) -> MemoryPlan:
    """Divide a memory between weights, activations and the KV cache.

    Contiguous allocation also reserves ``max_model_len`` tokens in layers with a sliding window.

    Args:
        specs: cache specs of the layers, as in ``Program.caches``.
        memory: bytes to divide.
        weight_bytes: bytes of parameters and buffers.
        activation_bytes: bytes of a step of ``max_num_batched_tokens`` tokens.
        block_size: tokens per block.
        max_num_seqs: maximum concurrent sequences.
        max_num_batched_tokens: maximum tokens per step.
        max_model_len: maximum tokens per sequence.
        spare_blocks: as in ``Program.reserve``.
        by_window: separate pools for layers with different windows; see ``plan_pools``.

    Raises:
        ValueError: a size is out of range, or the model has no cache. Too little memory is not an error: the plan
            then has no blocks and the number of missing bytes.
    """
    check_at_least(
        1,
        "use a positive one",
        memory=memory,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
    )
    used = {"weight_bytes": weight_bytes, "activation_bytes": activation_bytes, "spare_blocks": spare_blocks}
    check_at_least(0, "use 0 for none", **used)
    token_bytes, block_bytes = bytes_per_block(specs, 1), bytes_per_block(specs, block_size)
    state_bytes = bytes_per_slot(specs)
    if not token_bytes + state_bytes:
        raise ValueError("specs has no keys and values; give the cache specs of an attention model")
    cache_bytes = max(0, memory - weight_bytes - activation_bytes)
    usable = max(0, cache_bytes - spare_blocks * (block_bytes + state_bytes))
    contiguous = usable // (max_model_len * token_bytes + state_bytes)
    slots = slots_that_fit(usable, state_bytes, block_bytes, max_num_seqs)
    pools = plan_pools(
        token_specs(specs),
        usable - slots * state_bytes if slots or not state_bytes else 0,
        block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        by_window=by_window,
    )
    chunk = -(-max_num_batched_tokens // block_size)

    def limit(tokens: int) -> LengthLimit:
        blocks = -(-tokens // block_size)
        held = [pool.blocks_of(tokens, block_size) for pool in pools]
        # While a prompt is computed, the step's chunk of it lies beside the window.
        beside = [min(chunk, blocks - own) for own in held]
        sequence_bytes = state_bytes + sum(pool.block_bytes * own for pool, own in zip(pools, held, strict=True))
        chunk_bytes = sum(pool.block_bytes * more for pool, more in zip(pools, beside, strict=True))
        fitting = [max(0, pool.num_blocks - more) // own for pool, own, more in zip(pools, held, beside, strict=True)]
        if state_bytes:
            fitting.append(slots)
        return LengthLimit(
            tokens=tokens,
            sequence_bytes=sequence_bytes,
            paged=max(0, usable - chunk_bytes) // sequence_bytes,
            contiguous=contiguous,
            running=min(*fitting, max_num_seqs),
            paged_utilization=tokens / (blocks * block_size),
            contiguous_utilization=tokens / max_model_len,
        )

    return MemoryPlan(
        memory=memory,
        weight_bytes=weight_bytes,
        activation_bytes=activation_bytes,
        cache_bytes=cache_bytes,
        token_bytes=token_bytes,
        block_size=block_size,
        block_bytes=block_bytes,
        pools=pools,
        state_bytes=state_bytes,
        state_slots=slots,
        spare_blocks=spare_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        contiguous_sequences=contiguous,
        limits=tuple(limit(tokens) for tokens in listed_lengths(max_model_len)),
    )


def listed_lengths(max_model_len: int) -> list[int]:
    """512, 1024, 2048, … below ``max_model_len``, and that; for a shorter one, its quarter, half and full length."""
    if max_model_len <= SHORTEST_LISTED:
        return sorted({max(1, max_model_len // 4), max(1, max_model_len // 2), max_model_len})
    lengths = []
    tokens = SHORTEST_LISTED
    while tokens < max_model_len:
        lengths.append(tokens)
        tokens *= 2
    return [*lengths, max_model_len]
