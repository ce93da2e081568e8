"""Packs a scheduled step into one flat batch and runs the compiled model on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ..batching.schedule import ScheduledRequest
from ..cache.cache_specs import has_state, num_token_groups
from ..program import KVCache, Program
from ..requests.request import Request
from ..step_metadata import StepMetadata

_Int = TypeVar("_Int", bound=np.integer)

PackedStep = tuple[torch.Tensor, torch.Tensor, StepMetadata]

_FIRST_COLUMNS = 256


class ModelRunner:
    """Keeps each running request's tokens and block table in one row of arrays that live as long as it does.

    A step is packed by indexing these arrays, without Python work per token; per sequence only its row, start
    and length are read from the schedule.

    Args:
        program: the compiled model; it gets ``kv_cache`` here.
        kv_cache: as ``allocate_kv_cache`` makes it.
        block_size: tokens per block.
        max_num_seqs: rows.
        max_model_len: most tokens per row.
    """

    def __init__(
        self, program: Program, kv_cache: KVCache, block_size: int, max_num_seqs: int, max_model_len: int
    ) -> None:
        self.program = program
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        # The columns grow with the longest request: max_model_len can be millions.
        columns = min(_FIRST_COLUMNS, max_model_len)
        self._tokens: npt.NDArray[np.int64] = np.zeros((max_num_seqs, columns), np.int64)
        first_blocks = np.zeros((max_num_seqs, -(-columns // block_size)), np.int32)
        self._has_state = has_state(program.caches)
        num_groups = num_token_groups(program.caches)
        self._blocks: list[npt.NDArray[np.int32]] = [first_blocks.copy() for _ in range(num_groups)]
        self._num_tokens = np.zeros(max_num_seqs, np.int64)
        self._num_prompt_tokens = np.zeros(max_num_seqs, np.int64)
        self._num_blocks = [0] * max_num_seqs
        self._requests: list[Request | None] = [None] * max_num_seqs
        program.bind(kv_cache)

    def add(self, request: Request) -> None:
        """Give the request a row with its prompt and output tokens, and an empty block table.

        Raises:
            RuntimeError: every row is taken.
        """
        try:
            row = self._requests.index(None)
        except ValueError:
            raise RuntimeError(
                f"request {request.request_id!r} finds no free row: all max_num_seqs={self.max_num_seqs} are in use; "
                "remove one first"
            ) from None
        prompt, total = request.num_prompt_tokens, request.num_tokens
        self._reserve(total)
        self._tokens[row, :prompt] = request.prompt_token_ids
        self._tokens[row, prompt:total] = request.output_token_ids
        self._num_prompt_tokens[row] = prompt
        self._num_tokens[row] = total
        self._num_blocks[row] = 0
        self._requests[row] = request
        request.row = row

    def remove(self, request: Request) -> None:
        """Take the request's row away; nothing happens when it has none."""
        row = request.row
        request.row = None
        if row is not None and self._requests[row] is request:
            self._requests[row] = None

    def reset(self) -> None:
        """Take every row away, whatever state an interrupted call left behind."""
        for row, request in enumerate(self._requests):
            if request is not None:
                request.row = None
                self._requests[row] = None

    def set_blocks(self, request: Request, tables: Sequence[Sequence[int]]) -> None:
        """Replace the request's tables, one for each group of layers. That of states is passed over: each step says
        which slots it uses."""
        self._num_blocks[_row(request)] = 0
        self.append_blocks(request, tables)

    def append_blocks(self, request: Request, block_ids: Sequence[Sequence[int]]) -> None:
        """Add blocks to the end of the request's tables: as many to each group's."""
        row = _row(request)
        first = self._num_blocks[row]
        end = first + (len(block_ids[0]) if self._blocks else 0)
        for group, ids in enumerate(block_ids[: len(self._blocks)]):
            if end > self._blocks[group].shape[1]:
                self._blocks[group] = _widened(self._blocks[group], end)
            self._blocks[group][row, first:end] = ids
        self._num_blocks[row] = end

    def append_tokens(self, requests: Sequence[Request], token_ids: Sequence[int]) -> None:
        """Add one sampled token to each of the requests."""
        if not requests:
            return
        rows = np.array([_row(request) for request in requests])
        ends = self._num_tokens[rows]
        self._reserve(int(ends.max()) + 1)
        self._tokens[rows, ends] = token_ids
        self._num_tokens[rows] = ends + 1

    def run(
        self,
        scheduled: Sequence[ScheduledRequest],
        packed: PackedStep | None = None,
        call: Callable[..., torch.Tensor] | None = None,
    ) -> StepLogits:
        """Compute the planned tokens of each request as one flat step.

        Args:
            scheduled: what to run; each request has a row whose tokens and blocks reach that far.
            packed: what ``pack`` made of it, if it was called already.
            call: is called in place of the program.
        """
        input_ids, positions, step = self.pack(scheduled) if packed is None else packed
        with torch.inference_mode():
            logits = (self.program if call is None else call)(input_ids, positions, step)
        if logits.shape[0] != len(step.logits_rows):
            raise RuntimeError(
                f"the program returned logits {list(logits.shape)} for {len(step.logits_rows)} requested rows, which "
                "violates the contract of runtime/program.py"
            )
        return _split_logits(logits, scheduled)

    def pack(self, scheduled: Sequence[ScheduledRequest]) -> PackedStep:
        """Token ids and positions ``[1, T]`` int64 and metadata of one flat step, on the host; see ``StepMetadata``.

        Logits are requested for the last token of each entry that samples, and for all tokens of entries whose prompt
        is scored; if there are none, for the last token of the step: R is never 0.
        """
        size = self.block_size
        plan = np.array(
            [(_row(item.request), item.start, item.num_tokens, item.is_last_chunk) for item in scheduled],
            np.int64,
        )
        rows, starts, counts = plan[:, 0], plan[:, 1], plan[:, 2]
        lens = starts + counts
        ends = np.cumsum(counts)
        total = int(ends[-1])
        if total == len(scheduled):
            token_rows, positions = rows, np.ascontiguousarray(starts)
        else:
            token_rows = np.repeat(rows, counts)
            positions = np.arange(total) + np.repeat(lens - ends, counts)
        block_of, offset = np.divmod(positions, size)
        longest = int(lens.max())
        self._reserve(longest)  # the last token may be one that is not known yet
        drafted = [item for item in scheduled if item.drafts or item.num_filled]
        for item in drafted:
            self._write_drafts(item)
        width = -(-longest // size)
        placed = [
            (
                torch.from_numpy(blocks[token_rows, block_of] * np.int64(size) + offset),
                torch.from_numpy(blocks[rows, :width]),
            )
            for blocks in self._blocks
        ]
        if not placed:
            placed = [(torch.zeros(total, dtype=torch.int64), torch.zeros(len(scheduled), 1, dtype=torch.int32))]
        bounds = np.zeros(len(scheduled) + 1, np.int32)
        bounds[1:] = ends
        asked = ends[plan[:, 3] != 0] - 1
        if drafted or any(map(_is_scored, scheduled)):
            shares = zip(scheduled, ends.tolist(), strict=True)
            asked = np.concatenate([np.arange(end - _num_asked(item), end) for item, end in shares])
        if not len(asked):
            asked = ends[-1:] - 1
        lengths = self._num_prompt_tokens
        if (limit := self.program.restart_length) is not None:
            lengths = np.where(self._num_tokens > limit, np.maximum(lengths, limit + 1), lengths)
        slots = None
        if self._has_state:
            slots = np.array([(item.state_read, item.state_write) for item in scheduled], np.int32).T.copy()
        return (
            torch.from_numpy(self._tokens[token_rows, positions][None]),
            torch.from_numpy(positions[None]),
            StepMetadata(
                slot_mapping=placed[0][0],
                block_table=placed[0][1],
                query_start_loc=torch.from_numpy(bounds),
                seq_lens=torch.from_numpy(lens.astype(np.int32)),
                logits_rows=torch.from_numpy(asked),
                token_lengths=torch.from_numpy(np.maximum(lengths[token_rows], positions + 1)),
                groups=tuple(placed[1:]),
                state_read=None if slots is None else torch.from_numpy(slots[0]),
                state_write=None if slots is None else torch.from_numpy(slots[1]),
            ),
        )

    def _write_drafts(self, item: ScheduledRequest) -> None:
        """Put drafts behind the request's tokens, and its newest one into the rows behind them."""
        row = _row(item.request)
        first = int(self._num_tokens[row])
        end = first + len(item.drafts)
        self._tokens[row, first:end] = item.drafts
        self._tokens[row, end : end + item.num_filled] = self._tokens[row, first - 1]

    def _reserve(self, num_tokens: int) -> None:
        if num_tokens > self._tokens.shape[1]:
            self._tokens = _widened(self._tokens, num_tokens)


@dataclass(frozen=True, slots=True)
class StepLogits:
    """Logits of a step.

    Attributes:
        sampled: ``[R, vocab_size]``, in their order, for each entry with ``is_last_chunk`` the row of its last token,
            in front of those of its drafts.
        prompts: index of an entry whose prompt is scored → ``[num_tokens, vocab_size]``, its tokens' rows.
    """

    sampled: torch.Tensor
    prompts: dict[int, torch.Tensor]


def _is_scored(item: ScheduledRequest) -> bool:
    """True if the prompt's log-probabilities are asked for and this chunk holds some."""
    request = item.request
    return request.params.prompt_logprobs is not None and item.start < request.num_prompt_tokens - 1


def _num_asked(item: ScheduledRequest) -> int:
    return item.num_tokens if _is_scored(item) else _num_sampled(item)


def _num_sampled(item: ScheduledRequest) -> int:
    return 1 + item.num_draft_rows if item.is_last_chunk else 0


def _split_logits(logits: torch.Tensor, scheduled: Sequence[ScheduledRequest]) -> StepLogits:
    sampling = sum(map(_num_sampled, scheduled))
    if not any(map(_is_scored, scheduled)):
        return StepLogits(logits[:sampling], {})
    prompts, end = {}, 0
    rows: list[int] = []
    for i, item in enumerate(scheduled):
        start, end = end, end + _num_asked(item)
        if _is_scored(item):
            prompts[i] = logits[start:end]
        rows += range(end - _num_sampled(item), end)
    return StepLogits(logits[torch.tensor(rows, dtype=torch.int64, device=logits.device)], prompts)


def _row(request: Request) -> int:
    if request.row is None:
        raise RuntimeError(f"request {request.request_id!r} has no row; add it to the runner first")
    return request.row


def _widened(array: npt.NDArray[_Int], columns: int) -> npt.NDArray[_Int]:
    """A copy with at least that many columns, and at least twice as many as before."""
    wider = np.zeros((array.shape[0], max(columns, 2 * array.shape[1])), array.dtype)
    wider[:, : array.shape[1]] = array
    return wider
