"""Metadata of one model step in addition to its tokens: where KV is written and read, which logits are requested."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from .state_tables import CONVOLUTION_TABLES, STATE_TABLES, chunk_tables, convolution_tables
from .window_blocks import WINDOW_LENS, window_lens

GROUP_FIELDS = ("slot_mapping", "block_table")
"""Fields that every group of layers has its own of."""
PADDED_FIELDS = ("padded_tokens", "row_of_token")
"""Fields that say where tokens of sequences padded to one length are; the least length may follow the name."""
TOKEN_FIELDS = ("token_state_read", "token_state_write", "token_ones", "token_places")
"""Fields ``[T]`` int32 for steps of one token per sequence."""

PREVIOUS_HIDDEN = "previous_hidden"
"""The field of heads that read a row of hidden size for each token."""


@dataclass(frozen=True)
class StepMetadata:
    """Tensors that describe one flat step of T tokens from S sequences; R of the tokens ask for logits.

    They live on the host, so that no list or size made from them waits for a device.

    Where layers with different windows have block tables of their own, ``slot_mapping`` and ``block_table`` are those
    of the first group, and ``groups`` has the others'.

    Attributes:
        slot_mapping: ``[T]`` int64. Cache slot (``block * block_size + offset``) of each token; -1 for padding.
        block_table: ``[S, W]`` int32. Block ids of each sequence, in order; entries past its length are ignored.
        query_start_loc: ``[S + 1]`` int32. Sequence s owns tokens ``query_start_loc[s]:query_start_loc[s + 1]``.
        seq_lens: ``[S]`` int32. Context length of each sequence, this step's tokens included.
        logits_rows: ``[R]`` int64. Indices of the tokens whose logits are returned.
        token_lengths: ``[T]`` int64. For each token, the length that its sequence has when it is run alone and
            with a cache: ``max(prompt length, position + 1)``. It does not depend on how the scheduler cut the
            prompt into chunks; models whose position encoding depends on the length read it (longrope). A
            sequence that was computed anew (``Program.restart_length``) counts what it had then as its prompt.
        groups: slot mapping and block table of each group of layers but the first.
        state_read: ``[S]`` int32. Slot of the state that each sequence goes on from; -1: it begins, from zeros. None
            where the model keeps no state.
        state_write: ``[S]`` int32. Slot that receives each sequence's state after its last token of the step; -1:
            none. It may be the one that is read; a slot that is only read keeps its content, so that several
            sequences can go on from it. No two sequences write the same slot.
        previous_hidden: ``[1, T, hidden_size]``. The hidden row that a head reads with each token, that of the token
            before it; None for all other programs.
    """

    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    logits_rows: torch.Tensor
    token_lengths: torch.Tensor
    groups: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
    state_read: torch.Tensor | None = None
    state_write: torch.Tensor | None = None
    previous_hidden: torch.Tensor | None = None

    def field(self, name: str) -> Any:
        """The value for a graph input of that name: an attribute, or ``slot_mapping_g`` or ``block_table_g`` of group
        g.

        Where all groups lie in the same blocks, ``groups`` may be empty. A table of ``state_tables`` has the number
        of taps, or of a chunk's tokens, behind its name, and a field of ``PADDED_FIELDS`` the least length that
        sequences are padded to; ``window_lens_b_w`` are the ``window_lens`` of blocks of b tokens and a window of w.
        """
        if name.startswith(WINDOW_LENS):
            _, block_size, window = name.rsplit("_", 2)
            return window_lens(self.kv_lens, int(window), int(block_size))
        base, _, number = name.rpartition("_")
        if base in STATE_TABLES and number.isdigit():
            return self._table(base, int(number))
        if base in PADDED_FIELDS and number.isdigit():
            return self._padded_to(int(number))[PADDED_FIELDS.index(base)]
        if base not in GROUP_FIELDS or not number.isdigit():
            return getattr(self, name)
        if not self.groups:
            return getattr(self, base)
        return self.groups[int(number) - 1][GROUP_FIELDS.index(base)]

    @cached_property
    def query_ends(self) -> list[int]:
        """For each sequence how many tokens it and those before it have in the step, on the host."""
        return self.query_start_loc[1:].tolist()  # type: ignore[no-any-return]

    @cached_property
    def query_lens(self) -> list[int]:
        """Tokens of each sequence in the step, on the host."""
        return self.query_start_loc.diff().tolist()  # type: ignore[no-any-return]

    @cached_property
    def state_reads(self) -> list[int]:
        """``state_read`` on the host; [] where the model keeps no state."""
        return [] if self.state_read is None else self.state_read.tolist()  # type: ignore[no-any-return]

    @cached_property
    def token_state_read(self) -> torch.Tensor:
        """``[T]`` int32: ``state_read`` of each token's sequence."""
        return self._of_tokens(self.state_read)

    @cached_property
    def token_state_write(self) -> torch.Tensor:
        """``[T]`` int32: ``state_write`` of each token's sequence."""
        return self._of_tokens(self.state_write)

    @cached_property
    def token_ones(self) -> torch.Tensor:
        """``[T]`` int32 of ones: tokens of each sequence where it has one."""
        return torch.ones_like(self.token_state_read)

    @cached_property
    def token_places(self) -> torch.Tensor:
        """``[T]`` int32: 0, 1, 2, ..."""
        return torch.arange(len(self.token_state_read), dtype=torch.int32)

    def _of_tokens(self, slots: torch.Tensor | None) -> torch.Tensor:
        if slots is None:
            raise ValueError("a model with state needs state_read and state_write; give both")
        return torch.repeat_interleave(slots, self.query_start_loc.diff())

    @cached_property
    def kv_lens(self) -> list[int]:
        """``seq_lens`` on the host."""
        return self.seq_lens.tolist()  # type: ignore[no-any-return]

    @property
    def padded_tokens(self) -> torch.Tensor:
        """``[S, M]`` int64: index in the step of each sequence's tokens; M is the most that a sequence has, shorter
        ones repeat their first one."""
        return self._padded_to(1)[0]

    @property
    def row_of_token(self) -> torch.Tensor:
        """``[T]`` int64: where each token of the step stands in ``padded_tokens``, flattened."""
        return self._padded_to(1)[1]

    def _padded_to(self, least: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``padded_tokens`` with M at least ``least``, and where each token stands in it; made once for a step."""
        if least not in self._padded:
            starts = self.query_start_loc[:-1].long()
            counts = self.query_start_loc[1:].long() - starts
            width = max(least, int(counts.max()))
            at = torch.arange(width, device=starts.device).expand(len(starts), -1)
            padded = starts[:, None].clamp(max=self.slot_mapping.shape[0] - 1) + at.where(at < counts[:, None], 0)
            sequence = torch.repeat_interleave(torch.arange(len(starts), device=starts.device), counts)
            row = sequence * width + torch.arange(len(sequence), device=starts.device) - starts[sequence]
            self._padded[least] = padded, row
        return self._padded[least]

    @cached_property
    def _padded(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        return {}

    @cached_property
    def _tables(self) -> dict[tuple[str, int], dict[str, torch.Tensor]]:
        return {}

    def _table(self, base: str, number: int) -> torch.Tensor:
        """The table of ``state_tables`` that has this name, for convolutions of ``number`` taps or chunks of as many
        tokens; each is made once for a step."""
        tables = convolution_tables if base in CONVOLUTION_TABLES else chunk_tables
        key = tables.__name__, number
        if key not in self._tables:
            if self.state_read is None:
                raise ValueError(f"{base}_{number} is for models that keep state; give state_read and state_write")
            self._tables[key] = tables(self.query_start_loc, self.state_read, number)
        return self._tables[key][base]
