"""Who runs how many tokens in the next step: continuous batching, chunked prefill, first come, first served.

Deterministic, without a clock and without tensors, so that it can be simulated at any scale. Iteration-level
scheduling is from Orca (OSDI 2022), chunked prefill with decode priority from Sarathi-Serve (arXiv
2403.02310).
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass

from .block_manager import BlockManager
from .request import FinishReason, Request, RequestStatus

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """A request's share of one step: tokens ``start .. start + num_tokens - 1`` of prompt + output.

    Attributes:
        request: whose tokens they are; its table already holds ``start + num_tokens`` tokens.
        num_tokens: how many to compute, >= 1.
        start: the request's ``num_computed_tokens`` when the step was planned.
        is_last_chunk: nothing is left to compute after it, so its last token's logits are sampled.
    """

    request: Request
    num_tokens: int
    start: int
    is_last_chunk: bool


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step.

    Attributes:
        requests: what runs: decodes first, then prefill chunks, each in order of arrival.
        preempted: requests that lost their blocks and went back to the queue; none of them is in
            ``requests``, and no request is admitted in the same step.
        new_blocks: request id → block ids to append to its table, only where there are any. A request that is
            (re)admitted in this step (``start`` is 0) gets its whole table here.
        num_tokens: tokens of all ``requests`` together.
    """

    requests: list[ScheduledRequest]
    preempted: list[Request]
    new_blocks: dict[str, list[int]]
    num_tokens: int


