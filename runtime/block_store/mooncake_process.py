"""The process of a Mooncake client: answers what a ``MooncakeStore`` asks it over a socket, until that is closed.

    python -m torch_pagoda.runtime.block_store.mooncake_process DESCRIPTOR HOST:PORT SIZE

Frames: an ``Op``, the number of bytes behind it, and these. Names of entries have ``NAME_SIZE`` bytes. The first
answer says that the package is there, the second one that the master is. A signal ends the process when a call of the
client takes too long, because such a call may hold the interpreter's lock.
"""

from __future__ import annotations

import enum
import os
import signal
import socket
import struct
import sys
from typing import Any

FRAME = struct.Struct("<BQ")
NAME_SIZE = 32
_BUFFER_SIZE = 256 << 20
"""Bytes through which objects pass; what is larger is not stored. Pages that are not touched take no memory."""
_MOST_SECONDS = 15
_RPC_FAILED = -900
"""Mooncake's code where the master does not answer."""
_NO_MASTER = b"no answer from the master"


class Op(enum.IntEnum):
    """What a frame asks or answers."""

    KNOWN = 1
    LOAD = 2
    STORE = 3
    REMOVE = 4
    DONE = 5
    ABSENT = 6
    FAILED = 7


class Failed(Exception):
    """The client, or the process at the other end, failed."""


def send(sock: socket.socket, op: Op, *parts: bytes | bytearray | memoryview) -> None:
    """Send a frame."""
    sock.sendall(FRAME.pack(op, sum([memoryview(part).nbytes for part in parts])))
    for part in parts:
        sock.sendall(part)


def receive(sock: socket.socket) -> tuple[Op, bytearray]:
    """Receive a frame.

    Raises:
        Failed: the other end has closed the socket.
        TimeoutError: nothing came in the time of the socket.
    """
    op, size = FRAME.unpack(_read(sock, FRAME.size))
    return Op(op), _read(sock, size)


def _read(sock: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        count = sock.recv_into(rest)
        if not count:
            raise Failed("the end of its client")
        rest = rest[count:]
    return data


def main(descriptor: int, master: str, size: int) -> None:
    """Connect to a master, add ``size`` bytes of memory to its store, and answer."""
    sock = socket.socket(fileno=descriptor)
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        send(sock, Op.FAILED, str(error).encode())
        return
    send(sock, Op.DONE)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_MOST_SECONDS)
    client = MooncakeDistributedStore()
    if client.setup(_own_address(master), "P2PHANDSHAKE", size, _BUFFER_SIZE, "tcp", "", master):
        os._exit(1)  # a client that is not connected ends some calls with a fault
    send(sock, Op.DONE)
    while True:
        signal.alarm(0)
        try:
            op, data = receive(sock)
        except (Failed, OSError):
            break
        signal.alarm(_MOST_SECONDS)
        answer, content = _answer(client, op, data)
        send(sock, answer, content)
    signal.alarm(_MOST_SECONDS)
    client.close()
    os._exit(0)


def _own_address(master: str) -> str:
    """The address at which other clients reach this machine: the one from which the master is reached."""
    host, port = master.rsplit(":", 1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # sends nothing
        return str(probe.getsockname()[0])


def _answer(client: Any, op: Op, data: bytearray) -> tuple[Op, bytes | memoryview]:
    name = data[:NAME_SIZE].decode()
    if op is Op.KNOWN:
        names = [data[i : i + NAME_SIZE].decode() for i in range(0, len(data), NAME_SIZE)]
        found = client.batch_is_exist(names)
        return (Op.FAILED, _NO_MASTER) if _RPC_FAILED in found else (Op.DONE, bytes([code == 1 for code in found]))
    if op is Op.REMOVE:
        client.remove(name, True)
        return Op.DONE, b""
    if op is Op.STORE:
        code = client.is_exist(name) or client.put(name, memoryview(data)[NAME_SIZE:])
        if code == _RPC_FAILED:
            return Op.FAILED, _NO_MASTER
        return (Op.ABSENT if code else Op.DONE), b""
    entry = client.get_buffer(name)
    return (Op.ABSENT, b"") if entry is None else (Op.DONE, memoryview(entry))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
