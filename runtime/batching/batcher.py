"""Who runs how many tokens in the next step: continuous batching, chunked prefill, preemption, admission.

Deterministic, without a clock and without tensors, so that it can be simulated at any scale. Iteration-level
scheduling is from Orca (OSDI 2022), chunked prefill with decode priority from Sarathi-Serve (arXiv
2403.02310).
"""

from __future__ import annotations

import bisect
import heapq
import logging
from collections.abc import Callable

from ..blocks import BlockManager
from ..request import FinishReason, Request, RequestStatus
from .modes import Batches
from .policies import FirstComeFirstServed, Policy
from .preemption import PreemptionCost, preemption_mode
from .schedule import Plan, Schedule, ScheduledRequest
from .shared_prefixes import SharedPrefixes
from .waiting import WaitingQueue

logger = logging.getLogger(__name__)

_MOST_PUT_OFF = 64
"""Requests that may be put off in one step because others compute their prefix."""


class QueueFull(RuntimeError):
    """So many requests wait already that no more are taken; try again later."""


class Batcher:
    """Plans steps: ``add`` requests, then ``schedule`` → run it → ``advance`` / ``finish``, over and over.

    One token budget is spent first on running requests that decode, then on prefill chunks of running requests, then
    on the queue, all in the order of the policy. A request is admitted when the blocks for all of its tokens and one
    more are available, with a block to spare for each running request that may still grow, or when nothing else runs.
    A running request that finds no block takes those of the last in the order, which returns to its place in the
    queue, keeps its output, and is computed again or swapped out. The last itself waits, with its blocks, for others
    to finish. Hence the first in the order always progresses: nothing starves. A paused request gets no tokens; its
    blocks and its seat go to others when they come last in the order, or when nobody else could progress.

    Args:
        block_manager: owns the cache's blocks; tables are named by request id.
        max_num_seqs: most requests that hold blocks at once.
        max_num_batched_tokens: most tokens in one step.
        max_model_len: most tokens (prompt + output) of one request; one this long must fit in the cache.
        policy: the order; first come, first served if None.
        preemption: "recompute", "swap" (where the host's blocks suffice), or "auto": whatever ``cost`` says is
            cheaper.
        cost: of preemption, measured by whoever runs the steps; "auto" recomputes without one.
        max_queue: most requests that wait; None: any number. Preempted ones are not refused, but they count.
        key_variant: what, beside its tokens, a request's keys depend on, by name: requests with different ones share
            no blocks.
        batches: forms batches that run to their end before the next begins; None: sequences join at any step.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        *,
        policy: Policy | None = None,
        preemption: str = "recompute",
        cost: PreemptionCost | None = None,
        max_queue: int | None = None,
        key_variant: Callable[[Request], str] = lambda request: "",
        batches: Batches | None = None,
    ) -> None:
        for name, value in (
            ("max_num_seqs", max_num_seqs),
            ("max_num_batched_tokens", max_num_batched_tokens),
            ("max_model_len", max_model_len),
            ("max_queue", max_queue),
        ):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} is below 1; use at least 1")
        capacity = block_manager.capacity
        if capacity is not None and max_model_len > capacity:
            raise ValueError(
                f"max_model_len={max_model_len} is above the {capacity} tokens that "
                f"{[pool.num_blocks for pool in block_manager.pools]} blocks hold; lower it or give the cache more "
                "blocks"
            )
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.policy: Policy = FirstComeFirstServed() if policy is None else policy
        self.preemption = preemption_mode(preemption)
        self.cost = cost
        self.max_queue = max_queue
        self.num_preemptions = 0
        self.num_swaps = 0
        self._arrivals = 0
        self._now = 0.0
        self._requests: dict[str, Request] = {}  # every unfinished request
        self._waiting = WaitingQueue()
        self._parked: set[Request] = set()  # paused ones that lost their blocks
        self._running: list[Request] = []  # by rank
        self._fresh: set[str] = set()  # whose tables have not been handed out yet
        self._deadlines: list[tuple[float, int, Request]] = []
        self.batches = batches
        self._batch: list[Request] = []  # what was formed last, where batches are formed
        self._prefixes = SharedPrefixes(block_manager, self.policy, key_variant)

    # -- what is there

    @property
    def num_waiting(self) -> int:
        """Requests without blocks, preempted ones included."""
        return len(self._waiting) + len(self._parked)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def waiting(self) -> list[Request]:
        """The queue, next one first (a copy)."""
        return list(self._waiting)

    @property
    def running(self) -> list[Request]:
        """The requests that hold blocks, in the order of the policy (a copy)."""
        return list(self._running)

    def has_unfinished(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self._requests)

    def get(self, request_id: str) -> Request | None:
        """The unfinished request of that id, if there is one."""
        return self._requests.get(request_id)

    # -- in and out

    def add(self, request: Request, now: float = 0.0, *, was_promised: bool = False) -> None:
        """Put a new request in the queue and number its arrival.

        Args:
            request: it has no blocks, and nothing of it is computed.
            now: seconds, as for ``schedule``.
            was_promised: it is taken in whatever the length of the queue.

        Raises:
            ValueError: its id is taken, it is not new, or it is longer than ``max_model_len``.
            QueueFull: ``max_queue`` requests wait.
        """
        self._check_new(request)
        if not was_promised:
            self.check_queue(1)
        self._accept(request, now)
        self._waiting.push(request)

    def check_queue(self, count: int) -> None:
        """Raise ``QueueFull`` if the queue has no room for so many more requests."""
        if self.max_queue is not None and len(self._waiting) + count > self.max_queue:
            raise QueueFull(
                f"{count} more requests find {len(self._waiting)} waiting, max_queue={self.max_queue}; "
                "send them again later, or raise max_queue"
            )

    def fork(self, parent: Request, child: Request) -> bool:
        """Add ``child``, whose first tokens are those that ``parent`` has computed, on the parent's blocks.

        Returns:
            Whether it runs at once; where ``max_num_seqs`` run already it waits like any other.

        Raises:
            ValueError: as for ``add``, or the parent does not run.
        """
        self._check_new(child)
        computed = parent.num_computed_tokens
        runs = parent.status is RequestStatus.RUNNING and self._requests.get(parent.request_id) is parent
        if not runs or not 1 <= computed <= child.num_tokens:
            raise ValueError(
                f"parent {parent.request_id!r} is {parent.status.value} with {computed} computed tokens; only a "
                "running one with at most the child's tokens can be forked"
            )
        self._accept(child, self._now)
        return self._share(parent, child)

    def branch(self, parent: Request, child: Request) -> bool:
        """As ``fork``, but the child stands directly behind its parent in the order, and the policy is not asked: the
        two are branches of one search. The parent may hold no blocks; then the child waits.

        Raises:
            ValueError: as for ``add``, or the child does not begin with what the parent has computed.
        """
        self._check_new(child)
        if self._requests.get(parent.request_id) is not parent or parent.num_computed_tokens > child.num_tokens:
            raise ValueError(
                f"parent {parent.request_id!r} is {parent.status.value} with {parent.num_computed_tokens} computed "
                f"tokens, the child has {child.num_tokens}; only an unfinished one with at most the child's tokens "
                "can be branched"
            )
        self._accept(child, self._now, parent)
        return self._share(parent, child)

    def pause(self, request: Request) -> None:
        """Schedule nothing of a running request, whose tokens are all computed, until it is resumed or finished.

        Meanwhile it may be preempted; then it does not return before it is resumed.
        """
        if request.status is not RequestStatus.RUNNING or self._requests.get(request.request_id) is not request:
            raise ValueError(f"request {request.request_id!r} is {request.status.value}; only running ones pause")
        request.is_paused = True

    def resume(self, request: Request) -> None:
        """Schedule a paused request again, which has got another token; nothing happens if it is not paused."""
        request.is_paused = False
        if request in self._parked:
            self._parked.remove(request)
            self._waiting.push(request)

    def advance(self, request: Request, num_tokens: int) -> None:
        """Record that the step computed ``num_tokens`` more tokens of the request.

        The engine appends the sampled token before or after this, but before the next ``schedule``.
        """
        blocks = self.block_manager
        computed = request.num_computed_tokens + num_tokens
        if request.status is not RequestStatus.RUNNING or self._requests.get(request.request_id) is not request:
            raise ValueError(f"request {request.request_id!r} is {request.status.value}; only running ones advance")
        if num_tokens < 1 or computed > blocks.num_tokens(request.request_id):
            raise ValueError(
                f"num_tokens={num_tokens} of request {request.request_id!r} is not what was scheduled; "
                f"{request.num_computed_tokens} are computed and its blocks are reserved for "
                f"{blocks.num_tokens(request.request_id)}"
            )
        size = blocks.block_size
        if blocks.enable_prefix_caching and computed // size > request.num_computed_tokens // size:
            self._prefixes.extend(request, computed)
            blocks.commit(request.request_id, request.block_hashes, computed)
        request.num_computed_tokens = computed

    def restart(self, request: Request) -> None:
        """Compute all tokens of an unfinished request anew; it keeps its place, and if it runs its blocks, unless a
        window has passed some of them."""
        if self._requests.get(request.request_id) is not request:
            raise ValueError(
                f"request {request.request_id!r} is {request.status.value}; only unfinished ones restart"
            )
        if request.status is RequestStatus.RUNNING:
            self.block_manager.rewind(request.request_id)
        else:
            self._free(request)
        request.num_computed_tokens = 0
        request.block_hashes = []

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """End a waiting or running request and free its blocks; does nothing if it has ended already."""
        if self._requests.get(request.request_id) is not request:
            if request.is_finished:
                return
            raise ValueError(f"request {request.request_id!r} was never added; add it first")
        request.finish_reason = reason
        request.error = error
        request.status = RequestStatus.FINISHED
        request.is_paused = False
        if request in self._waiting:
            self._waiting.remove(request)
        elif request in self._parked:
            self._parked.remove(request)
        else:
            self._stop(request)
        self._free(request)
        self._prefixes.forget(request)
        self.policy.forget(request)
        del self._requests[request.request_id]
        if len(self._deadlines) > 2 * len(self._requests) + 64:
            self._collect_deadlines()

    def cancel(self, request_id: str) -> Request | None:
        """End a request at any moment; returns it, or None when no unfinished request has that id."""
        request = self._requests.get(request_id)
        if request is not None:
            self.finish(request, "cancelled")
        return request

    def requeue_all(self) -> list[Request]:
        """Take the blocks of every request and queue them all, to be computed again.

        Puts the batcher and its block manager into a sound state from whatever state an exception or Ctrl-C
        inside any of their methods left them in. Outputs are kept; none is paused any more.

        Returns:
            Every unfinished request, in the order of the policy; none of them runs any more.
        """
        self.block_manager.reset()
        self._running.clear()
        self._waiting.clear()
        self._parked.clear()
        self._fresh.clear()
        self._requests = {k: r for k, r in self._requests.items() if not r.is_finished}
        self._prefixes.keep(self._requests.values())
        for request in self._requests.values():
            request.status = RequestStatus.WAITING
            request.is_paused = False
            request.num_computed_tokens = 0
            self._waiting.push(request)
        self._collect_deadlines()
        return self.waiting

    # -- planning

    def schedule(self, now: float = 0.0) -> Schedule:
        """Plan the next step and reserve its blocks. The copies of the step before must be done.

        Args:
            now: seconds, on the clock that deadlines are given in; it does not run backwards.

        Returns:
            the step; empty only when nothing is unfinished, when all that is has expired, or while a batch waits for
            more requests.

        Raises:
            RuntimeError: no request can progress, because somebody else holds blocks of the cache.
        """
        self._now = max(self._now, now)
        blocks = self.block_manager
        blocks.settle()
        blocks.fit_to_load()
        expired = self._expired()
        if expired:
            return Schedule([], expired=expired)
        plan = Plan(self.max_num_batched_tokens)
        self._fill(plan)
        if not plan.planned and blocks.has_copies_beside:
            # The only ones that could run wait for copies: make these first.
            blocks.copy_first()
            self._fill(plan)
        while not plan.planned and (paused := [request for request in self._running if request.is_paused]):
            # Nobody gets on while they hold their blocks and seats.
            self._preempt(paused[-1], plan)
            self._fill(plan)
        if not plan.planned and self.batches is not None and not self._running and not self._batch:
            return Schedule([])
        if not plan.planned and self._requests:
            raise RuntimeError(
                f"none of {len(self._requests)} requests can progress: "
                f"{blocks.num_available_blocks} of {blocks.num_blocks} blocks are free; "
                "free the blocks that other users hold"
            )
        copies, beside, rewritten = blocks.drain()
        tables = {}
        for request_id in (self._fresh | rewritten) & plan.planned.keys():
            tables[request_id] = blocks.tables(request_id)
            plan.new_blocks.pop(request_id, None)
        # Those who were rewritten but do not run in this step are told when they do.
        self._fresh = {name for name in self._fresh | rewritten if name in blocks} - tables.keys()
        return Schedule(
            list(plan.planned.values()),
            plan.preempted,
            [],
            {name: new for name, new in plan.new_blocks.items() if any(new)},
            tables,
            self.max_num_batched_tokens - plan.budget,
            copies,
            beside,
        )

    def stats(self) -> dict[str, int | float]:
        """Queue figures and the block manager's."""
        return {
            "queue_length": self.num_waiting,
            "running": len(self._running),
            "preemptions": self.num_preemptions,
            "swaps": self.num_swaps,
            **self.block_manager.stats(),
        }

    def check(self) -> None:
        """Verify every invariant of the batcher and its block manager; for tests.

        Raises:
            RuntimeError: one is broken; the message says which.
        """
        self.block_manager.check()
        waiting, running = set(self._waiting), set(self._running)
        if any(request.is_paused for request in waiting) or not all(request.is_paused for request in self._parked):
            raise RuntimeError("a paused request is in the queue, or one that is not paused is kept out of it")
        if waiting & self._parked:
            raise RuntimeError("a request waits twice")
        waiting |= self._parked
        if set(self._requests.values()) != waiting | running or waiting & running:
            raise RuntimeError("an unfinished request neither waits nor runs, or does both, or a finished one does")
        if len(running) != len(self._running) or len(running) > self.max_num_seqs:
            raise RuntimeError(f"{len(self._running)} requests run, max_num_seqs={self.max_num_seqs}")
        ranks = [r.rank for r in self._running]
        if ranks != sorted(ranks):
            raise RuntimeError(f"running requests are out of order: {ranks}")
        leaks = self.block_manager.leaks(self._requests)
        if leaks:
            raise RuntimeError(f"blocks are held for {leaks}, which are not there any more")
        for request in waiting:
            if request.status is not RequestStatus.WAITING:
                raise RuntimeError(f"waiting request {request.request_id!r} is not marked so")
            if request.request_id in self.block_manager:
                raise RuntimeError(f"waiting request {request.request_id!r} holds blocks")
            if request.num_computed_tokens and not self.block_manager.is_swapped(request.request_id):
                raise RuntimeError(f"waiting request {request.request_id!r} has computed tokens nowhere")
        for request in running:
            if request.status is not RequestStatus.RUNNING:
                raise RuntimeError(f"running request {request.request_id!r} is not marked so")
            if request.num_computed_tokens > self.block_manager.num_tokens(request.request_id):
                raise RuntimeError(f"request {request.request_id!r} computed tokens that no block holds")

    # -- inside: one step

    def _fill(self, plan: Plan) -> None:
        decodes: list[Request] = []
        prefills: list[Request] = []
        for request in self._running:
            if request.is_paused:
                continue
            left = request.num_tokens - request.num_computed_tokens
            if left < 1 or request.num_tokens > self.max_model_len:
                raise RuntimeError(
                    f"request {request.request_id!r} has {request.num_tokens} tokens, "
                    f"{request.num_computed_tokens} computed, max_model_len={self.max_model_len}; "
                    "append the sampled token, or finish the request, before the next schedule()"
                )
            (decodes if left == 1 else prefills).append(request)
        for group in (decodes, prefills):
            for request in group:
                if plan.budget and request.status is RequestStatus.RUNNING:
                    self._continue(request, plan)
        # What was just taken from a running request is not given to the queue, unless nobody else could use it.
        if not plan.preempted or not plan.planned:
            self._admit(plan)

    def _continue(self, request: Request, plan: Plan) -> None:
        """Plan the running request's next tokens, unless it is the last in the order and there is no block."""
        blocks, computed = self.block_manager, request.num_computed_tokens
        wanted = min(request.num_tokens - computed, plan.budget)
        if blocks.fill(request.request_id, computed + wanted, computed):
            self._put(request, wanted, plan)
            return
        blocks.slide(request.request_id, computed)
        while (room := blocks.room(request.request_id, computed) - computed) < 1:
            victim = self._running[-1]
            # Whose blocks are on their way out already gives no more by waiting for another victim.
            if victim is request or blocks.has_copies_beside:
                return
            self._preempt(victim, plan)
        self._plan(request, min(wanted, room), plan)

    def _admit(self, plan: Plan) -> None:
        if not self._waiting or not plan.budget or len(self._running) >= self.max_num_seqs:
            return
        # One more block for everyone who may grow. Without it most admissions into a full cache end in a
        # preemption soon after: simulated, that recomputes 40 % of all tokens instead of 6 %.
        spare = sum(map(self._may_grow, self._running))
        computing = self._prefixes.being_computed(self._running)
        put_off: list[Request] = []
        while self._waiting and plan.budget and len(self._running) < self.max_num_seqs:
            request = self._candidate()
            if request is None:
                break
            if self.block_manager.is_swapped(request.request_id):
                admitted = self._return_swapped(request, spare, plan)
            elif len(put_off) < _MOST_PUT_OFF and self._prefixes.puts_off(request, computing):
                self._waiting.remove(request)
                put_off.append(request)
                continue
            else:
                admitted = self._begin(request, spare, plan)
            if not admitted:
                break
            spare += self._may_grow(request)
            computing.update(self._prefixes.uncomputed(request))
        for request in put_off:
            self._waiting.push(request)

    def _candidate(self) -> Request | None:
        """Who is admitted next; None where the batch that was formed is complete."""
        if self.batches is None:
            return self._prefixes.next(self._waiting)
        self._batch = [request for request in self._batch if not request.is_finished]
        if not self._batch and not self._running:
            self._batch = self.batches.form(self._waiting, self.max_num_seqs, self._now)
        return next((request for request in self._batch if request in self._waiting), None)

    def _begin(self, request: Request, spare: int, plan: Plan) -> bool:
        """Admit a request that has nothing in the cache but what others computed."""
        blocks, name = self.block_manager, request.request_id
        hashes = self._prefixes.full_blocks(request)
        prefix = blocks.find_prefix(hashes)
        start = prefix.num_blocks * blocks.block_size
        needed = blocks.lacking_to_begin(prefix, request.num_tokens + 1, self.max_num_batched_tokens)
        if self._running and not blocks.can_take([count + spare for count in needed]):
            return False
        if prefix.num_blocks:
            blocks.take_prefix(name, hashes, prefix.num_blocks)
        wanted = min(request.num_tokens - start, plan.budget)
        count = min(wanted, blocks.room(name, start) - start)
        if count < 1:
            if prefix.num_blocks:
                blocks.free(name)
            return False
        if blocks.enable_prefix_caching and not request.num_preemptions:
            blocks.count_prefix(request.num_tokens, start)
            request.num_cached_tokens = start
        request.num_computed_tokens = start
        self._waiting.remove(request)
        self._start(request)
        self._plan(request, count, plan)
        return True

    def _return_swapped(self, request: Request, spare: int, plan: Plan) -> bool:
        """Bring a request back from host memory; it runs in the next step if others run in this one."""
        blocks, name = self.block_manager, request.request_id
        needed = blocks.lacking_to_swap_in(name)
        extra = spare + 1 if self._running else 0
        if not blocks.can_take([count + extra for count in needed]):
            return False
        beside = bool(plan.planned)
        request.num_computed_tokens = blocks.swap_in(name, beside=beside)
        self._waiting.remove(request)
        self._start(request)
        if not beside:
            self._continue(request, plan)
        return True

    def _may_grow(self, request: Request) -> bool:
        longest = min(request.num_prompt_tokens + request.params.max_tokens, self.max_model_len)
        return longest > -(-self.block_manager.num_tokens(request.request_id) // self.block_manager.block_size) * (
            self.block_manager.block_size
        )

    def _plan(self, request: Request, count: int, plan: Plan) -> None:
        start = request.num_computed_tokens
        added = self.block_manager.allocate(request.request_id, start + count, start, in_one_run=request.in_one_run)
        if any(added):
            plan.new_blocks[request.request_id] = added
        self._put(request, count, plan)

    def _put(self, request: Request, count: int, plan: Plan) -> None:
        """Note a share for which there are blocks."""
        start = request.num_computed_tokens
        last = start + count == request.num_tokens
        plan.planned[request.request_id] = ScheduledRequest(request, count, start, last)
        plan.budget -= count

    def _preempt(self, victim: Request, plan: Plan) -> None:
        plan.drop(victim)
        blocks, name, computed = self.block_manager, victim.request_id, victim.num_computed_tokens
        mode = self.preemption
        if mode == "auto":
            mode = self.cost.cheaper(computed) if self.cost is not None else "recompute"
        swapped = mode == "swap" and computed > 0 and blocks.swap_out(name, computed, beside=bool(plan.planned))
        logger.debug("preempting %s: %d tokens to %s", name, computed, "swap out" if swapped else "recompute")
        if swapped:
            self.num_swaps += 1
        else:
            blocks.free(name)
            victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self.num_preemptions += 1
        victim.status = RequestStatus.WAITING
        self._stop(victim)
        if victim.is_paused:
            self._parked.add(victim)
        else:
            self._waiting.push(victim)
        plan.preempted.append(victim)

    # -- inside: requests

    def _check_new(self, request: Request) -> None:
        if request.request_id in self._requests:
            raise ValueError(f"request_id={request.request_id!r} is already in use; choose another")
        if request.status is not RequestStatus.WAITING or request.num_computed_tokens:
            raise ValueError(f"request {request.request_id!r} is {request.status.value}; add a new Request")
        if request.num_tokens > self.max_model_len:
            raise ValueError(
                f"prompt_token_ids of request {request.request_id!r} has {request.num_tokens} tokens, above "
                f"max_model_len={self.max_model_len}; shorten it or raise max_model_len"
            )

    def _accept(self, request: Request, now: float, behind: Request | None = None) -> None:
        self._now = max(self._now, now)
        request.arrival = self._arrivals
        self._arrivals += 1
        request.rank = self.policy.rank(request, now) if behind is None else (behind.rank[0], request.arrival)
        self._requests[request.request_id] = request
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.arrival, request))

    def _share(self, parent: Request, child: Request) -> bool:
        """Let a new child run on its parent's blocks, or wait; returns which."""
        computed = parent.num_computed_tokens
        if parent.status is not RequestStatus.RUNNING or not computed or len(self._running) >= self.max_num_seqs:
            self._waiting.push(child)
            return False
        self.block_manager.fork(parent.request_id, child.request_id, computed)
        child.block_hashes = parent.block_hashes[: computed // self.block_manager.block_size]
        child.num_computed_tokens = computed
        self._start(child)
        return True

    def _start(self, request: Request) -> None:
        request.status = RequestStatus.RUNNING
        bisect.insort(self._running, request, key=lambda r: r.rank)
        self._fresh.add(request.request_id)
        self._prefixes.begins(request, self._waiting)
        self.policy.admitted(request)

    def _stop(self, request: Request) -> None:
        at = bisect.bisect_left(self._running, request.rank, key=lambda r: r.rank)
        if at < len(self._running) and self._running[at] is request:
            del self._running[at]
        self._fresh.discard(request.request_id)

    def _free(self, request: Request) -> None:
        if request.request_id in self.block_manager or self.block_manager.is_swapped(request.request_id):
            self.block_manager.free(request.request_id)

    def _expired(self) -> list[Request]:
        expired = []
        while self._deadlines and self._deadlines[0][0] <= self._now:
            request = heapq.heappop(self._deadlines)[2]
            if self._requests.get(request.request_id) is request:
                expired.append(request)
        return expired

    def _collect_deadlines(self) -> None:
        """Forget the deadlines of those who ended, and recall all others."""
        self._deadlines = [(r.deadline, r.arrival, r) for r in self._requests.values() if r.deadline is not None]
        heapq.heapify(self._deadlines)
