"""Drafts with a head of the model itself (MTP): its program beside the model's, over the same blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Final

import torch

from ..autocast import without_autocast
from ..blocks import NULL_BLOCK, BlockManager
from ..cache.cache_specs import AnySpec, token_specs
from ..program import CacheSpec, KVCache, TappedProgram
from ..requests.request import Request
from ..step_metadata import StepMetadata
from .greedy_chains import GreedyChains, Share
from .step_seconds import StepSeconds

_MOST_HASHES: Final = 1 << 16


class MtpProgram:
    """A model and its head as one program: both store what they know of a token in the same blocks.

    The head computes with a token the hidden row of the one before it, which a step of the model leaves in a cache of
    its own: so whatever becomes of a block (a prefix hit, a swap, a fork), the rows come with it. All tokens run
    through the head when it drafts behind them, and not before.

    Args:
        model: its program.
        head: that of its head.

    Attributes:
        group: the model's group of layers whose blocks the head uses.
        head_caches: of ``caches``, the model's hidden rows and the head's keys and values.

    Raises:
        ValueError: the model has no layers whose blocks the head's could lie in.
    """

    def __init__(self, model: TappedProgram, head: TappedProgram) -> None:
        self.model, self.head = model, head
        own = token_specs(head.caches)
        windows = {spec.sliding_window for spec in own}
        groups = {spec.group for spec in token_specs(model.caches) if {spec.sliding_window} == windows}
        if len(own) != len(head.caches) or not groups or model.hidden_form is None:
            raise ValueError(
                "speculative_config: method 'mtp': the head's attention is of another kind than the model's layers; "
                "use method 'suffix' or 'draft_model'"
            )
        self.group = min(groups)
        size, dtype = model.hidden_form
        rows = CacheSpec(1, size, 0, dtype, sliding_window=own[0].sliding_window, group=self.group)
        self.head_caches: list[AnySpec] = [rows, *(replace(spec, group=self.group) for spec in own)]
        self.caches = [*model.caches, *self.head_caches]
        self.vocab_size = model.vocab_size
        self.max_model_len = model.max_model_len
        self.restart_length = model.restart_length
        self.rope_switch = model.rope_switch
        self.device = model.device
        self.block_size = model.block_size

    def reserve(self, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, num_drafts: int = 0) -> int:
        """See ``Program``."""
        sizes = max_num_seqs, max_num_batched_tokens, max_model_len, num_drafts
        return max([program.reserve(*sizes) for program in (self.model, self.head)])

    def bind(self, kv_cache: KVCache) -> None:
        """See ``Program``."""
        count = len(self.model.caches)
        self.model.bind(kv_cache[:count])
        self.head.bind(kv_cache[count + 1 :])
        (rows,) = kv_cache[count]
        self._block_size = rows.shape[1]
        self._rows = rows.squeeze(2).flatten(0, 1)

    def __call__(self, input_ids: torch.Tensor, position_ids: torch.Tensor, step: StepMetadata) -> torch.Tensor:
        """See ``Program``."""
        logits = self.model(input_ids, position_ids, step)
        slots, _ = self._places(step)
        assert self.model.hidden is not None
        self._rows.index_copy_(0, slots.long(), self.model.hidden)
        return logits

    def draft(self, input_ids: torch.Tensor, position_ids: torch.Tensor, step: StepMetadata) -> torch.Tensor:
        """Run the head on tokens that follow computed ones, as ``run_head`` does.

        The hidden rows of the asked tokens take the places of those that the model has not computed yet, so that the
        head can go on from them.
        """
        logits = self.run_head(input_ids, position_ids, step)
        slots, _ = self._places(step)
        assert self.head.hidden is not None
        self._rows[slots[step.logits_rows]] = self.head.hidden[step.logits_rows]
        return logits

    def _places(self, step: StepMetadata) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots and block table of the head's group."""
        return step.groups[self.group - 1] if self.group and step.groups else (step.slot_mapping, step.block_table)

    def run_head(self, input_ids: torch.Tensor, position_ids: torch.Tensor, step: StepMetadata) -> torch.Tensor:
        """Run the head on tokens that the model has computed, or that follow those; arguments and logits are those of
        a ``Program``."""
        slots, table = self._places(step)
        positions = position_ids[0]
        before = (positions - 1).clamp(min=0)
        sequences = torch.repeat_interleave(torch.arange(len(table)), step.query_start_loc.diff())
        blocks = table[sequences, before // self._block_size].long()
        rows = self._rows[blocks * self._block_size + before % self._block_size]
        own = replace(
            step,
            slot_mapping=slots,
            block_table=table,
            groups=(),
            state_read=None,
            state_write=None,
            previous_hidden=rows.where(positions[:, None] > 0, 0)[None],
        )
        return self.head(input_ids, position_ids, own)


@dataclass(frozen=True, slots=True)
class _Leading:
    """How many leading tokens of a request have the head's keys, or the model's hidden rows.

    Attributes:
        count: tokens.
        num_preemptions: of the request, at that time.
        hashes: the request's list of hashes. It has another one when it is computed anew.
    """

    count: int
    num_preemptions: int
    hashes: list[bytes]

    @classmethod
    def of(cls, request: Request, count: int) -> _Leading:
        """So many of the request as it is now."""
        return cls(count, request.num_preemptions, request.block_hashes)

    def are_of(self, request: Request) -> bool:
        """Return True if the request was not computed anew since then."""
        return self.num_preemptions == request.num_preemptions and self.hashes is request.block_hashes


class MtpDrafter:
    """Proposes what the head of a model continues a request with.

    Of a prompt, and of tokens that were settled since its last drafts, it computes the keys then, from the model's
    own hidden rows; the further drafts of a step follow from the head's. So a request that is not drafted for costs
    nothing. Of the tokens of a cached prefix it computes those whose blocks are not known to have their keys.

    Args:
        program: the model with its head.
        blocks: of the model's KV cache.
        most: most drafts of a request.
        max_num_batched_tokens: most tokens that one call computes.

    Attributes:
        seconds: what steps of the head take.
    """

    name = "mtp"
    expected = 0.7
    holds_blocks = True

    def __init__(self, program: MtpProgram, blocks: BlockManager, *, most: int, max_num_batched_tokens: int) -> None:
        self.program = program
        self.most = most
        self.seconds = StepSeconds()
        self._blocks = blocks
        self._max_num_batched_tokens = max_num_batched_tokens
        size, num_ids = blocks.block_size, program.vocab_size
        self._chains = GreedyChains(program.draft, size, num_ids, num_ids)
        self._keys = GreedyChains(program.run_head, size, num_ids, num_ids)
        self._counts: dict[Request, _Leading] = {}
        self._rows: dict[Request, _Leading] = {}
        self._complete: OrderedDict[bytes, None] = OrderedDict()  # hashes of blocks that have their keys
        self._drafts: dict[Request, list[int]] = {}

    def seconds_of(self, count: int, length: int) -> float:
        """Return about how long it takes to draft ``length`` tokens for ``count`` requests."""
        if not length:
            return 0.0
        return self.seconds.of(2 * count) + (length - 1) * self.seconds.of(count)

    def propose_all(self, requests: Sequence[Request], most: int) -> None:
        """Compute up to ``most`` drafts for each of the requests, all in one batch."""
        self._drafts = {}
        complete: list[Share] = []
        others: list[Share] = []
        left = self._max_num_batched_tokens
        able = filter(self._has_rows, requests)
        for request in sorted(able, key=lambda request: request.num_tokens - self._start(request)):
            start, end = self._start(request), request.num_tokens
            share = Share(request, self._table(request), start, min(end, start + left))
            if share.start < share.end:
                (complete if share.end == end else others).append(share)
                left -= share.end - share.start
        leveled = self._chains.level(complete, self._max_num_batched_tokens)
        with torch.inference_mode(), without_autocast(self.program.device.type):
            if others:  # whose rows are the model's, which a chain would replace
                self._keys.drafts(others, 1)
            if leveled:
                drafts = self._chains.drafts(leveled, most)
                self._drafts = {share.request: own for share, own in zip(leveled, drafts, strict=True)}
        for share in (*complete, *others):
            self._counts[share.request] = _Leading.of(share.request, share.end)

    def _has_rows(self, request: Request) -> bool:
        """Return True if all tokens but the newest have hidden rows: also those that are computed again because a
        state was taken back, but not those of a request that is computed anew."""
        rows, count = self._rows.get(request), request.num_computed_tokens
        if rows is not None and rows.are_of(request):
            count = rows.count
        return count >= request.num_tokens - 1

    def _table(self, request: Request) -> Sequence[int]:
        return self._blocks.table(request.request_id, self.program.group)

    def _start(self, request: Request) -> int:
        """The first token without keys; the newest one is computed in any case."""
        size, known = self._blocks.block_size, self._counts.get(request)
        if known is not None and known.are_of(request):
            start = known.count
        else:
            cached = request.block_hashes[: request.num_cached_tokens // size]
            start = size * sum(1 for _ in takewhile(self._complete.__contains__, cached))
        start = min(start, request.num_tokens - 1)
        table = self._table(request)
        while table[start // size] == NULL_BLOCK:  # a window has passed it
            start = (start // size + 1) * size
        return start

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """Return the first ``most`` of the request's drafts."""
        return self._drafts.get(request, [])[:most]

    def settled(self, request: Request, tokens: Sequence[int]) -> None:
        """Note that a step has left the hidden rows of all tokens but the newest."""
        self._rows[request] = _Leading.of(request, request.num_tokens - 1)

    def finished(self, request: Request) -> None:
        """Remember which of the request's blocks have their keys, and forget it."""
        self._rows.pop(request, None)
        known = self._counts.pop(request, None)
        count = known.count if known is not None and known.are_of(request) else request.num_cached_tokens
        blocks = count // self._blocks.block_size
        if known is not None:
            self._complete.update(dict.fromkeys(request.block_hashes[:blocks]))
        for content in request.block_hashes[blocks:]:
            self._complete.pop(content, None)
        while len(self._complete) > _MOST_HASHES:
            self._complete.popitem(last=False)

    def reset(self) -> None:
        """Forget all requests."""
        self._counts, self._rows, self._drafts, self._complete = {}, {}, {}, OrderedDict()
