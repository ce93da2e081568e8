"""Snapshots of states for prefix caching: where a sequence leaves its slot behind for others that begin alike.

Keys and values of a prefix can be used up to any block, a state only at the moment at which somebody kept it. A slot
is kept by leaving it: the step after reads it and writes another. So nothing is copied, but the state must be there
when a step ends: chunks of prompts are cut where a snapshot is worth another step.

Places, in the order of their value: the last block's end before a prompt's end; where a prompt leaves others whose
keys and values are there (the second that is seen makes the third a hit at that depth); while decoding, the latest
only, for the next turn of a chat; inside long prompts. The last are kept only where a chunk ends anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from ..blocks import BlockManager, Prefix
from ..requests.request import Request

WORTH: Final = 64
"""Tokens that a snapshot must save to be worth a step that ends there, and between two of a decoding sequence."""

_WITHIN, _DECODED, _PROMPT = 1, 2, 3


@dataclass(slots=True)
class _Marks:
    """Attributes:
    cuts: numbers of tokens, ascending, at which a step is to end.
    last: tokens of the last snapshot that it took or made.
    decoded: hash of the last one that it made while decoding.
    """

    cuts: list[int] = field(default_factory=list)
    last: int = 0
    decoded: bytes | None = None


_NO_MARKS = _Marks()


class Snapshots:
    """Decides where sequences leave snapshots of their states.

    Args:
        blocks: has states, and caches prefixes.
        interval: least tokens between two inside a prompt, so that they take no more bytes than the keys and values
            that they stand for; None: there are none.
    """

    def __init__(self, blocks: BlockManager, interval: int | None) -> None:
        self.blocks = blocks
        self.interval = interval
        self._marks: dict[Request, _Marks] = {}

    def begin(self, request: Request, hashes: Sequence[bytes], prefix: Prefix) -> None:
        """A request is to be computed from the prefix on that was found of it.

        Args:
            request: that is admitted.
            hashes: of its blocks that may come from the cache.
            prefix: what was found.
        """
        size = self.blocks.block_size
        start = prefix.num_blocks * size
        end = min((request.num_prompt_tokens - 1) // size, len(hashes)) * size
        places = {tokens for tokens in (prefix.known_blocks * size, end) if tokens >= start + WORTH}
        # Two that are closer than a snapshot is worth: that which others share, too.
        cuts = [tokens for tokens in sorted(places) if not 0 < tokens - min(places) < WORTH]
        self._marks[request] = _Marks(cuts, start)

    def chunk(self, request: Request, start: int, count: int) -> int:
        """Tokens to compute, of ``count`` from ``start`` on, so that the step ends where a snapshot is wanted."""
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
        """Keep the state of a request whose step has ended with a block, if it stands at one of the places."""
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
        """True if the state that the request's launched step leaves is to be kept when that is settled: it may not be
        written over before."""
        computed = request.num_computed_tokens
        return not computed % self.blocks.block_size and bool(self._value(request, computed))

    def _value(self, request: Request, computed: int) -> int:
        """The value of a snapshot at that place; 0: none is wanted."""
        marks = self._marks.get(request, _NO_MARKS)
        if computed in marks.cuts:
            return _PROMPT
        if computed >= request.num_prompt_tokens and computed >= marks.last + WORTH:
            return _DECODED
        if self.interval is not None and marks.last + self.interval <= computed < request.num_prompt_tokens:
            return _WITHIN
        return 0

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._marks.pop(request, None)

    def clear(self) -> None:
        """Nothing that was kept is there any more."""
        self._marks.clear()
