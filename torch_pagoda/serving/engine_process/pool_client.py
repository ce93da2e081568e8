"""Several engines behind one client: each request goes to the engine that has most of its prompt cached."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from msgspec.structs import replace

from ...runtime.blocks import chain_start, extend_chain
from .client import DeltaStream, EngineDied, EngineState, EngineUnavailable, RequestRefused
from .hand_over import HandOver
from .routing import PrefixRouter
from .socket_client import SocketClient
from .wire import CacheChange, Delta, Hello, Submit

logger = logging.getLogger(__name__)

_SHARED = ("block_size", "ranks", "graph_sizes", "draft_length")
_RATIOS = ("utilization", "internal_fragmentation")
"""Keys of ``Engine.stats`` that are no counts: those of the last engine stand for all, or their mean does."""


class PoolClient:
    """An ``EngineClient`` of several engines that serve the same model.

    A request whose engine ends before it has sent anything is sent to another engine; one that has streamed fails
    with ``EngineDied``. The pool is dead when all of its engines are.

    Args:
        clients: one for each engine, not started yet; ``add`` adds others.
        prefill: other engines, which compute a prompt first and store its blocks where these read them, unless one
            of these holds all of its full blocks. The pool's facts are those of its own engines, its statistics those
            of all.
    """

    def __init__(self, clients: Sequence[SocketClient], prefill: PoolClient | None = None) -> None:
        self._clients: list[SocketClient] = []
        self._prefill = prefill
        self._router = PrefixRouter()
        for client in clients:
            self.add(client)

    def add(self, client: SocketClient) -> None:
        """Add an engine."""
        number = len(self._clients)
        self._clients.append(client)
        client.on_cache_change = lambda change: self._note(number, change)

    async def start(self) -> None:
        """Start all engines; ``wait_ready`` waits until they accept submissions.

        Raises:
            OSError: a process could not be started.
        """
        for client in self._all:
            await client.start()

    @property
    def _all(self) -> list[SocketClient]:
        return self._clients if self._prefill is None else [*self._clients, *self._prefill._clients]

    @property
    def state(self) -> EngineState:
        """``"ready"`` while an engine accepts submissions, ``"dead"`` when none will."""
        states = {client.state for client in self._clients}
        return "ready" if "ready" in states else "loading" if "loading" in states else "dead"

    @property
    def hello(self) -> Hello:
        """Facts about the engines that are ready, their sequences and queues taken together; without any, about
        those that have been."""
        ready = [client for client in self._clients if client.state == "ready"]
        hellos = []
        for client in ready or self._clients:
            with suppress(EngineUnavailable):
                hellos.append(client.hello)
        if not hellos:
            raise EngineUnavailable(self.state, "the engines are still loading; wait until one is ready")
        queues = [hello.max_queue for hello in hellos]
        return replace(
            hellos[0],
            max_num_seqs=sum(hello.max_num_seqs for hello in hellos),
            max_model_len=min(hello.max_model_len for hello in hellos),
            max_queue=None if None in queues else sum(filter(None, queues)),
        )

    @property
    def stats(self) -> Mapping[str, int | float]:
        """Sums over the engines; of ratios the mean."""
        total: dict[str, int | float] = {}
        engines = self.stats_of_engines.values()
        for stats in engines:
            for name, value in stats.items():
                total[name] = value if name in _SHARED else total.get(name, 0) + value
        for name in total.keys() & set(_RATIOS):
            total[name] /= sum(name in stats for stats in engines)
        if "prefix_hit_rate" in total:
            total["prefix_hit_rate"] = total.get("prefix_hit_tokens", 0) / max(total.get("prefix_query_tokens", 0), 1)
        return total

    @property
    def stats_of_engines(self) -> Mapping[str, Mapping[str, int | float]]:
        """By the engine's number, with ``"prefill-"`` in front for those of the other pool."""
        own = {str(number): client.stats for number, client in enumerate(self._clients)}
        if self._prefill is None:
            return own
        return own | {f"prefill-{name}": stats for name, stats in self._prefill.stats_of_engines.items()}

    @property
    def seconds_since_heard(self) -> float:
        """Of the engine that was heard last."""
        ready = [client.seconds_since_heard for client in self._clients if client.state == "ready"]
        return min(ready, default=0.0)

    async def wait_ready(self) -> Hello:
        """Wait until all engines accept submissions.

        Raises:
            EngineDied: an engine ended before it was ready, or the engines have other limits.
        """
        hellos = await asyncio.gather(*(client.wait_ready() for client in self._all))
        for name in ("vocab_size", "model"):
            if len({getattr(hello, name) for hello in hellos}) > 1:
                raise EngineDied(f"the engines differ in {name}; the checkpoint changed while they loaded it")
        return self.hello

    async def wait_dead(self) -> None:
        """Wait until all engines have ended for good."""
        await asyncio.gather(*(client.wait_dead() for client in self._clients))

    def submit(self, submit: Submit) -> DeltaStream:
        if self._prefill is not None and self._prefill.state == "ready" == self.state and self._is_new(submit):
            return HandOver(submit, partial(_PoolStream, self._prefill), partial(_PoolStream, self))
        return _PoolStream(self, submit)

    def _is_new(self, submit: Submit) -> bool:
        """Whether a prompt has a full block that no engine holds, and that may be read from a cache."""
        if submit.params.get("prompt_logprobs") is not None:
            return False
        ready = [number for number, client in enumerate(self._clients) if client.state == "ready"]
        found = [self._hashes(prompt, submit) for prompt in submit.prompts]
        return any(len(hashes) > self._router.num_held(hashes, ready) for hashes in found)

    def _hashes(self, prompt: Sequence[int], submit: Submit) -> list[bytes]:
        """Of the full blocks of a prompt that an engine could find."""
        hashes: list[bytes] = []
        if size := int(next((c.stats["block_size"] for c in self._clients if "block_size" in c.stats), 0)):
            extend_chain(hashes, prompt[:-1], 0, size, chain_start(submit.options.get("cache_salt") or ""))
        return hashes

    def place(self, submit: Submit, without: Sequence[SocketClient] = ()) -> tuple[SocketClient, DeltaStream]:
        """Send a submission to the engine that the router chooses.

        Args:
            submit: the submission.
            without: engines that are not asked.

        Raises:
            EngineUnavailable: no other engine accepts submissions.
        """
        loads = [
            float(client.num_prompts) if client.state == "ready" and client not in without else None
            for client in self._clients
        ]
        if all(load is None for load in loads):
            raise EngineUnavailable(self.state, f"no engine is ready (the engines are {self.state}); try again later")
        hashes = self._hashes(submit.prompts[0], submit) if submit.prompts else []
        client = self._clients[self._router.choose(hashes, loads)]
        return client, client.submit(submit)

    async def ask(self, what: str, timeout: float = 10.0) -> list[Any]:
        """Ask all engines that are ready; returns their answers."""
        ready = [client for client in self._all if client.state == "ready"]
        if not ready:
            raise EngineUnavailable(self.state, "no engine is ready; try again later")
        return await asyncio.gather(*(client.ask(what, timeout) for client in ready))

    async def close(self) -> None:
        """End all engines and wait for their ends."""
        await asyncio.gather(*(client.close() for client in self._all))

    def _note(self, number: int, change: CacheChange) -> None:
        if change.is_stored:
            self._router.stored(number, change.hashes)
        elif change.hashes:
            self._router.removed(number, change.hashes)
        else:
            self._router.cleared(number)


