"""One kind of blocks: their reference counts, the free ones, and the cached content."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

NULL_BLOCK = -1
"""Entry of a block table whose block left the sliding window and was released."""


class OutOfBlocks(RuntimeError):
    """Too few blocks are available; nothing was changed."""


class BlockPool:
    """Blocks ``0 .. num_blocks - 1``, each *used* (it has a holder), *cached* (it has none, but its content has a
    hash and can be found again) or *free*; ``used + cached + free = num_blocks`` at every moment.

    Every operation costs O(blocks that it uses). Free blocks are allocated last in, first out, so that a cache whose
    pages the OS commits lazily stays as small as the load; if none is free, the least recently released cached block
    is evicted.

    Args:
        num_blocks: at least 1.

    Attributes:
        num_blocks: current number of blocks.
        max_blocks: largest number of blocks.
        evictions: number of cached blocks evicted so far.
        on_change: called with a content that became findable (True) or was forgotten (False), and with None when all
            contents were forgotten.
        peak_used: most blocks used at once.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks={num_blocks} is below 1; use at least one block")
        self.evictions = 0
        self.peak_used = 0
        self.on_change: Callable[[bytes | None, bool], None] | None = None
        self._refs: list[int] = []
        self._free: dict[int, None] = {}  # the last entry is the next to be allocated
        self._cached: OrderedDict[int, None] = OrderedDict()  # the first entry is the next to be evicted
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._value_of: dict[int, int] = {}
        self.num_blocks = self.max_blocks = num_blocks
        self.reset()

    def reset(self) -> None:
        """Free all blocks and forget all content."""
        self._refs = [0] * self.num_blocks
        self._free = dict.fromkeys(range(self.num_blocks - 1, -1, -1))
        self._cached.clear()
        self._forget_contents()

    @property
    def num_free(self) -> int:
        """Number of blocks without a holder and without useful content."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Number of blocks without a holder whose content can be found by its hash."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Number of blocks that ``take`` can return."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Number of blocks with a holder."""
        return self.num_blocks - len(self._free) - len(self._cached)

    def refs(self, block: int) -> int:
        """Return the number of holders of the block.

        Raises:
            ValueError: there is no such block.
        """
        if not 0 <= block < self.num_blocks:
            raise ValueError(
                f"block={block} is not one of the pool's {self.num_blocks}; use 0 to {self.num_blocks - 1}"
            )
        return self._refs[block]

    def take(self, count: int) -> list[int]:
        """Return ``count`` blocks without another holder.

        Raises:
            OutOfBlocks: fewer are available.
        """
        free, refs = self._free, self._refs
        if count > len(free) + len(self._cached):
            raise OutOfBlocks(
                f"{count} blocks are needed, {len(free) + len(self._cached)} of {self.num_blocks} are available"
            )
        taken = [free.popitem()[0] for _ in range(min(count, len(free)))]
        while len(taken) < count:
            taken.append(self._evict_oldest())
        for block in taken:
            refs[block] = 1
        self._note_peak()
        return taken

    def take_run(self, count: int) -> list[int] | None:
        """Return ``count`` neighboring blocks, ids ascending, or None without such a run; O(``num_blocks``)."""
        start = 0
        for block, holders in enumerate(self._refs):
            if holders:
                start = block + 1
            elif block + 1 - start == count:
                run = list(range(start, start + count))
                self.take_these(run)
                return run
        return None

    def take_these(self, blocks: Iterable[int]) -> None:
        """Take blocks without a holder; their content is dropped."""
        for block in blocks:
            if self.refs(block):
                raise ValueError(f"block={block} already has holders ({self._refs[block]}); take only free blocks")
            if block in self._cached:
                del self._cached[block]
                self._forget_evicted(block)
            else:
                del self._free[block]
            self._refs[block] = 1
        self._note_peak()

    def retain(self, block: int) -> None:
        """Add a holder to the block; a cached block becomes used."""
        if not self.refs(block):
            if block not in self._cached:
                raise ValueError(f"block={block} is free and has no content; use take() instead")
            del self._cached[block]
        self._refs[block] += 1
        self._note_peak()

    def release(self, block: int) -> None:
        """Remove a holder of the block; without holders it becomes cached if its content has a hash, else free."""
        if self.refs(block) < 1:
            raise ValueError(f"block={block} has no holder; it was released twice")
        self._refs[block] -= 1
        if self._refs[block]:
            return
        if block in self._hash_of:
            self._cached[block] = None
        else:
            self._free[block] = None

    def commit(self, block: int, content: bytes, value: int = 0) -> None:
        """Publish the used block under the hash of its content. If a block with that hash exists, that one stays.

        Args:
            block: block id.
            content: hash of the content.
            value: cached blocks of the lowest value are evicted first.
        """
        if content not in self._block_of and block not in self._hash_of:
            self._hash_of[block] = content
            self._block_of[content] = block
            if value:
                self._value_of[block] = value
            if self.on_change is not None:
                self.on_change(content, True)

    def num_available_for(self, value: int) -> int:
        """Return how many blocks ``take`` can return without evicting one of a higher value; O(cached blocks)."""
        return self.num_available - sum(self._value_of.get(block, 0) > value for block in self._cached)

    def discard(self, content: bytes) -> None:
        """Forget the content if its block has no holder."""
        block = self._block_of.get(content)
        if block is not None and block in self._cached:
            del self._cached[block]
            self.forget(block)
            self._free[block] = None

    def forget(self, block: int) -> None:
        """Unpublish the used block, because its content changes."""
        content = self._hash_of.pop(block, None)
        if content is not None:
            del self._block_of[content]
            self._value_of.pop(block, None)
            if self.on_change is not None:
                self.on_change(content, False)

    def forget_all(self) -> None:
        """Drop the content of all blocks; cached ones become free."""
        for block in self._cached:
            self._free[block] = None
        self._cached.clear()
        self._forget_contents()

    def lookup(self, content: bytes) -> int | None:
        """Return the used or cached block with that content, or None."""
        return self._block_of.get(content)

    def num_known(self, contents: Sequence[bytes], most: int) -> int:
        """Return how many of the first ``most`` contents, counted from the first on, are in used or cached blocks."""
        known = self._block_of
        for i in range(most):
            if contents[i] not in known:
                return i
        return most

    def num_unheld(self, contents: Sequence[bytes]) -> int:
        """Return how many of the contents, all of which are known, are in blocks without a holder."""
        refs, known = self._refs, self._block_of
        return sum([not refs[known[content]] for content in contents])

    def hash_of(self, block: int) -> bytes | None:
        """Return the hash that leads to the block, or None."""
        return self._hash_of.get(block)

    def is_held(self, block: int) -> bool:
        """Return True if the block is used."""
        return self._refs[block] > 0

    def is_private(self, block: int) -> bool:
        """Return True if the block has one holder and no hash leads to it."""
        return self._refs[block] == 1 and block not in self._hash_of

    def is_cached(self, block: int) -> bool:
        """Return True if the block is cached."""
        return block in self._cached

    def is_free(self, block: int) -> bool:
        """Return True if the block is free."""
        return block in self._free

    def move(self, moves: Mapping[int, int]) -> None:
        """Move each source, with its holders and content, to its target, which must be available.

        Args:
            moves: source → target; no block is both. Cached blocks keep their positions in the order of eviction.
        """
        moved = {source: target for source, target in moves.items() if source in self._cached}
        for source, target in moves.items():
            if not self.refs(source) and source not in moved:
                raise ValueError(f"source={source} has no content to move")
            holders, content = self._refs[source], self._hash_of.pop(source, None)
            value = self._value_of.pop(source, None)
            self.take_these([target])
            self._refs[target], self._refs[source] = holders, 0
            if content is not None:
                self._hash_of[target], self._block_of[content] = content, target
            if value is not None:
                self._value_of[target] = value
            if source not in moved:
                self._free[source] = None
        if moved:
            self._cached = OrderedDict.fromkeys(moved.get(block, block) for block in self._cached)
            self._free.update(dict.fromkeys(moved))

    def resize(self, num_blocks: int) -> None:
        """Add or drop blocks at the end; dropped cached blocks lose their content.

        Raises:
            ValueError: a block that would be dropped is used; nothing was changed.
        """
        if num_blocks < 1:
            raise ValueError(f"num_blocks={num_blocks} is below 1; keep at least one block")
        dropped = range(num_blocks, self.num_blocks)
        used = [block for block in dropped if self._refs[block]]
        if used:
            raise ValueError(f"num_blocks={num_blocks} would drop used blocks {used}; move them first")
        for block in dropped:
            if block in self._cached:
                del self._cached[block]
                self._forget_evicted(block)
            else:
                del self._free[block]
        self.max_blocks = max(self.max_blocks, num_blocks)
        del self._refs[num_blocks:]
        added = range(self.num_blocks, num_blocks)
        self._refs.extend([0] * len(added))
        self._free.update(dict.fromkeys(reversed(added)))
        self.num_blocks = num_blocks

    def size_for_load(self) -> int:
        """Return the number of blocks it should have; call once per step."""
        return self.num_blocks

    def check(self, holders: list[int]) -> None:
        """Verify every invariant, in O(``num_blocks``).

        Args:
            holders: for each block, the number of tables that contain it.

        Raises:
            RuntimeError: an invariant is broken; the message names it.
        """
        if not len(self._refs) == len(holders) == self.num_blocks:
            raise RuntimeError(f"{len(self._refs)} reference counts for {self.num_blocks} blocks")
        if holders != self._refs:
            wrong = [block for block in range(self.num_blocks) if holders[block] != self._refs[block]]
            raise RuntimeError(f"reference counts differ from the number of holders for blocks {wrong}")
        unheld = {block for block, count in enumerate(holders) if not count}
        if self._free.keys() & self._cached.keys() or self._free.keys() | self._cached.keys() != unheld:
            raise RuntimeError("free and cached blocks are not exactly the blocks without a holder")
        if {content: block for block, content in self._hash_of.items()} != self._block_of:
            raise RuntimeError("hashes and blocks do not match")
        if not self._cached.keys() <= self._hash_of.keys() or self._free.keys() & self._hash_of.keys():
            raise RuntimeError("a cached block has no hash, or a free one has")
        if not self._value_of.keys() <= self._hash_of.keys():
            raise RuntimeError("a block without a hash has a value")

    def _forget_contents(self) -> None:
        self._hash_of.clear()
        self._block_of.clear()
        self._value_of.clear()
        if self.on_change is not None:
            self.on_change(None, False)

    def _evict_oldest(self) -> int:
        if self._value_of:
            block = min(self._cached, key=lambda cached: self._value_of.get(cached, 0))
            del self._cached[block]
        else:
            block, _ = self._cached.popitem(last=False)
        self._forget_evicted(block)
        return block

    def _forget_evicted(self, block: int) -> None:
        self.forget(block)
        self.evictions += 1

    def _note_peak(self) -> None:
        self.peak_used = max(self.peak_used, self.num_used)
