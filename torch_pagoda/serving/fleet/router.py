"""Serve's part of the routing: it tells the front which replicas there are, and sends a call to the one that the
front has chosen by what is cached (``engine_process.routing``). Serve's router interface is alpha: all of it is here.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from .membership import tell


class BlockHashRouter(RequestRouter):
    """Sends each call to the replica that its first argument names; without one to any."""

    def initialize_state(self, **kwargs: Any) -> None:
        """No-op."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Note which replicas take calls."""
        super().update_replicas(replicas)
        tell(self._deployment_id.name, {replica.replica_id.unique_id for replica in replicas})

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the named replica; if it is gone, all others, which refuse the call."""
        name = pending_request.args[0] if pending_request is not None and pending_request.args else None
        named = [replica for replica in candidate_replicas if replica.replica_id.unique_id == name]
        return [named or candidate_replicas]
