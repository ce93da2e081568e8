"""Steps of no request, for graphs that are compiled or captured ahead: they lie in spare blocks and slots alone.

A step has to write and read like one of requests: sequences of different lengths, contexts that other steps would
have written, blocks that begin anywhere. So the tokens of a step form chains, each as long as a sequence may be, in
blocks that no sequence owns. The sequences of the step are the pieces of a chain: a piece that begins at token 40
reads keys and values of tokens 0 to 39, which the pieces before it write in the same step. Every operator writes a
cache before it is read, so each run of the step yields the same, whatever was in these blocks.

States have three slots that no sequence owns: one that is read, one that the last sequence writes, and one for what
all others write, whose content is undefined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .....runtime.step_metadata import StepMetadata

Shares = list[tuple[int, int, int]]
"""(chain, first token, tokens) of each sequence of a step."""

STATE_SLOTS = 3
"""Spare slots of states that steps use."""


@dataclass(frozen=True)
class StepShape:
    """A step that exercises a graph.

    Attributes:
        tokens: T.
        sequences: S, at most T; with as many as tokens it is a decode step.
        drafts: each sequence has so many tokens besides its newest one, and logits of all are requested; 0: only
            those of the last ones are.
    """

    tokens: int
    sequences: int
    drafts: int = 0


@dataclass(frozen=True)
class SpareRoom:
    """The blocks and slots that steps may use.

    Attributes:
        block_size: tokens per block.
        first_block: id of the first one.
        num_blocks: how many there are.
        longest: most tokens of a sequence.
        read_slot: of states, the slot that sequences go on from.
        write_slot: the one that the last sequence of a step writes.
        shared_slot: the one that all others write.
    """

    block_size: int
    first_block: int
    num_blocks: int
    longest: int
    read_slot: int = 0
    write_slot: int = 0
    shared_slot: int = 0

    def holds(self, step: StepMetadata) -> bool:
        """True if a step writes and reads nothing outside."""
        first, last = self.first_block, self.first_block + self.num_blocks
        slots, own = step.slot_mapping, {self.read_slot, self.write_slot, self.shared_slot}
        width = torch.arange(step.block_table.shape[1])
        used = step.block_table[width < -(-step.seq_lens // self.block_size)[:, None]]
        states = [s for given in (step.state_read, step.state_write) if given is not None for s in given.tolist()]
        return (
            bool(((slots >= first * self.block_size) & (slots < last * self.block_size)).all())
            and bool(((used >= first) & (used < last)).all())
            and own.issuperset(slot for slot in states if slot >= 0)
        )


def chain_blocks(shape: StepShape, longest: int, block_size: int) -> int:
    """Blocks that the chains of a step lie in."""
    whole, rest = divmod(shape.tokens, longest)
    if shape.drafts:
        tokens = 1 + shape.drafts
        whole, rest = divmod(shape.sequences, longest // tokens)
        rest *= tokens
    return whole * -(-longest // block_size) + -(-rest // block_size)


def fitting_shape(tokens: int, sequences: int, longest: int) -> StepShape:
    """The largest step of at most so many tokens, and of so many sequences where it has the tokens for them."""
    tokens = min(tokens, sequences * longest)
    return StepShape(tokens, min(tokens, sequences))


def shares_of(shape: StepShape, longest: int) -> Shares:
    """The sequences of a step: decoding ones behind a chunk that begins a sequence and one that goes on with it; or,
    with drafts, equal ones.

    Args:
        shape: of at most ``sequences * longest`` tokens.
        longest: most tokens of a sequence.
    """
    if shape.drafts:
        tokens = 1 + shape.drafts
        places = [divmod(i, longest // tokens) for i in range(shape.sequences)]
        return [(chain, place * tokens, tokens) for chain, place in places]
    lengths = [min(longest, shape.tokens - at) for at in range(0, shape.tokens, longest)]
    left = shape.sequences - len(lengths)
    shares: Shares = []
    for chain, length in enumerate(lengths):
        cuts = min(left, length - 1)
        left -= cuts
        halves = chain == 0 and cuts > 0 and length - cuts >= 3
        chunk = length - cuts + halves
        parts = [chunk // 2, chunk - chunk // 2] if halves else [chunk]
        parts += [1] * (cuts - halves)
        start = 0
        for tokens in parts:
            shares.append((chain, start, tokens))
            start += tokens
    return shares


def warm_up_step(
    shape: StepShape, room: SpareRoom, vocab_size: int, *, variant: int = 0, has_state: bool = False
) -> tuple[torch.Tensor, torch.Tensor, StepMetadata]:
    """Ids ``[1, T]``, positions ``[1, T]`` and metadata of a step in ``room``, on the host.

    Args:
        shape: of the step.
        room: holds at least ``chain_blocks`` of its tokens.
        vocab_size: ids are drawn below it.
        variant: another number gives other tokens; with an odd one the sequences come in the opposite order, so that
            every length and block table differs from those of an even one.
        has_state: the model keeps state.
    """
    shares = shares_of(shape, room.longest)
    if variant % 2:
        shares.reverse()
    size = room.block_size
    blocks = -(-room.longest // size)
    width = max(-(-(start + tokens) // size) for _, start, tokens in shares)
    table = torch.zeros(len(shares), width, dtype=torch.int32)
    positions, slots = [], []
    for row, (chain, start, tokens) in enumerate(shares):
        base = room.first_block + chain * blocks
        needed = -(-(start + tokens) // size)
        table[row, :needed] = torch.arange(base, base + needed, dtype=torch.int32)
        at = torch.arange(start, start + tokens)
        positions.append(at)
        slots.append(base * size + at)
    lengths = torch.tensor([tokens for _, _, tokens in shares])
    ends = lengths.cumsum(0)
    where = torch.cat(positions)
    decodes = shape.tokens == shape.sequences  # which go on from a state, all of them
    generator = torch.Generator().manual_seed(variant)
    metadata = StepMetadata(
        slot_mapping=torch.cat(slots),
        block_table=table,
        query_start_loc=torch.cat((torch.zeros(1, dtype=torch.int64), ends)).to(torch.int32),
        seq_lens=torch.tensor([start + tokens for _, start, tokens in shares], dtype=torch.int32),
        logits_rows=torch.arange(shape.tokens) if shape.drafts else ends - 1,
        token_lengths=where + 1,
        state_read=_slots([room.read_slot if start or decodes else -1 for _, start, _ in shares])
        if has_state
        else None,
        state_write=_slots([room.shared_slot] * (len(shares) - 1) + [room.write_slot]) if has_state else None,
    )
    ids = torch.randint(0, vocab_size, (1, shape.tokens), generator=generator)
    return ids, where[None], metadata


def _slots(numbers: Sequence[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)
