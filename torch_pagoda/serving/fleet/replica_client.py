"""The front's side of a link to a replica."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import Protocol

from msgspec import DecodeError
from msgspec.msgpack import Decoder, Encoder

from ..engine_process.client import EngineState
from ..engine_process.counters import COUNTERS
from ..engine_process.socket_client import SocketClient
from ..engine_process.wire import Cancel, FromEngine, Hello, Refused, Step, Submit, ToEngine

logger = logging.getLogger(__name__)

SAY_SECONDS = 5.0
"""Seconds between two messages of a front that has nothing else to say."""
_AGAIN_SECONDS = 0.5


class NotThisReplica(RuntimeError):
    """A message has reached another replica than the one that it was sent to, which is leaving or gone."""


class Replica(Protocol):
    """A ``ReplicaServer`` elsewhere; see there. What fails on the way raises."""

    name: str

    def news(self, link: str) -> AsyncIterator[bytes]: ...

    async def take(self, link: str, frame: bytes) -> None: ...


class ReplicaClient(SocketClient):
    """An ``EngineClient`` of one replica of a fleet at a time.

    While it has none, its state is ``"loading"``; its counters go on with the next one.

    Args:
        refusal: called with this object and what the replica says first; returns why it cannot be used, or None.
    """

    def __init__(self, refusal: Callable[[ReplicaClient, Hello], str | None]) -> None:
        super().__init__()
        self._refusal = refusal
        self.replica: Replica | None = None
        self._greeted: Replica | None = None
        self._is_leaving = False
        self._again: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """No-op: ``join`` names the replica."""

    @property
    def state(self) -> EngineState:
        """``"loading"`` also while the replica takes no further requests."""
        return "loading" if self._is_leaving else self._state

    @property
    def stats(self) -> Mapping[str, int | float]:
        """Without a replica, its counters only."""
        stats = super().stats
        if self._state == "ready":
            return stats
        return {name: value for name, value in stats.items() if name in COUNTERS or name == "restarts"}

    def join(self, replica: Replica) -> None:
        """Open a link to a replica, and again if that is lost, until ``leave``."""
        if self._hello is not None:
            self._counters.restart()
        self.replica = replica
        self._link()

    def leave(self) -> None:
        """Send the replica nothing more, and close the link when what is under way has ended."""
        self._is_leaving = True
        self._leave_if_idle()

    async def close(self) -> None:
        self._set_state("dead")
        self._disconnect("the front was closed")
        if self._again is not None:
            self._again.cancel()

    def _link(self) -> None:
        self._again = None
        if self.replica is not None and self._state != "dead":
            self._connection = _Link(self.replica, self)

    def _greet(self, hello: Hello) -> None:
        if (reason := self._refusal(self, hello)) is None:
            if self.replica is self._greeted:
                self._counters.resume()
            self._greeted = self.replica
            super()._greet(hello)
            return
        logger.error("%s", reason)
        self._disconnect(reason)
        self._free()

    def _lost(self) -> None:
        if self._is_leaving:
            self._free()
        else:
            self._again = asyncio.get_running_loop().call_later(_AGAIN_SECONDS, self._link)

    def _take_step(self, step: Step) -> None:
        super()._take_step(step)
        if self._is_leaving:
            self._leave_if_idle()

    def _leave_if_idle(self) -> None:
        if not self._streams:
            if self._again is not None:
                self._again.cancel()
            self._set_state("loading")
            self._disconnect("the replica has left the fleet")
            self._free()

    def _free(self) -> None:
        self.replica, self._is_leaving = None, False

    def take(self, message: FromEngine) -> None:
        """Take a message of the link."""
        self._take(message)

    def lose(self, reason: str) -> None:
        """Note that the link is lost."""
        self._lose(reason)


class _Link:
    """A ``Connection`` to a replica.

    Args:
        replica: the other side.
        client: takes messages and the loss.
    """

    def __init__(self, replica: Replica, client: ReplicaClient) -> None:
        self._replica, self._client = replica, client
        self._name = uuid.uuid4().hex
        self._encoder = Encoder()
        self._decoder: Decoder[FromEngine] = Decoder(FromEngine)
        self._is_open = True
        self._sending: set[asyncio.Task[None]] = set()
        self._tasks = (asyncio.create_task(self._read()), asyncio.create_task(self._say_so()))

    def send(self, message: ToEngine) -> None:
        """Send a message; messages may overtake each other."""
        task = asyncio.create_task(self._send(message, self._encoder.encode(message)))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    def close(self) -> None:
        """Read and send nothing more; the replica cancels what was asked for."""
        self._is_open = False
        for task in self._tasks:
            task.cancel()

    async def _say_so(self) -> None:
        """Let the replica know that this front is there."""
        while True:
            await asyncio.sleep(SAY_SECONDS)
            with suppress(Exception):  # ``_read`` sees why
                await self._replica.take(self._name, b"")

    async def _send(self, message: ToEngine, frame: bytes) -> None:
        try:
            await self._replica.take(self._name, frame)
        except NotThisReplica as error:
            if isinstance(message, Submit):
                self._take(Step(time.monotonic(), [], [Refused(message.request_id, "queue_full", str(error))]))
        except Exception as error:
            if not isinstance(message, Cancel):
                self._lose(error)

    async def _read(self) -> None:
        try:
            async for frame in self._replica.news(self._name):
                self._take(self._decoder.decode(frame))
            self._lose("it has forgotten this front")
        except DecodeError as error:
            self._lose(f"it sent an invalid message ({error})")
        except Exception as error:
            self._lose(error)

    def _take(self, message: FromEngine) -> None:
        if self._is_open:
            self._client.take(message)

    def _lose(self, reason: object) -> None:
        if self._is_open:
            first = str(reason).strip().splitlines()[-1:] or [type(reason).__name__]
            self._client.lose(f"replica {self._replica.name} is lost: {first[0]}")
