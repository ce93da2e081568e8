"""A store in the memory of Mooncake's clients, which a Mooncake master leads.

The client runs in a process of its own (see ``mooncake_process``): it holds the interpreter's lock while it connects,
waits up to 90 s for a master that is away, and ends the process on some errors.
"""

from __future__ import annotations

import importlib.util
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar
from urllib.parse import SplitResult

from .entries import HEAD_SIZE, Seal
from .mooncake_process import Failed, Op, receive, send

logger = logging.getLogger(__name__)

DEFAULT_SIZE = 1 << 30
LEAST_SIZE = 16 << 20
"""Bytes of memory that Mooncake takes at least."""
_IMPORT_SECONDS, _SETUP_SECONDS, _ANSWER_SECONDS, _CLOSE_SECONDS = 60.0, 10.0, 2.0, 3.0
_RETRY_SECONDS = 5.0
"""Time without a question to a store that did not answer."""
_REMEDY = (
    "run: pip install 'torch-pagoda[mooncake]' and, on Debian, apt-get install libibverbs1 libnl-3-200 "
    "libnl-route-3-200"
)

T = TypeVar("T")


class MooncakeStore:
    """Entries as objects of Mooncake's store; see ``BlockStore``.

    Args:
        address: ``mooncake://host[:port]`` of the master.
        seal: names and seals the entries.
        size: bytes of memory that this process adds to the store while it lives; None: ``DEFAULT_SIZE``.

    Raises:
        ValueError: the package or a library of it is missing, or the size is too small.
    """

    def __init__(self, address: SplitResult, seal: Seal, size: int | None) -> None:
        size = DEFAULT_SIZE if size is None else size
        if size < LEAST_SIZE:
            raise ValueError(f"kv_store_size={size} is less than Mooncake takes; use at least {LEAST_SIZE} (16MiB)")
        self.num_damaged = 0
        self._name = f"{address.hostname}:{address.port or 50051}"
        if importlib.util.find_spec("mooncake") is None:
            raise ValueError(f"kv_store=mooncake://{self._name} needs a package; {_REMEDY}")
        self._seal, self._size = seal, size
        self._away_until = 0.0
        self._was_away = False
        self._lock = threading.Lock()  # of the process and its socket: it answers one question after the other
        try:
            self._start()
        except (OSError, Failed) as error:
            raise ValueError(f"kv_store=mooncake://{self._name} cannot be used: {error}; {_REMEDY}") from None

    def known(self, keys: Sequence[bytes]) -> list[bool]:
        def ask() -> list[bool]:
            _, answer = self._answer(Op.KNOWN, b"".join(map(self._key, keys)))
            if len(answer) != len(keys):
                raise Failed("a wrong number of answers")
            return [found == 1 for found in answer]

        return self._asked(ask, [False] * len(keys))

    def load(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        return [self._asked(partial(self._load, key, part), False) for key, part in zip(keys, into, strict=True)]

    def _load(self, key: bytes, part: memoryview) -> bool:
        name, size = self._key(key), HEAD_SIZE + part.nbytes
        op, entry = self._answer(Op.LOAD, name)
        if op is Op.ABSENT:
            return False
        content = memoryview(entry)[HEAD_SIZE:]
        if len(entry) != size or not self._seal.fits(entry[:HEAD_SIZE], key, content):
            self.num_damaged += 1
            self._answer(Op.REMOVE, name)
            return False
        part[:] = content
        return True

    def store(self, keys: Sequence[bytes], parts: Sequence[memoryview]) -> int:
        return sum([self._asked(partial(self._write, key, part), 0) for key, part in zip(keys, parts, strict=True)])

    def _write(self, key: bytes, part: memoryview) -> int:
        op, _ = self._answer(Op.STORE, self._key(key), self._seal.head(key, part), part)
        return HEAD_SIZE + part.nbytes if op is Op.DONE else 0

    def close(self) -> None:
        with self._lock:
            self._socket.close()  # the process gives back the memory that it added, and ends
            try:
                self._process.wait(_CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                self._end()

    def _key(self, key: bytes) -> bytes:
        return self._seal.name(key).encode()

    def _start(self) -> None:
        """Start the process, which begins to connect."""
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", f"{__package__}.mooncake_process"]
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), self._name, str(self._size)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a line for each error of each entry
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._is_connected = False
        try:
            self._receive(_IMPORT_SECONDS)
        except (OSError, Failed):
            self._end()
            raise

    def _end(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _answer(self, op: Op, *parts: bytes | memoryview) -> tuple[Op, bytearray]:
        if not self._is_connected:
            self._receive(_SETUP_SECONDS)
            self._is_connected = True
        self._socket.settimeout(_ANSWER_SECONDS)
        send(self._socket, op, *parts)
        return self._receive(_ANSWER_SECONDS)

    def _receive(self, seconds: float) -> tuple[Op, bytearray]:
        self._socket.settimeout(seconds)
        op, content = receive(self._socket)
        if op is Op.FAILED:
            raise Failed(content.decode(errors="replace"))
        return op, content

    def _asked(self, ask: Callable[[], T], otherwise: T) -> T:
        """Ask the process; returns ``otherwise`` if the store is away, and does not ask for a while then."""
        with self._lock:
            if time.monotonic() < self._away_until:
                return otherwise
            try:
                if self._process.poll() is not None:
                    self._end()
                    self._start()
                answer = ask()
            except (OSError, Failed) as error:
                self._end()
                self._away_until = time.monotonic() + _RETRY_SECONDS
                if not self._was_away:
                    logger.warning("the KV store at %s failed with %s", self._name, error or type(error).__name__)
                self._was_away = True
                return otherwise
            self._was_away = False
            return answer
