"""An engine in a process of its own, restarted when it dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from ...runtime.process_state import StoppedProcesses
from ...runtime.restart_limit import RestartLimit
from .socket_client import SocketClient
from .supervisor import EngineProcess
from .wire import Start

logger = logging.getLogger(__name__)

_WATCH_SECONDS = 0.5


class ProcessClient(SocketClient):
    """An ``EngineClient`` that starts an engine process, watches it, restarts it and ends it.

    If the first engine dies before it is ready, it is not restarted: the cause would still be there.

    Args:
        argv: the command of the engine process; the file descriptor of its socket is appended.
        start: the model and options to load.
        restarts: the allowed restarts; None: three in ten minutes.
        load_seconds: maximum seconds until the engine is ready.
        end_seconds: seconds that the process has to exit before it is killed.
    """

    def __init__(
        self,
        argv: Sequence[str],
        start: Start,
        *,
        restarts: RestartLimit | None = None,
        load_seconds: float = 3600.0,
        end_seconds: float = 10.0,
    ) -> None:
        super().__init__()
        self._argv = list(argv)
        self._start = start
        self._restarts = RestartLimit() if restarts is None else restarts
        self._load_seconds = load_seconds
        self._end_seconds = end_seconds
        self._process: EngineProcess | None = None
        self._is_lost = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The process id; None while there is no process."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the process; ``wait_ready`` waits until it accepts submissions.

        Raises:
            OSError: the process could not be started.
        """
        self._launch()
        self._task = asyncio.create_task(self._supervise(), name="pagoda-engine-supervisor")

    async def close(self) -> None:
        """End the process and wait for its end; running requests fail with ``EngineDied``."""
        self._set_state("dead")
        self._disconnect("the engine was closed")
        self._is_lost.set()
        if self._task is not None:
            await asyncio.shield(self._task)

    def _launch(self) -> None:
        self._is_lost.clear()
        self._process = EngineProcess(self._argv)
        self._connect(self._process.sock).send(self._start)

    async def _supervise(self) -> None:
        try:
            while self._process is not None:
                process = self._process
                await self._watch(process)
                status = await process.end(self._end_seconds)
                self._process = None
                if self._state == "dead":
                    return
                if self._hello is None or not self._restarts.allows_one():
                    logger.error("the engine process ended with status %d and is not restarted", status)
                    return
                logger.warning("the engine process ended with status %d; restarting it", status)
                self._counters.restart()
                self._launch()
        except Exception:
            logger.exception("the engine process could not be restarted")
        finally:
            if self._process is not None:
                self._process.kill()
            self._set_state("dead")
            self._disconnect("the engine has ended")

    async def _watch(self, process: EngineProcess) -> None:
        """Wait until the engine is lost: it says so, it has ended or is stopped, or it is not ready in time."""
        stopped = StoppedProcesses()
        deadline = asyncio.get_running_loop().time() + self._load_seconds
        while not self._is_lost.is_set():
            try:
                await asyncio.wait_for(self._is_lost.wait(), _WATCH_SECONDS)
            except TimeoutError:
                if process.exit_status is not None:  # a process that it left behind may hold the socket open
                    self._lose("the engine has ended")
                elif stopped.look(process.pid):
                    self._lose("the engine was stopped by a signal")
                    process.kill()  # it would not end by itself
                elif self._state == "loading" and asyncio.get_running_loop().time() > deadline:
                    self._lose(f"the engine was not ready after {self._load_seconds:g} s")

    def _lost(self) -> None:
        self._is_lost.set()
