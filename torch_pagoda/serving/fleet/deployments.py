"""The deployments of a fleet on Ray Serve: engines, others that only compute prompts, the front that speaks HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from ...checkpoint.configs import load_tokenizer
from ...checkpoint.loading import checkpoint_files
from ...checkpoint.weights_digest import weights_digest
from ...runtime.parallel.ray_placement import hand_on
from ...runtime.restart_limit import RestartLimit
from ..app import load_formats, make_app
from ..engine_process.process_client import ProcessClient
from ..engine_process.wire import Hello, Start
from ..monitoring.logs import RequestLog, log_throughput, set_up_logs
from .fleet_client import FleetClient
from .membership import follow
from .plan import FleetPlan
from .replica_client import SAY_SECONDS, NotThisReplica
from .replica_server import ReplicaServer
from .router import BlockHashRouter

logger = logging.getLogger(__name__)

_HEALTH_SECONDS = 2.0
_WAIT_SECONDS = 0.5
"""Seconds between two looks at whether a deployment that drains has ended its work."""
_ENGINES, _PREFILL = "Engines", "Prefill"
"""Names of the deployments."""
_MOST_CALLS = 2**20
"""Calls of a replica at a time: the front's limits hold, not Serve's."""


class Engines:
    """A replica: one engine process, or group of ranks, that serves the fronts.

    When the engine ends, the replica is unhealthy, and Serve replaces it.
    """

    async def __init__(self, plan: FleetPlan) -> None:  # type: ignore[misc]  # Serve awaits it
        set_up_logs(plan.log_format)
        if plan.spread:
            hand_on()
        self._name = serve.get_replica_context().replica_id.unique_id
        start = Start(
            plan.model,
            plan.tokenizer,
            dict(plan.options),
            log_format=plan.log_format,
            reports_cache=plan.options.get("enable_prefix_caching", True),
        )
        self._client = ProcessClient(plan.engine_argv, start, restarts=RestartLimit(0))
        await self._client.start()
        digest = asyncio.create_task(asyncio.to_thread(_digest, plan))
        try:
            await self._client.wait_ready()
            # A front cannot reach a replica that drains, and is gone only after the time that it has for that.
            seconds = plan.settings.shutdown_timeout + 4 * SAY_SECONDS
            self._server = ReplicaServer(self._client, await digest, seconds)
        except BaseException:
            await self._client.close()
            raise

    async def news(self, replica: str, link: str) -> AsyncIterator[bytes]:
        """See ``ReplicaServer``; ``replica`` is the one that is meant."""
        self._check(replica)
        async with aclosing(self._server.news(link)) as frames:
            async for frame in frames:
                yield frame

    async def take(self, replica: str, link: str, frame: bytes) -> None:
        """See ``ReplicaServer``."""
        self._check(replica)
        await self._server.take(link, frame)

    async def greet(self) -> None:
        """No-op; a first call makes Serve tell the front which replicas there are."""

    async def check_health(self) -> None:
        """Called by Serve every two seconds; raises if the engine has ended."""
        if self._client.state == "dead":
            raise RuntimeError("the engine has ended; the log says why")
        self._server.forget_fronts()

    async def __del__(self) -> None:
        await self._client.close()

    def _check(self, replica: str) -> None:
        if replica != self._name:
            raise NotThisReplica(f"replica {replica} has left the fleet; this is {self._name}")


class Front:
    """The application of ``pagoda serve`` over the replicas."""

    async def __init__(  # type: ignore[misc]
        self, plan: FleetPlan, engines: DeploymentHandle, prefill: DeploymentHandle | None
    ) -> None:
        set_up_logs(plan.log_format)
        tokenizer = load_tokenizer(
            plan.tokenizer or plan.model, plan.options["trust_remote_code"], required=plan.tokenizer is not None
        )
        self._prefill = None if prefill is None else FleetClient(partial(_RemoteReplica, prefill))
        self._client = FleetClient(partial(_RemoteReplica, engines), self._prefill)
        self._app = make_app(
            plan.settings,
            self._client,
            tokenizer,
            formats=load_formats(plan.settings, tokenizer),
            log=RequestLog(plan.log_requests),
        )
        front = self._app.state.front
        front.grammars.prepare()
        self._tasks = [
            asyncio.create_task(front.metrics.sample_event_loop_lag()),
            asyncio.create_task(log_throughput(self._client)),
        ]
        for name, handle, client in ((_ENGINES, engines, self._client), (_PREFILL, prefill, self._prefill)):
            if handle is not None and client is not None:
                _follow(name, client)
                self._tasks.append(asyncio.create_task(_greet(handle)))

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app

    async def wait_for(self, count: int, prefill: int) -> Hello:
        """See ``FleetClient``; ``prefill`` replicas compute prompts."""
        if self._prefill is not None:
            await self._prefill.wait_for(prefill)
        return await self._client.wait_for(count)

    async def __del__(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self._client.close()
        self._app.state.front.close()


class _RemoteReplica:
    """A ``Replica`` that Serve carries the messages of."""

    def __init__(self, engines: DeploymentHandle, name: str) -> None:
        self.name = name
        self._news = engines.options(stream=True).news
        self._take = engines.take

    async def news(self, link: str) -> AsyncIterator[bytes]:
        response: Any = self._news.remote(self.name, link)
        try:
            async for frame in response:
                yield frame
        finally:
            response.cancel()

    async def take(self, link: str, frame: bytes) -> None:
        await self._take.remote(self.name, link, frame)


def application(plan: FleetPlan) -> serve.Application:
    """The application of a fleet for ``serve.run``."""
    seconds = plan.settings.shutdown_timeout
    front: Any = serve.deployment(
        serve.ingress()(Front),
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=_MOST_CALLS,
        logging_config={"enable_access_log": False},  # the front has its own
        health_check_period_s=_HEALTH_SECONDS,
        graceful_shutdown_wait_loop_s=_WAIT_SECONDS,
        graceful_shutdown_timeout_s=seconds,
    )
    prefill = None if plan.prefill is None else _engines(plan.prefill, _PREFILL)
    return front.bind(replace(plan, prefill=None), _engines(plan, _ENGINES), prefill)


def _engines(plan: FleetPlan, name: str) -> Any:
    """A deployment of engines, bound."""
    ranks = plan.spread or 1
    others = {"NPU": plan.npus / ranks} if plan.npus else {}
    places: dict[str, Any] = {}
    if plan.spread:
        places["placement_group_bundles"] = [{"CPU": plan.cpus / ranks, **others}] * ranks
    number: dict[str, Any] = {"num_replicas": plan.replicas}
    if plan.autoscaling is not None:
        number = {"autoscaling_config": {"initial_replicas": plan.replicas, **plan.autoscaling}}
    engines: Any = serve.deployment(
        Engines,
        name=name,
        **number,
        **places,
        ray_actor_options={"num_cpus": plan.cpus / ranks, "resources": others},
        max_ongoing_requests=_MOST_CALLS,
        logging_config={"enable_access_log": False},  # the front has its own
        health_check_period_s=_HEALTH_SECONDS,
        graceful_shutdown_wait_loop_s=_WAIT_SECONDS,
        graceful_shutdown_timeout_s=plan.settings.shutdown_timeout,
        request_router_config={"request_router_class": BlockHashRouter},
    )
    return engines.bind(plan)


def _follow(deployment: str, client: FleetClient) -> None:
    """Keep a client's replicas to those that a deployment has."""
    loop = asyncio.get_running_loop()
    follow(deployment, lambda names: loop.call_soon_threadsafe(client.set_replicas, names))


async def _greet(engines: DeploymentHandle) -> None:
    await engines.greet.remote()


def _digest(plan: FleetPlan) -> str:
    """A digest of the checkpoint on this host; "" if its files do not identify it."""
    model = plan.model
    if (file := plan.options.get("gguf_file")) is not None:
        model = os.path.join(model, file)
    files = checkpoint_files(model, plan.options.get("dtype", "auto"))
    if files is None:
        logger.warning("the files of %s do not identify it; the weights of replicas are not compared", model)
        return ""
    texts = repr(sorted((name, text) for name, text in files.texts.items() if name != "files"))
    return hashlib.blake2b(texts.encode() + weights_digest(files.weights), digest_size=16).hexdigest()
