"""Sets up an engine's KV cache for its program: block pools, maximum sequence length, cache keys."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from ..autocast import without_autocast
from ..block_store.entries import FINGERPRINT_SIZE, Seal
from ..block_store.kinds import open_block_store, read_secret
from ..block_store.traffic import Traffic
from ..blocks import BlockGroup, BlockManager
from ..cache.cache_specs import bytes_per_block, bytes_per_slot, has_state, of_all_ranks, token_specs, whole_caches
from ..cache.host_blocks import HostBlocks
from ..cache.kv_cache import UNSTATED_MODEL_LEN
from ..cache.pool_plan import CacheCounts, CacheSizes, cache_counts
from ..parallel.rank_blocks import RankBlocks
from ..program import Program
from ..requests.request import Request
from .engine_options import EngineOptions

logger = logging.getLogger(__name__)


DEFAULT_STORE_SPACE = 1 << 30
"""Most bytes of host memory for blocks from and to a store, unless ``swap_space`` says."""


def plan_caches(program: Program, block_size: int, options: EngineOptions, free_memory: int | None) -> CacheCounts:
    """What the caches of a program hold; of several ranks, what those of each do.

    Args:
        program: has the layers.
        block_size: tokens per block.
        options: size the caches.
        free_memory: see ``EngineBase``.

    Raises:
        ValueError: not even one block, or the state of one sequence, fits.
    """
    sizes = CacheSizes(
        block_size=block_size,
        num_blocks=options.num_blocks,
        memory=options.cache_bytes,
        free_memory=free_memory,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=options.max_model_len or program.max_model_len,
        swap_bytes=options.swap_bytes,
    )
    plan: Callable[[CacheSizes], CacheCounts] = getattr(
        program, "cache_counts", partial(cache_counts, program.caches)
    )
    counts = plan(sizes)
    if options.kv_store is None or options.swap_bytes:
        return counts
    # Blocks from the store arrive in host memory: by default as much as the caches take, up to a limit.
    whole = sum(
        counts.device[spec.group] * (bytes_per_block([spec], block_size) + bytes_per_slot([spec]))
        for spec in program.caches
    )
    return plan(replace(sizes, swap_bytes=min(DEFAULT_STORE_SPACE, whole)))


def block_groups(program: Program, planned: CacheCounts, block_size: int, options: EngineOptions) -> list[BlockGroup]:
    """The groups of the program's layers.

    Args:
        program: has the layers.
        planned: blocks of each group, slots of that of states.
        block_size: tokens per block.
        options: say what the pools shrink to, and what is swapped where.

    Raises:
        ValueError: an option does not fit the others or the device.
    """
    _check_swap_space(program, block_size, options)
    counts: Sequence[int] = planned.device
    num_host_blocks, num_host_slots = planned.host
    tokens = token_specs(program.caches)
    states = [counts[-1]] if has_state(program.caches) else []
    counts = counts[: len(counts) - len(states)]
    # That of states alone where nothing else is stored.
    most = max(counts or states)
    smallest = _smallest_pool(program, [*counts, *states], block_size, options)
    windows = {spec.group: {other.sliding_window for other in tokens if other.group == spec.group} for spec in tokens}
    groups = []
    for group, count in enumerate(counts):
        own = windows.get(group, {0})
        groups.append(
            BlockGroup(
                count,
                window=min(own) if len(own) == 1 else 0,
                num_host_blocks=num_host_blocks,
                min_blocks=0 if smallest is None else max(1, smallest * count // most),
            )
        )
    for count in states:
        # Two for one sequence: it may read one and write the other.
        least = 0 if smallest is None else min(count, max(2, smallest * count // most))
        groups.append(BlockGroup(count, is_state=True, num_host_blocks=num_host_slots, min_blocks=least))
    return groups


def _check_swap_space(program: Program, block_size: int, options: EngineOptions) -> None:
    """Refuse memory for swapping that holds no sequence's block and state."""
    specs = whole_caches(program)
    block, slot = bytes_per_block(specs, block_size), bytes_per_slot(specs)
    swap_space = options.swap_bytes
    if block + slot > 0 and swap_space >= block + slot:
        return
    needed = f"a block of {block} bytes" if not slot else f"a sequence's state of {slot} bytes"
    if slot and block:
        needed += f" and a block of {block} bytes"
    if options.preemption == "swap":
        raise ValueError(
            f"preemption='swap' needs {needed}, more than swap_space={swap_space} bytes; raise it, such as to 1 GiB"
        )
    if swap_space:
        raise ValueError(f"swap_space={swap_space} is less than {needed}; raise it, such as to 1 GiB, or use 0")


