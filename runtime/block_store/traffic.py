"""Blocks of an engine on their way from and to a store: what is fetched, waited for, published and written."""

from __future__ import annotations

import atexit
import logging
import time
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from ..blocks import BlockManager, CacheCopy
from ..requests.request import Request
from .prefetch import Fetch, Parts, Reader, Writer
from .store import BlockStore

logger = logging.getLogger(__name__)

_MOST_FETCHES = 64
"""Fetches that wait for the thread that reads; further requests are computed."""
_STALLED_SECONDS = 2.0
"""After so long in one call the store counts as away, and nobody waits for it."""
_MOST_QUEUED = 4096
"""Blocks that wait to be copied for the store; further ones are dropped."""
_COPIES_A_STEP = 16
_COPIES_A_STEP_OF_ALL = 256
"""Where all blocks are stored, those of the longest steps."""
_MOST_REMEMBERED = 1 << 16
"""Hashes that are remembered, of blocks that were asked for and of those that are stored."""
_DRAIN_SECONDS = 5.0


FIGURES = {
    "kv_store_hits": "Blocks read from the KV store.",
    "kv_store_misses": "Blocks of prompts that neither the KV store nor the engine had.",
    "kv_store_failed_loads": "Blocks that the KV store had and that could not be read.",
    "kv_store_damaged": "Entries of the KV store that were torn, changed or somebody else's.",
    "kv_store_read_bytes": "Bytes read from the KV store.",
    "kv_store_written_bytes": "Bytes written to the KV store.",
    "kv_store_dropped_fetches": "Requests whose blocks were not fetched: the KV store or memory was busy.",
    "kv_store_dropped_writes": "Blocks that were not stored: the KV store was too slow, or they were gone.",
}
"""Figure of ``Traffic.stats`` → what it counts."""


