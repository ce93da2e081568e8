"""Compiles requests' grammars before submission, so that a bad one is refused at once, with the reason."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ...runtime.structured.grammar import check_structured
from ...runtime.structured.vocabulary import prepare_vocabulary
from ..http.errors import ApiError

logger = logging.getLogger(__name__)

MAX_SECONDS = 5.0
"""Maximum seconds for one grammar; llguidance's own limits end most slow ones earlier."""
MAX_SECONDS_IN_QUEUE = 10.0
MAX_WAITING = 64
"""Maximum grammars in compilation; cached ones take microseconds."""
_AT_A_TIME = 2


class Grammars:
    """Compiles grammars of requests, off the event loop.

    Args:
        tokenizer: the engine's; None: refuse every grammar.
        observe: called with the seconds of each compilation.
    """

    def __init__(self, tokenizer: Any, observe: Callable[[float], None] = lambda seconds: None) -> None:
        self._tokenizer, self._observe = tokenizer, observe
        self._pool = ThreadPoolExecutor(_AT_A_TIME, thread_name_prefix="pagoda-grammar")
        self._free = asyncio.Semaphore(_AT_A_TIME)
        self._waiting = 0

    def prepare(self) -> None:
        """Prepare the vocabulary for the first grammar, on a thread; see ``prepare_vocabulary``."""
        if self._tokenizer is not None:
            self._pool.submit(prepare_vocabulary, self._tokenizer)

    async def check(self, structured_outputs: object) -> list[str]:
        """Compile one grammar.

        Args:
            structured_outputs: as for ``SamplingParams``.

        Returns:
            Warnings: parts of a schema that are not enforced.

        Raises:
            ApiError: 400, it cannot be enforced; 429, too many are in compilation.
        """
        if self._tokenizer is None:
            text = "structured outputs need a tokenizer, which this server does not have"
            raise ApiError(400, "unsupported_parameter", text)
        if self._waiting >= MAX_WAITING:
            raise _busy()
        self._waiting += 1
        try:
            await asyncio.wait_for(self._free.acquire(), MAX_SECONDS_IN_QUEUE)
        except TimeoutError:
            raise _busy() from None
        finally:
            self._waiting -= 1
        begin = time.perf_counter()
        work = asyncio.get_running_loop().run_in_executor(
            self._pool, check_structured, structured_outputs, self._tokenizer
        )
        # A thread that is given up goes on, and holds its place until it ends.
        work.add_done_callback(lambda _: self._ended(begin))
        try:
            return await asyncio.wait_for(asyncio.shield(work), MAX_SECONDS)
        except TimeoutError:
            text = f"compiling the grammar took more than {MAX_SECONDS:g} s; simplify it"
            raise ApiError(400, "invalid_schema", text, param="structured_outputs") from None
        except ValueError as error:
            raise ApiError(400, "invalid_schema", str(error), param="structured_outputs") from error

    def _ended(self, begin: float) -> None:
        self._free.release()
        self._observe(time.perf_counter() - begin)

    def close(self) -> None:
        """Stop; running compilations end by themselves."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _busy() -> ApiError:
    text = "too many grammars are being compiled; retry later"
    return ApiError(429, "queue_full", text, headers={"retry-after": "1"})
