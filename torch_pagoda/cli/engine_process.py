"""The engine process of ``pagoda serve``: loads a model and serves it over a socket."""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..serving.engine_process.wire import Start

_START_SECONDS = 60.0
_GRACE_SECONDS = 2.0


def engine_argv() -> list[str]:
    """The command that runs this file; append the file descriptor of the socket."""
    return [sys.executable, "-P", "-m", "torch_pagoda.cli.engine_process"]


def main(fd: int) -> int:
    """Serve over the socket of that file descriptor until it closes; returns the exit status."""
    # What ends a server from a terminal or a service manager ends it in order: the API process closes the socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    threading.Thread(target=_end_with, args=(sock.fileno(),), name="pagoda-watch", daemon=True).start()

    from ..serving.engine_process.wire import EXIT_BAD_MESSAGE, EXIT_DONE
    from ..serving.monitoring.logs import formatter

    try:
        start = _read_start(sock)
    except (ValueError, OSError) as error:
        print(f"pagoda: error: the engine process received an invalid start message: {error}", file=sys.stderr)
        return EXIT_BAD_MESSAGE
    if start is None:
        return EXIT_DONE
    if start.processors:  # before torch counts them
        os.sched_setaffinity(0, start.processors)
    handler = logging.StreamHandler()
    handler.setFormatter(formatter("json" if start.log_format == "json" else "text"))
    logging.basicConfig(level=start.log_level, handlers=[handler])

    import typer
    from transformers.utils import logging as transformers_logging

    from ..device import resolve_device
    from ..llm import LLM
    from ..runtime.processors import bind_to_node_of
    from ..serving.engine_process.worker import Worker
    from .errors import one_line_errors
    from .frozen_objects import freeze_objects
    from .phases import show_phases

    transformers_logging.disable_progress_bar()
    try:
        with one_line_errors(debug=False), show_phases(start.model):
            bind_to_node_of(resolve_device(start.options.get("device", "auto")))
            llm = LLM(start.model, start.tokenizer, **start.options)
            publisher = None
            if start.kv_events is not None:
                from ..serving.engine_process.kv_events import KvEventPublisher, KvEventsConfig

                config = KvEventsConfig.from_dict(start.kv_events)
                publisher = KvEventPublisher(config, llm.block_manager.block_size, start.data_parallel_rank)
    except typer.Exit as end:
        return end.exit_code
    llm.prepare_structured_outputs()
    freeze_objects()
    worker = Worker(
        llm,
        sock,
        model=start.model,
        default_params=llm.recommended_params,
        reports_cache=start.reports_cache,
        publisher=publisher,
    )
    return worker.run()


def _read_start(sock: socket.socket) -> Start | None:
    """The first message; None if the peer has disconnected."""
    from msgspec.msgpack import Decoder

    from ..serving.engine_process.framing import FrameReader
    from ..serving.engine_process.wire import WIRE_VERSION
    from ..serving.engine_process.wire import Start as StartMessage

    sock.settimeout(_START_SECONDS)
    reader = FrameReader()
    while data := sock.recv(2**16):
        for frame in reader.feed(data):
            start = Decoder(StartMessage).decode(frame)
            if start.version != WIRE_VERSION:
                raise ValueError(f"version={start.version} of the messages, this is {WIRE_VERSION}")
            return start
    return None


def _end_with(fd: int) -> None:
    """Kill this process if the peer disconnects, even while it loads or runs a long step, unless it ends by
    itself."""
    poll = select.poll()
    poll.register(fd, 0)  # only what is always reported: that the other side hung up
    poll.poll()
    time.sleep(_GRACE_SECONDS)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
