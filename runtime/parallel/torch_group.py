"""A group over torch.distributed's gloo: the reference for other groups, and what runs where they cannot."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..ops.collectives import GROUP
from .group import Agreement, CollectiveFailed, GroupFailed

_PART = timedelta(seconds=0.2)
_END_SECONDS = 1.0


class TorchGroup:
    """Ranks that exchange tensors over TCP.

    A sum is made of every rank's numbers on each rank, in one order: its bits are the same everywhere and depend on
    nothing but the numbers. Each rank receives ``size - 1`` tensors for it, which suits a few ranks.

    The process group is not torch's default one, which belongs to the user's script.

    Args:
        store: which all ranks see, with nothing in it of another group.
        rank: of this process.
        size: number of ranks.
        timeout: seconds that an exchange waits for other ranks.
        host: address of this rank that others reach; None: what the host's name resolves to.
        name: by which graphs name the group.

    Attributes:
        store: as given; None once this rank has left.

    Raises:
        CollectiveFailed: the other ranks did not come.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, *, timeout: float, host: str | None = None, name: str = GROUP
    ) -> None:
        self.rank, self.size, self.name = rank, size, name
        self._ranks: Any = None
        self._is_aborted = False
        self._work: Any = None  # the exchange that is under way
        self.seconds = 0.0
        self._meeting: int | None = None
        self.store: Any = None
        gloo: Any = dist.ProcessGroupGloo  # its stub lacks most of it
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout)
        try:
            with self._explained():
                options._devices = [gloo.create_device(hostname=host) if host else gloo.create_default_device()]
                self._ranks = gloo(store, rank, size, options)
            self.store = store
        finally:
            del store  # which a traceback would keep

    @classmethod
    def of_descriptor(cls, meeting: int, rank: int, size: int, timeout: float, prefix: str = "all") -> TorchGroup:
        """The group of ranks on this host that meet in a file without a name, which can be closed then.

        Args:
            meeting: its descriptor in this process, of ``os.memfd_create``.
            rank: as above.
            size: as above.
            timeout: as above.
            prefix: tells groups apart that meet in one file.
        """
        own = os.dup(meeting)  # the store opens this path when it is freed, too: nothing else may be there by then
        try:
            store = partial(dist.FileStore, f"/proc/self/fd/{own}", size)
            group = cls(dist.PrefixStore(prefix, store()), rank, size, timeout=timeout, host="127.0.0.1")
        except BaseException:
            os.close(own)
            raise
        group._meeting = own
        return group

    @classmethod
    def of_environment(cls, timeout: float) -> TorchGroup:
        """The group of the processes that ``torchrun`` started: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""
        store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
        return cls(dist.PrefixStore("torch_pagoda", store), rank, size, timeout=timeout)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum, see ``ParallelGroup``; float64 is added in float64."""
        first, *others = self._exchanged(x)
        total = first.to(torch.promote_types(x.dtype, torch.float32))
        for part in others:
            total = total + part
        return total.to(x.dtype)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's ``x``, see ``ParallelGroup``."""
        return torch.cat(list(self._exchanged(x)), -1)

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """See ``RankGroup``."""
        return self.begin_broadcast(x.clone(memory_format=torch.contiguous_format), source).wait()

    def begin_broadcast(self, x: torch.Tensor, source: int) -> Sending:
        """As ``broadcast``, into ``x``, a contiguous tensor that nobody else may use until ``wait`` has returned."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        with self._explained():
            work = self._group.broadcast([x], options)
        self._work = work
        return Sending(self, work, x)

    def agree(self, value: int, how: Agreement, name: str = "value") -> int:
        """See ``RankGroup``."""
        values = torch.cat(self._gathered(torch.tensor([value]))).tolist()
        if how == "equal" and len(set(values)) > 1:
            odd = next(rank for rank, other in enumerate(values) if other != values[0])
            raise GroupFailed(odd, f"has another {name} than rank 0: {values[odd]}, not {values[0]}")
        return int(max(values) if how == "max" else min(values))

    def abort(self) -> None:
        """Let this rank leave the exchange that it is in, and enter no other; any thread may call it."""
        self._is_aborted = True

    def close(self) -> None:
        """See ``RankGroup``; a second call does nothing."""
        work, self._work = self._work, None
        until = time.monotonic() + _END_SECONDS
        while work is not None and not work.is_completed() and time.monotonic() < until:
            time.sleep(0.01)  # with a rank that has ended, it fails
        if self._ranks is not None and work is not None and not work.is_completed():
            # torch waits for the exchange before it frees the group, as long as its timeout; so nobody frees it.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._ranks))
            self._ranks = self._meeting = None
        self._ranks = self.store = None
        if self._meeting is not None:
            os.close(self._meeting)
            self._meeting = None

    def __del__(self) -> None:
        self.close()

    @property
    def _group(self) -> Any:
        if self._ranks is None:
            raise CollectiveFailed(self.rank, "has left the group")
        return self._ranks

    def _wait(self, work: Any) -> None:
        """Wait for an exchange: in parts, since torch's ``abort`` does not end one with a process that is stopped."""
        self._work = work
        try:
            while not self._is_aborted:
                try:
                    work.wait(_PART)
                    break
                except RuntimeError:
                    if work.is_completed():
                        self._work = None
                        raise
            else:
                raise CollectiveFailed(self.rank, "has left an exchange, as another rank has failed")
        finally:
            del work  # which a traceback would keep, and the group's sockets with it
        self._work = None

    def _exchanged(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        begin = time.perf_counter()
        found = self._gathered(x)
        self.seconds += time.perf_counter() - begin
        return found

    def _gathered(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = x.new_empty(self.size, *x.shape).unbind(0)
        with self._explained():
            self._wait(self._group.allgather([list(parts)], [x.contiguous()]))
        return parts

    def finish(self, work: Any) -> None:
        """Wait for an exchange that has begun."""
        with self._explained():
            try:
                self._wait(work)
            finally:
                del work

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except GroupFailed:
            raise
        except RuntimeError as error:
            line = str(error).strip().partition("\n")[0][:300]
            raise CollectiveFailed(self.rank, f"could not exchange tensors with other ranks: {line}") from error


@dataclass(frozen=True)
class Sending:
    """An exchange that has begun.

    Attributes:
        group: of the ranks.
        work: torch's.
        tensor: that is sent, or received.
    """

    group: TorchGroup
    work: Any
    tensor: torch.Tensor

    def wait(self) -> torch.Tensor:
        """The tensor, once it has arrived; see ``RankGroup`` for the errors."""
        self.group.finish(self.work)
        return self.tensor
