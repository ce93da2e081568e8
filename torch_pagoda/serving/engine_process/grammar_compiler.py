"""Compiles grammars for the engine on a thread, while the loop runs the steps of other requests."""

from __future__ import annotations

import logging
import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from ...runtime.engine.engine import Engine
from ...runtime.requests.sampling_params import SamplingParams
from .wire import Submit

logger = logging.getLogger(__name__)


class GrammarCompiler:
    """Compiles grammars one after the other, mostly without holding the GIL.

    Readable for a selector when a grammar is done.

    Args:
        engine: the engine that uses the grammars.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, "pagoda-engine-grammar")
        self._waiting: dict[str, Submit] = {}
        self._done: deque[tuple[str, str | None]] = deque()
        self._news, self._say = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        """The file descriptor that becomes readable."""
        return self._news

    def compile(self, submit: Submit, params: SamplingParams) -> None:
        """Start to compile the grammar of a submission."""
        self._waiting[submit.request_id] = submit
        self._thread.submit(self._compile, submit.request_id, params)

    def forget(self, request_id: str) -> bool:
        """Drop a submission; returns False if it is not queued here."""
        return self._waiting.pop(request_id, None) is not None

    def done(self) -> list[tuple[Submit, str | None]]:
        """Submissions whose grammars are compiled, or refused with a reason; each is returned once."""
        with suppress(BlockingIOError):
            os.read(self._news, 4096)
        found = []
        while self._done:
            request_id, refusal = self._done.popleft()
            submit = self._waiting.pop(request_id, None)
            if submit is not None:
                found.append((submit, refusal))
        return found

    def close(self) -> None:
        """Stop, once the selector no longer uses this object."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        os.close(self._news)
        os.close(self._say)

    def _compile(self, request_id: str, params: SamplingParams) -> None:
        refusal: str | None = "the engine failed to compile this grammar"
        try:
            if request_id in self._waiting:
                self._engine.compile_grammar(params)
            refusal = None
        except ValueError as error:
            refusal = str(error)
        except BaseException:  # a panic of llguidance is not an Exception; whoever waits must hear of it
            logger.exception("failed to compile a grammar")
        self._done.append((request_id, refusal))
        with suppress(BlockingIOError):  # where it is full it can be read already
            os.write(self._say, b"\0")
