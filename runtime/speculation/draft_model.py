"""Drafts with a smaller model of the same vocabulary: its greedy continuation of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..autocast import without_autocast
from ..blocks import BlockGroup, BlockTables, OutOfBlocks
from ..cache.cache_specs import has_state
from ..cache.kv_cache import allocate_kv_cache
from ..program import Program
from ..requests.request import Request
from .greedy_chains import GreedyChains, Share
from .step_seconds import StepSeconds


@dataclass(slots=True)
class _Sequence:
    """What the drafter has computed of a request.

    Attributes:
        count: leading tokens whose keys are in its blocks.
        fed: drafts whose keys stand behind them.
        table: its blocks.
    """

    count: int = 0
    fed: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)


class DraftModel:
    """Proposes what a second program continues a request with.

    It has its own KV cache. All of its layers lie in the same blocks, also those with windows, and each request's
    prompt is computed when the request first decodes, in chunks. Drafts that were rejected leave keys behind that the
    next tokens are written over. A request that finds no free block has no drafts until another one has ended.

    Args:
        program: the compiled draft model.
        num_blocks: in its KV cache.
        block_size: tokens per block.
        most: most drafts of a request.
        vocab_size: drafts are below it.
        max_num_seqs: most requests at once.
        max_num_batched_tokens: most tokens that one call computes of what it has not seen yet.
        max_model_len: most tokens of a request.

    Attributes:
        blocks: of the KV cache.
        seconds: what its steps take.

    Raises:
        ValueError: the model keeps state.
    """

    name = "draft_model"
    expected = 0.7
    holds_blocks = False

    def __init__(
        self,
        program: Program,
        num_blocks: int,
        block_size: int,
        *,
        most: int,
        vocab_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
    ) -> None:
        if has_state(program.caches):
            raise ValueError(
                "speculative_config: the draft model keeps a state per sequence, which rejected drafts cannot be "
                "taken back from; use a model with attention only"
            )
        self.program = program
        self.most = most
        self.seconds = StepSeconds()
        self.blocks = BlockTables([BlockGroup(num_blocks)], block_size)
        self._chains = GreedyChains(program, block_size, program.vocab_size, vocab_size)
        self._longest = min(max_model_len, program.max_model_len or max_model_len)
        self._max_num_batched_tokens = max_num_batched_tokens
        self._sequences: dict[Request, _Sequence] = {}
        self._refused: set[Request] = set()
        self._drafts: dict[Request, list[int]] = {}
        spare = program.reserve(max_num_seqs, max_num_batched_tokens, self._longest)
        program.bind(allocate_kv_cache(program.caches, num_blocks + spare, block_size, program.device))

    def seconds_of(self, count: int, length: int) -> float:
        """Return about how long it takes to draft ``length`` tokens for ``count`` requests."""
        if not length:
            return 0.0
        # After a step whose drafts were all accepted, the last of them is new, too.
        return self.seconds.of(2 * count) + (length - 1) * self.seconds.of(count)

    def propose_all(self, requests: Sequence[Request], most: int) -> None:
        """Compute up to ``most`` drafts for each of the requests, all in one batch."""
        self._drafts = {}
        shares = self._chains.level(self._shares(requests, most), self._max_num_batched_tokens)
        if not shares:
            return
        with torch.inference_mode(), without_autocast(self.program.device.type):
            drafts = self._chains.drafts(shares, most)
        for share, own in zip(shares, drafts, strict=True):
            sequence = self._sequences[share.request]
            sequence.count, sequence.fed = share.end, own[:-1]
            if own:
                self._drafts[share.request] = own

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """Return the first ``most`` of the request's drafts."""
        return self._drafts.get(request, [])[:most]

    def settled(self, request: Request, tokens: Sequence[int]) -> None:
        """Do nothing: tokens are compared with drafts when more are asked for."""

    def finished(self, request: Request) -> None:
        """Free the request's blocks."""
        self._refused.clear()
        self._release(request)

    def reset(self) -> None:
        """Forget all requests, whatever an interrupted call left behind."""
        self.blocks.reset()
        self._sequences, self._refused, self._drafts = {}, set(), {}

    def _release(self, request: Request) -> None:
        if self._sequences.pop(request, None) is not None and request.request_id in self.blocks:
            self.blocks.free(request.request_id)

    def _shares(self, requests: Sequence[Request], most: int) -> list[Share]:
        """What the first step computes: all that is missing, those with little first, as far as it may."""
        starts = {request: self._num_known(request) for request in requests if request not in self._refused}
        left = self._max_num_batched_tokens
        shares = []
        for request, start in sorted(starts.items(), key=lambda item: item[0].num_tokens - item[1]):
            end = min(request.num_tokens, start + left)
            # The last draft is not computed.
            held = end + most - 1 if end == request.num_tokens else end
            if start < end and held <= self._longest and self._hold(request, held, start, starts):
                own = self._sequences[request]
                own.count, own.fed = start, []  # what is behind is written over now
                shares.append(Share(request, own.table, start, end))
                left -= end - start
        return shares

    def _num_known(self, request: Request) -> int:
        """How many leading tokens have keys; the newest one is computed in any case."""
        own = self._sequences.get(request)
        if own is None:
            return 0
        known = own.count
        for draft, token in zip(own.fed, request.tokens(known, request.num_tokens), strict=False):
            if draft != token:
                break
            known += 1
        return min(known, request.num_tokens - 1)

    def _hold(self, request: Request, num_tokens: int, start: int, wanted: dict[Request, int]) -> bool:
        """Take blocks for so many tokens of a request; returns whether there are enough."""
        name = request.request_id
        own = self._sequences.setdefault(request, _Sequence())
        for _ in range(2):
            try:
                (added,) = self.blocks.allocate(name, num_tokens, start)
            except OutOfBlocks:
                # Requests that do not run now, such as preempted ones, make room.
                for other in self._sequences.keys() - wanted.keys():
                    self._release(other)
                continue
            own.table += added
            return True
        self._release(request)
        self._refused.add(request)
        return False
