"""``pagoda serve`` in a process, and raw connections to it."""

from __future__ import annotations

import atexit
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from functools import cache
from pathlib import Path
from typing import Any

from torch_pagoda.compiler.warm_start.file import DISABLE
from torch_pagoda.runtime.ops.native import load_kernels

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "tiny-pydoc"
PATIENCE = 120.0
FAST = ("--verify", "off", "--codegen", "none")
"""Compiling is for the tests of the compiler."""


@cache
def cache_folder() -> Path:
    """A cache for all servers of this process, with its kernels: the first server stores the program that others
    take."""
    folder = Path(tempfile.mkdtemp(prefix="pagoda-served-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = load_kernels()
    if library is not None:
        built = Path(library._name).resolve()
        (folder / "kernels").mkdir(mode=0o700)
        for file in built.parent.glob(f"{built.stem}*"):
            shutil.copy(file, folder / "kernels")
    return folder


class Served:
    """A server that has said that it takes requests."""

    def __init__(self, *options: str, command: str = "serve", port: int = 0) -> None:
        argv = [sys.executable, "-c", "from torch_pagoda.cli import main; main()", command, str(MODEL)]
        env = {name: value for name, value in os.environ.items() if name not in ("PAGODA_API_KEY", DISABLE)}
        self.process = subprocess.Popen(
            [*argv, "--port", str(port), *FAST, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**env, "OMP_NUM_THREADS": "1", "TORCH_PAGODA_CACHE": str(cache_folder())},
        )
        self._errors: list[str] = []
        self._reader = threading.Thread(target=self._read_errors, daemon=True)
        self._reader.start()
        assert self.process.stdout is not None
        self.first_line = self.process.stdout.readline()
        found = re.fullmatch(r"pagoda: serving (\S+) on (http://127\.0\.0\.1:(\d+))\n", self.first_line)
        if found is None:
            self.kill()
            raise AssertionError(f"{self.first_line!r}\n{self.errors}")
        self.name, self.url, self.port = found[1], found[2], int(found[3])

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self._errors += iter(self.process.stderr.readline, "")

    @property
    def errors(self) -> str:
        """What it has written to stderr."""
        return "".join(self._errors)

    def get(self, path: str) -> Any:
        """JSON of a path."""
        with urllib.request.urlopen(self.url + path, timeout=PATIENCE) as response:
            return json.load(response)

    def text(self, path: str) -> str:
        """Text of a path."""
        with urllib.request.urlopen(self.url + path, timeout=PATIENCE) as response:
            return str(response.read().decode())

    def figure(self, name: str) -> float:
        """A metric without labels, or with the model's alone."""
        text = self.text("/metrics")
        return float(re.search(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)[1])  # type: ignore[index]

    def becomes_idle(self) -> None:
        """Wait until no request is under way and no block is used."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            load = self.get("/load")
            if load == {"server_load": 0, "running": 0, "waiting": 0, "kv_cache_usage": 0.0}:
                return
            time.sleep(0.1)
        raise AssertionError(load)

    def connect(self) -> socket.socket:
        """A connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

    def post(self, path: str, body: dict[str, Any]) -> socket.socket:
        """A connection on which this was sent."""
        connection = self.connect()
        raw = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        return connection

    def engine_pid(self) -> int:
        """Of its only engine process."""
        import psutil

        (child,) = [
            child for child in psutil.Process(self.process.pid).children() if "engine_process" in str(child.cmdline())
        ]
        return int(child.pid)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait; returns the exit status."""
        self.process.send_signal(number)
        status = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return status

    def kill(self) -> None:
        """End it whatever it does."""
        self.process.kill()
        self.process.wait()
        self._reader.join(PATIENCE)


def read_all(connection: socket.socket) -> bytes:
    """What comes until the other side closes."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    """What comes up to and with the mark."""
    read = b""
    while mark not in read:
        part = connection.recv(65536)
        assert part, read
        read += part
    return read
