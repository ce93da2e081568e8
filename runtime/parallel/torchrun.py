"""Ranks that a launcher such as ``torchrun`` has started, on one host or several, and how they find each other."""

from __future__ import annotations

import hmac
import json
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from ..process_state import process_state
from .channel import Channel
from .device_group import Backend, DeviceGroup
from .follow import LoadProgram, take_part
from .group import GroupFailed, RankGroup
from .host_group import on_host
from .stage_group import meet_in_stages
from .torch_group import TorchGroup

_OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PROOF_BYTES = 32
_PROOF_SECONDS = 10.0
_GRACE_SECONDS = 2.0
_CHECK_SECONDS = 0.2
_RANK = struct.Struct("=I")


@dataclass(frozen=True)
class Place:
    """This process among those that a launcher started.

    Attributes:
        rank: of it.
        size: number of processes.
        local_size: of them on this host.
        local_rank: of this process among these.
    """

    rank: int
    size: int
    local_size: int
    local_rank: int = 0

    @classmethod
    def of_environment(cls) -> Place:
        """The place that RANK, WORLD_SIZE and LOCAL_WORLD_SIZE name.

        Raises:
            ValueError: no launcher has set them.
        """
        if missing := [name for name in _OF_LAUNCHERS if name not in os.environ]:
            raise ValueError(
                f"distributed_executor_backend='external_launcher' needs {', '.join(missing)} in the environment; "
                "start the script by torchrun, or omit the option"
            )
        size = int(os.environ["WORLD_SIZE"])
        rank = int(os.environ["RANK"])
        local_size, local_rank = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("LOCAL_RANK")
        return cls(rank, size, int(local_size or size), int(local_rank or rank))


def host_id() -> str:
    """Names the host and the namespaces of this process: equal where processes can share memory and files."""
    spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "mnt")]
    return " ".join([Path("/proc/sys/kernel/random/boot_id").read_text().strip(), *spaces])


@dataclass(frozen=True)
class LaunchedWorker:
    """A rank that the launcher started; stands beside :class:`~.workers.Worker`.

    Attributes:
        rank: 1 or more.
        pid: of its process; 0 on another host.
        name: for messages, behind "rank n".
        channel: to it.
        pidfd: -1; its end is seen by the channel's.
    """

    rank: int
    pid: int
    name: str
    channel: Channel
    pidfd: int = -1

    @property
    def is_stopped(self) -> bool:
        """A signal or a debugger holds it up, as far as this host can tell."""
        return process_state(self.pid) in ("T", "t")

    def how_it_ended(self) -> str:
        """In words."""
        return "ended"

    def wait(self, seconds: float) -> None:
        """Wait for its end, so long at most."""
        poll = select.poll()
        poll.register(self.channel.fileno(), select.POLLRDHUP)
        poll.poll(max(seconds, 0.0) * 1000)

    def kill(self) -> None:
        """Close the channel, which ends it; the process is the launcher's."""
        self.channel.close()


class LaunchedRanks:
    """What the processes of a launcher know of each other, by its store.

    Args:
        place: of this process.
        timeout: seconds that it waits for the others.
        stages: that they run, of a pipeline.
        backend: of graphs that exchange tensors on devices, see ``DeviceGroup``; "" for CPUs.
        store: host and port of a store that rank 0 opens, on any port for 0; None: MASTER_ADDR and MASTER_PORT.

    Attributes:
        address: of this host, by which it reaches the store.
        store: host and port of the store.

    Raises:
        GroupFailed: the store cannot be reached.
    """

    def __init__(
        self,
        place: Place,
        timeout: float = 600.0,
        stages: int = 1,
        backend: Backend | Literal[""] = "",
        store: tuple[str, int] | None = None,
    ) -> None:
        self.place, self.timeout, self.stages, self.backend = place, timeout, stages, backend
        self._deadline = time.monotonic() + timeout
        try:
            found, self.store = _open_store(store, place, timedelta(seconds=timeout))
        except (dist.DistError, ValueError, OSError) as error:
            raise GroupFailed(place.rank, f"cannot reach the launcher's store: {error}") from error
        self._store: Any = dist.PrefixStore("torch_pagoda", found)
        self.address = _own_address(*self.store)
        self._listener: socket.socket | None = None
        told = [host_id(), socket.gethostname(), os.getpid()]
        self._set(f"rank {place.rank}", told)

    def start(self, check: Callable[[], None] = lambda: None) -> list[LaunchedWorker]:
        """As rank 0: channels to all others, once they have come.

        Args:
            check: called now and then; raises where it knows that one will not come.

        Raises:
            GroupFailed: they have not.
        """
        key = secrets.token_bytes(_PROOF_BYTES)
        self._listener = listener = socket.create_server((self.address, 0), backlog=self.place.size)
        self._set("rank 0's channel", [self.address, listener.getsockname()[1], key.hex()])
        listener.settimeout(_CHECK_SECONDS)
        found: dict[int, Channel] = {}
        try:
            while missing := sorted(set(range(1, self.place.size)) - set(found)):
                try:
                    sock, _ = listener.accept()
                except TimeoutError:
                    check()
                    if time.monotonic() > self._deadline:
                        raise GroupFailed(missing[0], f"did not come within {self.timeout:g} s") from None
                    continue
                rank = _prove_as_first(sock, key)
                if rank in missing:
                    found[rank] = Channel(sock)
                else:
                    sock.close()
        except BaseException:
            for channel in found.values():
                channel.close()
            raise
        return [self._worker(rank, found[rank]) for rank in sorted(found)]

    def join(self) -> Channel:
        """As another rank: the channel to rank 0.

        Raises:
            GroupFailed: it has not come.
        """
        address, port, key = self._get("rank 0's channel")
        try:
            sock = socket.create_connection((address, port), timeout=self.timeout)
            _prove_as_other(sock, bytes.fromhex(key), self.place.rank)
        except OSError as error:
            raise GroupFailed(0, f"at {address}:{port} does not answer: {error}") from error
        return Channel(sock)

    def meeting(self, timeout: float) -> Callable[[], RankGroup]:
        """What makes the group, called by all ranks at once: in shared memory if those of a stage are on one host.

        Args:
            timeout: seconds that an exchange waits for other ranks.
        """
        place = self.place

        def open_group(name: str, rank: int, size: int) -> TorchGroup:
            store = dist.PrefixStore(name, self._store)
            return TorchGroup(store, rank, size, timeout=timeout, host=self.address)

        def meet() -> RankGroup:
            control, size = open_group("group", place.rank, place.size), place.size // self.stages
            if self.backend:
                return DeviceGroup(control, self.backend, place.local_rank, timeout)
            first = place.rank - place.rank % size
            hosts = {self._get(f"rank {rank}")[0] for rank in range(first, first + size)}
            share = on_host if len(hosts) == 1 else _as_it_is
            return share(control) if self.stages == 1 else meet_in_stages(control, size, open_group, share)

        return meet

    def close(self) -> None:
        """Accept no more ranks."""
        if self._listener is not None:
            self._listener.close()

    def _worker(self, rank: int, channel: Channel) -> LaunchedWorker:
        host, name, pid = self._get(f"rank {rank}")
        return LaunchedWorker(rank, pid if host == host_id() else 0, f"(pid {pid}, host {name})", channel)

    def _set(self, key: str, value: list[Any]) -> None:
        self._store.set(key, json.dumps(value))

    def _get(self, key: str) -> list[Any]:
        try:
            value: list[Any] = json.loads(self._store.get(key))
        except dist.DistError as error:
            raise GroupFailed(self.place.rank, f"waits for {key!r} in the launcher's store: {error}") from error
        return value


