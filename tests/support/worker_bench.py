"""The engine's loop on a thread, at the end of a bare socket that a test writes to and reads from."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

from msgspec.msgpack import Decoder, encode

from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.serving.engine_process.framing import FrameReader
from torch_pagoda.serving.engine_process.wire import Delta, FromEngine, Hello, Step
from torch_pagoda.serving.engine_process.worker import Worker


class Bench:
    """A worker on a thread, and this side of its socket."""

    def __init__(self, engine: Engine, **options: Any) -> None:
        self.engine = engine
        self.sock, theirs = socket.socketpair()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.worker = Worker(engine, theirs, **options)
        self.exit_status: int | None = None
        self._reader = FrameReader()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.sock.settimeout(10)

    def _run(self) -> None:
        self.exit_status = self.worker.run()

    def start(self) -> Bench:
        self._thread.start()
        return self

    def send(self, message: Any) -> None:
        self.send_frame(encode(message))

    def send_frame(self, frame: bytes) -> None:
        self.sock.sendall(len(frame).to_bytes(4, "big") + frame)

    def messages(self, size: int = 2**16) -> Iterator[FromEngine]:
        decoder = Decoder(FromEngine)
        while data := self.sock.recv(size):
            yield from map(decoder.decode, self._reader.feed(data))

    def steps(self, until: str, size: int = 2**16) -> list[Step]:
        """All that come until the last delta of one of the request's prompts, or a refusal."""
        steps = []
        for message in self.messages(size):
            if isinstance(message, Hello):
                continue
            steps.append(message)
            if any(d.request_id == until and d.times is not None for d in message.deltas) or message.refused:
                return steps
        raise AssertionError("the worker has ended")

    def end(self) -> int:
        """The exit status; everything must be as it was before."""
        self._thread.join(30)
        assert not self._thread.is_alive(), "the worker hangs"
        self.sock.close()
        assert self.engine.block_manager.num_used_blocks == 0 and not self.engine.has_unfinished()
        assert not self.engine._core.state.submissions
        assert self.exit_status is not None
        return self.exit_status


def deltas(steps: list[Step]) -> list[Delta]:
    return [delta for step in steps for delta in step.deltas]