class _PoolStream:
    """A ``DeltaStream`` that moves to another engine while nothing of it has been read."""

    def __init__(self, pool: PoolClient, submit: Submit) -> None:
        self._pool, self._submit = pool, submit
        self._tried: list[SocketClient] = []
        self._has_news = self._is_cancelled = False
        self._stream = self._place()

    async def next(self) -> list[Delta]:
        """See ``DeltaStream``."""
        while True:
            try:
                deltas = await self._stream.next()
            except (EngineDied, RequestRefused) as error:
                is_final = isinstance(error, RequestRefused) and error.code != "queue_full"
                if self._has_news or self._is_cancelled or is_final:
                    raise
                try:
                    self._stream = self._place()
                except EngineUnavailable:
                    raise error from None
                logger.info("request %s is sent to another engine: %s", self._submit.request_id, error)
            else:
                self._has_news = self._has_news or bool(deltas)
                return deltas

    def cancel(self) -> None:
        """See ``DeltaStream``."""
        self._is_cancelled = True
        self._stream.cancel()

    async def stored(self) -> None:
        """See ``PrefillStream``."""
        await self._tried[-1].ask("stored")

    def _place(self) -> DeltaStream:
        client, stream = self._pool.place(self._submit, self._tried)
        self._tried.append(client)
        return stream
