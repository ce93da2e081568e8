"""Snapshots of states for prefix caching: slots that a sequence leaves behind for others with the same beginning.

Keys and values of a prefix can be reused up to any block, but a state only at a point where it was kept. A slot is
kept by leaving it: the next step reads it and writes another one. So nothing is copied, but the state must exist
when a step ends: chunks of prompts are cut where a snapshot is worth another step.

Positions, most valuable first: the last block's end before a prompt's end; where a prompt diverges from others whose
keys and values are cached (the second such prompt makes the third a hit at that depth); while decoding, the latest
only, for the next turn of a chat; inside long prompts. The last are kept only where a chunk ends anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from ..blocks import BlockManager, Prefix
from ..requests.request import Request

WORTH: Final = 64
"""Least tokens that a snapshot must save to be worth ending a step there; also between two while decoding."""

_WITHIN, _DECODED, _PROMPT = 1, 2, 3


@dataclass(slots=True)
class _Marks:
    """Attributes:
    cuts: token counts, ascending, at which a step should end.
    last: token count of the last snapshot that it used or made.
    decoded: hash of the last snapshot that it made while decoding.
    """

    cuts: list[int] = field(default_factory=list)
    last: int = 0
    decoded: bytes | None = None


_NO_MARKS = _Marks()


class Snapshots:
    """Decides where sequences leave snapshots of their states.

    Args:
        blocks: block manager with states and prefix caching.
        interval: least tokens between two snapshots inside a prompt, so that they take no more bytes than the keys
            and values of these tokens; None: no such snapshots.
    """

    def __init__(self, blocks: BlockManager, interval: int | None) -> None:
        self.blocks = blocks
        self.interval = interval
        self._marks: dict[Request, _Marks] = {}

    def begin(self, request: Request, hashes: Sequence[bytes], prefix: Prefix) -> None:
        """Start a request that is computed from its cached prefix on.

        Args:
            request: the admitted request.
            hashes: hashes of its blocks that may come from the cache.
            prefix: the prefix that was found.
        """
        size = self.blocks.block_size
        start = prefix.num_blocks * size
        end = min((request.num_prompt_tokens - 1) // size, len(hashes)) * size
        places = {tokens for tokens in (prefix.known_blocks * size, end) if tokens >= start + WORTH}
        # Of two closer than a snapshot is worth, the one that others share, too.
        cuts = [tokens for tokens in sorted(places) if not 0 < tokens - min(places) < WORTH]
        self._marks[request] = _Marks(cuts, start)

    def chunk(self, request: Request, start: int, count: int) -> int:
        """Return how many of ``count`` tokens from ``start`` on to compute, so that the step ends at a snapshot."""
        marks = self._marks.get(request)
        if marks is None:
            return count
        for tokens in marks.cuts:
            if start < tokens < start + count and self.blocks.can_keep_state(request.request_id, start, _PROMPT):
                return tokens - start
        # A chunk that ends within the prompt anyway ends with a block.
        size = self.blocks.block_size
        end = (start + count) // size * size
        is_cut = start + count < request.num_tokens
        if is_cut and self.interval is not None and end >= max(start + size, marks.last + self.interval):
            return end - start
        return count

    def keep(self, request: Request, computed: int) -> None:
        """Keep the state of a request whose step ended with a block, if a snapshot is wanted there."""
        marks = self._marks.get(request)
        if marks is None:
            marks = self._marks[request] = _Marks()
        content = request.block_hashes[computed // self.blocks.block_size - 1]
        value = self._value(request, computed)
        if not value or not self.blocks.keep_state(request.request_id, content, value):
            return
        marks.last = computed
        if value == _DECODED:
            if marks.decoded is not None:
                self.blocks.pools[-1].discard(marks.decoded)
            marks.decoded = content

    def awaits(self, request: Request) -> bool:
        """Return True if the state that the request's launched step leaves is kept when the step is settled: until
        then it must not be overwritten."""
        computed = request.num_computed_tokens
        return not computed % self.blocks.block_size and bool(self._value(request, computed))

    def due(self, request: Request, start: int) -> int:
        """Return the token count behind ``start`` where the next snapshot of a decoding request may be kept."""
        size = self.blocks.block_size
        least = max(request.num_prompt_tokens, self._marks.get(request, _NO_MARKS).last + WORTH, start + 1)
        return -(-least // size) * size

    def _value(self, request: Request, computed: int) -> int:
        """Return the value of a snapshot at that token; 0: none is wanted."""
        marks = self._marks.get(request, _NO_MARKS)
        if computed in marks.cuts:
            return _PROMPT
        if computed >= request.num_prompt_tokens and computed >= marks.last + WORTH:
            return _DECODED
        if self.interval is not None and marks.last + self.interval <= computed < request.num_prompt_tokens:
            return _WITHIN
        return 0

    def forget(self, request: Request) -> None:
        """Forget a request that has ended."""
        self._marks.pop(request, None)

    def clear(self) -> None:
        """Forget all snapshots, which no longer exist."""
        self._marks.clear()
