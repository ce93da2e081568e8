"""Prefill and decode apart: an engine computes a prompt and stores its blocks, then another one generates."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from msgspec.structs import replace

from .client import DeltaStream, EngineDied, EngineUnavailable, RequestRefused
from .wire import Delta, Submit

logger = logging.getLogger(__name__)

_PREFILL_SECONDS = 60.0
"""After so long the engine that generates computes what is not stored yet."""
_LEAST_SECONDS = 1e-3


class PrefillStream(DeltaStream, Protocol):
    """The deltas of a submission whose engine stores what it computes."""

    async def stored(self) -> None:
        """Wait until the blocks that it has computed so far are in the store, or dropped; what fails raises."""


class HandOver:
    """A ``DeltaStream`` of a submission whose prompts are computed and stored by another engine first.

    Only the store connects the two: if the first engine ends, refuses or is slow, the second one computes what it
    does not find.

    Args:
        submit: the submission.
        prefill: sends a submission to an engine that stores all blocks.
        decode: sends one to an engine that reads from the same store.
    """

    def __init__(
        self, submit: Submit, prefill: Callable[[Submit], PrefillStream], decode: Callable[[Submit], DeltaStream]
    ) -> None:
        self._submit, self._prefill, self._decode = submit, prefill, decode
        self._current: DeltaStream | None = None
        self._is_cancelled = False
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())  # ``next`` may never ask

    async def next(self) -> list[Delta]:
        """See ``DeltaStream``."""
        stream = await asyncio.shield(self._task)
        return await stream.next()

    def cancel(self) -> None:
        """See ``DeltaStream``."""
        self._is_cancelled = True
        if self._current is not None:
            self._current.cancel()

    async def _run(self) -> DeltaStream:
        begin, submit = time.monotonic(), self._submit
        try:
            async with asyncio.timeout(_PREFILL_SECONDS):
                await self._compute(replace(submit, params={"max_tokens": 0}, streams=False))
        except (EngineDied, EngineUnavailable, RequestRefused, TimeoutError, ValueError) as error:
            reason = str(error) or f"it takes more than {_PREFILL_SECONDS:g} s"
            logger.warning("request %s is computed without a prefill: %s", submit.request_id, reason)
        if (deadline := submit.options.get("deadline")) is not None:
            left = max(deadline - (time.monotonic() - begin), _LEAST_SECONDS)
            submit = replace(submit, options={**submit.options, "deadline": left})
        try:
            stream = self._current = self._decode(submit)
        except EngineUnavailable as error:
            raise EngineDied(str(error)) from error
        if self._is_cancelled:
            stream.cancel()
        return stream

    async def _compute(self, submit: Submit) -> None:
        """Compute prompts and wait until they are stored."""
        stream = self._current = self._prefill(submit)
        try:
            while await stream.next():
                pass
            if not self._is_cancelled:
                await stream.stored()
        finally:
            stream.cancel()
