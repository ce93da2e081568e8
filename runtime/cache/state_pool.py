"""The pool of a model's states: how many slots it has, and what of a memory that takes."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from .cache_specs import AnySpec, bytes_per_block, bytes_per_slot

logger = logging.getLogger(__name__)


def num_slots_wanted(max_num_seqs: int) -> int:
    """Slots that ``max_num_seqs`` sequences can use: each its own, and one more that it goes on from.

    That is another's slot after a fork, and a snapshot after a prefix was found.
    """
    return 2 * max_num_seqs


def num_slots_in(
    memory: int, specs: Sequence[AnySpec], block_size: int, max_num_seqs: int, *, name: str = "kv_cache_memory"
) -> int:
    """Slots to take off a memory before its rest is divided into blocks, see ``slots_that_fit``.

    Args:
        memory: bytes of states, keys and values.
        specs: what each layer stores.
        block_size: tokens per block.
        max_num_seqs: most sequences at once; fewer run where there are fewer slots.
        name: of the argument that gave the memory, for errors.

    Raises:
        ValueError: one sequence's two slots and a block of each layer do not fit.
    """
    slot, block = bytes_per_slot(specs), bytes_per_block(specs, block_size)
    slots = slots_that_fit(memory, slot, block, max_num_seqs)
    if not slots:
        needed = 2 * slot + block
        beside = f" and a block of {block_size} tokens ({block} bytes)" if block else ""
        raise ValueError(
            f"{name}={memory} bytes holds no state: one sequence takes 2 slots of {slot} bytes{beside}, {needed} "
            "bytes together; give it more memory"
        )
    if slots < max_num_seqs:
        logger.warning(
            "%d slots of states, %d bytes each, fit into %d bytes: no more of max_num_seqs=%d sequences run at once",
            slots,
            slot,
            memory,
            max_num_seqs,
        )
    return slots


def slots_that_fit(memory: int, slot: int, block: int, max_num_seqs: int) -> int:
    """Slots that are taken off a memory: as many as can be used, but no more than half of it holds where there are
    keys and values, too.

    Args:
        memory: bytes.
        slot: bytes of one.
        block: bytes of a block in all layers; 0 where there are no keys and values.
        max_num_seqs: most sequences at once.

    Returns:
        0 where not even one sequence's two slots and a block fit, or where there are no states.
    """
    if not slot or 2 * slot + block > memory:
        return 0
    share = min(memory // 2, memory - block) if block else memory
    return min(num_slots_wanted(max_num_seqs), max(2, share // slot))


def snapshot_interval(specs: Sequence[AnySpec], block_size: int) -> int | None:
    """Tokens of a prompt between two snapshots of its state: so many blocks, a power of two, that their keys and
    values take no fewer bytes than a snapshot. None where there are no keys and values to weigh it against."""
    slot, block = bytes_per_slot(specs), bytes_per_block(specs, block_size)
    if not slot or not block:
        return None
    interval = block_size
    while interval // block_size * block < slot:
        interval *= 2
    return interval
