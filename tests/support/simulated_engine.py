"""A stand-in for model, runner and cache memory that remembers which tokens every slot was computed from.

Nothing is computed: a slot holds the *name* of the token prefix whose keys and values would lie there. Whoever reads
another name than its own prefix's would have got wrong numbers.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Hashable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from torch_pagoda.runtime.batching import Batcher, Schedule
from torch_pagoda.runtime.batching.schedule import Plan, ScheduledRequest
from torch_pagoda.runtime.blocks import NULL_BLOCK, BlockManager, CacheCopy
from torch_pagoda.runtime.engine.draft_settlement import settle_drafts, settle_states
from torch_pagoda.runtime.engine.step_output import SampledToken, StepOutput
from torch_pagoda.runtime.requests.request import Request, RequestStatus
from torch_pagoda.runtime.speculation.drafting import Drafting

EMPTY = 0
"""What a slot holds that was never written."""

JUNK = 77
"""Token of filled rows."""

SPOILT = -1
"""What a slot holds that a failed step has written to."""

TIMES = ("before", "after", "late")
"""When copies beside a step are made: before its writes, after them, or only when the next step is planned."""


class Prefixes:
    """Gives equal prefixes, computed with equal weights and under the same salt, equal names.

    Attributes:
        weights: version of the weights; whatever is computed from now on depends on it.
    """

    def __init__(self) -> None:
        self.weights = 0
        self._names: dict[Hashable, int] = {}

    def extended(self, names: Sequence[int], tokens: Iterable[int], salt: str) -> list[int]:
        """``names`` of a sequence's leading tokens, and those of the ``tokens`` that follow."""
        result = list(names)
        name = result[-1] if result else self._name(("start", salt))
        for token in tokens:
            name = self._name((name, int(token), self.weights))
            result.append(name)
        return result

    def _name(self, key: Hashable) -> int:
        return self._names.setdefault(key, len(self._names) + 1)


