"""The engine as the API process sees it: submissions in, merged deltas out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

from .wire import Delta, Hello, Submit

EngineState = Literal["loading", "ready", "dead"]
"""``"dead"``: it ended and does not come back; while a new one is started it is ``"loading"``."""


class EngineUnavailable(RuntimeError):
    """Nothing can be submitted: the engine loads or is dead; ``state`` says which."""

    def __init__(self, state: EngineState, message: str) -> None:
        super().__init__(message)
        self.state = state


class EngineDied(RuntimeError):
    """The engine ended while a request was under way."""


class RequestRefused(ValueError):
    """The engine did not take a submission.

    Attributes:
        code: as in ``wire.Refused``.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class DeltaStream(Protocol):
    """The deltas of one submission."""

    async def next(self) -> list[Delta]:
        """Wait for news; returns all of it, in at most one delta for each completion.

        What comes while nobody waits is merged, so a slow reader holds no more than the text itself. After the last
        delta of every completion nothing more comes.

        Raises:
            RequestRefused: with the first call, if at all.
            EngineDied: the engine ended; what it had sent has been returned by earlier calls.
        """
        ...

    def cancel(self) -> None:
        """Say that nobody reads any more; nothing happens when it has ended. Its blocks are free a step later."""
        ...


class EngineClient(Protocol):
    """One engine, wherever it runs. All of it is called from one event loop."""

    @property
    def state(self) -> EngineState:
        """Whether it takes submissions."""
        ...

    @property
    def hello(self) -> Hello:
        """Facts about the engine; raises ``EngineUnavailable`` before the first one was ready."""
        ...

    @property
    def stats(self) -> Mapping[str, int | float]:
        """The latest figures; those that count up go on counting when the engine is started again.

        See ``Engine.stats``; and ``restarts``, how often a new engine was started.
        """
        ...

    @property
    def seconds_since_heard(self) -> float:
        """Seconds since the engine last said anything (0 if nothing was expected of it)."""
        ...

    def submit(self, submit: Submit) -> DeltaStream:
        """Send a submission; refusals come with the stream's first ``next``.

        Raises:
            EngineUnavailable: it loads or is dead.
        """
        ...

    async def ask(self, what: str, timeout: float = 10.0) -> Any:
        """Ask the engine, see ``wire.Ask``.

        Raises:
            EngineUnavailable: it loads or is dead.
            TimeoutError: no answer came in time.
        """
        ...

    async def close(self) -> None:
        """End the engine and wait for that."""
        ...
