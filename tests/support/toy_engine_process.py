"""An engine process that serves the toy program; ``Start.options`` are the engine's, ``step_seconds``, and
``warm_when``, a file that its warm-up waits for."""

from __future__ import annotations

import signal
import socket
import sys
import time
from pathlib import Path

from msgspec.msgpack import Decoder

from torch_pagoda.serving.engine_process.framing import FrameReader
from torch_pagoda.serving.engine_process.wire import Start
from torch_pagoda.serving.engine_process.worker import Worker


def main(fd: int) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sock = socket.socket(fileno=fd)
    (frame,) = FrameReader().feed(sock.recv(2**16))
    start = Decoder(Start).decode(frame)
    from toy_client import toy_engine
    from toy_program import ToyProgram

    options = dict(start.options)
    seconds = options.pop("step_seconds", 0.0)
    warm_when = options.pop("warm_when", None)
    program = ToyProgram(vocab_size=258)

    def warm_up() -> None:
        while warm_when is not None and not Path(warm_when).exists():
            time.sleep(0.01)

    program.warm_up = warm_up  # type: ignore[attr-defined]
    program.before_call = lambda tokens: time.sleep(seconds)
    engine = toy_engine(program, **options)
    return Worker(engine, sock, model=start.model, reports_cache=start.reports_cache).run()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
