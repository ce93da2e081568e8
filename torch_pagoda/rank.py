"""One rank of a group of processes, started by rank 0: ``python -m torch_pagoda.rank`` and numbers.

The numbers are the descriptors of the socket to rank 0 and of the file in which the ranks meet, the rank, the number
of ranks, the number of stages that they run, and the process id of rank 0. In front of them, ranks for NPUs have the
backend of their group.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from .runtime.parallel.follow import LoadProgram
    from .runtime.parallel.group import RankGroup

_PR_SET_PDEATHSIG = 1
_MEET_SECONDS = 600.0


def main(arguments: list[str], loader: Callable[[], LoadProgram]) -> int:
    """Follow rank 0 until it ends or says so; returns the exit status.

    Args:
        arguments: the numbers, and what may stand in front of them.
        loader: imports what makes this rank's program, while rank 0 compiles it.
    """
    fd, meeting, rank, size, stages, leader = map(int, arguments[-6:])
    backend: Any = arguments[:-6]
    _end_with(leader, fd)
    # Ctrl-C in a terminal reaches the whole group of processes; rank 0 decides what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    import logging

    import torch

    from .compiler.targets.npu.without_device import is_offline

    if is_offline():
        import torch_npu  # noqa: F401  before operators of its namespace are defined, which would abort the process

    from .runtime.parallel.channel import Channel
    from .runtime.parallel.device_group import meet_on_devices
    from .runtime.parallel.facts import facts
    from .runtime.parallel.follow import take_part
    from .runtime.parallel.host_group import meet_on_host

    load_program = loader()
    logging.basicConfig(format=f"[rank {rank}] %(levelname)s %(name)s: %(message)s")
    meet: Callable[[], RankGroup] = partial(meet_on_host, meeting, rank, size, stages, _MEET_SECONDS)
    if backend:
        meet = partial(meet_on_devices, meeting, rank, size, stages, _MEET_SECONDS, backend[0])
    try:
        take_part(Channel(socket.socket(fileno=fd)), meet, load_program, facts(torch.get_num_threads()))
    except BaseException:  # rank 0 was told
        return 1
    return 0


def loader() -> LoadProgram:
    """What makes this rank's part of the model that a message describes."""
    from .shipping import load_program

    return load_program


def _end_with(leader: int, fd: int) -> None:
    """Let this process end with rank 0, at once and whatever it does."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != leader:
        os._exit(0)  # it ended before

    def wait() -> None:
        poll = select.poll()
        poll.register(fd, 0)  # only what is always reported: that the other side hung up
        poll.poll()
        os._exit(0)

    threading.Thread(target=wait, name="pagoda-rank-0", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], loader))
