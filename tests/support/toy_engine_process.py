"""An engine process that serves the toy program; ``Start.options`` are the engine's, and ``step_seconds``."""

from __future__ import annotations

import signal
import socket
import sys
import time

from msgspec.msgpack import Decoder

from torch_pagoda.runtime.serving.engine_process.framing import FrameReader
from torch_pagoda.runtime.serving.engine_process.wire import Start
from torch_pagoda.runtime.serving.engine_process.worker import Worker


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
    program = ToyProgram(vocab_size=258)
    program.before_call = lambda tokens: time.sleep(seconds)
    return Worker(toy_engine(program, **options), sock, model=start.model).run()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
