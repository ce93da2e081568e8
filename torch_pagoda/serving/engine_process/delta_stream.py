"""The deltas of one submission, merged until the reader takes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .wire import Delta

_MANY_PARTS = 64


class _Merged:
    """Several unread deltas of one completion, merged."""

    __slots__ = ("_parts", "delta")

    def __init__(self, delta: Delta) -> None:
        self.delta = delta
        self._parts: list[str] = []

    def add(self, newer: Delta) -> None:
        """Append a later delta of the same completion."""
        delta = self.delta
        if newer.text:
            self._parts.append(newer.text)
            if len(self._parts) > _MANY_PARTS:  # small strings take several times the room of their text
                self._join()
        delta.token_ids += newer.token_ids
        if newer.logprobs is not None:
            if delta.logprobs is None:
                delta.logprobs = []
            delta.logprobs += newer.logprobs
        if newer.prompt_logprobs is not None:
            delta.prompt_logprobs = newer.prompt_logprobs
        delta.finish_reason, delta.stop_reason, delta.error = newer.finish_reason, newer.stop_reason, newer.error
        delta.num_cached_tokens = newer.num_cached_tokens
        delta.times = newer.times

    def take(self) -> Delta:
        if self._parts:
            self._join()
        return self.delta

    def _join(self) -> None:
        self.delta.text = "".join([self.delta.text, *self._parts])
        self._parts.clear()


class MergedDeltas:
    """A ``DeltaStream`` filled from the same event loop.

    Args:
        request_id: id of the submission.
        num_prompts: number of its prompts.
        on_cancel: called with the id when the reader cancels.
    """

    def __init__(self, request_id: str, num_prompts: int, on_cancel: Callable[[str], None]) -> None:
        self.request_id = request_id
        self.num_prompts = num_prompts
        self._unfinished = num_prompts
        self._on_cancel = on_cancel
        self._pending: dict[tuple[int, int], Delta | _Merged] = {}
        self._failure: Exception | None = None
        self._news = asyncio.Event()

    @property
    def is_complete(self) -> bool:
        """True when every completion has had its last delta, or no more can come."""
        return self._unfinished <= 0 or self._failure is not None

    async def next(self) -> list[Delta]:
        """See ``DeltaStream``; an empty list after all deltas were read."""
        while not self._pending:
            if self._failure is not None:
                raise self._failure
            if self.is_complete:
                return []
            self._news.clear()
            await self._news.wait()
        pending, self._pending = self._pending, {}
        return [entry if isinstance(entry, Delta) else entry.take() for entry in pending.values()]

    def cancel(self) -> None:
        """See ``DeltaStream``; the last deltas, with ``"cancelled"``, can still be read."""
        if not self.is_complete:
            self._on_cancel(self.request_id)

    def put(self, delta: Delta) -> None:
        """Append a delta from the engine."""
        if self._unfinished <= 0 or self._failure is not None:
            return
        key = delta.prompt_index, delta.index
        known = self._pending.get(key)
        if known is None:
            self._pending[key] = delta
            self._news.set()
        else:
            if isinstance(known, Delta):
                known = self._pending[key] = _Merged(known)
            known.add(delta)
        if delta.times is not None:
            self._unfinished -= 1

    def fail(self, error: Exception) -> None:
        """End the stream: what has arrived can still be read, then ``error`` is raised."""
        if not self.is_complete:
            self._failure = error
            self._news.set()
