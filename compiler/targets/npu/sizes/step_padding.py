"""Pads a step to a planned size with dummy tokens and sequences.

Dummy tokens come after the real ones and belong to dummy sequences, which come after the real ones too, so that

- the last cumulative query length is the number of tokens, as the attention kernel wants it in layout TND;
- the lengths do not fall, and each dummy sequence has as much context as tokens (a token at least);
- the real sequences keep their tokens, lengths and blocks: the numbers of their rows do not change.

They write their keys and values to blocks at the end of the cache that no sequence owns, each to a slot of its own,
and read what they have just written. The vendor documents slots as numbers from 0 to num_blocks * block_size - 1
without repetition, and promises nothing otherwise (``npu_scatter_pa_kv_cache``), so the -1 that ``StepMetadata``
allows for padding must not reach the operator.

States of dummy sequences begin from zeros and all go to one slot that no sequence owns; what is in it then is
undefined, and nothing reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .....runtime.step_metadata import StepMetadata


@dataclass(frozen=True)
class StepSize:
    """A size that a step is filled up to.

    Attributes:
        tokens: T.
        sequences: S.
        rows: R, requested rows of logits.
        blocks: W, columns of the block table; 0 leaves them as they are.
    """

    tokens: int
    sequences: int
    rows: int
    blocks: int = 0


def size_of(step: StepMetadata) -> StepSize:
    """The size that a step has."""
    sequences, blocks = step.block_table.shape
    return StepSize(step.slot_mapping.shape[0], sequences, step.logits_rows.shape[0], blocks)


def spare_blocks(padding: int, block_size: int) -> int:
    """Blocks that hold the keys and values of ``padding`` dummy tokens."""
    return -(-padding // block_size)


def pad_step(
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    step: StepMetadata,
    size: StepSize,
    *,
    block_size: int,
    first_spare_block: int,
    spare_slot: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, StepMetadata]:
    """The step with dummy tokens and sequences behind its own.

    As far as dummy tokens go, dummy sequences get them evenly; the rest have none, which layout TND allows (lengths
    that do not rise). Requested rows beyond the step's own repeat its first one: drop them from the logits.

    Args:
        input_ids: ``[1, T]``.
        position_ids: ``[1, T]``.
        step: of the same T; everything on the host.
        size: what to fill up to.
        block_size: tokens per block.
        first_spare_block: id of the first block that is for padding; as many follow as ``spare_blocks`` says.
        spare_slot: id of the slot of states that is for padding, where the model keeps state.

    Returns:
        ids, positions and metadata of that size; new tensors, or the given ones where nothing is added.

    Raises:
        ValueError: the step is larger than ``size``, or dummy tokens would belong to no dummy sequence.
    """
    own = size_of(step)
    tokens, sequences, rows = size.tokens - own.tokens, size.sequences - own.sequences, size.rows - own.rows
    width = size.blocks or own.blocks
    if min(tokens, sequences, rows, width - own.blocks) < 0 or (tokens and not sequences):
        raise ValueError(f"a step of {own} cannot be filled up to {size}")
    if not (tokens or sequences or rows or width - own.blocks):
        return input_ids, position_ids, step

    lengths = torch.full((sequences,), tokens // max(sequences, 1), dtype=torch.int32)
    lengths[: tokens - int(lengths.sum())] += 1
    contexts = lengths.clamp(min=1)
    needed = spare_blocks(int(contexts.max()), block_size) if sequences else 0
    if needed > width:
        raise ValueError(f"a dummy sequence of {int(contexts.max())} tokens needs {needed} blocks, not {width}")
    table = step.block_table.new_zeros(size.sequences, width)
    table[: own.sequences, : own.blocks] = step.block_table
    table[own.sequences :, :needed] = torch.arange(first_spare_block, first_spare_block + needed)
    slots = first_spare_block * block_size + torch.arange(tokens)
    return (
        _extended(input_ids[0], input_ids.new_zeros(tokens))[None],
        _extended(position_ids[0], position_ids.new_zeros(tokens))[None],
        StepMetadata(
            slot_mapping=_extended(step.slot_mapping, slots),
            block_table=table,
            query_start_loc=_extended(step.query_start_loc, own.tokens + lengths.cumsum(0)),
            seq_lens=_extended(step.seq_lens, contexts),
            logits_rows=_extended(step.logits_rows, step.logits_rows[:1].expand(rows)),
            token_lengths=_extended(step.token_lengths, step.token_lengths.new_ones(tokens)),
            state_read=_extended_slots(step.state_read, sequences, spare_slot),
            state_write=_extended_slots(step.state_write, sequences, spare_slot),
        ),
    )


def _extended(tensor: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    return torch.cat((tensor, more.to(tensor.dtype))) if more.numel() else tensor


def _extended_slots(slots: torch.Tensor | None, sequences: int, slot: int) -> torch.Tensor | None:
    return None if slots is None else _extended(slots, slots.new_full((sequences,), slot))
