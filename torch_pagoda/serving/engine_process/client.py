"""The engine as the API process sees it: submissions in, merged deltas out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

from .wire import Delta, Hello, Submit

EngineState = Literal["loading", "ready", "dead"]
"""``"dead"``: the engine has ended and is not restarted; while a new one starts, the state is ``"loading"``."""


class EngineUnavailable(RuntimeError):
    """The engine is loading or dead (see ``state``), so nothing can be submitted."""

    def __init__(self, state: EngineState, message: str) -> None:
        super().__init__(message)
        self.state = state


class EngineDied(RuntimeError):
    """The engine ended while a request was running."""


class RequestRefused(ValueError):
    """The engine rejected a submission.

    Attributes:
        code: as in ``wire.Refused``.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class DeltaStream(Protocol):
    """The deltas of one submission."""

    async def next(self) -> list[Delta]:
        """Wait for new deltas and return all of them, at most one for each completion.

        Deltas that arrive while nobody waits are merged, so a slow reader holds no more than the text itself. After
        the last delta of every completion, nothing more arrives.

        Raises:
            RequestRefused: only from the first call.
            EngineDied: the engine ended; earlier calls have returned what it sent.
        """
        ...

    def cancel(self) -> None:
        """Cancel the request, a no-op after its end. The engine frees its blocks one step later."""
        ...


class EngineClient(Protocol):
    """A client of one engine, wherever it runs. Call it from one event loop only."""

    @property
    def state(self) -> EngineState:
        """Whether the engine accepts submissions."""
        ...

    @property
    def hello(self) -> Hello:
        """Facts about the engine; raises ``EngineUnavailable`` until an engine has been ready."""
        ...

    @property
    def stats(self) -> Mapping[str, int | float]:
        """The latest statistics; counters keep counting across engine restarts.

        See ``Engine.stats``; ``restarts`` counts the engines started after the first.
        """
        ...

    @property
    def stats_of_engines(self) -> Mapping[str, Mapping[str, int | float]]:
        """The same of each engine behind this client, by its name in metrics."""
        ...

    @property
    def seconds_since_heard(self) -> float:
        """Seconds since the engine's last message (0 if no message was due)."""
        ...

    def submit(self, submit: Submit) -> DeltaStream:
        """Send a submission; a refusal is raised by the stream's first ``next``.

        Raises:
            EngineUnavailable: the engine is loading or dead.
        """
        ...

    async def ask(self, what: str, timeout: float = 10.0) -> Any:
        """Ask the engine; see ``wire.Ask``.

        Raises:
            EngineUnavailable: the engine is loading or dead.
            TimeoutError: the engine did not answer in time.
        """
        ...

    async def close(self) -> None:
        """End the engine and wait for its end."""
        ...