class SimulatedCache:
    """The memory that a block manager's ids stand for, on device and host."""

    def __init__(self, manager: BlockManager) -> None:
        self.manager = manager
        self.device: list[dict[int, list[int]]] = [{} for _ in manager.groups]
        self.host: list[dict[int, list[int]]] = [{} for _ in manager.groups]

    def copy(self, copies: Sequence[CacheCopy]) -> None:
        """Make the copies one after the other."""
        places = {"move": (self.device, self.device), "out": (self.device, self.host), "in": (self.host, self.device)}
        for where, group, source, target in copies:
            origin, goal = places[where]
            assert source >= 0 and target >= 0
            goal[group][target] = list(origin[group].get(source, self._blank()))

    def give_back_dropped_blocks(self) -> None:
        """The memory behind the end of each pool is not there any more."""
        for pool, blocks in zip(self.manager.pools, self.device, strict=True):
            for block in [block for block in blocks if block >= pool.num_blocks]:
                del blocks[block]

    def write(self, tables: Sequence[Sequence[int]], names: Sequence[int], start: int) -> None:
        """Tokens from ``start`` on are computed; ``names``: of all tokens up to the last of them."""
        size = self.manager.block_size
        for g, pool in enumerate(self.manager.token_pools):
            for p in range(start, len(names)):
                block = tables[g][p // size]
                assert 0 <= block < pool.num_blocks, f"token {p} is written to block {block}"
                self.device[g].setdefault(block, self._blank())[p % size] = names[p]

    def write_states(self, steps: Sequence[tuple[int, int, Sequence[int], int]]) -> None:
        """A step goes on from states, and writes those after its tokens.

        Args:
            steps: of each sequence the slots that it reads and writes, the names of its tokens and where the step
                starts. An empty list of names: the step fails.
        """
        pool, states = self.manager.pools[-1], self.device[-1]
        written = [write for _, write, _, _ in steps]
        assert len(set(written)) == len(written) and all(0 <= slot < pool.num_blocks for slot in written)
        for read, write, names, start in steps:
            assert (read < 0) == (start == 0)
            assert read == write or read not in written, f"slot {read} is read while another is to be kept in it"
            if start and names:
                assert states[read][0] == names[start - 1], f"the state in slot {read} is another's"
        for _, write, names, _ in steps:
            states[write] = [names[-1] if names else SPOILT]

    def state_is(self, slot: int, name: int) -> bool:
        """True if the slot holds the state after the token of that name."""
        return self.device[-1].get(slot, [EMPTY])[0] == name

    def read(self, tables: Sequence[Sequence[int]], names: Sequence[int], first_query: int) -> None:
        """Assert that all which tokens from ``first_query`` to the last of ``names`` see is what it should be."""
        size = self.manager.block_size
        for g, group in enumerate(self.manager.groups):
            if group.is_state:
                continue
            first = max(0, first_query - group.window + 1) if group.window else 0
            for p in range(first, len(names)):
                block = tables[g][p // size]
                assert block != NULL_BLOCK, f"token {p} was let go, token {first_query} sees it"
                held = self.device[g].get(block, self._blank())[p % size]
                assert held == names[p], f"group {g}: token {p} in block {block} is {held}, not {names[p]}"

    def _blank(self) -> list[int]:
        return [EMPTY] * self.manager.block_size


class SimulatedEngine:
    """Does with a batcher what an engine does, and asserts what must be true of every schedule.

    Args:
        batcher: to drive.
        vocabulary: sampled tokens are below it; few, so that outputs meet again in prefixes.

    Attributes:
        finished: requests that came to their end here.
        num_tokens: that were computed.
        pausing: requests that are paused when they sample next, until ``resume``.
    """

    def __init__(self, batcher: Batcher, vocabulary: int = 3) -> None:
        self.batcher = batcher
        self.vocabulary = vocabulary
        self.cache = SimulatedCache(batcher.block_manager)
        self.prefixes = Prefixes()
        self.now = 0.0
        self.finished: list[Request] = []
        self.num_tokens = 0
        self.pausing: set[Request] = set()
        self._tables: dict[str, list[list[int]]] = {}  # all that a runner knows of tables
        self._names: dict[Request, list[int]] = {}  # of the computed tokens
        self._late: list[CacheCopy] = []

    def draft(self, right: float, length: int = 3) -> None:
        """Plan drafts, a share of which is ``right``; ``length`` in each step."""
        self.drafting = CheckedDrafting(
            [SimulatedDrafter(self, right)],
            self.batcher,
            most=7,
            vocab_size=self.vocabulary,
            is_beam=self.pausing.__contains__,
        )
        self.drafting.lengths.idle = lambda *given: None  # type: ignore[method-assign]
        self.drafting.lengths.choose = (  # type: ignore[method-assign]
            lambda rows, others, candidates, budget, num_fillers: (
                length if sum(c.rows(length) - c.known for c in candidates) <= budget else 0,
                candidates,
            )
        )
        self.batcher.planner.drafting = self.drafting

    def step(self, overlapped: str = "after", *, fails: bool = False) -> Schedule:
        """Plan a step and run it.

        Args:
            overlapped: one of ``TIMES``.
            fails: the model raises after the copies.
        """
        schedule = self._plan()
        if schedule.expired:
            for request in schedule.expired:
                self.finish(request, "timeout")
            return schedule
        self.cache.copy(schedule.copies)
        self.cache.give_back_dropped_blocks()
        if overlapped == "before":
            self.cache.copy(schedule.overlapped_copies)
        if not fails:
            self._compute(schedule)
        self._compute_states(schedule, fails)
        if overlapped == "after":
            self.cache.copy(schedule.overlapped_copies)
        elif overlapped == "late":
            self._late = schedule.overlapped_copies
        if fails:
            for item in schedule.requests:
                if item.overwrites_state:
                    self.compute_anew(item.request)
        if not self._late:
            self._read_all(schedule)
        if not fails:
            self._settle(schedule)
        return schedule

    def finish(self, request: Request, reason: str = "stop") -> None:
        """End a request."""
        self.batcher.finish(request, reason)
        self.finished.append(request)
        self._names.pop(request, None)

    def fork(self, parent: Request, child: Request) -> bool:
        """Let ``child`` go on from what ``parent`` has computed."""
        runs = self.batcher.fork(parent, child)
        if runs:
            self._names[child] = self._names[parent][: parent.num_computed_tokens]
        return runs

    def branch(self, parent: Request, child: Request) -> bool:
        """As ``fork``, in the parent's place in the order."""
        runs = self.batcher.branch(parent, child)
        if runs:
            self._names[child] = self._names[parent][: parent.num_computed_tokens]
        return runs

    def resume(self, request: Request) -> None:
        """Let a paused request go on with the token that it would have got before."""
        self.pausing.discard(request)
        if request.is_paused:
            self.batcher.resume(request)
            self._sample(request)

    def restart(self, request: Request) -> None:
        """Compute a running request anew."""
        self.batcher.restart(request)
        self._names[request] = []

    def compute_anew(self, request: Request) -> None:
        """As ``restart``, of a request whose state is spoilt."""
        self.batcher.compute_anew(request)
        self._names[request] = []

    def requeue_all(self) -> None:
        """As after an exception: nothing that was in the cache counts."""
        self.batcher.requeue_all()
        self.pausing.clear()
        self._names.clear()
        self._tables.clear()
        self._late = []

    def change_weights(self) -> None:
        """What is cached is of no use to whoever begins now; running sequences go on with what they have."""
        self.batcher.block_manager.forget_prefixes()
        self.prefixes.weights += 1

    def run_to_the_end(self, limit: int = 100_000) -> None:
        """Step until nothing is left."""
        while self.batcher.has_unfinished():
            limit -= 1
            assert limit > 0, "no end in sight"
            self.step()

    def next_token(self, request: Request) -> int:
        """The model: a function of all tokens so far."""
        return self.token_after(request.tokens(0, request.num_tokens))

    def token_after(self, tokens: Iterable[int]) -> int:
        """The model's next token."""
        return zlib.crc32(bytes(int(token) % 256 for token in tokens)) % self.vocabulary

    def _plan(self) -> Schedule:
        batcher = self.batcher
        self.cache.copy(self._late)
        self._late = []
        before = batcher.running
        decoding = {r for r in before if r.num_tokens - r.num_computed_tokens == 1}
        schedule = batcher.schedule(self.now)
        batcher.check()
        items = schedule.requests
        assert schedule.num_tokens == sum(item.num_tokens for item in items) <= batcher.max_num_batched_tokens
        assert len({item.request for item in items}) == len(items) <= batcher.num_running <= batcher.max_num_seqs
        if schedule.expired:
            assert all(r.deadline is not None and r.deadline <= self.now for r in schedule.expired) and not items
            return schedule
        assert bool(items) == batcher.has_unfinished(), "a step without progress"
        assert set(schedule.preempted).isdisjoint(item.request for item in items)
        assert set(schedule.preempted) <= set(before)
        order = [item.request in decoding for item in items]
        assert order == sorted(order, reverse=True), "decodes come first"
        for kind in (True, False):
            ranks = [i.request.rank for i in items if (i.request in decoding) is kind and i.request in before]
            assert ranks == sorted(ranks), "out of the order of the policy"
        for request in schedule.preempted:
            self._tables.pop(request.request_id, None)
            if not batcher.block_manager.is_swapped(request.request_id):
                self._names.pop(request, None)
        for request_id, tables in schedule.tables.items():
            self._tables[request_id] = [list(table) for table in tables]
        for request_id, added in schedule.new_blocks.items():
            for table, new in zip(self._tables[request_id], added, strict=True):
                table.extend(new)
        for item in items:
            request = item.request
            assert request.status is RequestStatus.RUNNING and item.num_tokens >= 1
            assert item.start == request.num_computed_tokens
            end = item.start + item.num_tokens - item.num_draft_rows
            assert end <= request.num_tokens and item.is_last_chunk == (end == request.num_tokens)
            names = self._names.setdefault(request, [])
            if len(names) < item.start:
                assert not names, "tokens are said to be computed that were not"
                found = request.tokens(0, item.start)
                self._names[request] = self.prefixes.extended([], found, request.cache_salt)
            tables = batcher.block_manager.tables(request.request_id)[: len(batcher.block_manager.token_pools)]
            for known, real in zip(self._tables[request.request_id], tables, strict=False):
                assert len(known) == len(real)
                assert all(a == b for a, b in zip(known, real, strict=True) if b != NULL_BLOCK), (
                    "the runner was not told"
                )
        return schedule

    def _compute(self, schedule: Schedule) -> None:
        for item in schedule.requests:
            request, end = item.request, item.start + item.num_tokens - item.num_draft_rows
            names = self._names[request][: item.start]
            tokens = [*request.tokens(item.start, end), *item.drafts, *[JUNK] * item.num_filled]
            names = self.prefixes.extended(names, tokens, request.cache_salt)
            self._names[request] = names
            self.cache.write(self._tables[request.request_id], names, item.start)
        for item in schedule.requests:
            self.cache.read(self._tables[item.request.request_id], self._names[item.request], item.start)
        self.num_tokens += schedule.num_tokens

    def _compute_states(self, schedule: Schedule, fails: bool) -> None:
        if not self.batcher.block_manager.has_state:
            assert all(item.state_read == item.state_write == -1 for item in schedule.requests)
            return
        self.cache.write_states(
            [
                (item.state_read, item.state_write, [] if fails else self._names[item.request], item.start)
                for item in schedule.requests
            ]
        )

    def _read_all(self, schedule: Schedule) -> None:
        """Whoever runs, in this step or not, must find all that its next token sees."""
        blocks = self.batcher.block_manager
        written = {item.request: item.state_write for item in schedule.requests}
        for request in self.batcher.running:
            names = self._names.get(request, [])
            tables = blocks.tables(request.request_id)
            if len(names) >= request.num_computed_tokens:
                self.cache.read(tables, names, len(names))
                if blocks.has_state and names:
                    slot = written.get(request, tables[-1][0]) if len(names) > request.num_computed_tokens else None
                    assert self.cache.state_is(tables[-1][0] if slot is None else slot, names[-1])

    def _settle(self, schedule: Schedule) -> None:
        drawn = {item.request: self._drawn(item) for item in schedule.requests if item.num_draft_rows}
        if self.batcher.block_manager.has_state:
            outputs = [StepOutput((drawn.get(item.request, ()),)) for item in schedule.requests]
            settle_states(self.batcher.block_manager, schedule.requests, outputs)
        for item in schedule.requests:
            request = item.request
            if item.num_draft_rows:
                self._settle_drafts(item, drawn[request])
                continue
            self.batcher.advance(request, item.num_tokens)
            if item.is_last_chunk and request in self.pausing:
                self.batcher.pause(request)
            elif item.is_last_chunk:
                self._sample(request)
        self.batcher.check()
        stats = self.batcher.stats()
        assert stats["blocks_used"] + stats["blocks_cached"] + stats["blocks_free"] == stats["blocks_total"]

    def _drawn(self, item: ScheduledRequest) -> tuple[SampledToken, ...]:
        request, tokens = item.request, [self.next_token(item.request)]
        for draft in item.drafts:
            if tokens[-1] != draft:
                break
            tokens.append(self.token_after([*request.tokens(0, request.num_tokens), *tokens]))
        return tuple(map(SampledToken, tokens))

    def _settle_drafts(self, item: ScheduledRequest, tokens: Sequence[SampledToken]) -> None:
        request = item.request
        state: Any = SimpleNamespace(
            batcher=self.batcher,
            runner=SimpleNamespace(append_tokens=lambda requests, ids: None),
            append_token=lambda completion, token, now: self._append(request, token.token_id),
            append_until_end=lambda completion, given, now: all(
                self._append(request, token.token_id) for token in given
            ),
        )
        completion: Any = SimpleNamespace(request=request)
        settle_drafts(state, completion, item, tokens, self.now)
        if request in self._names:
            self._names[request] = self._names[request][: request.num_computed_tokens]

    def _append(self, request: Request, token: int) -> bool:
        """Append a token; returns whether the request goes on."""
        request.output_token_ids.append(token)
        longest = min(request.num_prompt_tokens + request.params.max_tokens, self.batcher.max_model_len)
        if request.num_tokens >= longest:
            self.finish(request, "length")
        return not request.is_finished

    def _sample(self, request: Request) -> None:
        self._append(request, self.next_token(request))


class SimulatedDrafter:
    """Knows what the model gives, and says so in a share of cases."""

    name = "simulated"
    expected = 0.9

    def __init__(self, engine: SimulatedEngine, right: float) -> None:
        self.engine, self.right, self.draws = engine, right, random.Random(0)

    def propose(self, request: Request, most: int) -> list[int]:
        tokens = list(request.tokens(0, request.num_tokens))
        for _ in range(self.draws.randint(0, most)):
            tokens.append(self.engine.token_after(tokens))
            if self.draws.random() >= self.right:
                tokens[-1] = (tokens[-1] + 1) % self.engine.vocabulary
        return tokens[request.num_tokens :]

    def settled(self, request: Request, tokens: Sequence[int]) -> None:
        pass

    def finished(self, request: Request) -> None:
        pass


class CheckedDrafting(Drafting):
    """Asserts that nobody loses anything for a draft."""

    def extend(self, plan: Plan) -> None:
        def held() -> Any:
            pools = self.batcher.block_manager.pools
            return self.batcher.num_preemptions, [(pool.evictions, pool.num_cached) for pool in pools]

        before, budget = held(), plan.budget
        super().extend(plan)
        assert held() == before, "somebody gave something up for a draft"
        assert 0 <= plan.budget <= budget
