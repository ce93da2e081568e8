"""Changes of the prefix cache, in the order in which they happened.

A router sends a request to the engine that holds most of its prompt; the changes tell it which blocks these are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ..blocks import BlockManager
from ..requests.request import Request


@dataclass(slots=True)
class BlocksStored:
    """Blocks that can be found from now on, each the successor of the one before it.

    Attributes:
        hashes: of the blocks; see ``blocks.hashing``.
        parent: hash of the block before the first one; None at the start of a sequence.
        tokens: ids in all of them; empty unless tokens were asked for.
    """

    hashes: list[bytes]
    parent: bytes | None = None
    tokens: list[int] = field(default_factory=list)


@dataclass(slots=True)
class BlocksRemoved:
    """Blocks that can no longer be found, by their hashes."""

    hashes: list[bytes]


@dataclass(slots=True)
class AllBlocksCleared:
    """No block can be found any more."""


CacheEvent: TypeAlias = BlocksStored | BlocksRemoved | AllBlocksCleared


class CacheEvents:
    """Collects the changes of one group's blocks: the first group of layers that looks back without limit, else the
    first one of all.

    Args:
        blocks: the block manager; it reports to one collector at most.
        with_tokens: collect the tokens of the blocks, too.

    Raises:
        ValueError: prefix caching is off, or tokens are asked of a model whose layers have no blocks, only states.
    """

    def __init__(self, blocks: BlockManager, *, with_tokens: bool = False) -> None:
        if not blocks.enable_prefix_caching:
            raise ValueError("enable_prefix_caching=False leaves no cached blocks to report; set it to True")
        if with_tokens and not blocks.token_pools:
            raise ValueError("the model has states and no KV blocks, so there are no tokens of blocks to report")
        self.with_tokens = with_tokens
        self._blocks = blocks
        self._changes: list[tuple[bytes | None, bool]] = []
        self._described: dict[bytes, tuple[bytes | None, list[int] | npt.NDArray[np.integer]]] = {}
        unlimited = [i for i, group in enumerate(blocks.groups) if not (group.window or group.is_state)]
        blocks.pools[unlimited[0] if unlimited else 0].on_change = lambda *change: self._changes.append(change)

    def describe(self, request: Request, num_tokens: int) -> None:
        """Note the tokens of the blocks that the first ``num_tokens`` tokens of a request fill, before they are
        published."""
        if not self.with_tokens:
            return
        size, hashes = self._blocks.block_size, request.block_hashes
        first = self._blocks.sequences[request.request_id].num_committed
        for i in range(first, min(num_tokens // size, len(hashes))):
            self._described[hashes[i]] = hashes[i - 1] if i else None, request.tokens(i * size, (i + 1) * size)

    def take(self) -> list[CacheEvent]:
        """Return the changes since the last call."""
        if not self._changes:
            return []
        changes, self._changes = self._changes, []
        described, self._described = self._described, {}
        events: list[CacheEvent] = []
        for content, is_stored in changes:
            last = events[-1] if events else None
            if content is None:
                events.append(AllBlocksCleared())
            elif not is_stored:
                if isinstance(last, BlocksRemoved):
                    last.hashes.append(content)
                else:
                    events.append(BlocksRemoved([content]))
            elif not self.with_tokens:
                if isinstance(last, BlocksStored):
                    last.hashes.append(content)
                else:
                    events.append(BlocksStored([content]))
            elif content in described:  # else it came back from the host, and its tokens are not at hand
                parent, tokens = described[content]
                if not (isinstance(last, BlocksStored) and last.hashes[-1] == parent):
                    last = BlocksStored([], parent)
                    events.append(last)
                last.hashes.append(content)
                last.tokens += map(int, tokens)
        return events
