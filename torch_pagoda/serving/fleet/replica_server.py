"""The replica's side: one engine that serves the fronts of a fleet, whatever carries their messages."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress

from msgspec.msgpack import Decoder, Encoder
from msgspec.structs import replace

from ..engine_process.client import DeltaStream, EngineDied, EngineUnavailable, RequestRefused
from ..engine_process.socket_client import SocketClient
from ..engine_process.wire import Answer, CacheChange, Cancel, Delta, Refused, Step, Submit, ToEngine

logger = logging.getLogger(__name__)

STATS_SECONDS = 0.25
"""Seconds between two messages with statistics."""
_MOST_EARLY = 1024


class ReplicaServer:
    """Serves an engine to several fronts, each over a link of its own.

    A front reads the engine's messages as the frames of ``news``: ``Hello`` first, then ``Step``, each encoded in
    msgpack. It sends its messages with ``take``.

    Args:
        client: the engine, ready; used by nobody else.
        weights: digest of the checkpoint, for ``Hello``.
        read_seconds: seconds after which ``news`` ends, to be called again.
        forget_seconds: seconds after the end of ``news`` when a front that has not called it again counts as gone.
    """

    def __init__(
        self, client: SocketClient, weights: str, *, read_seconds: float = 10.0, forget_seconds: float = 10.0
    ) -> None:
        self._client, self._weights = client, weights
        self._read_seconds, self._forget_seconds = read_seconds, forget_seconds
        self._links: dict[str, _Link] = {}
        self._cached: dict[bytes, None] = {}
        self._encoder = Encoder()
        self._decoder: Decoder[ToEngine] = Decoder(ToEngine)

    def note(self, change: CacheChange) -> None:
        """Pass on a change of the prefix cache; the engine's ``on_cache_change``."""
        if change.is_stored:
            self._cached.update(dict.fromkeys(change.hashes))
        elif change.hashes:
            for content in change.hashes:
                self._cached.pop(content, None)
        else:
            self._cached.clear()
        for link in self._links.values():
            link.put(change=change)

    async def news(self, name: str, is_new: bool) -> AsyncIterator[bytes]:
        """Frames for a front, until ``read_seconds`` have passed.

        Args:
            name: of the link.
            is_new: open it.

        Raises:
            EngineDied: the engine has ended; what it sent before has been yielded.
            ValueError: there is no such link (any more).
        """
        if is_new:
            link = self._links[name] = _Link()
            hello = self._client.hello
            yield self._encoder.encode(replace(hello, stats=dict(self._client.stats), weights=self._weights))
            if self._cached:
                yield self._encoder.encode(Step(time.monotonic(), [], cache=[CacheChange(True, [*self._cached])]))
        elif (known := self._links.get(name)) is None:
            raise ValueError(f"no link {name}")
        else:
            link = known
        end = time.monotonic() + self._read_seconds
        link.read_until = None
        try:
            while True:
                if (step := link.take(self._client.stats)) is not None:
                    yield self._encoder.encode(step)
                if self._client.state == "dead":
                    raise EngineDied("the engine of the replica has ended")
                if (left := end - time.monotonic()) <= 0:
                    return
                await link.wait(min(left, STATS_SECONDS))
        finally:
            link.read_until = time.monotonic()

    async def take(self, name: str, frame: bytes) -> None:
        """Apply a front's message; of a ``Submit``, return when it is answered.

        Raises:
            ValueError: there is no such link (any more).
        """
        link = self._links.get(name)
        if link is None:
            raise ValueError(f"no link {name}")
        message = self._decoder.decode(frame)
        if isinstance(message, Submit):
            await self._answer(link, message)
        elif isinstance(message, Cancel):
            for request_id in message.request_ids:
                link.cancel(request_id)
        else:
            try:
                link.put(answer=Answer(message.call_id, await self._client.ask(message.what)))
            except (EngineUnavailable, TimeoutError, ValueError) as error:
                link.put(answer=Answer(message.call_id, error=str(error)))

    def forget_fronts(self) -> None:
        """Cancel what fronts asked for that are gone."""
        now = time.monotonic()
        for name, link in list(self._links.items()):
            if link.read_until is not None and now - link.read_until > self._forget_seconds:
                logger.warning("a front is gone; its %d requests are cancelled", len(link.streams))
                del self._links[name]
                for stream in link.streams.values():
                    stream.cancel()

    async def _answer(self, link: _Link, submit: Submit) -> None:
        request_id = submit.request_id
        try:
            stream = self._client.submit(submit)
        except (EngineUnavailable, ValueError) as error:
            code = "queue_full" if isinstance(error, EngineUnavailable) else "invalid"
            link.put(refused=Refused(request_id, code, str(error)))
            return
        link.add(request_id, stream)
        try:
            while deltas := await stream.next():
                link.put(deltas=deltas)
        except RequestRefused as error:
            link.put(refused=Refused(request_id, error.code, str(error)))
        except EngineDied:
            link.put()  # ``news`` says so
        finally:
            stream.cancel()
            link.streams.pop(request_id, None)


class _Link:
    """What one front has not read yet, and its requests.

    Attributes:
        streams: of the requests under way.
        read_until: when ``news`` was read last; None while it is.
    """

    def __init__(self) -> None:
        self.streams: dict[str, DeltaStream] = {}
        self.read_until: float | None = None
        self._unread = Step(0.0, [], [], [], None, [])
        self._early: dict[str, None] = {}
        self._has_news = asyncio.Event()
        self._stats: object = None
        self._stats_sent = 0.0

    def put(
        self,
        *,
        deltas: Sequence[Delta] = (),
        refused: Refused | None = None,
        answer: Answer | None = None,
        change: CacheChange | None = None,
    ) -> None:
        """Append news, or only end ``wait``."""
        self._unread.deltas.extend(deltas)
        for item, unread in (
            *((refused, self._unread.refused), (answer, self._unread.answers), (change, self._unread.cache)),
        ):
            if item is not None:
                unread.append(item)
        self._has_news.set()

    async def wait(self, seconds: float) -> None:
        """Wait for news."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._has_news.wait(), seconds)

    def add(self, request_id: str, stream: DeltaStream) -> None:
        """Note a request; its cancellation may have come before it."""
        self.streams[request_id] = stream
        if request_id in self._early:
            del self._early[request_id]
            stream.cancel()

    def cancel(self, request_id: str) -> None:
        """Cancel a request, which may come later: messages keep no order."""
        if (stream := self.streams.get(request_id)) is not None:
            stream.cancel()
            return
        self._early[request_id] = None
        if len(self._early) > _MOST_EARLY:
            del self._early[next(iter(self._early))]

    def take(self, stats: Mapping[str, int | float]) -> Step | None:
        """Return the news as one message, now and then with the engine's statistics; None: there are none."""
        unread, now, sent = self._unread, time.monotonic(), None
        if stats is not self._stats and now - self._stats_sent >= STATS_SECONDS:
            self._stats, self._stats_sent = stats, now
            sent = dict(stats)
        elif not self._has_news.is_set():
            return None
        self._has_news.clear()
        self._unread = Step(0.0, [], [], [], None, [])
        return replace(unread, time=now, stats=sent)
