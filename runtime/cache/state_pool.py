"""Sizes the pool of state slots and its share of the cache's memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from .cache_specs import AnySpec, bytes_per_block, bytes_per_slot

logger = logging.getLogger(__name__)


def num_slots_wanted(max_num_seqs: int) -> int:
    """Return the number of slots that ``max_num_seqs`` sequences can use: two each, to write and to continue from.

    The second is another sequence's slot after a fork, or a snapshot after a prefix hit.
    """
    return 2 * max_num_seqs


def num_slots_in(
    memory: int, specs: Sequence[AnySpec], block_size: int, max_num_seqs: int, *, name: str = "kv_cache_memory"
) -> int:
    """Return the number of slots to subtract from memory before dividing it into blocks, see ``slots_that_fit``.

    Args:
        memory: bytes for states, keys and values.
        specs: cache specification of each layer.
        block_size: tokens per block.
        max_num_seqs: most sequences at once; with fewer slots, fewer run.
        name: name of the memory argument in errors.

    Raises:
        ValueError: one sequence's two slots and a block of each layer do not fit.
    """
    slot, block = bytes_per_slot(specs), bytes_per_block(specs, block_size)
    slots = slots_that_fit(memory, slot, block, max_num_seqs)
    if not slots:
        needed = 2 * slot + block
        beside = f" and a block of {block_size} tokens ({block} bytes)" if block else ""
        raise ValueError(
            f"{name}={memory} bytes is too small: one sequence takes 2 state slots of {slot} bytes{beside}, {needed} "
            "bytes together; increase it"
        )
    if slots < max_num_seqs:
        logger.warning(
            "only %d state slots of %d bytes fit into %d bytes; fewer than max_num_seqs=%d sequences run at once",
            slots,
            slot,
            memory,
            max_num_seqs,
        )
    return slots


def slots_that_fit(memory: int, slot: int, block: int, max_num_seqs: int) -> int:
    """Return the number of slots in a memory: as many as can be used, but at most half of the memory if the model has
    keys and values, too.

    Args:
        memory: size in bytes.
        slot: bytes of a slot.
        block: bytes of a block in all layers; 0 without keys and values.
        max_num_seqs: most sequences at once.

    Returns:
        The number; 0 if one sequence's two slots and a block do not fit, or without states.
    """
    if not slot or 2 * slot + block > memory:
        return 0
    share = min(memory // 2, memory - block) if block else memory
    return min(num_slots_wanted(max_num_seqs), max(2, share // slot))


def snapshot_interval(specs: Sequence[AnySpec], block_size: int) -> int | None:
    """Return the number of prompt tokens between two snapshots of its state: the smallest power-of-two number of
    blocks whose keys and values take at least the bytes of a snapshot. None without states, or without keys and
    values."""
    slot, block = bytes_per_slot(specs), bytes_per_block(specs, block_size)
    if not slot or not block:
        return None
    interval = block_size
    while interval // block_size * block < slot:
        interval *= 2
    return interval
