"""Plans one step: which requests continue, which are admitted, and which give up blocks for them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from ..blocks import BlockManager
from ..requests.request import Request, RequestStatus
from .modes import Batches
from .preemption import PreemptionCost, PreemptionMode
from .request_queues import RequestQueues
from .schedule import Plan, ScheduledRequest
from .shared_prefixes import SharedPrefixes
from .snapshots import Snapshots

logger = logging.getLogger(__name__)

_MAX_DEFERRED = 64
"""Most requests deferred in one step because others compute their prefix."""


class StoreTraffic(Protocol):
    """Blocks on their way from and to a store outside of the process."""

    def begin(self, request: Request, hashes: Sequence[bytes]) -> None:
        """Begin to fetch the blocks with these hashes for a request that joins the queue."""

    def is_awaited(self, request: Request, now: float) -> bool:
        """Return True if the request, which could be admitted, waits a little for blocks that are on their way."""

    def end(self, request: Request) -> None:
        """Fetch no more for a request that was admitted or has ended."""

    def settled(self, request: Request, num_tokens: int) -> None:
        """Note that the first ``num_tokens`` tokens of a request are computed and may be stored."""

    def take_arrived(self) -> None:
        """Publish the host blocks that have arrived; called before a step is planned."""

    def plan_copies(self) -> None:
        """Plan copies of blocks that are to be stored; called when a step is planned."""

    def reset(self) -> None:
        """Forget all requests, whatever state an interrupted call left behind."""


class DraftPlanner(Protocol):
    """Adds drafts to plans."""

    def is_due(self) -> bool:
        """Return True if the next step may have drafts, for which all tokens must be settled."""

    def extend(self, plan: Plan) -> None:
        """Add drafts to the shares of a plan."""


class Planner:
    """Spends the tokens of one step; see ``Batcher`` for the rules and the arguments.

    Attributes:
        now: seconds on the batcher's clock.
        num_preemptions: number of sequences that lost their blocks so far.
        num_swaps: number of these that were copied to host memory.
        suspects: requests whose state a failed step has spoilt. Each is recomputed alone up to its newest token, so
            that only a request that makes steps fail is ended for it.
        in_flight: requests of steps that are launched and not settled. They keep their blocks, see
            ``could_preempt``; those that await an outcome are left out of the next step.
        num_stages: steps of a pipeline that are under way at a time; sequences that decode are dealt to them.
        drafting: adds drafts; None: there are none.
        traffic: fetches and stores blocks; None: nothing is stored.
        waits_for_blocks: a request that could have been admitted waits for its blocks.
    """

    def __init__(
        self,
        blocks: BlockManager,
        queues: RequestQueues,
        prefixes: SharedPrefixes,
        snapshots: Snapshots | None,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        preemption: PreemptionMode,
        cost: PreemptionCost | None,
        batches: Batches | None,
    ) -> None:
        self.blocks = blocks
        self.queues = queues
        self.prefixes = prefixes
        self.snapshots = snapshots
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.preemption = preemption
        self.cost = cost
        self.batches = batches
        self.now = 0.0
        self.num_preemptions = 0
        self.num_swaps = 0
        self.suspects: set[Request] = set()
        self.in_flight: frozenset[Request] = frozenset()
        self.num_stages = 1
        self._decoded: frozenset[Request] = frozenset()  # in the last step, if there are stages
        self.drafting: DraftPlanner | None = None
        self.traffic: StoreTraffic | None = None
        self.waits_for_blocks = False
        self._batch: list[Request] = []  # the last batch, if ``batches`` forms them

    def plan(self) -> Plan:
        """Return the next step; empty if no request can progress, or while a batch waits for more requests."""
        plan = Plan(self.max_num_batched_tokens)
        self.waits_for_blocks = False
        if self.in_flight and (self.could_preempt() or self.awaits_drafts()):
            return plan
        if self.suspects and (alone := self._next_suspect()) is not None:
            self._continue(alone, plan)
            if plan.planned:
                return plan
        self._fill(plan)
        if not plan.planned and self.blocks.copies.overlapped:
            # The only runnable requests wait for copies: make these first.
            self.blocks.copy_before_step()
            self._fill(plan)
        while not (plan.planned or self.in_flight or self.waits_for_blocks) and (
            paused := [r for r in self.queues.running if r.is_paused]
        ):
            # No request can progress while they hold blocks and count towards max_num_seqs.
            self._preempt(paused[-1], plan)
            self._fill(plan)
        return plan

    def awaits_drafts(self) -> bool:
        """Return True if the launched step is settled first, because the next one may have drafts."""
        return self.drafting is not None and self.drafting.is_due()

    def could_preempt(self) -> bool:
        """Return True if the next step of the running requests might need more blocks than there are; O(running)."""
        blocks, running = self.blocks, self.queues.running
        most = self.max_num_batched_tokens // blocks.block_size + 2 * len(running) + 1
        if all([pool.num_available >= most for pool in blocks.pools]):
            return False
        needed, left, chunks = [0] * len(blocks.pools), self.max_num_batched_tokens, 0
        for request in running:
            computed = request.num_computed_tokens
            count = min(request.num_tokens_with_placeholders - computed, left)
            if request.is_paused or count < 1:
                continue
            left -= count
            chunks += count > 1
            own = blocks.num_blocks_to_allocate(request.request_id, computed + count, computed)
            needed = [a + b for a, b in zip(needed, own, strict=True)]
        # Chunks may be cut elsewhere, as decodes come first: then one more of them begins or ends within a block.
        return not blocks.can_take(needed, 2 * chunks)

    def _awaits(self, request: Request) -> bool:
        """Return True if a request of the launched step cannot run before that step is settled: its length already
        ends it, or its state after the step must be kept."""
        tokens = request.num_tokens_with_placeholders
        if tokens == request.num_computed_tokens:
            return True
        if request.num_output_placeholders and tokens >= min(request.longest, self.max_model_len):
            return True
        return self.snapshots is not None and self.snapshots.awaits(request)

    @property
    def waits_for_a_batch(self) -> bool:
        """True if no request runs because the next batch is not full yet."""
        return self.batches is not None and not self.queues.running and not self._batch

    def _next_suspect(self) -> Request | None:
        return next((r for r in self.queues.running if r in self.suspects and not r.is_paused), None)

    def _fill(self, plan: Plan) -> None:
        decodes: list[Request] = []
        prefills: list[Request] = []
        for request in self.queues.running:
            if request.is_paused or (request in self.in_flight and self._awaits(request)):
                continue
            left = request.num_tokens_with_placeholders - request.num_computed_tokens
            if left < 1 or request.num_tokens > self.max_model_len:
                raise RuntimeError(
                    f"request {request.request_id!r} has {request.num_tokens} tokens, "
                    f"{request.num_computed_tokens} computed, max_model_len={self.max_model_len}; "
                    "append the sampled token, or finish the request, before the next schedule()"
                )
            (decodes if left == 1 else prefills).append(request)
        if self.num_stages > 1 and (self.in_flight or not self.could_preempt()):
            decodes.sort(key=self._decoded.__contains__)
            del decodes[-(-len(self.queues.running) // self.num_stages) :]
            self._decoded = frozenset(decodes)
        for group in (decodes, prefills):
            for request in group:
                if plan.budget and request.status is RequestStatus.RUNNING:
                    self._continue(request, plan)
        # Blocks just taken from a running request do not go to the queue, unless no other request could use them.
        if not plan.preempted or not plan.planned:
            self._admit(plan)

    def _continue(self, request: Request, plan: Plan) -> None:
        """Plan the running request's next tokens, unless it is the last in the order and no block is free."""
        blocks, computed = self.blocks, request.num_computed_tokens
        wanted = min(request.num_tokens_with_placeholders - computed, plan.budget)
        if self.snapshots is not None and wanted > 1:
            wanted = self.snapshots.chunk(request, computed, wanted)
        if blocks.allocate_in_place(request.request_id, computed + wanted, computed):
            self._put(request, wanted, plan)
            return
        blocks.remove_skipped_blocks(request.request_id, computed)
        while (room := blocks.num_tokens_that_fit(request.request_id, computed) - computed) < 1:
            victim = self.queues.running[-1]
            # A request whose blocks are being copied out gives up no more by waiting for another victim.
            if victim is request or blocks.copies.overlapped:
                return
            self._preempt(victim, plan)
        self._plan(request, min(wanted, room), plan)

    def _admit(self, plan: Plan) -> None:
        if not self.queues.waiting or not plan.budget or len(self.queues.running) >= self.max_num_seqs:
            return
        # One more block for each request that may grow. Without it most admissions into a full cache end in a
        # preemption soon after: simulated, that recomputes 40 % of all tokens instead of 6 %.
        spare = sum(map(self._may_grow, self.queues.running))
        computing = self.prefixes.being_computed(self.queues.running)
        deferred: list[Request] = []
        while self.queues.waiting and plan.budget and len(self.queues.running) < self.max_num_seqs:
            request = self._candidate()
            if request is None:
                break
            if self.blocks.is_swapped(request.request_id):
                admitted = self._return_swapped(request, spare, plan)
            elif len(deferred) < _MAX_DEFERRED and self._defers(request, computing):
                self.queues.waiting.remove(request)
                deferred.append(request)
                continue
            else:
                admitted = self._begin(request, spare, plan)
            if not admitted:
                break
            spare += self._may_grow(request)
            computing.update(self.prefixes.uncomputed(request))
        for request in deferred:
            self.queues.waiting.push(request)

    def _defers(self, request: Request, computing: set[bytes]) -> bool:
        """Return True to admit the request later, when more of it is in the cache."""
        if self.traffic is not None and self.traffic.is_awaited(request, self.now):
            self.waits_for_blocks = True
            return True
        return self.prefixes.defers(request, computing)

    def _candidate(self) -> Request | None:
        """Return the request to admit next; None if the current batch is complete."""
        if self.batches is None:
            return self.prefixes.next(self.queues.waiting)
        self._batch = [request for request in self._batch if not request.is_finished]
        if not self._batch and not self.queues.running:
            self._batch = self.batches.form(self.queues.waiting, self.max_num_seqs, self.now)
        return next((request for request in self._batch if request in self.queues.waiting), None)

    def _begin(self, request: Request, spare: int, plan: Plan) -> bool:
        """Admit a request that has nothing in the cache except shared prefixes."""
        blocks, name = self.blocks, request.request_id
        hashes = self.prefixes.full_blocks(request)
        prefix = blocks.find_prefix(hashes)
        if self.traffic is not None:
            found = blocks.find_prefix_with_host(hashes)
            if found > prefix.num_blocks and self._bring_in(request, hashes, found, spare, plan):
                return True
        start = prefix.num_blocks * blocks.block_size
        needed = blocks.num_blocks_to_admit(prefix, request.num_tokens + 1, self.max_num_batched_tokens)
        if self.queues.running and not blocks.can_take(needed, spare):
            return False
        if prefix.num_blocks:
            blocks.take_prefix(name, hashes, prefix.num_blocks)
        wanted = min(request.num_tokens - start, plan.budget)
        if self.snapshots is not None:
            self.snapshots.begin(request, hashes, prefix)
            wanted = self.snapshots.chunk(request, start, wanted)
        count = min(wanted, blocks.num_tokens_that_fit(name, start) - start)
        if count < 1:
            if prefix.num_blocks:
                blocks.free(name)
            return False
        self._start(request, start)
        self._plan(request, count, plan)
        return True

    def _bring_in(self, request: Request, hashes: Sequence[bytes], count: int, spare: int, plan: Plan) -> bool:
        """Admit a request on ``count`` cached blocks of which some are in host memory; if others run in this step, it
        runs in the next one."""
        blocks = self.blocks
        prefix = blocks.prefix_with_host(hashes, count)
        needed = blocks.num_blocks_to_admit(prefix, request.num_tokens + 1, self.max_num_batched_tokens)
        if not blocks.can_take(needed, spare if self.queues.running else 0):
            return False
        overlapped = bool(plan.planned)
        blocks.take_prefix_with_host(request.request_id, hashes, count, overlapped=overlapped)
        if self.snapshots is not None:
            self.snapshots.begin(request, hashes, prefix)
        self._start(request, count * blocks.block_size)
        if not overlapped:
            self._continue(request, plan)
        return True

    def _start(self, request: Request, num_cached: int) -> None:
        """Let a request run whose first ``num_cached`` tokens are in the cache."""
        # A request with output has run before, or got the output from a sibling together with its count.
        if self.blocks.enable_prefix_caching and not request.num_preemptions and not request.output_token_ids:
            self.blocks.count_prefix(request.num_tokens, num_cached)
            request.num_cached_tokens = num_cached
        request.num_computed_tokens = num_cached
        self.queues.waiting.remove(request)
        self.queues.start_running(request)
        if self.traffic is not None:
            self.traffic.end(request)

    def _return_swapped(self, request: Request, spare: int, plan: Plan) -> bool:
        """Bring a request back from host memory; if others run in this step, it runs in the next one."""
        blocks, name = self.blocks, request.request_id
        needed = blocks.num_blocks_to_swap_in(name)
        extra = spare + 1 if self.queues.running else 0
        if not blocks.can_take(needed, extra):
            return False
        overlapped = bool(plan.planned)
        request.num_computed_tokens = blocks.swap_in(name, overlapped=overlapped)
        self.queues.waiting.remove(request)
        self.queues.start_running(request)
        if not overlapped:
            self._continue(request, plan)
        return True

    def _may_grow(self, request: Request) -> bool:
        longest = min(request.longest, self.max_model_len)
        return longest > -(-self.blocks.num_tokens(request.request_id) // self.blocks.block_size) * (
            self.blocks.block_size
        )

    def _plan(self, request: Request, count: int, plan: Plan) -> None:
        start = request.num_computed_tokens
        added = self.blocks.allocate(request.request_id, start + count, start, in_one_run=request.in_one_run)
        if any(added):
            plan.new_blocks[request.request_id] = added
        self._put(request, count, plan)

    def _put(self, request: Request, count: int, plan: Plan) -> None:
        """Add a share whose blocks are reserved."""
        start = request.num_computed_tokens
        last = start + count == request.num_tokens_with_placeholders
        item = ScheduledRequest(request, count, start, last)
        if self.blocks.has_state:
            item = ScheduledRequest(*item[:4], *self.blocks.slots_of_step(request.request_id, start))
        plan.planned[request.request_id] = item
        plan.budget -= count

    def _preempt(self, victim: Request, plan: Plan) -> None:
        if victim in self.in_flight:
            raise RuntimeError(f"request {victim.request_id!r} is in a launched step; settle the step first")
        plan.drop(victim)
        blocks, name, computed = self.blocks, victim.request_id, victim.num_computed_tokens
        mode = self.preemption
        if mode == "auto":
            mode = self.cost.cheaper(computed) if self.cost is not None else "recompute"
        swapped = mode == "swap" and computed > 0 and blocks.swap_out(name, computed, overlapped=bool(plan.planned))
        logger.debug("preempting %s: %d tokens to %s", name, computed, "swap out" if swapped else "recompute")
        if swapped:
            self.num_swaps += 1
        else:
            blocks.free(name)
            victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self.queues.stop_running(victim)
        self.queues.enqueue(victim)
        plan.preempted.append(victim)