class EndsWithFirst:
    """Ends this process, unless ``over`` is set, soon after rank 0 has closed the channel: it may wait for others.

    Args:
        channel: to rank 0.
    """

    def __init__(self, channel: Channel) -> None:
        self.over = threading.Event()
        self._descriptor = channel.fileno()
        threading.Thread(target=self._run, name="pagoda-rank-0", daemon=True).start()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLRDHUP)
        poll.poll()
        if not self.over.wait(_GRACE_SECONDS):
            os._exit(1)


def follow_first(launched: LaunchedRanks, load_program: LoadProgram, known: Mapping[str, Any]) -> None:
    """Be another rank than 0 to its end, or to that of rank 0.

    Args:
        launched: this process's.
        load_program, known: see ``take_part``.

    Raises:
        Exception: see ``take_part``.
    """
    channel = launched.join()
    ends = EndsWithFirst(channel)
    try:
        take_part(channel, launched.meeting(launched.timeout), load_program, known)
    finally:
        ends.over.set()


def _open_store(
    where: tuple[str, int] | None, place: Place, timeout: timedelta
) -> tuple[dist.Store, tuple[str, int]]:
    """The store of a launcher, or that of rank 0; and its host and port."""
    if where is None:
        found, _, _ = next(dist.rendezvous("env://", timeout=timeout))
        return found, (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store = dist.TCPStore(*where, is_master=place.rank == 0, timeout=timeout, wait_for_workers=False)
    return store, (where[0], store.port)


def _as_it_is(control: TorchGroup) -> RankGroup:
    return control


def _own_address(host: str, port: int) -> str:
    """The address of this host that a route to another one begins with."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as sock:
        sock.connect(address)  # which sends nothing
        return str(sock.getsockname()[0])


def _prove_as_first(sock: socket.socket, key: bytes) -> int | None:
    """The rank at the other end, if it knows the key; this end shows that it does, too."""
    sock.settimeout(_PROOF_SECONDS)
    own = secrets.token_bytes(_PROOF_BYTES)
    with suppress(OSError):
        sock.sendall(own)
        told = _take(sock, _RANK.size + 2 * _PROOF_BYTES)
        rank, theirs, proof = told[: _RANK.size], told[_RANK.size : -_PROOF_BYTES], told[-_PROOF_BYTES:]
        if hmac.compare_digest(proof, _proof(key, b"other", rank + own + theirs)):
            sock.sendall(_proof(key, b"first", rank + own + theirs))
            sock.settimeout(None)
            return int(_RANK.unpack(rank)[0])
    return None


def _prove_as_other(sock: socket.socket, key: bytes, rank: int) -> None:
    """Show rank 0 that this end knows the key, and see that it does.

    Raises:
        OSError: it does not.
    """
    sock.settimeout(_PROOF_SECONDS)
    own, name = secrets.token_bytes(_PROOF_BYTES), _RANK.pack(rank)
    theirs = _take(sock, _PROOF_BYTES)
    sock.sendall(name + own + _proof(key, b"other", name + theirs + own))
    if not hmac.compare_digest(_take(sock, _PROOF_BYTES), _proof(key, b"first", name + theirs + own)):
        raise OSError("it has another key")
    sock.settimeout(None)


def _proof(key: bytes, role: bytes, content: bytes) -> bytes:
    return hmac.digest(key, role + content, "sha256")


def _take(sock: socket.socket, count: int) -> bytes:
    taken = b""
    while len(taken) < count:
        part = sock.recv(count - len(taken))
        if not part:
            raise OSError("the connection was closed")
        taken += part
    return taken
