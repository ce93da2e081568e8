"""The lifecycle of one server: socket, connections, signals, drain."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI

from .engine_process.client import EngineClient, EngineDied
from .engine_process.wire import Hello
from .generation.front import Front
from .http.http_protocol import uvicorn_options
from .monitoring.logs import log_throughput
from .settings import Settings

logger = logging.getLogger(__name__)

SEND_BUFFER_BYTES = 64 * 1024
"""Kernel send buffer of a connection in bytes (Linux doubles it). The default grows to megabytes for a stuck reader,
and the server would see a stream end before anybody has read it."""

_CUT_SECONDS = 2.0
"""Seconds to send the end of aborted responses."""


class StartedClient(EngineClient, Protocol):
    """An engine that is loading or ready."""

    async def wait_ready(self) -> Hello:
        """Wait until the engine accepts submissions; raises ``EngineDied``."""
        ...

    async def wait_dead(self) -> None:
        """Wait until the engine has ended for good."""
        ...


class Server:
    """Serves an application until a signal, or the end of its engine.

    Args:
        app: the application of ``make_app``.
        client: the client of its engine.
        settings: the server's settings.
        sock: bound, from ``bind``; None with ``uds``.
        tls: ``ssl_*`` keywords of ``uvicorn.Config``.
    """

    def __init__(
        self,
        app: FastAPI,
        client: StartedClient,
        settings: Settings,
        sock: socket.socket | None,
        tls: dict[str, Any] | None = None,
    ) -> None:
        self._client, self._settings, self._sock = client, settings, sock
        self._front: Front = app.state.front
        options = uvicorn_options(settings) | (tls or {})
        if sock is None:
            options["uds"] = settings.uds
        self._uvicorn = _Uvicorn(uvicorn.Config(app, **options))
        self._scheme = "https" if (tls or {}).get("ssl_certfile") else "http"
        self._stop: asyncio.Queue[signal.Signals] = asyncio.Queue()

    @property
    def address(self) -> str:
        """The address as a URL or path."""
        if self._sock is None:
            return f"unix:{self._settings.uds}"
        host, port = self._sock.getsockname()[:2]
        return f"{self._scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    async def run(self, on_ready: Callable[[str], None]) -> int:
        """Serve; returns the exit status: 0 after a signal, 1 if the engine ended.

        Args:
            on_ready: called with the address when the server accepts requests.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.put_nowait, number)
        self._front.grammars.prepare()  # while the engine loads
        serving = asyncio.create_task(self._uvicorn.serve(sockets=None if self._sock is None else [self._sock]))
        background = [
            asyncio.create_task(self._front.metrics.sample_event_loop_lag()),
            asyncio.create_task(log_throughput(self._client)),
        ]
        try:
            return await self._until_the_end(serving, on_ready)
        finally:
            for task in background:
                task.cancel()
            self._uvicorn.should_exit = self._uvicorn.force_exit = True
            await self._client.close()
            with suppress(Exception):
                await serving
            self._front.close()
            if self._sock is None and self._uvicorn.started and self._settings.uds is not None:
                with suppress(OSError):
                    os.unlink(self._settings.uds)
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def _until_the_end(self, serving: asyncio.Task[None], on_ready: Callable[[str], None]) -> int:
        stop = asyncio.create_task(self._stop.get())
        ready = asyncio.create_task(self._client.wait_ready())
        dead = asyncio.create_task(self._client.wait_dead())
        try:
            await asyncio.wait((stop, ready, dead, serving), return_when=asyncio.FIRST_COMPLETED)
            if not stop.done() and not serving.done():
                try:
                    await ready
                except EngineDied as error:
                    logger.error("%s", error)
                    return 1
                on_ready(self.address)
                await asyncio.wait((stop, dead, serving), return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                await self._drain(stop.result())
                return 0
            if not serving.done():
                logger.error("the engine has ended and is not restarted")
                await asyncio.sleep(_CUT_SECONDS / 4)  # for the last events of its streams
            return 1
        finally:
            for task in (stop, ready, dead):
                task.cancel()

    async def _drain(self, number: signal.Signals) -> None:
        """Let requests in progress finish, until the timeout or a second signal."""
        seconds = self._settings.shutdown_timeout if number == signal.SIGTERM else 0.0
        front = self._front
        front.begin_drain()
        count = front.admission.num_requests
        logger.info("%s: %d requests in progress have %g s to finish", number.name, count, seconds)
        loop = asyncio.get_running_loop()
        closing = loop.call_later(min(self._settings.listen_while_draining, seconds), self._uvicorn.stop_listening)
        again = asyncio.create_task(self._stop.get())
        drained = asyncio.create_task(front.drained())
        try:
            await asyncio.wait((again, drained), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if not drained.done():
                front.cut()
                await asyncio.wait((drained,), timeout=_CUT_SECONDS)
        finally:
            closing.cancel()
            again.cancel()
            drained.cancel()
        self._uvicorn.should_exit = True


class _Uvicorn(uvicorn.Server):
    """A uvicorn server without signal handlers."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        """No-op: ``Server`` handles signals."""
        yield

    def stop_listening(self) -> None:
        """Stop accepting connections."""
        for server in self.servers:
            server.close()


def bind(settings: Settings) -> socket.socket | None:
    """A socket that listens at the settings' address; None for a Unix socket.

    Raises:
        ValueError: cannot listen on the address; one line with the remedy.
    """
    if settings.uds is not None:
        return None
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        sock = socket.socket(family, kind, protocol)
        with ExitStack() as stack:
            stack.callback(sock.close)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # of its connections
            sock.bind(address)
            stack.pop_all()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(
            f"cannot listen on --host {settings.host} --port {settings.port}: {reason}; choose others, "
            "or --port 0 for any free port"
        ) from error
    sock.set_inheritable(False)
    return sock
