"""Adds drafts to a planned step: tokens that may follow those that a request computes anyway.

A step with drafts is planned when all tokens are settled, and settled before the next is planned. Drafts take what
nobody else wants: rows that the step has left, and blocks and state slots that are free. So no request is preempted,
and nothing cached is evicted, for a draft.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Final
from weakref import WeakKeyDictionary

from ..batching import Batcher, ScheduledRequest
from ..batching.schedule import Plan
from ..requests.request import Request
from .config import LENGTHS
from .draft_lengths import MOST_RECORDED_ROWS, Asking, Candidate, DraftLengths
from .drafter import BatchDrafter, Drafter, Drafters
from .forced_tokens import ForcedTokens
from .token_worth import is_draining, token_worths

BEAMS: Final = "beam_search"
STATIC: Final = "static_batches"
PROMPT_LOGPROBS: Final = "prompt_logprobs"
SNAPSHOT: Final = "snapshot"
RESTART: Final = "restart_length"
BLOCKS: Final = "blocks"
ONE_QUERY: Final = "one_query"

LIMITS: Final = (BEAMS, STATIC, PROMPT_LOGPROBS, SNAPSHOT, RESTART, BLOCKS, ONE_QUERY)
"""Reasons why a request that decodes has no drafts in a step, in ``Engine.stats`` after ``undrafted_``:
- beam_search: which beams go on follows from the candidates of all.
- static_batches: batches that run to their end are for comparison.
- prompt_logprobs: the step scores the prompt.
- snapshot: the step must end where a snapshot of the state is due.
- restart_length: all keys of the sequence change with its next token (longrope).
- blocks: the cache has no free block, or no free slot of a state.
- one_query: the attention kernel takes one token of each sequence (int8 caches on an NPU); more would be computed by
  its formula.
