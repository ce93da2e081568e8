"""The replica's side: one engine that serves the fronts of a fleet, whatever carries their messages."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
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
    msgpack. It sends its messages with ``take``, and an empty one now and then.

    Args:
        client: the engine, ready; used by nobody else.
        weights: digest of the checkpoint, for ``Hello``.
        forget_seconds: seconds after the last message of a front when it counts as gone.
    """

    def __init__(self, client: SocketClient, weights: str, forget_seconds: float) -> None:
        self._client, self._weights, self._forget_seconds = client, weights, forget_seconds
        self._links: dict[str, _Link] = {}
        self._cached: dict[bytes, None] = {}
        self._encoder = Encoder()
        self._decoder: Decoder[ToEngine] = Decoder(ToEngine)
        client.on_cache_change = self._note

    async def news(self, name: str) -> AsyncGenerator[bytes, None]:
        """Open a link and yield its frames; when the reader ends this, what the front asked for is cancelled.

        Args:
            name: of the link.

        Raises:
            EngineDied: the engine has ended; what it sent before has been yielded.
        """
        link = self._links[name] = _Link()
        try:
            stats = self._client.stats
            yield self._encoder.encode(replace(self._client.hello, stats=dict(stats), weights=self._weights))
            if self._cached:
                link.put(change=CacheChange(True, [*self._cached]))
            while name in self._links:
                if (step := link.take(self._client.stats)) is not None:
                    yield self._encoder.encode(step)
                if self._client.state == "dead":
                    raise EngineDied("the engine of the replica has ended")
                await link.wait(STATS_SECONDS)
        finally:
            self._links.pop(name, None)
            link.cancel_all()

    async def take(self, name: str, frame: bytes) -> None:
        """Apply a front's message; of a ``Submit``, return when it is answered.

        Raises:
            ValueError: there is no such link any more.
        """
        link = self._links.get(name)
        if link is None:
            raise ValueError(f"no link {name}")
        link.heard = time.monotonic()
        if not frame:
            return
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
            if now - link.heard > self._forget_seconds:
                logger.warning("a front is gone; its requests are cancelled")
                del self._links[name]
                link.cancel_all()

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

    def _note(self, change: CacheChange) -> None:
        """Pass on a change of the prefix cache."""
        if change.is_stored:
            self._cached.update(dict.fromkeys(change.hashes))
        elif change.hashes:
            for content in change.hashes:
                self._cached.pop(content, None)
        else:
            self._cached.clear()
        for link in self._links.values():
            link.put(change=change)


class _Link:
    """What one front has not read yet, and its requests.

    Attributes:
        streams: of the requests under way.
        heard: ``time.monotonic`` of the front's last message.
    """

    def __init__(self) -> None:
        self.streams: dict[str, DeltaStream] = {}
        self.heard = time.monotonic()
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
        if refused is not None:
            self._unread.refused.append(refused)
        if answer is not None:
            self._unread.answers.append(answer)
        if change is not None:
            self._unread.cache.append(change)
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

    def cancel_all(self) -> None:
        """Cancel all requests."""
        for stream in self.streams.values():
            stream.cancel()

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
