"""Fetches blocks from a store while their request waits, in a thread, so that no step waits for the store."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..blocks import BlockGroup
from ..blocks.prefix import longest_run
from .entries import entry_key
from .store import BlockStore

logger = logging.getLogger(__name__)

Parts = Callable[[int, int], list[memoryview]]
"""Group, host block → the bytes of the block, a piece for each KV head."""

_BLOCKS_A_CALL = 16
"""Blocks that are asked for, or read, before the thread looks at whether anybody still wants them."""


@dataclass(eq=False, slots=True)
class Fetch:
    """The blocks of one request.

    Attributes:
        hashes: of its leading full blocks.
        here: for each group, those of them that need not be fetched.
        since: seconds at which it could have been admitted; None: it could not yet.
        num_blocks: leading blocks that there are once all is read; None: not known yet.
        missing: for each group, which of ``hashes`` are to be read for that.
        blocks: group, host block and hash of each block to read, in the order of the sequence.
        num_read: of these, how many leading ones were read.
        num_published: of these, how many can be found.
        is_over: nothing more is coming.
        is_taken: and what came can be found.
        is_cancelled: nobody wants it any more.
    """

    hashes: list[bytes]
    here: list[set[bytes]]
    since: float | None = None
    num_blocks: int | None = None
    missing: list[list[int]] = field(default_factory=list)
    blocks: list[tuple[int, int, bytes]] = field(default_factory=list)
    num_read: int = 0
    num_published: int = 0
    is_over: bool = False
    is_taken: bool = False
    is_cancelled: bool = False


class _Places:
    """What is found of one group, in the form that ``longest_run`` asks for."""

    def __init__(self, contents: set[bytes]) -> None:
        self._contents = contents

    def lookup(self, content: bytes) -> int | None:
        return 0 if content in self._contents else None

    def num_known(self, contents: Sequence[bytes], most: int) -> int:
        return next((i for i in range(most) if contents[i] not in self._contents), most)


class Reader(threading.Thread):
    """Looks for blocks and reads them, one request after the other.

    Args:
        store: where from.
        groups: groups of layers.
        block_size: tokens per block.
        num_heads: KV heads of each group.
        parts: host memory of blocks.

    Attributes:
        news: fetches that went on, in order; each is taken once.
        has_news: set when there are some.
        busy_since: ``time.monotonic`` when it began what it is doing; None: nothing.
        num_failed: blocks that the store has and could not be read.
        num_bytes: read.
    """

    def __init__(
        self,
        store: BlockStore,
        groups: Sequence[BlockGroup],
        block_size: int,
        num_heads: Sequence[int],
        parts: Parts,
    ) -> None:
        super().__init__(name="pagoda-kv-store-reader", daemon=True)
        self.news: deque[Fetch] = deque()
        self.has_news = threading.Event()
        self.busy_since: float | None = None
        self.num_failed = 0
        self.num_bytes = 0
        self._asked: queue.SimpleQueue[Fetch | None] = queue.SimpleQueue()
        self._store = store
        self._groups, self._block_size, self._num_heads, self._parts = groups, block_size, num_heads, parts

    def ask(self, fetch: Fetch) -> None:
        """Look for the blocks of a fetch, or read those that it says."""
        self._asked.put(fetch)

    def close(self) -> None:
        """End behind what was asked for."""
        self._asked.put(None)

    @property
    def num_asked(self) -> int:
        """Number of fetches that wait for the thread."""
        return self._asked.qsize()

    def run(self) -> None:
        while (fetch := self._asked.get()) is not None:
            self.busy_since = time.monotonic()
            try:
                if fetch.is_cancelled:
                    fetch.is_over = True
                elif fetch.num_blocks is None:
                    self._find(fetch)
                else:
                    self._read(fetch)
            except Exception:
                logger.exception("reading the KV store failed")
                fetch.is_over = True
            self.busy_since = None
            self._tell(fetch)

    def _tell(self, fetch: Fetch) -> None:
        self.news.append(fetch)
        self.has_news.set()

    def _find(self, fetch: Fetch) -> None:
        """Find the longest run that the store makes possible."""
        hashes = fetch.hashes
        there = [set(here) for here in fetch.here]
        count = len(hashes)
        for g, group in enumerate(self._groups):
            if not group.window and not group.is_state:
                count = self._look(g, hashes[:count], there[g], stops=True)
        for g, group in enumerate(self._groups):
            if group.window or group.is_state:
                self._look(g, hashes[:count], there[g], stops=False)
        run, _ = longest_run(self._groups, list(map(_Places, there)), hashes[:count], self._block_size)
        fetch.missing = [
            [i for i in range(group.first_seen(run, self._block_size), run) if hashes[i] not in here]
            for group, here in zip(self._groups, fetch.here, strict=True)
        ]
        fetch.num_blocks = run

    def _look(self, group: int, hashes: Sequence[bytes], there: set[bytes], *, stops: bool) -> int:
        """Add the hashes that the store knows to ``there``, if ``stops`` up to the first one that it does not.

        Returns:
            How many leading ones are there.
        """
        for at in range(0, len(hashes), _BLOCKS_A_CALL):
            asked = [content for content in hashes[at : at + _BLOCKS_A_CALL] if content not in there]
            if not asked:
                continue
            known = self._store.known([key for content in asked for key in self._keys(group, content)])
            heads = self._num_heads[group]
            for i, content in enumerate(asked):
                if all(known[i * heads : (i + 1) * heads]):
                    there.add(content)
                elif stops:
                    return hashes.index(content)
        return len(hashes)

    def _read(self, fetch: Fetch) -> None:
        """Read the blocks of a fetch up to the first one that fails."""
        for at in range(0, len(fetch.blocks), _BLOCKS_A_CALL):
            if fetch.is_cancelled:
                break
            batch = fetch.blocks[at : at + _BLOCKS_A_CALL]
            keys = [key for group, _, content in batch for key in self._keys(group, content)]
            parts = [part for group, block, _ in batch for part in self._parts(group, block)]
            results = self._store.load(keys, parts)
            self.num_bytes += sum([part.nbytes for part, is_read in zip(parts, results, strict=True) if is_read])
            each = iter(results)
            read = [all([next(each) for _ in range(self._num_heads[group])]) for group, _, _ in batch]
            whole = read.index(False) if False in read else len(read)
            fetch.num_read += whole
            if whole < len(read):
                self.num_failed += read.count(False)
                break
            if fetch.num_read < len(fetch.blocks):
                self._tell(fetch)
        fetch.is_over = True

    def _keys(self, group: int, content: bytes) -> list[bytes]:
        return [entry_key(content, group, head) for head in range(self._num_heads[group])]


class Writer(threading.Thread):
    """Writes host blocks to a store.

    Args:
        store: where to.
        num_heads: KV heads of each group.
        parts: host memory of blocks.

    Attributes:
        written: group, host block and hash of blocks that it needs no longer; each is taken once.
        looked_for: group and hash of blocks, and whether the store has them; each is taken once.
        num_bytes: written.
    """

    def __init__(self, store: BlockStore, num_heads: Sequence[int], parts: Parts) -> None:
        super().__init__(name="pagoda-kv-store-writer", daemon=True)
        self.written: deque[tuple[int, int, bytes]] = deque()
        self.looked_for: deque[tuple[int, bytes, bool]] = deque()
        self.num_bytes = 0
        self._asked: queue.SimpleQueue[tuple[int, int, bytes] | Sequence[tuple[int, bytes]] | None]
        self._asked = queue.SimpleQueue()
        self._store, self._num_heads, self._parts = store, num_heads, parts

    def ask(self, group: int, block: int, content: bytes) -> None:
        """Write the content of a host block under its hash."""
        self._asked.put((group, block, content))

    def close(self) -> None:
        """End behind what was asked for."""
        self._asked.put(None)

    def look_for(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        """Look whether the store has blocks, by their groups and hashes."""
        self._asked.put(blocks)

    def run(self) -> None:
        while (asked := self._asked.get()) is not None:
            if isinstance(asked, tuple):
                self._write(*asked)
                continue
            for at in range(0, len(asked), _BLOCKS_A_CALL):
                self._look(asked[at : at + _BLOCKS_A_CALL])

    def _write(self, group: int, block: int, content: bytes) -> None:
        try:
            self.num_bytes += self._store.store(self._keys(group, content), self._parts(group, block))
        except Exception:
            logger.exception("writing to the KV store failed")
        self.written.append((group, block, content))

    def _look(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        try:
            each = iter(self._store.known([key for block in blocks for key in self._keys(*block)]))
            found = [all([next(each) for _ in range(self._num_heads[group])]) for group, _ in blocks]
        except Exception:
            logger.exception("reading the KV store failed")
            found = [True] * len(blocks)
        self.looked_for += [(*block, is_there) for block, is_there in zip(blocks, found, strict=True)]

    def _keys(self, group: int, content: bytes) -> list[bytes]:
        return [entry_key(content, group, head) for head in range(self._num_heads[group])]
