"""An engine on a thread of this process, behind the same socket and messages as one in a process of its own."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Mapping
from typing import Any

from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.serving.engine_process.socket_client import SocketClient
from torch_pagoda.serving.engine_process.worker import Worker

logger = logging.getLogger(__name__)

_END_SECONDS = 30.0


class ThreadClient(SocketClient):
    """An ``EngineClient`` on a thread, for tests.

    Args:
        engine: used by nobody else from ``start`` to ``close``; it is not shut down.
        model: name or folder, for ``hello``.
        default_params: likewise.
        worker_options: keywords of ``Worker``.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        model: str = "",
        default_params: Mapping[str, Any] | None = None,
        **worker_options: Any,
    ) -> None:
        super().__init__()
        self._engine = engine
        self._worker_options = {"model": model, "default_params": default_params, **worker_options}
        self._thread: threading.Thread | None = None

    async def start(self) -> None:
        """Start the thread and wait until it takes submissions."""
        ours, theirs = socket.socketpair()
        worker = Worker(self._engine, theirs, **self._worker_options)
        self._connect(ours)
        self._thread = threading.Thread(target=_run, args=(worker,), name="pagoda-engine", daemon=True)
        self._thread.start()
        await self.wait_ready()

    async def close(self) -> None:
        """End the thread and wait for that; what is under way fails with ``EngineDied``."""
        self._set_state("dead")
        self._disconnect("the engine was closed")
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, _END_SECONDS)
            if self._thread.is_alive():
                logger.warning("the engine's thread has not ended after %g s", _END_SECONDS)

    def _lost(self) -> None:
        self._set_state("dead")


def _run(worker: Worker) -> None:
    try:
        worker.run()
    except BaseException:
        logger.exception("the engine's thread failed")
