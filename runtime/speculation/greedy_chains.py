"""Greedy continuations of several sequences by a program, token after token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from ..blocks import NULL_BLOCK
from ..requests.request import Request
from ..step_metadata import StepMetadata
from .config import LENGTHS

_Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Share:
    """Tokens of a request that a step computes: those from ``start`` to ``end``.

    Attributes:
        request: it.
        table: its blocks.
        start, end: numbers of tokens.
    """

    request: Request
    table: Sequence[int]
    start: int
    end: int


class GreedyChains:
    """Continues sequences with their likeliest tokens.

    Args:
        call: runs a step, as a ``Program`` does.
        block_size: tokens per block.
        known_ids: ids of the program's vocabulary are below it.
        vocab_size: drafts are below it.
    """

    def __init__(
        self,
        call: Callable[[torch.Tensor, torch.Tensor, StepMetadata], torch.Tensor],
        block_size: int,
        known_ids: int,
        vocab_size: int,
    ) -> None:
        self._call = call
        self._block_size = block_size
        self._known_ids = known_ids
        self._vocab_size = vocab_size

    def level(self, shares: Sequence[Share], most: int) -> Sequence[Share]:
        """Let shares of few tokens begin earlier, so that all have one, two, four or eight: sizes of steps are few,
        and recorded ones repeat. What is computed again stays what it is.

        Args:
            shares: of a step.
            most: tokens of a step.
        """
        width = max([share.end - share.start for share in shares], default=1)
        width = 1 << (width - 1).bit_length()
        starts = [share.end - width for share in shares]
        if width > 1 + LENGTHS[-1] or width * len(shares) > most or min(starts, default=0) < 0:
            return shares
        blocks = [share.table[start // self._block_size] for share, start in zip(shares, starts, strict=True)]
        if NULL_BLOCK in blocks:  # a window has passed it
            return shares
        return [replace(share, start=start) for share, start in zip(shares, starts, strict=True)]

    def drafts(self, shares: Sequence[Share], most: int) -> list[list[int]]:
        """Run the step of the shares, and up to ``most`` - 1 further ones of those that are complete, as far as their
        blocks reach; returns the drafts of each."""
        tables = np.zeros((len(shares), max([len(share.table) for share in shares])), np.int32)
        for row, share in enumerate(shares):
            tables[row, : len(share.table)] = share.table
        starts = np.array([share.start for share in shares])
        ends = np.array([share.end for share in shares])
        held = np.array([len(share.table) * self._block_size for share in shares])
        prompts = np.array([share.request.num_prompt_tokens for share in shares])
        ids = np.concatenate([np.asarray(share.request.tokens(share.start, share.end)) for share in shares])
        newest = self._step(ids, starts, ends - starts, tables, prompts)
        drafts: list[list[int]] = [[] for _ in shares]
        left = np.array([row for row, share in enumerate(shares) if share.end == share.request.num_tokens], np.int64)
        for place in range(most):
            for row in left.tolist():
                drafts[row].append(int(newest[row]))
            left = left[ends[left] + place < held[left]]
            if place == most - 1 or not len(left):
                break
            ones = np.ones_like(left)
            newest[left] = self._step(newest[left], ends[left] + place, ones, tables[left], prompts[left])
        return drafts

    def _step(self, ids: _Ids, starts: _Ids, counts: _Ids, tables: npt.NDArray[np.int32], prompts: _Ids) -> _Ids:
        """Compute so many tokens of each sequence; returns the likeliest token behind the last of each."""
        size = self._block_size
        lens, ends = starts + counts, np.cumsum(counts)
        rows = np.repeat(np.arange(len(counts)), counts)
        positions = np.arange(len(rows)) + np.repeat(lens - ends, counts)
        block_of, offset = np.divmod(positions, size)
        metadata = StepMetadata(
            slot_mapping=torch.from_numpy(tables[rows, block_of] * np.int64(size) + offset),
            block_table=torch.from_numpy(tables[:, : -(-int(lens.max()) // size)].copy()),
            query_start_loc=torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)),
            seq_lens=torch.from_numpy(lens.astype(np.int32)),
            logits_rows=torch.from_numpy(ends - 1),
            token_lengths=torch.from_numpy(np.maximum(prompts[rows], positions + 1)),
        )
        # Models of one tokenizer may have other numbers of unused ids behind its own.
        known = torch.from_numpy(np.minimum(ids, self._known_ids - 1).astype(np.int64))
        logits = self._call(known[None], torch.from_numpy(positions[None]), metadata)
        return logits[:, : self._vocab_size].argmax(-1).cpu().numpy()  # type: ignore[no-any-return]
