"""The replicas of a fleet behind one client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection

from ..engine_process.client import EngineDied, EngineState
from ..engine_process.pool_client import PoolClient
from ..engine_process.wire import Hello
from .replica_client import Replica, ReplicaClient

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.1


class FleetClient(PoolClient):
    """An ``EngineClient`` of replicas that come and go.

    A replica that serves other weights, or with other sizes, than those before it gets no requests.

    Args:
        connect: a replica's other side, by its name.
        prefill: the replicas that compute prompts for these; see ``PoolClient``.
    """

    def __init__(self, connect: Callable[[str], Replica], prefill: FleetClient | None = None) -> None:
        super().__init__([], prefill)
        self._pools = [self] if prefill is None else [self, prefill]
        if prefill is not None:
            prefill._pools = self._pools
        self._connect = connect
        self._members: list[ReplicaClient] = []
        self.refusals: dict[str, str] = {}
        """Reasons for which replicas get no requests, by their names."""

    @property
    def state(self) -> EngineState:
        """``"loading"`` while there is no replica: Serve starts others."""
        return "ready" if any(client.state == "ready" for client in self._members) else "loading"

    def set_replicas(self, names: Collection[str]) -> None:
        """Use exactly these replicas; requests of others that are under way go on."""
        for client in self._members:
            if client.replica is not None and client.replica.name not in names:
                client.leave()
        is_used = self.state == "ready"
        self.refusals = {name: reason for name, reason in self.refusals.items() if is_used and name in names}
        known = {client.replica.name for client in self._members if client.replica is not None}
        for name in names:
            if name not in known and name not in self.refusals:
                self._free_member().join(self._connect(name))

    async def wait_for(self, count: int) -> Hello:
        """Wait until that many replicas take requests.

        Raises:
            EngineDied: one of them differs from the others.
        """
        while sum(client.state == "ready" for client in self._members) < count:
            for reason in self.refusals.values():
                raise EngineDied(reason)
            await asyncio.sleep(_POLL_SECONDS)
        return self.hello

    def _free_member(self) -> ReplicaClient:
        for client in self._members:
            if client.replica is None:
                return client
        client = ReplicaClient(self._refusal)
        self._members.append(client)
        self.add(client)
        return client

    def _refusal(self, client: ReplicaClient, hello: Hello) -> str | None:
        """The reason why a replica cannot serve beside the others; None: it can."""
        for other in (member for pool in self._pools for member in pool._members):
            if other is client or other.state != "ready":
                continue
            for what, facts in (("weights", _weights), ("block size", _block_size), ("vocabulary", _vocabulary)):
                if facts(hello) != facts(other.hello):
                    assert client.replica is not None and other.replica is not None
                    reason = (
                        f"replica {client.replica.name} differs from replica {other.replica.name} in its {what}; "
                        "give all hosts the same checkpoint and restart the fleet"
                    )
                    self.refusals[client.replica.name] = reason
                    return reason
        return None


def _weights(hello: Hello) -> object:
    return hello.model, hello.weights


def _block_size(hello: Hello) -> object:
    return hello.stats.get("block_size")


def _vocabulary(hello: Hello) -> object:
    return hello.vocab_size
