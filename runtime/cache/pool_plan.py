"""Divides the KV cache's memory among layers with and without a sliding window.

Layers with the same window form a group with its own pool of blocks. In a group with a window, a sequence keeps only
the blocks that the window still covers, so the pool of such a group need not grow with the length of sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..program import CacheSpec
from .cache_specs import AnySpec, bytes_per_block, bytes_per_slot, has_state, token_specs
from .kv_cache import DEFAULT_CPU_CACHE_BYTES, UNSTATED_MODEL_LEN, available_memory, default_num_blocks, num_blocks_in
from .state_pool import num_slots_in, num_slots_wanted


@dataclass(frozen=True)
class PoolPlan:
    """The pool of blocks of one group of layers.

    Attributes:
        window: tokens that its layers look back over, 0 when unlimited.
        layers: indices of the layers among the specs.
        block_bytes: bytes of one block in all of its layers.
        num_blocks: blocks available to sequences.
    """

    window: int
    layers: tuple[int, ...]
    block_bytes: int
    num_blocks: int

    def blocks_of(self, tokens: int, block_size: int) -> int:
        """Return the number of blocks that a decoding sequence of ``tokens`` tokens holds."""
        return _held(self.window, tokens, block_size)


@dataclass(frozen=True)
class CacheSizes:
    """What sizes the caches of a program; all but the last two are arguments of ``blocks_by_group``.

    Attributes:
        swap_bytes: host memory for blocks and states of sequences that wait.
        ranks: processes that share this host's memory, each with caches of its own.
    """

    block_size: int
    num_blocks: int | None
    memory: int | None
    free_memory: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    swap_bytes: int
    ranks: int = 1


@dataclass(frozen=True)
class CacheCounts:
    """What the caches of a program hold.

    Attributes:
        device: blocks of each group of layers, then slots if there is a group of states.
        host: blocks of each group of layers in host memory, and slots of states.
    """

    device: tuple[int, ...]
    host: tuple[int, int]


def cache_counts(specs: Sequence[AnySpec], sizes: CacheSizes) -> CacheCounts:
    """Blocks and slots of a program.

    Args:
        specs: cache specification of each layer.
        sizes: of its caches.

    Raises:
        ValueError: not even one block, or the state of one sequence, fits.
    """
    free = sizes.free_memory
    if free is None and sizes.ranks > 1:
        free = _default_memory() // sizes.ranks
    counts = blocks_by_group(
        specs,
        sizes.block_size,
        num_blocks=sizes.num_blocks,
        memory=sizes.memory,
        free_memory=free,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_model_len=sizes.max_model_len,
    )
    return CacheCounts(tuple(counts), _host_counts(specs, sizes))


def _host_counts(specs: Sequence[AnySpec], sizes: CacheSizes) -> tuple[int, int]:
    """Of states as many as sequences run, but no more than half of the memory holds where there are blocks, too; none
    where it does not hold one of each. Layers that another stage of a pipeline holds limit neither."""
    block, slot, swap_space = bytes_per_block(specs, sizes.block_size), bytes_per_slot(specs), sizes.swap_bytes
    if not specs or swap_space < block + slot:
        return 0, 0
    slots = min(sizes.max_num_seqs, swap_space) if has_state(specs) else 0
    if slot:
        share = min(swap_space // 2, swap_space - block) if block else swap_space
        slots = min(slots, max(1, share // slot))
    if not block:
        return swap_space if token_specs(specs) else 0, slots
    return (swap_space - slots * slot) // block, slots


def plan_pools(
    specs: Sequence[CacheSpec],
    memory: int,
    block_size: int,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    by_window: bool = False,
) -> tuple[PoolPlan, ...]:
    """Divide memory into pools of blocks: one pool, or one per window size in the order of the specs.

    With one pool for layers of different windows, a sequence keeps all of its blocks; if all layers have the same
    window, blocks that left it return to the pool.

    A pool with a window gets the most that ``max_num_seqs`` sequences and one step's prompt chunks can use, if that
    is less than an even share; the saved blocks go to the other pools. So no pool has fewer blocks than with an even
    split, unless it cannot use them. If no pool can use more, all have equally many.

    Args:
        specs: cache specification of each layer.
        memory: bytes of all pools together.
        block_size: tokens per block.
        max_num_seqs: most sequences at once.
        max_num_batched_tokens: most tokens per step.
        max_model_len: most tokens per sequence.
        by_window: give layers with different windows separate pools.

    Returns:
        The pools; with 0 blocks if not even one fits into each.
    """
    layers: dict[int, list[int]] = {}
    for i, spec in enumerate(specs):
        layers.setdefault(spec.sliding_window, []).append(i)
    if len(layers) > 1 and not by_window:
        layers = {0: list(range(len(specs)))}
    sizes = {window: bytes_per_block([specs[i] for i in own], block_size) for window, own in layers.items()}
    most = {
        window: _most(window, max_model_len, block_size, max_num_seqs, max_num_batched_tokens)
        for window in layers
        if 0 < window < max_model_len
    }
    even = memory // max(1, sum(sizes.values()))
    counts = dict.fromkeys(layers, even)
    while True:
        capped = {window: most[window] for window in layers if window in most and most[window] <= even}
        open_bytes = sum(size for window, size in sizes.items() if window not in capped)
        if not capped or not open_bytes:
            break
        share = (memory - sum(sizes[window] * count for window, count in capped.items())) // open_bytes
        counts = {window: capped.get(window, share) for window in layers}
        if share == even:
            break
        even = share
    return tuple(
        PoolPlan(window, tuple(layers[window]), size, counts[window] if size else memory)
        for window, size in sizes.items()
    )


def blocks_by_group(
    specs: Sequence[AnySpec],
    block_size: int,
    *,
    num_blocks: int | None,
    memory: int | None,
    free_memory: int | None = None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int | None,
) -> list[int]:
    """Return the number of blocks of each group of layers, then of slots if there is a group of states.

    Slots are subtracted from the memory first. With ``num_blocks``, they come in addition.

    Args:
        specs: cache specification of each layer.
        block_size: tokens per block.
        num_blocks: blocks of layers without a window; layers with a window get at most as many.
        memory: bytes of all caches together, if ``num_blocks`` is None.
        free_memory: most bytes to take if both are None, see ``default_num_blocks``.
        max_num_seqs: most sequences at once.
        max_num_batched_tokens: most tokens per step.
        max_model_len: most tokens per sequence; None if the model does not specify it.

    Raises:
        ValueError: not even one block, or the state of one sequence, fits.
    """
    if has_state(specs):
        slots = num_slots_wanted(max_num_seqs)
        if num_blocks is None and bytes_per_slot(specs):
            given, name = memory, "kv_cache_memory"
            if given is None:
                given, name = _default_memory() if free_memory is None else free_memory, "free memory"
            slots = num_slots_in(given, specs, block_size, max_num_seqs, name=name)
            taken = slots * bytes_per_slot(specs)
            memory = None if memory is None else memory - taken
            free_memory = given - taken
        tokens = token_specs(specs)
        if not tokens:
            return [slots]
        counts = blocks_by_group(
            tokens,
            block_size,
            num_blocks=num_blocks,
            memory=memory,
            free_memory=free_memory,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
        )
        return [*counts, slots]
    specs = token_specs(specs)
    num_groups = max((spec.group for spec in specs), default=0) + 1
    if num_groups == 1:
        if num_blocks is not None:
            return [num_blocks]
        if memory is not None:
            return [num_blocks_in(memory, specs, block_size)]
        return [default_num_blocks(specs, block_size, max_num_seqs, max_model_len, memory=free_memory)]
    longest = UNSTATED_MODEL_LEN if max_model_len is None else max_model_len
    windows = [next(spec.sliding_window for spec in specs if spec.group == group) for group in range(num_groups)]
    most = [_most(window, longest, block_size, max_num_seqs, max_num_batched_tokens) for window in windows]
    if num_blocks is not None:
        return [min(num_blocks, limit) if window else num_blocks for window, limit in zip(windows, most, strict=True)]
    is_limit = memory is not None
    if memory is None:
        memory = _default_memory() if free_memory is None else free_memory
    num_blocks_in(memory, specs, block_size)  # raises if none fits even one fits
    pools = plan_pools(
        specs,
        memory,
        block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=longest,
        by_window=True,
    )
    if is_limit:
        return [pool.num_blocks for pool in pools]
    return [max(1, min(pool.num_blocks, limit)) for pool, limit in zip(pools, most, strict=True)]


def _default_memory() -> int:
    return min(DEFAULT_CPU_CACHE_BYTES, available_memory() // 2)


def _most(window: int, longest: int, block_size: int, max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """Blocks that a pool can use: of decoding sequences, and of one step's prompt chunks where those slide along."""
    chunk = -(-max_num_batched_tokens // block_size) if 0 < window < longest else 0
    return max_num_seqs * _held(window, longest, block_size) + chunk


def _held(window: int, tokens: int, block_size: int) -> int:
    """Blocks that hold the last ``window`` of ``tokens`` tokens wherever they begin, or all of them."""
    blocks = -(-tokens // block_size)
    return min(blocks, -(-window // block_size) + 1) if window else blocks
