"""Slots of recurrent and convolution states: the slot that a sequence continues from, and the one a step writes.

A state is valid at one token only, and a step overwrites it. So a step writes a slot in place only if no other
sequence needs its content. Otherwise it reads that slot and writes another one, which the sequence owns from then on:
forks and snapshots cost no copy.
"""

from __future__ import annotations

from .groups import UNKNOWN, SequenceBlocks
from .pool import NULL_BLOCK, BlockPool

ZEROS = -1
"""Slot that a sequence reads at its first token."""


def num_to_take(pool: BlockPool, sequence: SequenceBlocks | None, start: int) -> int:
    """Return the number of slots, 0 or 1, that ``begin_step`` takes."""
    table = sequence.tables[-1] if sequence is not None else []
    if not table:
        return 1
    if sequence is not None and start and sequence.state_target != NULL_BLOCK:
        return 0
    if pool.refs(table[0]) > 1:
        return 1
    # A snapshot is kept if there is room, and otherwise overwritten.
    return int(start > 0 and pool.hash_of(table[0]) is not None and pool.num_available > 0)


def begin_step(pool: BlockPool, sequence: SequenceBlocks, start: int) -> list[int]:
    """Give the sequence a slot to write for a step that begins at token ``start``.

    Args:
        pool: pool with as many available slots as ``num_to_take`` returns.
        sequence: its state covers ``start`` tokens, unless it begins anew.
        start: first token of the step; 0: the state is not needed.

    Returns:
        The slots added to its table.

    Raises:
        ValueError: its state does not cover ``start`` tokens: the step would continue from another token's state, or
            from the remains of an interrupted step.
    """
    table = sequence.tables[-1]
    if start and sequence.state_tokens != start:
        found = "a half-written state" if sequence.state_tokens == UNKNOWN else f"one of {sequence.state_tokens}"
        raise ValueError(f"start={start} needs the state of {start} tokens, the sequence has {found}; start from 0")
    if not table:
        table += pool.take(1)
        return list(table)
    slot = table[0]
    if not start:
        drop_target(pool, sequence)
        sequence.state_tokens = 0
        if pool.refs(slot) > 1:
            (table[0],) = pool.take(1)
            pool.release(slot)
        else:
            pool.forget(slot)
    elif sequence.state_target == NULL_BLOCK and not pool.is_private(slot):
        if pool.refs(slot) > 1 or pool.num_available:
            (sequence.state_target,) = pool.take(1)
        else:
            pool.forget(slot)
    if start and sequence.state_target == NULL_BLOCK:
        sequence.state_tokens = UNKNOWN
    return []


def begin_step_in_place(pool: BlockPool, sequence: SequenceBlocks, start: int) -> bool:
    """Begin a step in the slot that the sequence has, the usual case; returns True if that is possible."""
    table = sequence.tables[-1]
    if sequence.state_tokens != start or not start or sequence.state_target != NULL_BLOCK:
        return False
    if not pool.is_private(table[0]):
        return False
    sequence.state_tokens = UNKNOWN
    return True


def can_begin_draft(pool: BlockPool, sequence: SequenceBlocks) -> bool:
    """Return True if the step that has begun can write a slot of its own without evicting a snapshot."""
    return sequence.state_target != NULL_BLOCK or pool.num_free > 0


def begin_draft(pool: BlockPool, sequence: SequenceBlocks, start: int) -> bool:
    """Let the step that has begun at token ``start`` write a slot of its own; returns False if none is free."""
    if not can_begin_draft(pool, sequence):
        return False
    if sequence.state_target == NULL_BLOCK:
        (sequence.state_target,) = pool.take(1)
        sequence.state_tokens = start
    return True


def slots_of_step(sequence: SequenceBlocks, start: int) -> tuple[int, int]:
    """Return the slots that the current step reads and writes, see ``StepMetadata.state_read``, ``state_write``."""
    slot, target = sequence.tables[-1][0], sequence.state_target
    return slot if start else ZEROS, slot if target == NULL_BLOCK else target


def end_step(pool: BlockPool, sequence: SequenceBlocks, num_tokens: int) -> None:
    """Record that the step is computed: the state covers ``num_tokens`` tokens; release the slot that it read."""
    if sequence.state_target != NULL_BLOCK:
        pool.release(sequence.tables[-1][0])
        sequence.tables[-1][0] = sequence.state_target
        sequence.state_target = NULL_BLOCK
    sequence.state_tokens = num_tokens


def drop_target(pool: BlockPool, sequence: SequenceBlocks) -> None:
    """Release the slot that a step was to write, because nothing will be written to it."""
    if sequence.state_target != NULL_BLOCK:
        pool.release(sequence.state_target)
        sequence.state_target = NULL_BLOCK
