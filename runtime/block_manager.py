"""Who holds which block of the KV cache: block tables with reference counts, in pure Python, no tensors."""

from __future__ import annotations


class OutOfBlocks(RuntimeError):
    """Too few free blocks for what was asked; nothing was changed."""


class SharedBlock(RuntimeError):
    """The next token would be written into a block that another table holds too; nothing was changed."""


class BlockManager:
    """Hands out the blocks of a paged KV cache (PagedAttention, arXiv 2309.06180, section 4).

    A request's *table* lists its blocks in order: token i lies in block ``table[i // block_size]`` at offset
    ``i % block_size``. A block may be in several tables (``fork``); it is free again when the last one lets
    go. Every operation costs O(blocks that it adds or drops), never O(``num_blocks``). Freed blocks are
    reused last in, first out, so that a cache whose pages are touched lazily stays as small as the load.

    Args:
        num_blocks: blocks in the cache, ids ``0 .. num_blocks - 1``.
        block_size: tokens per block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks={num_blocks} is below 1; give the cache at least one block")
        if block_size < 1:
            raise ValueError(f"block_size={block_size} is below 1; use 16 or another positive size")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._tables: dict[str, list[int]] = {}
        self._tokens: dict[str, int] = {}  # tokens that each table was asked to hold
        self._free: list[int] = []  # a stack; the next block is the last entry
        self._refs: list[int] = []
        self._peak_used = 0
        self.reset()

    def reset(self) -> None:
        """Free everything, whatever state an interrupted operation left behind."""
        self._tables.clear()
        self._tokens.clear()
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._refs = [0] * self.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no table holds."""
        return len(self._free)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that at least one table holds."""
        return self.num_blocks - len(self._free)

    @property
    def capacity(self) -> int:
        """Tokens that the whole cache holds."""
        return self.num_blocks * self.block_size

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tables

    def blocks_needed(self, request_id: str, num_tokens: int) -> int:
        """Blocks to add so that the request's table (empty when it has none) holds ``num_tokens`` tokens."""
        held = len(self._tables.get(request_id, ()))
        return max(0, -(-num_tokens // self.block_size) - held)

    def tokens_free(self, request_id: str) -> int:
        """Tokens that the request's table could hold if it were given every free block."""
        return (len(self._tables.get(request_id, ())) + len(self._free)) * self.block_size

    def allocate(self, request_id: str, num_tokens: int) -> list[int]:
        """Make the request's table hold ``num_tokens`` tokens; a table never shrinks here.

        Returns:
            The block ids added to the end of the table, often none.

        Raises:
            OutOfBlocks: too few free blocks.
            SharedBlock: a new token would land in a block that is shared with another table.
        """
        if num_tokens < 1:
            raise ValueError(f"num_tokens={num_tokens} is below 1; use free() to give blocks back")
        table = self._tables.get(request_id)
        held = 0
        if table is not None:
            tokens = self._tokens[request_id]
            if num_tokens <= tokens:
                return []
            held = len(table)
            if tokens % self.block_size and self._refs[table[-1]] > 1:
                raise SharedBlock(
                    f"request_id={request_id!r} would write token {tokens} into block {table[-1]}, which "
                    f"{self._refs[table[-1]]} requests share; free the other holders first"
                )
        count = -(-num_tokens // self.block_size) - held
        free = self._free
        if count > len(free):
            raise OutOfBlocks(
                f"request_id={request_id!r} needs {count} more blocks for num_tokens={num_tokens}, "
                f"{len(free)} of {self.num_blocks} are free; free another request first"
            )
        if table is None:
            table = self._tables[request_id] = []
        self._tokens[request_id] = num_tokens
        if count <= 0:
            return []
        added = free[: -count - 1 : -1]
        del free[-count:]
        for block in added:
            self._refs[block] = 1
        table.extend(added)
        if self.num_used_blocks > self._peak_used:
            self._peak_used = self.num_used_blocks
        return added

    def table(self, request_id: str) -> list[int]:
        """The request's block ids, in order (a copy)."""
        return list(self._held(request_id))

    def num_tokens(self, request_id: str) -> int:
        """Tokens that the request's table was asked to hold, 0 when it has none."""
        return self._tokens.get(request_id, 0)

    def free(self, request_id: str) -> None:
        """Drop the request's table; blocks that nobody else holds become free."""
        table = self._held(request_id)
        del self._tables[request_id], self._tokens[request_id]
        # Backwards, so that the blocks come off the stack in the order they had in the table.
        for block in reversed(table):
            self._refs[block] -= 1
            if not self._refs[block]:
                self._free.append(block)

    def fork(self, parent_id: str, child_id: str) -> None:
        """Give ``child_id`` a table with the same blocks as ``parent_id``; no block is copied.

        Neither of the two may then write into the last block while it is only partly filled (``allocate``
        raises ``SharedBlock``); a full last block is not in the way.
        """
        table = self._held(parent_id)
        if child_id in self._tables:
            raise ValueError(f"child_id={child_id!r} already holds blocks; free it or use another id")
        for block in table:
            self._refs[block] += 1
        self._tables[child_id] = list(table)
        self._tokens[child_id] = self._tokens[parent_id]

    def stats(self) -> dict[str, int | float]:
        """Counts of blocks; ``utilisation``: used blocks of all; ``internal_fragmentation``: slots without a
        token of all slots of used blocks."""
        used = self.num_used_blocks
        filled: dict[int, int] = {}
        for request_id, table in self._tables.items():
            tail = self._tokens[request_id] - (len(table) - 1) * self.block_size
            for block in table[:-1]:
                filled[block] = self.block_size
            filled[table[-1]] = max(filled.get(table[-1], 0), tail)
        return {
            "blocks_total": self.num_blocks,
            "blocks_used": used,
            "blocks_free": len(self._free),
            "blocks_used_peak": self._peak_used,
            "utilisation": used / self.num_blocks,
            "internal_fragmentation": 1 - sum(filled.values()) / (used * self.block_size) if used else 0.0,
        }

    def check(self) -> None:
        """Verify every invariant, in O(``num_blocks`` + table entries).

        Raises:
            RuntimeError: one is broken; the message says which.
        """
        holders = [0] * self.num_blocks
        for request_id, table in self._tables.items():
            if len(set(table)) != len(table):
                raise RuntimeError(f"table of {request_id!r} names a block twice: {table}")
            for block in table:
                if not 0 <= block < self.num_blocks:
                    raise RuntimeError(f"table of {request_id!r} names block {block} of {self.num_blocks}")
                holders[block] += 1
            tokens = self._tokens.get(request_id, 0)
            if len(table) != -(-tokens // self.block_size) or not table:
                raise RuntimeError(f"table of {request_id!r} has {len(table)} blocks for {tokens} tokens")
        if self._tokens.keys() != self._tables.keys():
            raise RuntimeError("token counts and tables name different requests")
        if holders != self._refs:
            wrong = [b for b in range(self.num_blocks) if holders[b] != self._refs[b]]
            raise RuntimeError(f"reference counts differ from the number of holders for blocks {wrong}")
        free = set(self._free)
        if len(free) != len(self._free):
            raise RuntimeError("the free list names a block twice")
        if free != {block for block, count in enumerate(holders) if not count}:
            raise RuntimeError("the free list is not exactly the blocks that nobody holds")

    def _held(self, request_id: str) -> list[int]:
        table = self._tables.get(request_id)
        if table is None:
            raise ValueError(f"request_id={request_id!r} holds no blocks; allocate some first")
        return table
