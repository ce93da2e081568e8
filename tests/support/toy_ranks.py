"""The toy transformer cut for several ranks, in processes; run as a script, this is one of them.

Its load message may ask for a fault: ``{"fault": [place, count, what]}`` does ``what`` to the rank that has
``fault_rank``, else the last one, when it comes to ``place`` for that time; with ``once`` only if there is a file of
that name, which it removes.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from torch_pagoda.rank import main
from torch_pagoda.runtime.cache.block_copier import BlockCopier
from torch_pagoda.runtime.ops.collectives import GROUP
from torch_pagoda.runtime.parallel.channel import Channel
from torch_pagoda.runtime.parallel.group import RankGroup
from torch_pagoda.runtime.parallel.launch import Ranks
from torch_pagoda.runtime.parallel.leader import LeaderProgram
from torch_pagoda.runtime.parallel.messages import Message
from torch_pagoda.runtime.parallel.workers import Worker
from torch_pagoda.runtime.program import KVCache
from torch_pagoda.runtime.step_metadata import StepMetadata

from toy_program import DIM, HEADS, KV_HEADS, LAYERS, ToyProgram

_at_end: list[Callable[[str], None]] = []
COMMAND = (sys.executable, str(Path(__file__)))


class RankProgram(ToyProgram):
    """One rank's heads of ``ToyProgram``, in float64: the tokens are the whole one's.

    Args:
        rank: of these heads.
        size: number of ranks; KV heads are repeated where there are too few.
        windows: as there.
    """

    def __init__(self, rank: int, size: int, windows: tuple[int, ...] = (0,) * LAYERS) -> None:
        super().__init__(windows=windows, dtype=torch.float64)
        own = HEADS // size
        heads = range(rank * own, (rank + 1) * own)
        kv_heads = sorted({head // (HEADS // KV_HEADS) for head in heads})
        rows = [*heads, *(HEADS + h for h in kv_heads), *(HEADS + KV_HEADS + h for h in kv_heads)]
        self._split = [len(heads), len(kv_heads), len(kv_heads)]
        self._qkv = [w.view(-1, DIM, w.shape[1])[rows].flatten(0, 1) for w in self._qkv]
        self._out = [w.view(w.shape[0], HEADS, DIM)[:, list(heads)].flatten(1) for w in self._out]
        self.caches = [_with_heads(spec, len(kv_heads)) for spec in self.caches]

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Callable[..., Any]) -> torch.Tensor:
        x = self._embedding[tokens] + self._positions[positions]
        for layer in range(LAYERS):
            heads = torch.nn.functional.rms_norm(x, (x.shape[-1],)) @ self._qkv[layer].T
            q, k, v = heads.view(1, len(tokens), -1, DIM).transpose(1, 2).split(self._split, 1)
            mixed = attend(layer, q, k, v).transpose(1, 2).reshape(len(tokens), -1)
            x = x + torch.ops.pagoda.all_reduce(mixed @ self._out[layer].T, GROUP)
        return x @ self._head.T


def _with_heads(spec: Any, count: int) -> Any:
    return type(spec)(count, DIM, DIM, spec.dtype, sliding_window=spec.sliding_window, group=spec.group)


def start(
    size: int = 2, *, windows: tuple[int, ...] = (0,) * LAYERS, load: Any = (), **options: Any
) -> LeaderProgram:
    """The toy on so many ranks.

    Args:
        size: number of ranks.
        windows: of its layers.
        load: further values of the message.
        options: of ``Ranks``.
    """
    ranks = Ranks(size, command=COMMAND, threads=1, **options)
    try:
        ranks.load(Message("load", {"windows": list(windows), **dict(load)}))
        return ranks.lead(RankProgram(0, size, windows))
    except BaseException:
        ranks.close()
        raise


class FaultyProgram(RankProgram):
    """One that comes to grief.

    Args:
        place: ``"load"``, ``"reserve"``, ``"bind"``, ``"step"``, ``"copies"`` or ``"end"``.
        count: at which time.
        what: ``"kill"``, ``"stop"``, ``"raise"`` or ``"exit"``.
        arguments: of ``RankProgram``.
    """

    def __init__(self, place: str, count: int, what: str, *arguments: Any) -> None:
        self.fault = place, what
        self.left = count
        self._in("load")
        super().__init__(*arguments)
        if place == "end":
            _at_end.append(self._in)
        if place == "copies":
            BlockCopier._make = self._instead(BlockCopier._make)  # type: ignore[method-assign]

    def _instead(self, make: Callable[..., None]) -> Any:
        def copies(copier: BlockCopier, copies: Any) -> None:
            self._in("copies")
            make(copier, copies)

        return copies

    def _in(self, place: str) -> None:
        self.left -= place == self.fault[0]
        if place != self.fault[0] or self.left:
            return
        what = self.fault[1]
        if what == "raise":
            raise ValueError(f"no {place} today\nand none tomorrow")
        if what == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)
        time.sleep(0.2)  # for the signal

    def reserve(self, *sizes: int) -> int:
        self._in("reserve")
        return super().reserve(*sizes)

    def bind(self, kv_cache: KVCache) -> None:
        self._in("bind")
        super().bind(kv_cache)

    def __call__(self, input_ids: torch.Tensor, position_ids: torch.Tensor, step: StepMetadata) -> torch.Tensor:
        self._in("step")
        return super().__call__(input_ids, position_ids, step)


def load_program(message: Message, group: RankGroup) -> ToyProgram:
    """The part of a rank."""
    arguments = group.rank, group.size, tuple(message.values["windows"])
    fault, once = message.values.get("fault"), message.values.get("once")
    if fault is None or group.rank != message.values.get("fault_rank", group.size - 1):
        return RankProgram(*arguments)
    if once is not None:
        if not os.path.exists(once):
            return RankProgram(*arguments)
        os.remove(once)
    return FaultyProgram(*fault, *arguments)


def run(arguments: list[str]) -> int:
    """Be one of the ranks."""
    status = main(arguments, lambda: load_program)
    for do in _at_end:
        do("end")
    return status


class Forked:
    """A fork of this process as a rank, which starts at once; stands for ``subprocess.Popen``."""

    def __init__(self, numbers: list[int]) -> None:
        self.pid = os.fork()
        self._status: int | None = None
        if self.pid:
            return
        status = 9
        try:
            for descriptor in map(int, os.listdir("/proc/self/fd")):
                if descriptor > 2 and descriptor not in numbers[:2]:
                    with suppress(OSError):
                        os.close(descriptor)
            status = run(list(map(str, numbers)))
        finally:
            os._exit(status)

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (1e9 if timeout is None else timeout)
        while self._status is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self._status = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("fork", timeout or 0.0)
            else:
                time.sleep(0.002)
        return self._status

    def kill(self) -> None:
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)


def fork_workers(
    command: object, size: int, stages: int, meeting: int, threads: int, environment: object
) -> list[Worker]:
    """Stands for ``start_workers``: forks have imported torch already."""
    workers = []
    for rank in range(1, size):
        ours, theirs = socket.socketpair()
        with theirs:
            process: Any = Forked([theirs.fileno(), meeting, rank, size, stages, os.getpid()])
        workers.append(Worker(rank, process, os.pidfd_open(process.pid), Channel(ours)))
    return workers


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