"""

ACCEPTED_BY_PLACE: Final = tuple(f"spec_decode_num_accepted_tokens_pos_{place}" for place in range(LENGTHS[-1]))
"""Names of the figures of accepted drafts by place in ``Engine.stats``."""


_SMOOTHING: Final = 0.1  # weight of the newest pace


@dataclass(slots=True)
class DraftFigures:
    """Counts since the engine was made.

    Attributes:
        num_drafts: requests' shares of steps that had drafts.
        num_draft_tokens: tokens in them.
        accepted: of these by place.
        undrafted: shares without drafts, by reason.
        num_filled: rows that were computed to repeat a size.
    """

    num_drafts: int
    num_draft_tokens: int
    accepted: list[int]
    undrafted: Counter[str]
    num_filled: int = 0


class Drafting:
    """Plans the drafts of an engine's steps, and learns from what became of them.

    Args:
        drafters: asked in this order.
        batcher: of the engine.
        most: most drafts of a request in a step.
        vocab_size: ids are below it.
        restart_length: of the program.
        is_beam: tells beams of a search from other requests.
        is_planned: steps run at planned sizes: with drafts, all requests have ``most`` rows besides their own.
        one_query: see ``LIMITS``.

    Attributes:
        lengths: chooses how many drafts a step has.
        runs_ahead: steps without drafts are launched before the one before them is settled.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        batcher: Batcher,
        *,
        most: int,
        vocab_size: int,
        restart_length: int | None = None,
        is_beam: Callable[[Request], bool] = lambda request: False,
        is_planned: bool = False,
        one_query: bool = False,
    ) -> None:
        self.drafters = Drafters(drafters, vocab_size)
        self.batcher = batcher
        self.is_planned, self.one_query = is_planned, one_query
        lengths = (0, most) if is_planned else [length for length in LENGTHS if length <= most]
        expected = {drafter.name: drafter.expected for drafter in drafters}
        self.lengths = DraftLengths(lengths, expected, all_or_none=is_planned)
        self.restart_length = restart_length
        self.is_beam = is_beam
        self.runs_ahead = False
        self.figures = DraftFigures(0, 0, [0] * self.lengths.lengths[-1], Counter())
        self._lookups = frozenset(drafter.name for drafter in drafters) - {ForcedTokens.name}
        self._batch_drafters = [drafter for drafter in drafters if isinstance(drafter, BatchDrafter)]
        self._seconds = 0.0  # of drafting, not judged yet
        self._asked: set[str] = set()  # drafters, since the last step was judged
        self._latest: dict[Request, str] = {}  # drafter of its last drafts
        self._worths: dict[Request, float] = {}  # of their tokens, where a batch drains
        self._paces: WeakKeyDictionary[Request, float] = WeakKeyDictionary()

    def is_due(self) -> bool:
        """Return True if the next step may have drafts, so that it is planned when this one is settled."""
        if self._lookups - self.lengths.resting():
            return True
        return any([request.grammar is not None for request in self.batcher.planner.queues.running])

    def extend(self, plan: Plan) -> None:
        """Add drafts to the shares of a plan."""
        planner = self.batcher.planner
        self.lengths.begin_step()
        if planner.in_flight or planner.suspects or plan.preempted:
            return
        items = list(plan.planned.values())
        if self.is_planned and not all([item.request.output_token_ids for item in items]):
            return  # a step with prompts has no planned size for drafts
        awake = self._lookups - self.lengths.resting()
        if not awake and not any([item.request.grammar is not None for item in items]):
            return
        started = time.perf_counter()
        candidates, others = self._candidates(plan, items)
        self._asked |= awake
        self._seconds += time.perf_counter() - started
        if not candidates:
            if self.runs_ahead:
                self.lengths.decline(awake)
            return
        rows = sum([item.num_tokens for item in items])
        num_fillers = partial(self._num_fillers, others)
        length, picked = self.lengths.choose(rows, len(others), candidates, plan.budget, num_fillers)
        if not length:
            return
        count = 0
        for candidate in picked:
            drafts = candidate.proposal.ids[: max(candidate.num_drafts(length), 0)]
            if drafts and self._add(plan, candidate.request, candidate.rows(length), drafts):
                self._latest[candidate.request] = candidate.proposal.drafter
                count += 1
        if count:
            self._fill_up(plan, others, count, length)

    def _num_fillers(self, others: Sequence[ScheduledRequest], rows: int, count: int, length: int) -> int:
        """How many requests without drafts get ``length`` rows more, so that the numbers of rows are few.

        Args:
            others: requests without drafts.
            rows: of the step with the drafts of ``count`` requests, ``length`` each at most.
        """
        if self.batcher.block_manager.has_state or not count:
            return 0
        able = sum([item.num_tokens == 1 for item in others])
        if self.is_planned:
            return able
        wanted = (1 << (count - 1).bit_length()) - count
        return max(min(able, wanted, (MOST_RECORDED_ROWS - rows) // length), 0)

    def _fill_up(self, plan: Plan, others: Sequence[ScheduledRequest], count: int, length: int) -> None:
        """Give requests without drafts as many rows."""
        rows = sum([item.num_tokens for item in plan.planned.values()])
        left = self._num_fillers(others, rows, count, length)
        for item in others:
            if not left or length > plan.budget:
                return
            if item.num_tokens == 1 and self._room(item) >= 1 + length:
                left -= self._add(plan, item.request, 1 + length, ())

    def _add(self, plan: Plan, request: Request, rows: int, drafts: tuple[int, ...]) -> bool:
        """Give a share more rows; returns whether there are free blocks for them."""
        name, blocks = request.request_id, self.batcher.block_manager
        item = plan.planned[name]
        added = blocks.draft_in_place(name, item.start + rows, item.start)
        if added is None:
            return False
        filled = rows - item.num_tokens - len(drafts)
        grown = self._with_slots(item)._replace(num_tokens=rows, drafts=drafts, num_filled=filled)
        plan.replace(grown, added)
        self.figures.num_filled += filled
        return True

    def _with_slots(self, item: ScheduledRequest) -> ScheduledRequest:
        """The share with the slots of its state, which room for drafts may have changed."""
        blocks = self.batcher.block_manager
        if not blocks.has_state:
            return item
        read, write = blocks.slots_of_step(item.request.request_id, item.start)
        return item._replace(state_read=read, state_write=write)

    def _candidates(
        self, plan: Plan, items: Sequence[ScheduledRequest]
    ) -> tuple[list[Candidate], list[ScheduledRequest]]:
        """Those with drafts, and those that get a token without."""
        found, others = [], []
        fills = not self.batcher.block_manager.has_state
        rooms = [(item, self._room(item)) for item in items if item.is_last_chunk]
        self._worths = {}
        resting = self._compute(plan, rooms, sum([item.num_tokens for item in items]))
        for item, room in rooms:
            request = item.request
            left = min(room - item.num_tokens, plan.budget)
            proposal = self.drafters.propose(request, left, resting) if left > 0 else None
            if proposal is not None and request.grammar is not None:
                proposal = proposal.cut(request.grammar.num_allowed(proposal.ids, request.output_token_ids))
            if proposal is None:
                others.append(item)
            else:
                found.append((item, room, proposal))
        if found and not self._worths:
            acceptance = self.lengths.acceptance
            expected = {
                item.request: acceptance(item.request, proposal.drafter).expected(len(proposal.ids))
                for item, _, proposal in found
            }
            self._weigh([item.request for item, _ in rooms], expected)
        worths = self._worths
        candidates = [
            Candidate(item.request, proposal, item.num_tokens, room, fills, worths.get(item.request, 1.0))
            for item, room, proposal in found
        ]
        return candidates, others

    def _weigh(self, requests: Sequence[Request], expected: Mapping[Request, float]) -> None:
        """Note what tokens of requests are worth, and how many of their drafts are expected to be accepted."""
        if not is_draining(self.batcher.planner.queues.running, self.batcher.num_waiting):
            return
        paces = self._paces
        for request in requests:
            pace = 1.0 + expected.get(request, 0.0)
            paces[request] = paces.get(request, pace) * (1.0 - _SMOOTHING) + _SMOOTHING * pace
        left = [min(request.longest, self.batcher.max_model_len) - request.num_tokens for request in requests]
        growing = self.lengths.seconds.growing(len(requests))
        worths = token_worths(left, [paces[request] for request in requests], growing)
        self._worths = dict(zip(requests, worths, strict=True))

    def _compute(self, plan: Plan, rooms: Sequence[tuple[ScheduledRequest, int]], rows: int) -> frozenset[str]:
        """Let drafters compute their drafts for shares with room; returns the drafters that are not to be asked."""
        resting, idle = self.lengths.resting(), set()
        requests: Sequence[Request] = ()
        able = [(item.request, room - item.num_tokens) for item, room in rooms if room > item.num_tokens]
        for drafter in self._batch_drafters:
            name = drafter.name
            if name in resting:
                continue
            if drafter.holds_blocks and self.batcher.block_manager.copies.before:
                idle.add(name)
                continue
            length = 0
            if able and plan.budget:
                acceptance = self.lengths.acceptance
                expected = {request: acceptance(request, name).expected(drafter.most) for request, _ in able}
                self._weigh([item.request for item, _ in rooms], expected)
                asking = [Asking(request, room, self._worths.get(request, 1.0)) for request, room in able]
                length, requests = self.lengths.to_compute(
                    name, asking, rows, len(rooms) - len(able), plan.budget, drafter.most, drafter.seconds_of
                )
            if not length:
                idle.add(name)
                continue
            started = time.perf_counter()
            if drafter.holds_blocks:
                self._hold(plan, rooms, frozenset(requests), length)
            if self.drafters.propose_all(drafter, requests, length):
                said = drafter.seconds_of(len(requests), length)
                self.lengths.measure_drafting(name, said, time.perf_counter() - started)
            else:
                self.lengths.decline([name])
                idle.add(name)
        return resting | idle

    def _hold(
        self, plan: Plan, rooms: Sequence[tuple[ScheduledRequest, int]], requests: Set[Request], length: int
    ) -> None:
        """Give sequences of ``requests`` the blocks of ``length`` drafts, where there are free ones."""
        for item, room in rooms:
            end = item.start + min(room, item.num_tokens + length)
            if item.request in requests:
                added = self.batcher.block_manager.draft_in_place(item.request.request_id, end, item.start)
                if added is not None:
                    plan.replace(self._with_slots(item), added)

    def _room(self, item: ScheduledRequest) -> int:
        """Most rows of a request's share, its known tokens among them."""
        request, known = item.request, item.num_tokens
        most = self.lengths.lengths[-1] + 1
        if not request.output_token_ids or known >= most:
            return known  # a prompt, or one that is computed again
        if self.batcher.planner.batches is not None:
            return self._limited(STATIC, known)
        if self.one_query:
            return self._limited(ONE_QUERY, known)
        if self.is_beam(request):
            return self._limited(BEAMS, known)
        if request.params.prompt_logprobs is not None and item.start < request.num_prompt_tokens - 1:
            return self._limited(PROMPT_LOGPROBS, known)
        longest = min(request.longest, self.batcher.max_model_len)
        rows = min(most, known + longest - request.num_tokens - 1)
        limit = self.restart_length
        if limit is not None and request.num_prompt_tokens <= limit and request.num_tokens <= limit:
            rows = self._cut(RESTART, rows, known + limit - request.num_tokens, known)
        if (due := self.batcher.snapshot_due(request, item.start)) is not None:
            rows = self._cut(SNAPSHOT, rows, due - item.start, known)
        blocks = self.batcher.block_manager
        held = blocks.room_for_drafts(request.request_id, self.batcher.num_running) - item.start
        return self._cut(BLOCKS, rows, held, known)

    def _limited(self, reason: str, known: int) -> int:
        self.figures.undrafted[reason] += 1
        return known

    def _cut(self, reason: str, rows: int, most: int, known: int) -> int:
        """The lesser of two numbers of rows; counted where nothing is left for drafts."""
        if most <= known < rows:
            return self._limited(reason, known)
        return max(min(rows, most), known)

    def learn(self, scheduled: Sequence[ScheduledRequest], given: Sequence[int], seconds: float) -> None:
        """Record a step that was planned with or without drafts.

        Args:
            scheduled: its shares.
            given: tokens that the request of each was given.
            seconds: that it took.
        """
        lengths, asked, worths = self.lengths, self._asked, self._worths
        rows, tokens, drafted = 0, 0.0, False
        is_decode, most = True, lengths.lengths[-1] + 1
        for item, count in zip(scheduled, given, strict=True):
            rows += item.num_tokens
            is_decode &= item.is_last_chunk and item.num_tokens <= most
            tokens += 1 + (count - 1) * worths.get(item.request, 1.0) if count else 0
            drafter = self._latest.get(item.request)
            if drafter is None or not count or item.num_tokens == 1:
                continue
            if item.drafts:
                self._note(item, count - 1)
                lengths.note(item.request, drafter, len(item.drafts), count - 1)
            asked.add(drafter)
            drafted = True
        if asked and is_decode:
            plain = lengths.seconds.of(len(scheduled))
            if drafted:
                lengths.judge(sorted(asked), tokens, len(scheduled), seconds + self._seconds, plain)
            else:
                lengths.idle(asked, self._seconds, plain)
            self._asked, self._seconds = set(), 0.0
        lengths.measure(len(scheduled), rows, seconds)

    def _note(self, item: ScheduledRequest, accepted: int) -> None:
        self.figures.num_drafts += 1
        self.figures.num_draft_tokens += len(item.drafts)
        for place in range(accepted):
            self.figures.accepted[place] += 1

    def settled(self, request: Request, count: int) -> None:
        """Take note of the ``count`` newest tokens of a request's output."""
        if self._lookups:
            self.drafters.settled(request, request.output_token_ids[len(request.output_token_ids) - count :])

    def finished(self, request: Request) -> None:
        """Forget a request that ends."""
        self._latest.pop(request, None)
        self.drafters.finished(request)

    def reset(self) -> None:
        """Forget what is known of requests."""
        self._latest.clear()
        for drafter in self._batch_drafters:
            drafter.reset()

    def stats(self) -> dict[str, int | float]:
        """Figures for ``Engine.stats``, by vLLM's names where it has them."""
        figures = self.figures
        return {
            "spec_decode_num_drafts": figures.num_drafts,
            "spec_decode_num_draft_tokens": figures.num_draft_tokens,
            "spec_decode_num_accepted_tokens": sum(figures.accepted),
            **{name: count for name, count in zip(ACCEPTED_BY_PLACE, figures.accepted, strict=False)},
            "draft_rows_filled": figures.num_filled,
            "drafters_failed": self.drafters.num_failed,
            "draft_length": self.lengths.current,
            **{f"undrafted_{reason}": figures.undrafted[reason] for reason in LIMITS},
        }