def _smallest_pool(program: Program, counts: Sequence[int], block_size: int, options: EngineOptions) -> int | None:
    """Blocks that the largest group shrinks to, others in proportion; None: none does."""
    least = options.min_cache_bytes
    if least is None:
        return None
    given = f"min_kv_cache_memory={options.min_kv_cache_memory!r}"
    if program.device.type != "cpu":
        raise ValueError(f"{given}: the cache cannot shrink on {program.device}; omit it")
    whole = sum(
        counts[spec.group] * (bytes_per_block([spec], block_size) + bytes_per_slot([spec])) for spec in program.caches
    )
    if least > whole:
        raise ValueError(f"{given} exceeds the {whole} bytes of the KV cache; lower it, or omit it")
    unit = bytes_per_block(program.caches, block_size)
    if has_state(program.caches):
        # Slots shrink in proportion to blocks.
        unit += bytes_per_slot(program.caches) * counts[-1] // max(counts[:-1] or counts)
    return max(1, least // unit)


def open_traffic(
    program: Program,
    blocks: BlockManager,
    host: HostBlocks | RankBlocks,
    options: EngineOptions,
    fingerprint: bytes | None,
) -> Traffic:
    """Open the store that the options ask for.

    Args:
        program: has the layers.
        blocks: the cache's.
        host: host memory of blocks.
        options: name the store.
        fingerprint: of all that keys and values depend on besides the tokens.

    Raises:
        ValueError: the store cannot be used, or not with this model.
    """
    if fingerprint is None:
        raise ValueError("kv_store: what computes the blocks has no fingerprint, so nobody could use them; omit it")
    secret = b"" if options.kv_store_key_file is None else read_secret(options.kv_store_key_file)
    made_of = hashlib.blake2b(fingerprint, digest_size=FINGERPRINT_SIZE)
    made_of.update(repr((blocks.block_size, of_all_ranks(program.caches))).encode())
    assert options.kv_store is not None
    store = open_block_store(options.kv_store, Seal(made_of.digest(), secret), options.store_bytes)
    return Traffic(
        store,
        blocks,
        host.num_heads,
        host.parts,
        wait=options.store_wait,
        stores_all=options.kv_store_write == "all",
    )


def warm_up(program: Program, options: EngineOptions) -> None:
    """Have a program whose steps are compiled or captured at planned sizes do so, if the options say when."""
    if options.npu_warmup == "full" and (own := getattr(program, "warm_up", None)) is not None:
        with without_autocast(program.device.type):
            own()


def longest_sequence(blocks: BlockManager, max_model_len: int | None, longest: int | None) -> tuple[int, str]:
    """The most tokens of a sequence, and what to do for longer ones.

    Args:
        blocks: the cache's.
        max_model_len: the requested length; None: as much as the model and the cache allow.
        longest: what the model supports, if it says.

    Raises:
        ValueError: the cache does not hold a sequence of the requested length.
    """
    capacity = blocks.capacity
    num_blocks = [pool.max_blocks for pool in blocks.token_pools]
    if max_model_len is not None:
        if capacity is not None and max_model_len > capacity:
            raise ValueError(
                f"max_model_len={max_model_len} exceeds the {capacity} tokens of the KV cache "
                f"(num_blocks={', '.join(map(str, num_blocks))} of {blocks.block_size}); lower it or give the "
                "cache more memory"
            )
        return (
            max_model_len,
            "use a model with a longer context" if max_model_len == longest else "raise max_model_len",
        )
    limits = [limit for limit in (longest, capacity) if limit is not None]
    found = min(limits, default=UNSTATED_MODEL_LEN)
    logger.info("max_model_len=%d (model: %s, KV cache: %s tokens)", found, longest, capacity)
    if found == capacity:
        return found, "give the KV cache more memory (num_blocks or kv_cache_memory)"
    return found, "use a model with a longer context"


def key_variant(program: Program, request: Request) -> str:
    """The rotary table that the model uses for a request, by name: prompts of the two kinds share no keys."""
    switch = program.rope_switch
    if switch is None:
        return ""
    length = request.num_prompt_tokens if program.restart_length is None else request.num_tokens
    return "long" if length > switch else "short"
