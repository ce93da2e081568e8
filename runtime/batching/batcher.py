"""Plans the next step: continuous batching, chunked prefill, preemption, admission.

Deterministic, without a clock and without tensors, so tests can simulate it at any scale. Iteration-level
scheduling is from Orca (OSDI 2022), chunked prefill with decode priority from Sarathi-Serve (arXiv
2403.02310).
"""

from __future__ import annotations

from collections.abc import Callable

from ..blocks import BlockManager
from ..requests.checks import check_at_least
from ..requests.request import FinishReason, Request, RequestStatus
from .cache_events import CacheEvents
from .modes import Batches
from .planner import Planner
from .policies import FirstComeFirstServed, Policy
from .preemption import PreemptionCost, preemption_mode
from .request_queues import RequestQueues
from .schedule import Schedule
from .shared_prefixes import SharedPrefixes
from .snapshots import Snapshots


class QueueFull(RuntimeError):
    """The queue is full, so the batcher rejects new requests; try again later."""


class Batcher:
    """Plans steps: ``add`` requests, then repeat ``schedule`` → run it → ``advance`` / ``finish``.

    One token budget is spent first on running requests that decode, then on prefill chunks of running requests, then
    on the queue, all in the order of the policy. A request is admitted when the blocks for all of its tokens and one
    more are available, with a block to spare for each running request that may still grow, or when nothing else runs.
    If a running request finds no free block, it preempts the last request in the order. That one returns to its
    position in the queue, keeps its output, and is recomputed or swapped out. The last request itself waits, with its
    blocks, for others to finish. Hence the first in the order always progresses: nothing starves. A paused request
    gets no tokens; it is preempted when it comes last in the order, or when no other request could progress.

    Args:
        block_manager: owns the cache's blocks; block tables are named by request id.
        max_num_seqs: most requests that hold blocks at once.
        max_num_batched_tokens: most tokens in one step.
        max_model_len: most tokens (prompt + output) of one request; one this long must fit in the cache.
        policy: the order of requests; first come, first served if None.
        preemption: "recompute", "swap" (if the host has enough blocks), or "auto": whichever ``cost`` estimates to be
            cheaper.
        cost: measured cost of preemption, updated by the engine; without one, "auto" recomputes.
        max_queue: most waiting requests; None: no limit. Preempted requests count, but are never rejected.
        key_variant: returns what a request's keys depend on in addition to its tokens; requests with different
            variants share no blocks.
        batches: forms batches that run to their end before the next begins; None: sequences join at any step.
        snapshot_interval: number of tokens of a long prompt between two snapshots of its state; None: snapshots are
            kept only at the prompt's end and where prompts diverge.

    Attributes:
        planner: spends the tokens of a step; its ``preemption`` can be set at any time.
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
        snapshot_interval: int | None = None,
    ) -> None:
        sizes = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
        queue = {} if max_queue is None else {"max_queue": max_queue}
        check_at_least(1, "use a positive value", **sizes, max_model_len=max_model_len, **queue)
        capacity = block_manager.capacity
        if capacity is not None and max_model_len > capacity:
            raise ValueError(
                f"max_model_len={max_model_len} is above the {capacity} tokens that "
                f"{[pool.num_blocks for pool in block_manager.token_pools]} blocks hold; lower it or give the cache "
                "more blocks"
            )
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.policy: Policy = FirstComeFirstServed() if policy is None else policy
        self.max_queue = max_queue
        self._arrivals = 0
        self.cache_events: CacheEvents | None = None
        """The collector of the prefix cache's changes, if somebody wants them."""
        self._prefixes = SharedPrefixes(block_manager, self.policy, key_variant)
        self._queues = RequestQueues(self.policy, self._prefixes)
        self._snapshots: Snapshots | None = None
        if block_manager.has_state and block_manager.enable_prefix_caching:
            self._snapshots = Snapshots(block_manager, snapshot_interval)
        self.planner = Planner(
            block_manager,
            self._queues,
            self._prefixes,
            self._snapshots,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            preemption=preemption_mode(preemption),
            cost=cost,
            batches=batches,
        )

    @property
    def num_preemptions(self) -> int:
        """Number of times that a sequence lost its blocks."""
        return self.planner.num_preemptions

    @property
    def num_swaps(self) -> int:
        """Number of preempted sequences that were copied to host memory."""
        return self.planner.num_swaps

    @property
    def num_waiting(self) -> int:
        """Number of requests without blocks, including preempted ones."""
        return self._queues.num_waiting

    @property
    def num_running(self) -> int:
        """Number of requests that hold blocks."""
        return len(self._queues.running)

    @property
    def waiting(self) -> list[Request]:
        """A copy of the queue, next request first."""
        return list(self._queues.waiting)

    @property
    def running(self) -> list[Request]:
        """A copy of the requests that hold blocks, in the order of the policy."""
        return list(self._queues.running)

    def has_unfinished(self) -> bool:
        """True if any request waits or runs."""
        return bool(self._queues.requests)

    @property
    def num_unfinished(self) -> int:
        """Number of requests that wait or run."""
        return len(self._queues.requests)

    def get(self, request_id: str) -> Request | None:
        """Return the unfinished request with that id, or None."""
        return self._queues.requests.get(request_id)

    def add(self, request: Request, now: float = 0.0, *, was_promised: bool = False) -> None:
        """Put a new request into the queue and number its arrival.

        Args:
            request: a new request, without blocks or computed tokens.
            now: seconds, as for ``schedule``.
            was_promised: accept it even if the queue is full.

        Raises:
            ValueError: the id is in use, the request is not new, or it is longer than ``max_model_len``.
            QueueFull: ``max_queue`` requests are waiting.
        """
        self._check_new(request)
        if not was_promised:
            self.check_queue(1)
        self._accept(request, now)
        self._queues.enqueue(request)
        if self.planner.traffic is not None:
            self.planner.traffic.begin(request, self._prefixes.full_blocks(request))

    def check_queue(self, count: int, num_promised: int = 0) -> None:
        """Raise ``QueueFull`` if the queue has no room for ``count`` more requests on top of ``num_promised``."""
        waiting = len(self._queues.waiting) + num_promised
        if self.max_queue is not None and waiting + count > self.max_queue:
            raise QueueFull(
                f"the queue is full: {count} new requests, {waiting} waiting, max_queue={self.max_queue}; "
                "retry later, or raise max_queue"
            )

    def fork(self, parent: Request, child: Request) -> bool:
        """Add ``child`` on the parent's blocks; its first tokens are those that ``parent`` has computed.

        Returns:
            True if the child runs at once; with ``max_num_seqs`` requests running it waits in the queue.

        Raises:
            ValueError: as for ``add``, or the parent is not running.
        """
        self._check_new(child)
        computed = parent.num_computed_tokens
        runs = parent.status is RequestStatus.RUNNING and self._queues.holds(parent)
        if not runs or not 1 <= computed <= child.num_tokens:
            raise ValueError(
                f"cannot fork {parent.request_id!r}: it is {parent.status.value} with {computed} computed tokens; "
                "fork only a running request with at most the child's tokens"
            )
        self._accept(child, self.planner.now)
        return self._share(parent, child)

    def branch(self, parent: Request, child: Request) -> bool:
        """Fork ``parent`` as two branches of one search: the child follows its parent directly in the order, without
        consulting the policy. The parent may hold no blocks; then the child waits.

        Raises:
            ValueError: as for ``add``, or the child does not begin with the tokens that the parent has computed.
        """
        self._check_new(child)
        if not self._queues.holds(parent) or parent.num_computed_tokens > child.num_tokens:
            raise ValueError(
                f"cannot branch {parent.request_id!r}: it is {parent.status.value} with "
                f"{parent.num_computed_tokens} computed tokens and the child has {child.num_tokens}; branch only an "
                "unfinished request with at most the child's tokens"
            )
        self._accept(child, self.planner.now, parent)
        return self._share(parent, child)

    def pause(self, request: Request) -> None:
        """Pause a running request whose tokens are all computed, until it is resumed or finished.

        It may be preempted meanwhile; then it stays out of the queue until it is resumed.
        """
        if request.status is not RequestStatus.RUNNING or not self._queues.holds(request):
            raise ValueError(f"cannot pause {request.request_id!r}: it is {request.status.value}, not running")
        request.is_paused = True

    def resume(self, request: Request) -> None:
        """Schedule a paused request again, after it got another token; no-op if it is not paused."""
        self._queues.resume(request)

    def advance(self, request: Request, num_tokens: int) -> None:
        """Record that the step computed ``num_tokens`` more tokens of the request.

        The engine appends the sampled token before or after this, but before the next ``schedule``.
        """
        self.launch(request, num_tokens)
        self._settle(request, request.num_computed_tokens)

    def launch(self, request: Request, num_tokens: int, num_sampled: int = 0) -> None:
        """Record that ``num_tokens`` more tokens of the request are being computed, and that ``num_sampled`` tokens
        will follow them: later steps treat them as computed.

        Call ``settle`` when the step is done. The engine sets the planner's ``in_flight``.
        """
        blocks = self.block_manager
        computed = request.num_computed_tokens + num_tokens
        if request.status is not RequestStatus.RUNNING or not self._queues.holds(request):
            raise ValueError(f"request {request.request_id!r} is {request.status.value}, so it cannot advance")
        if num_tokens < 1 or computed > blocks.num_tokens(request.request_id):
            raise ValueError(
                f"num_tokens={num_tokens} of request {request.request_id!r} was not scheduled: "
                f"{request.num_computed_tokens} are computed and its blocks are reserved for "
                f"{blocks.num_tokens(request.request_id)}"
            )
        if computed // blocks.block_size > request.num_computed_tokens // blocks.block_size:
            self._commit(request, computed)
        if blocks.has_state:
            blocks.end_step(request.request_id, computed)
        request.num_computed_tokens = computed
        request.num_output_placeholders += num_sampled

    def settle(self, request: Request, num_tokens: int, num_sampled: int = 0) -> None:
        """Record that a launched step is done, which computed the tokens up to ``num_tokens``. The engine appends the
        ``num_sampled`` tokens that the step sampled."""
        request.num_output_placeholders -= num_sampled
        if num_tokens > request.num_prompt_tokens and num_tokens % self.block_manager.block_size == 0:
            self._commit(request, num_tokens)
        self._settle(request, num_tokens)

    def _settle(self, request: Request, computed: int) -> None:
        is_newest = computed == request.num_computed_tokens  # no step is under way that goes on from here
        if self._snapshots is not None and is_newest and computed % self.block_manager.block_size == 0:
            self._snapshots.keep(request, computed)
        if self.planner.suspects and computed == request.num_tokens:
            self.planner.suspects.discard(request)
        if self.planner.traffic is not None:
            self.planner.traffic.settled(request, computed)

    def snapshot_due(self, request: Request, start: int) -> int | None:
        """Return the token count at which a step of a decoding request must end, so that a snapshot of its state can
        be kept; None where there are no snapshots."""
        return None if self._snapshots is None else self._snapshots.due(request, start)

    def _commit(self, request: Request, computed: int) -> None:
        """Publish the hashes of full blocks of the first ``computed`` tokens, as far as the tokens are known."""
        if self.block_manager.enable_prefix_caching:
            known = min(computed, request.num_tokens)
            self._prefixes.extend(request, known)
            if self.cache_events is not None:
                self.cache_events.describe(request, known)
            self.block_manager.commit(request.request_id, request.block_hashes, known)

    def rewind(self, request: Request, num_tokens: int) -> None:
        """Recompute a running request from token ``num_tokens`` on, or from its first token if it keeps state or a
        window, because their past may be gone."""
        blocks = self.block_manager
        request.num_output_placeholders = 0
        if blocks.has_state or any(group.window for group in blocks.groups):
            self.restart(request)
        else:
            request.num_computed_tokens = num_tokens

    def restart(self, request: Request) -> None:
        """Recompute all tokens of an unfinished request. It keeps its position in the order and, if it runs, its
        blocks, unless a window has passed some of them."""
        if not self._queues.holds(request):
            raise ValueError(
                f"request {request.request_id!r} is {request.status.value}; restart only unfinished requests"
            )
        if request.status is RequestStatus.RUNNING:
            self.block_manager.restart(request.request_id)
        else:
            self._free(request)
        request.num_computed_tokens = request.num_output_placeholders = 0
        request.block_hashes = []

    def compute_anew(self, request: Request) -> None:
        """Restart a request whose state a failed step has spoilt; it runs alone until it has caught up."""
        self.restart(request)
        self.planner.suspects.add(request)

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """End a waiting or running request and free its blocks; no-op if it has already ended."""
        if not self._queues.holds(request):
            if request.is_finished:
                return
            raise ValueError(f"request {request.request_id!r} was never added; add it first")
        request.finish_reason = reason
        request.error = error
        request.status = RequestStatus.FINISHED
        self._queues.remove(request)
        self.planner.suspects.discard(request)
        if self._snapshots is not None:
            self._snapshots.forget(request)
        if self.planner.traffic is not None:
            self.planner.traffic.end(request)
        if request in self.planner.in_flight:
            self.block_manager.hold(request.request_id)
        self._free(request)

    def cancel(self, request_id: str) -> Request | None:
        """End a request at any moment; returns it, or None if no unfinished request has that id."""
        request = self._queues.requests.get(request_id)
        if request is not None:
            self.finish(request, "cancelled")
        return request

    def requeue_all(self) -> list[Request]:
        """Take the blocks of all requests and queue them all for recomputation.

        Restores a consistent state of the batcher and its block manager after an exception or Ctrl-C inside any of
        their methods. Outputs are kept; no request is paused any more.

        Returns:
            All unfinished requests, in the order of the policy; none of them is running.
        """
        self.block_manager.reset()
        self.planner.suspects.clear()
        self.planner.in_flight = frozenset()
        if self._snapshots is not None:
            self._snapshots.clear()
        self._queues.requeue_all()
        if self.planner.traffic is not None:
            self.planner.traffic.reset()
        return self.waiting

    def schedule(self, now: float = 0.0) -> Schedule:
        """Plan the next step and reserve its blocks. The copies of the previous step must be done.

        Args:
            now: seconds, on the clock of the deadlines; it never goes backwards.

        Returns:
            The step; empty only if no request is unfinished, all unfinished ones have expired, a batch waits for more
            requests, a request waits for its blocks, or a launched step must be settled first.

        Raises:
            RuntimeError: no request can progress, because another user holds blocks of the cache.
        """
        planner, blocks = self.planner, self.block_manager
        planner.now = max(planner.now, now)
        blocks.finish_copies()
        if planner.traffic is not None:
            planner.traffic.take_arrived()
        blocks.fit_to_load()
        expired = self._queues.expired(planner.now)
        if expired:
            return Schedule([], expired=expired)
        plan = planner.plan()
        if plan.planned and planner.drafting is not None:
            planner.drafting.extend(plan)
        if not plan.planned and planner.waits_for_a_batch:
            return Schedule([])
        if not plan.planned and (planner.in_flight or planner.waits_for_blocks):
            return Schedule([])
        if not plan.planned and self._queues.requests:
            raise RuntimeError(
                f"none of {len(self._queues.requests)} requests can progress: "
                f"{blocks.num_available_blocks} of {blocks.num_blocks} blocks are free; "
                "free the blocks that other users hold"
            )
        if planner.traffic is not None:
            planner.traffic.plan_copies()
        copies, overlapped, rewritten = blocks.take_changes()
        tables = {}
        unsent = self._queues.unsent_tables | rewritten
        for request_id in unsent & plan.planned.keys():
            tables[request_id] = blocks.tables(request_id)
            plan.new_blocks.pop(request_id, None)
        # Requests with rewritten tables that are not in this step get theirs when they run.
        self._queues.unsent_tables = {name for name in unsent if name in blocks} - tables.keys()
        return Schedule(
            list(plan.planned.values()),
            plan.preempted,
            [],
            {name: new for name, new in plan.new_blocks.items() if any(new)},
            tables,
            self.max_num_batched_tokens - plan.budget,
            copies,
            overlapped,
        )

    def stats(self) -> dict[str, int | float]:
        """Return statistics of the queue and the block manager."""
        return {
            "queue_length": self.num_waiting,
            "queue_tokens": self._queues.num_waiting_tokens,
            "running": len(self._queues.running),
            "preemptions": self.num_preemptions,
            "swaps": self.num_swaps,
            **self.block_manager.stats(),
        }

    def check(self) -> None:
        """Verify every invariant of the batcher and its block manager; for tests.

        Raises:
            RuntimeError: an invariant is broken; the message names it.
        """
        self.block_manager.check()
        self._queues.check()
        if len(self._queues.running) > self.max_num_seqs:
            raise RuntimeError(f"{len(self._queues.running)} requests run, max_num_seqs={self.max_num_seqs}")
        leaks = self.block_manager.leaks(self._queues.requests)
        if leaks:
            raise RuntimeError(f"blocks are held for {leaks}, which no longer exist")
        for request in (*self._queues.waiting, *self._queues.paused):
            if request.request_id in self.block_manager:
                raise RuntimeError(f"waiting request {request.request_id!r} holds blocks")
            if request.num_computed_tokens and not self.block_manager.is_swapped(request.request_id):
                raise RuntimeError(f"waiting request {request.request_id!r} has computed tokens that nothing stores")
        for request in self._queues.running:
            if request.num_computed_tokens > self.block_manager.num_tokens(request.request_id):
                raise RuntimeError(f"request {request.request_id!r} computed tokens that no block holds")

    def _check_new(self, request: Request) -> None:
        if request.request_id in self._queues.requests:
            raise ValueError(f"request_id={request.request_id!r} is already in use; choose another id")
        if request.status is not RequestStatus.WAITING or request.num_computed_tokens:
            raise ValueError(f"request {request.request_id!r} is {request.status.value}; add a new Request")
        if request.num_tokens > self.max_model_len:
            raise ValueError(
                f"prompt_token_ids of request {request.request_id!r} has {request.num_tokens} tokens, above "
                f"max_model_len={self.max_model_len}; shorten it or raise max_model_len"
            )

    def _accept(self, request: Request, now: float, behind: Request | None = None) -> None:
        self.planner.now = max(self.planner.now, now)
        request.arrival = self._arrivals
        self._arrivals += 1
        request.rank = self.policy.rank(request, now) if behind is None else (behind.rank[0], request.arrival)
        self._queues.add(request)

    def _share(self, parent: Request, child: Request) -> bool:
        """Run a new child on its parent's blocks, or let it wait; returns True if it runs."""
        computed = parent.num_computed_tokens
        if (
            parent.status is not RequestStatus.RUNNING
            or not computed
            or len(self._queues.running) >= self.max_num_seqs
        ):
            self._queues.enqueue(child)
            return False
        self.block_manager.fork(parent.request_id, child.request_id, computed)
        child.block_hashes = parent.block_hashes[: computed // self.block_manager.block_size]
        child.num_computed_tokens = computed
        self._queues.start_running(child)
        return True

    def _free(self, request: Request) -> None:
        if request.request_id in self.block_manager or self.block_manager.is_swapped(request.request_id):
            self.block_manager.free(request.request_id)
