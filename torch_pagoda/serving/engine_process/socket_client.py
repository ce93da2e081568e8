"""A client of an engine at the other end of a socket; where that engine runs is left to subclasses."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from .client import EngineDied, EngineState, EngineUnavailable, RequestRefused
from .connection import EngineConnection, NotTaken
from .counters import Counters
from .delta_stream import MergedDeltas
from .framing import FrameTooLong
from .wire import WIRE_VERSION, Answer, Ask, CacheChange, Cancel, FromEngine, Hello, Step, Submit, ToEngine

logger = logging.getLogger(__name__)


class Connection(Protocol):
    """What carries messages to an engine; see ``EngineConnection``."""

    def send(self, message: ToEngine) -> None: ...

    def close(self) -> None: ...


class SocketClient(ABC):
    """The part of an ``EngineClient`` that talks to the current engine; see there for the methods."""

    def __init__(self) -> None:
        self.on_cache_change: Callable[[CacheChange], None] | None = None
        """Called with each change of the engine's prefix cache, also when a new engine starts with an empty one."""
        self.num_prompts = 0
        """Prompts under way."""
        self._state: EngineState = "loading"
        self._hello: Hello | None = None
        self._counters = Counters()
        self._connection: Connection | None = None
        self._streams: dict[str, MergedDeltas] = {}
        self._asks: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count()
        self._heard = 0.0
        self._expected_since: float | None = None
        self._changed = asyncio.Event()

    @abstractmethod
    async def start(self) -> None:
        """Start the engine, or connect to it."""

    @abstractmethod
    async def close(self) -> None:
        """End the engine and wait for its end; running requests fail with ``EngineDied``."""

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def hello(self) -> Hello:
        if self._hello is None:
            raise EngineUnavailable(self._state, "the engine is still loading; wait until it is ready")
        return self._hello

    @property
    def stats(self) -> Mapping[str, int | float]:
        return self._counters.stats

    @property
    def stats_of_engines(self) -> Mapping[str, Mapping[str, int | float]]:
        return {"0": self._counters.stats}

    @property
    def seconds_since_heard(self) -> float:
        if self._expected_since is None:
            return 0.0
        return time.monotonic() - max(self._heard, self._expected_since)

    async def wait_ready(self) -> Hello:
        """Wait until the engine accepts submissions.

        Raises:
            EngineDied: the engine ended before it was ready, and is not restarted.
        """
        while self._state == "loading":
            self._changed.clear()
            await self._changed.wait()
        if self._state == "dead":
            raise EngineDied("the engine has ended; its log says why")
        return self.hello

    async def wait_dead(self) -> None:
        """Wait until the engine has ended for good."""
        while self._state != "dead":
            self._changed.clear()
            await self._changed.wait()

    def submit(self, submit: Submit) -> MergedDeltas:
        connection = self._ready_connection()
        if submit.request_id in self._streams:
            raise ValueError(f"request_id={submit.request_id!r} is in use; choose another")
        stream = MergedDeltas(submit.request_id, len(submit.prompts) or 1, self._cancel)
        try:
            connection.send(submit)
        except (OverflowError, UnicodeEncodeError) as error:
            stream.fail(RequestRefused("invalid", f"the request has a value that cannot be serialized: {error}"))
        except FrameTooLong as error:
            stream.fail(RequestRefused("invalid", f"the request is too long: {error}"))
        except NotTaken as error:
            stream.fail(RequestRefused("queue_full", str(error)))
        else:
            self._streams[submit.request_id] = stream
            self.num_prompts += stream.num_prompts
            self._expect()
        return stream

    async def ask(self, what: str, timeout: float = 10.0) -> Any:
        connection = self._ready_connection()
        call_id = next(self._call_ids)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asks[call_id] = future
        try:
            connection.send(Ask(call_id, what))
            self._expect()
            return await asyncio.wait_for(future, timeout)
        except NotTaken as error:
            raise TimeoutError(str(error)) from error
        finally:
            self._asks.pop(call_id, None)
            self._expect_nothing_if_so()

    def _ready_connection(self) -> Connection:
        if self._state != "ready" or self._connection is None:
            raise EngineUnavailable(self._state, f"the engine is {self._state}; try again later")
        return self._connection

    def _connect(self, sock: socket.socket) -> EngineConnection:
        """Talk to a new engine; ``_lost`` is called when it ends."""
        connection = self._connection = EngineConnection(sock, self._take, self._lose)
        return connection

    def _disconnect(self, reason: str) -> None:
        """Close the socket, which ends the engine, and fail all waiting requests."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        self._counters.end()
        streams, self._streams = self._streams, {}
        self.num_prompts = 0
        for stream in streams.values():
            stream.fail(EngineDied(reason))
        asks, self._asks = self._asks, {}
        for future in asks.values():
            if not future.done():
                future.set_exception(EngineUnavailable(self._state, reason))
        self._expected_since = None

    @abstractmethod
    def _lost(self) -> None:
        """Called when the engine has ended by itself, after all waiting requests have failed."""

    def _lose(self, reason: str) -> None:
        logger.error("%s", reason)
        self._set_state("loading")
        self._disconnect(reason)
        self._lost()

    def _set_state(self, state: EngineState) -> None:
        if self._state != "dead":
            self._state = state
            self._changed.set()

    def _take(self, message: FromEngine) -> None:
        self._heard = time.monotonic()
        if isinstance(message, Hello) != (self._state == "loading"):
            self._lose("the engine broke the protocol: its first message, and no other, must say that it is ready")
        elif isinstance(message, Hello):
            self._greet(message)
        else:
            self._take_step(message)

    def _greet(self, hello: Hello) -> None:
        if hello.version != WIRE_VERSION:
            self._lose(f"the engine uses wire version {hello.version}, this process {WIRE_VERSION}")
            return
        self._hello = hello
        self._counters.update(hello.stats)
        if self.on_cache_change is not None:
            self.on_cache_change(CacheChange(False))
        self._set_state("ready")

    def _take_step(self, step: Step) -> None:
        if step.stats is not None:
            self._counters.update(step.stats)
        streams = self._streams
        for delta in step.deltas:
            stream = streams.get(delta.request_id)
            if stream is not None:
                stream.put(delta)
                if stream.is_complete:
                    self._end(delta.request_id)
        for refused in step.refused:
            stream = self._end(refused.request_id)
            if stream is not None:
                stream.fail(RequestRefused(refused.code, refused.message))
        for answer in step.answers:
            self._take_answer(answer)
        if self.on_cache_change is not None:
            for change in step.cache:
                self.on_cache_change(change)
        self._expect_nothing_if_so()

    def _end(self, request_id: str) -> MergedDeltas | None:
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self.num_prompts -= stream.num_prompts
        return stream

    def _take_answer(self, answer: Answer) -> None:
        future = self._asks.pop(answer.call_id, None)
        if future is None or future.done():
            return
        if answer.error is None:
            future.set_result(answer.value)
        else:
            future.set_exception(ValueError(answer.error))

    def _cancel(self, request_id: str) -> None:
        if self._connection is not None and request_id in self._streams:
            try:
                self._connection.send(Cancel([request_id]))
            except NotTaken:
                logger.warning("could not cancel request %s: the engine does not read its messages", request_id)

    def _expect(self) -> None:
        if self._expected_since is None:
            self._expected_since = time.monotonic()

    def _expect_nothing_if_so(self) -> None:
        if not self._streams and not self._asks:
            self._expected_since = None
