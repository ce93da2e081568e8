"""Ray clusters of ``ray start`` on this host: as many nodes as a test asks for, and processes on them."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from served import cache_folder

BIN = Path(sys.executable).parent
PATIENCE = 180.0


def free_ports(count: int) -> list[int]:
    listening = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in listening]
    for one in listening:
        one.close()
    return ports


def processes(pid: int, mark: str) -> list[int]:
    """Ids of the descendants of a process that have a text in their commands."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        try:
            if mark in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.NoSuchProcess:
            continue
    return found


def wait_for(what: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    """What it returns, once that is true."""
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end
        time.sleep(0.3)
    return found


@contextmanager
def started(
    argv: list[str], patience: float = 30.0, end: int = signal.SIGTERM, **options: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is ended by a signal with all that it has started, which have so many seconds for that."""
    process = subprocess.Popen(argv, **options)
    try:
        yield process
    finally:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        process.send_signal(end)
        psutil.wait_procs(family, patience)
        for one in family:
            if one.is_running():
                one.kill()
        process.wait()


@dataclass(frozen=True)
class RayCluster:
    """A Ray of its own.

    Attributes:
        address: of it, for ``--address`` or RAY_ADDRESS.
        nodes: ids of the processes ``ray start``, the head's first.
    """

    address: str
    nodes: list[int]

    def processes(self, mark: str, node: int | None = None) -> list[int]:
        """Ids of those on a node, or on all, that have a text in their commands."""
        nodes = self.nodes if node is None else [self.nodes[node]]
        return [pid for own in nodes for pid in processes(own, mark)]


@contextmanager
def ray_cluster(*sizes: int) -> Iterator[RayCluster]:
    """A cluster of nodes with so many processors each; what this process starts can join it."""
    gcs, client = free_ports(2)
    address, own = f"127.0.0.1:{gcs}", ["--node-ip-address=127.0.0.1", "--disable-usage-stats", "--block"]
    head = ["--head", f"--port={gcs}", f"--ray-client-server-port={client}", "--include-dashboard=false"]
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        # Ray takes a token that it finds in the home folder, but only where it starts a cluster.
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        for name, value in {**token, "RAY_worker_niceness": "0"}.items():
            patch.setenv(name, value)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_PAGODA_CACHE": str(cache_folder())}
        cluster = RayCluster(address, [])
        for size in sizes:
            joins = [f"--address={address}"] if cluster.nodes else head
            argv = [str(BIN / "ray"), "start", f"--num-cpus={size}", *joins, *own]
            node = stack.enter_context(started(argv, 0, env=environment, stdout=subprocess.DEVNULL))
            cluster.nodes.append(node.pid)
            wait_for(lambda: cluster.processes("raylet/raylet", -1))  # two at once would take the same ports
        yield cluster