class Traffic:
    """Moves blocks between a store and the host blocks of one engine.

    Blocks that a waiting request needs are looked for and read by one thread, into host blocks that nobody else may
    use. Between two steps those that came whole are published under their hashes, and the batcher finds them as it
    finds what was swapped out. Blocks to be stored are copied to host blocks beside a step and written by another
    thread. Everything but these threads runs within the engine's transactions.

    Args:
        store: where blocks are kept.
        blocks: the block manager; its swap space has blocks in all groups.
        num_heads: KV heads of each group.
        parts: host memory of blocks.
        wait: most seconds for which a request waits that could be admitted.
        stores_all: store all blocks, not only those that at least two requests have asked for.

    Attributes:
        figures: counts of ``stats`` that nobody else keeps.
    """

    def __init__(
        self,
        store: BlockStore,
        blocks: BlockManager,
        num_heads: Sequence[int],
        parts: Parts,
        *,
        wait: float = 0.2,
        stores_all: bool = False,
    ) -> None:
        self.figures: Counter[str] = Counter()
        self._store, self._blocks, self._wait = store, blocks, wait
        self._stores_all, self._least_asked = stores_all, 0 if stores_all else 2
        self._copies_a_step = _COPIES_A_STEP_OF_ALL if stores_all else _COPIES_A_STEP
        self._reader = Reader(store, blocks.groups, blocks.block_size, num_heads, parts)
        self._writer = Writer(store, num_heads, parts)
        self._fetches: dict[Request, Fetch] = {}
        self._num_lent = [0] * len(blocks.groups)  # to fetches
        self._num_writing = [0] * len(blocks.groups)
        self._asked: dict[bytes, int] = {}
        self._stored: dict[tuple[int, bytes], None] = {}
        self._considered: dict[Request, int] = {}  # leading blocks that were queued for the store, or not
        self._queue: deque[tuple[int, bytes]] = deque()
        self._num_queued = 0  # so far
        self._unwritten: dict[tuple[int, bytes], int] = {}  # what was queued and not written yet → its number
        self._copying: dict[tuple[int, int], bytes] = {}
        self._is_stopped = self._is_closed = self._was_stalled = False
        self._reader.start()
        self._writer.start()
        weakref.finalize(self, _close, self._reader, self._writer)
        atexit.register(_drain, weakref.ref(self))

    def begin(self, request: Request, hashes: Sequence[bytes]) -> None:
        if self._is_stopped or not hashes:
            return
        for content in hashes:
            self._asked[content] = self._asked.pop(content, 0) + 1
        _forget_oldest(self._asked)
        host = self._blocks.swap_space.pools
        most = [self._most_lent(g) for g, group in enumerate(self._blocks.groups) if not group.is_state]
        fetch = Fetch(list(hashes[: min(most, default=None)]), [])
        for device, pool in zip(self._blocks.pools, host, strict=True):
            known = [c for c in fetch.hashes if device.lookup(c) is not None or pool.lookup(c) is not None]
            fetch.here.append(set(known))
        if all(len(here) == len(fetch.hashes) for here in fetch.here):
            return
        if self._reader.num_asked >= _MOST_FETCHES or self._is_stalled():
            self.figures["kv_store_dropped_fetches"] += 1
            return
        self._fetches[request] = fetch
        self._reader.ask(fetch)

    def is_awaited(self, request: Request, now: float) -> bool:
        fetch = self._fetches.get(request)
        if fetch is None or fetch.is_taken:
            return False
        if fetch.since is None:
            fetch.since = now
        return now - fetch.since < self._wait and not self._is_stalled()

    def wait(self, seconds: float) -> None:
        """Wait until something arrives, at most so long."""
        self._reader.has_news.wait(seconds)

    def end(self, request: Request) -> None:
        fetch = self._fetches.pop(request, None)
        if fetch is not None:
            fetch.is_cancelled = True
            if fetch.is_over:
                self._give_back(fetch)
        if request.is_finished:
            self._considered.pop(request, None)

    def take_arrived(self) -> None:
        self._reader.has_news.clear()
        while self._reader.news:
            fetch = self._reader.news.popleft()
            was_over = fetch.is_over  # first: the thread may go on meanwhile
            if not fetch.is_cancelled and not fetch.is_over and not fetch.blocks:
                self._lend(fetch)
            else:
                self._publish(fetch)
            fetch.is_taken = fetch.is_taken or was_over
            if fetch.is_over and fetch.is_cancelled:
                self._give_back(fetch)
        while self._writer.written:
            group, block, content = self._writer.written.popleft()
            self._num_writing[group] -= 1
            self._blocks.swap_space.give_back(group, block, None if self._is_stopped else content)
            self._unwritten.pop((group, content), None)
        while self._writer.looked_for:
            self._note_look(*self._writer.looked_for.popleft())
        _forget_oldest(self._stored)

    def _note_look(self, group: int, content: bytes, is_there: bool) -> None:
        """Note whether the store has a block that was stored; write one again that it has dropped."""
        if is_there:
            self._unwritten.pop((group, content), None)
        elif self._is_stopped or self._blocks.pools[group].lookup(content) is None:
            self._drop(group, content)
        else:
            self._queue.append((group, content))

    def _lend(self, fetch: Fetch) -> None:
        """Give a fetch that knows what the store has host blocks to read it into."""
        space = self._blocks.swap_space
        absent = fetch.hashes[fetch.num_blocks :]
        self.figures["kv_store_misses"] += len(absent)
        for content in absent:
            for g in range(len(self._blocks.groups)):
                self._stored.pop((g, content), None)
        wanted = sorted((i, g) for g, places in enumerate(fetch.missing) for i in places)
        fits = all(
            self._num_lent[g] + count <= self._most_lent(g) and count <= space.pools[g].num_available
            for g, count in Counter(g for _, g in wanted).items()
        )
        if not wanted or not fits:
            self.figures["kv_store_dropped_fetches"] += not fits
            fetch.is_over = fetch.is_taken = True
            return
        for i, g in wanted:
            block = space.lend(g)
            assert block is not None, "it was counted"
            self._num_lent[g] += 1
            fetch.blocks.append((g, block, fetch.hashes[i]))
        self._reader.ask(fetch)

    def _most_lent(self, group: int) -> int:
        """Return how many host blocks of a group fetches may have at once."""
        return max(1, self._blocks.swap_space.pools[group].num_blocks // 2)

    def _publish(self, fetch: Fetch) -> None:
        """Let the host blocks of a fetch that were read be found; they stay its own until it ends."""
        count = fetch.num_read
        for g, block, content in fetch.blocks[fetch.num_published : count]:
            if not fetch.is_cancelled:
                self._blocks.swap_space.pools[g].commit(block, content)
            self._stored[g, content] = None
        self.figures["kv_store_hits"] += count - fetch.num_published
        fetch.num_published = count

    def _give_back(self, fetch: Fetch) -> None:
        for g, block, _ in fetch.blocks:
            self._blocks.swap_space.give_back(g, block)
            self._num_lent[g] -= 1
        fetch.blocks = []

    def settled(self, request: Request, num_tokens: int) -> None:
        end = min(num_tokens // self._blocks.block_size, len(request.block_hashes))
        start = self._considered.get(request, 0)
        if start == end or self._is_stopped:
            return
        self._considered[request] = end
        doubtful: list[tuple[int, bytes]] = []
        for content in request.block_hashes[start:end]:
            if self._asked.get(content, 0) < self._least_asked:
                continue
            for g, pool in enumerate(self._blocks.pools):
                if pool.lookup(content) is None:
                    continue
                if (g, content) in self._stored:
                    # The engine has it; whoever it was computed for may not find it in the store any more.
                    if self._stores_all and (g, content) not in self._unwritten:
                        doubtful.append((g, content))
                        self._number(g, content)
                    continue
                if len(self._queue) >= _MOST_QUEUED:
                    self.figures["kv_store_dropped_writes"] += 1
                    continue
                self._stored[g, content] = None
                self._queue.append((g, content))
                self._number(g, content)
        if doubtful:
            self._writer.look_for(doubtful)

    def _number(self, group: int, content: bytes) -> None:
        """Count a block that is to be in the store."""
        self._num_queued += 1
        self._unwritten.pop((group, content), None)  # the numbers stay in order
        self._unwritten[group, content] = self._num_queued

    @property
    def num_queued(self) -> int:
        """Blocks that were queued for the store so far, or looked for there again."""
        return self._num_queued

    def is_written(self, count: int) -> bool:
        """True if of the first ``count`` blocks that were queued none waits: each is in the store, or was dropped."""
        return next(iter(self._unwritten.values()), count + 1) > count

    def plan_copies(self, most: int | None = None) -> None:
        for _ in range(self._copies_a_step if most is None else most):
            if not self._queue or not self._plan_copy():
                return

    def _plan_copy(self) -> bool:
        """Plan the copy of the first block of the queue; False where it has to wait for the store."""
        group, content = self._queue[0]
        pool = self._blocks.swap_space.pools[group]
        if self._num_writing[group] >= max(1, pool.num_blocks // 4):
            return False
        self._queue.popleft()
        block = self._blocks.copy_to_host(group, content)
        if block is None:
            self._drop(group, content)
            self.figures["kv_store_dropped_writes"] += 1
            return True
        self._num_writing[group] += 1
        self._copying[group, block] = content
        return True

    def note_copied(self, copies: Sequence[CacheCopy]) -> None:
        """Write the blocks among these copies that were made for the store; any thread may call it."""
        for copy in copies:
            if copy.where == "out" and (content := self._copying.pop((copy.group, copy.target), None)) is not None:
                self._writer.ask(copy.group, copy.target, content)

    def reset(self) -> None:
        for fetch in self._fetches.values():
            fetch.is_cancelled = True
            if fetch.is_over:
                self._give_back(fetch)
        self._fetches.clear()
        self._considered.clear()
        for entry in self._queue:
            self._drop(*entry)
        self._queue.clear()
        while self._copying:  # these copies were not made
            (group, block), content = self._copying.popitem()
            self._num_writing[group] -= 1
            self._blocks.swap_space.give_back(group, block)
            self._drop(group, content)

    def _drop(self, group: int, content: bytes) -> None:
        """Note that a block that was queued will not be stored."""
        self._stored.pop((group, content), None)
        self._unwritten.pop((group, content), None)

    def stop(self) -> None:
        """Neither fetch nor store anything from now on, because the weights may not be those of the entries."""
        if not self._is_stopped:
            logger.warning("the KV store is not used any more: the prefix cache was reset, as for other weights")
        self._is_stopped = True
        self.reset()

    @property
    def has_copies(self) -> bool:
        """True if blocks wait to be copied for the store."""
        return bool(self._queue)

    def close(self) -> None:
        """Let go of the store, when what was given to the thread that writes is written, or soon."""
        if self._is_closed:
            return
        self._is_stopped = self._is_closed = True
        _close(self._reader, self._writer)
        self._writer.join(_DRAIN_SECONDS)
        self._reader.join(0.1)
        if not self._writer.is_alive() and not self._reader.is_alive():
            self._store.close()

    def stats(self) -> dict[str, int]:
        """Figures since the engine was made, for ``Engine.stats``."""
        found = {
            **self.figures,
            "kv_store_failed_loads": self._reader.num_failed,
            "kv_store_damaged": self._store.num_damaged,
            "kv_store_read_bytes": self._reader.num_bytes,
            "kv_store_written_bytes": self._writer.num_bytes,
        }
        return {name: found.get(name, 0) for name in FIGURES}

    def _is_stalled(self) -> bool:
        since = self._reader.busy_since
        is_stalled = since is not None and time.monotonic() - since > _STALLED_SECONDS
        if is_stalled and not self._was_stalled:
            logger.warning("the KV store does not answer; requests are computed without it")
        self._was_stalled = is_stalled
        return is_stalled


def _drain(traffic: weakref.ref[Traffic]) -> None:
    """Give what is being written a little time where nobody has closed the store before the process ends."""
    if (open_one := traffic()) is not None:
        open_one.close()


def _close(*threads: Reader | Writer) -> None:
    for thread in threads:
        thread.close()


def _forget_oldest(known: dict[Any, Any]) -> None:
    if len(known) > _MOST_REMEMBERED:
        for key in list(known)[: _MOST_REMEMBERED // 2]:
            del known[key]