class Batcher:
    """Plans steps: ``add`` requests, then ``schedule`` → run it → ``advance`` / ``finish``, over and over.

    Policy: one token budget is spent first on running requests that decode, then on prefill chunks of running
    requests, then on the queue, all in order of arrival. A request is admitted when the blocks for all of its
    tokens and one more are free, with a block to spare for each running request that may still grow, or when
    nothing else runs. A running request that finds no free block takes those of the last to arrive, which
    returns to the front of the queue, keeps its output and is recomputed. The last to arrive itself waits,
    with its blocks, for others to finish. Hence the oldest request always progresses and the queue stays in
    order of arrival: nothing starves.

    Args:
        block_manager: owns the cache's blocks; tables are named by request id.
        max_num_seqs: most requests that hold blocks at once.
        max_num_batched_tokens: most tokens in one step.
        max_model_len: most tokens (prompt + output) of one request; one this long must fit in the cache.
    """

    def __init__(
        self, block_manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int
    ) -> None:
        for name, value in (
            ("max_num_seqs", max_num_seqs),
            ("max_num_batched_tokens", max_num_batched_tokens),
            ("max_model_len", max_model_len),
        ):
            if value < 1:
                raise ValueError(f"{name}={value} is below 1; use at least 1")
        if max_model_len > block_manager.capacity:
            raise ValueError(
                f"max_model_len={max_model_len} is above the {block_manager.capacity} tokens that "
                f"{block_manager.num_blocks} blocks hold; lower it or give the cache more blocks"
            )
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.num_preemptions = 0
        self._arrivals = 0
        self._requests: dict[str, Request] = {}  # every unfinished request
        # Both in order of arrival, and everything that runs arrived before everything that waits.
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._running: OrderedDict[str, Request] = OrderedDict()

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, preempted ones included."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def waiting(self) -> list[Request]:
        """The queue, next one first (a copy)."""
        return list(self._waiting.values())

    @property
    def running(self) -> list[Request]:
        """The requests that hold blocks, in order of arrival (a copy)."""
        return list(self._running.values())

    def has_unfinished(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self._requests)

    def get(self, request_id: str) -> Request | None:
        """The unfinished request of that id, if there is one."""
        return self._requests.get(request_id)

    def add(self, request: Request) -> None:
        """Put a new request at the end of the queue and number its arrival.

        Raises:
            ValueError: its id is taken, it is not new, or it is longer than ``max_model_len``.
        """
        if request.request_id in self._requests:
            raise ValueError(f"request_id={request.request_id!r} is already in use; choose another")
        if request.status is not RequestStatus.WAITING or request.num_computed_tokens:
            raise ValueError(f"request {request.request_id!r} is {request.status.value}; add a new Request")
        if request.num_tokens > self.max_model_len:
            raise ValueError(
                f"prompt_token_ids of request {request.request_id!r} has {request.num_tokens} tokens, above "
                f"max_model_len={self.max_model_len}; shorten it or raise max_model_len"
            )
        request.arrival = self._arrivals
        self._arrivals += 1
        self._requests[request.request_id] = request
        self._waiting[request.request_id] = request

    def schedule(self) -> Schedule:
        """Plan the next step and reserve its blocks. Empty only when nothing is unfinished.

        Raises:
            RuntimeError: no request can progress, because somebody else holds blocks of the cache.
        """
        step = _Step(self.max_num_batched_tokens)
        decodes: list[Request] = []
        prefills: list[Request] = []
        for request in self._running.values():
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
                if step.budget and request.status is RequestStatus.RUNNING:
                    self._continue(request, step)
        # What was just taken from a running request is not given to the queue.
        if not step.preempted:
            self._admit(step)
        if not step.planned and self._requests:
            raise RuntimeError(
                f"none of {len(self._requests)} requests can progress: "
                f"{self.block_manager.num_free_blocks} of {self.block_manager.num_blocks} blocks are free; "
                "free the blocks that other users hold"
            )
        return Schedule(
            list(step.planned.values()),
            step.preempted,
            step.new_blocks,
            self.max_num_batched_tokens - step.budget,
        )

    def advance(self, request: Request, num_tokens: int) -> None:
        """Record that the step computed ``num_tokens`` more tokens of the request.

        The engine appends the sampled token before or after this, but before the next ``schedule``.
        """
        computed = request.num_computed_tokens + num_tokens
        if request.status is not RequestStatus.RUNNING or request.request_id not in self._running:
            raise ValueError(f"request {request.request_id!r} is {request.status.value}; only running ones advance")
        if num_tokens < 1 or computed > self.block_manager.num_tokens(request.request_id):
            raise ValueError(
                f"num_tokens={num_tokens} of request {request.request_id!r} is not what was scheduled; "
                f"{request.num_computed_tokens} are computed and its blocks are reserved for "
                f"{self.block_manager.num_tokens(request.request_id)}"
            )
        request.num_computed_tokens = computed

    def restart(self, request: Request) -> None:
        """Compute all tokens of a running request anew; it keeps its blocks and its place."""
        if self._running.get(request.request_id) is not request:
            raise ValueError(f"request {request.request_id!r} is {request.status.value}; only running ones restart")
        request.num_computed_tokens = 0

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """End a waiting or running request and free its blocks; does nothing if it has ended already."""
        if self._requests.get(request.request_id) is not request:
            if request.is_finished:
                return
            raise ValueError(f"request {request.request_id!r} was never added; add it first")
        request.finish_reason = reason
        request.error = error
        request.status = RequestStatus.FINISHED
        if self._waiting.pop(request.request_id, None) is None:
            self._running.pop(request.request_id, None)
        if request.request_id in self.block_manager:
            self.block_manager.free(request.request_id)
        del self._requests[request.request_id]

    def cancel(self, request_id: str) -> Request | None:
        """End a request at any moment; returns it, or None when no unfinished request has that id."""
        request = self._requests.get(request_id)
        if request is not None:
            self.finish(request, "cancelled")
        return request

    def requeue_all(self) -> list[Request]:
        """Take the blocks of every request and queue them all in order of arrival, to be recomputed.

        Puts the batcher and its block manager into a sound state from whatever state an exception or Ctrl-C
        inside any of their methods left them in. Outputs are kept.

        Returns:
            Every unfinished request, in order of arrival; none of them runs any more.
        """
        self.block_manager.reset()
        self._running.clear()
        self._waiting.clear()
        self._requests = {k: r for k, r in self._requests.items() if not r.is_finished}
        for request in sorted(self._requests.values(), key=lambda r: r.arrival):
            request.status = RequestStatus.WAITING
            request.num_computed_tokens = 0
            self._waiting[request.request_id] = request
        return self.waiting

    def stats(self) -> dict[str, int | float]:
        """Queue figures and the block manager's."""
        return {
            "queue_length": len(self._waiting),
            "running": len(self._running),
            "preemptions": self.num_preemptions,
            **self.block_manager.stats(),
        }

    def check(self) -> None:
        """Verify every invariant of the batcher and its block manager; for tests.

        Raises:
            RuntimeError: one is broken; the message says which.
        """
        self.block_manager.check()
        if set(self._requests) != set(self._waiting) | set(self._running):
            raise RuntimeError("an unfinished request neither waits nor runs, or a finished one still does")
        if len(self._requests) != len(self._waiting) + len(self._running):
            raise RuntimeError("a request waits and runs at once")
        if len(self._running) > self.max_num_seqs:
            raise RuntimeError(f"{len(self._running)} requests run, max_num_seqs={self.max_num_seqs}")
        arrivals = [r.arrival for r in (*self._running.values(), *self._waiting.values())]
        if arrivals != sorted(arrivals):
            raise RuntimeError(f"requests are out of order of arrival: {arrivals}")
        for request in self._waiting.values():
            if request.status is not RequestStatus.WAITING or request.num_computed_tokens:
                raise RuntimeError(f"waiting request {request.request_id!r} is not marked so")
            if request.request_id in self.block_manager:
                raise RuntimeError(f"waiting request {request.request_id!r} holds blocks")
        for request in self._running.values():
            if request.status is not RequestStatus.RUNNING:
                raise RuntimeError(f"running request {request.request_id!r} is not marked so")
            if request.num_computed_tokens > self.block_manager.num_tokens(request.request_id):
                raise RuntimeError(f"request {request.request_id!r} computed tokens that no block holds")

    def _continue(self, request: Request, step: _Step) -> None:
        """Plan the running request's next tokens, unless it is the last to arrive and there is no block."""
        computed = request.num_computed_tokens
        wanted = min(request.num_tokens - computed, step.budget)
        while (room := self.block_manager.tokens_free(request.request_id) - computed) < 1:
            victim = next(reversed(self._running.values()))
            if victim is request:
                return
            self._preempt(victim, step)
        self._plan(request, min(wanted, room), step)

    def _admit(self, step: _Step) -> None:
        blocks = self.block_manager
        if not self._waiting or not step.budget or len(self._running) >= self.max_num_seqs:
            return
        # One more block for everyone who may grow. Without it most admissions into a full cache end in a
        # preemption soon after: simulated, that recomputes 40 % of all tokens instead of 6 %.
        spare = sum(map(self._may_grow, self._running.values()))
        while self._waiting and step.budget and len(self._running) < self.max_num_seqs:
            request = next(iter(self._waiting.values()))
            needed = blocks.blocks_needed(request.request_id, request.num_tokens + 1) + spare
            if self._running and needed > blocks.num_free_blocks:
                return
            count = min(request.num_tokens, step.budget, blocks.num_free_blocks * blocks.block_size)
            if not count:
                return
            self._plan(request, count, step)
            request.status = RequestStatus.RUNNING
            self._running[request.request_id] = request
            del self._waiting[request.request_id]
            spare += self._may_grow(request)

    def _may_grow(self, request: Request) -> bool:
        longest = min(request.num_prompt_tokens + request.params.max_tokens, self.max_model_len)
        return self.block_manager.blocks_needed(request.request_id, longest) > 0

    def _plan(self, request: Request, count: int, step: _Step) -> None:
        start = request.num_computed_tokens
        added = self.block_manager.allocate(request.request_id, start + count)
        if added:
            step.new_blocks[request.request_id] = added
        last = start + count == request.num_tokens
        step.planned[request.request_id] = ScheduledRequest(request, count, start, last)
        step.budget -= count

    def _preempt(self, victim: Request, step: _Step) -> None:
        planned = step.planned.pop(victim.request_id, None)
        if planned is not None:
            step.budget += planned.num_tokens
            step.new_blocks.pop(victim.request_id, None)
        logger.debug("preempting %s: %d tokens to recompute", victim.request_id, victim.num_computed_tokens)
        victim.status = RequestStatus.WAITING
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting[victim.request_id] = victim
        self._waiting.move_to_end(victim.request_id, last=False)
        del self._running[victim.request_id]
        self.block_manager.free(victim.request_id)
        step.preempted.append(victim)


class _Step:
    """A schedule in the making."""

    __slots__ = ("budget", "new_blocks", "planned", "preempted")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.planned: dict[str, ScheduledRequest] = {}
        self.preempted: list[Request] = []
        self.new_blocks: dict[str, list[int]] = {}
