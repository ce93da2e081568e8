"""The ranks of a group of NPUs: their graphs exchange tensors by torch.distributed, the host's decisions go by gloo.

The vendor's compilers find a group among those of torch.distributed, so that this one is its default group there:
``hccl``, which torch_npu starts. Ranks that simulate NPUs on CPUs have ``gloo`` in its place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from .group import Agreement, CollectiveFailed, GroupFailed
from .torch_group import TorchGroup

Backend = Literal["hccl", "gloo"]

VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
# Of torch's own backends, and of HCCL, whose codes are EI0001 to EI9999.
_EXCHANGE = re.compile(r"\bgloo\b|\bhccl\b|\bEI\d{4}\b|Connection (?:closed|reset) by peer", re.IGNORECASE)


class DeviceGroup:
    """A :class:`~.group.RankGroup` whose graphs name it as a group of torch.distributed.

    Args:
        control: of the same ranks; what they decide on the host goes through it.
        backend: "hccl", or "gloo" for ranks that compute on CPUs.
        index: of this rank's device among those that it sees.
        timeout: seconds that the ranks wait for each other.

    Attributes:
        device: that this rank's graphs run on.
        seconds: 0.0; exchanges are parts of graphs.

    Raises:
        GroupFailed: this process has a default group already, or the other ranks did not come.
    """

    def __init__(self, control: TorchGroup, backend: Backend, index: int, timeout: float) -> None:
        self.rank, self.size, self.name = control.rank, control.size, control.name
        self.seconds = 0.0
        self._control = control
        if dist.is_initialized():
            raise GroupFailed(
                self.rank,
                "has a default group of torch.distributed already, which its graphs need; call "
                "torch.distributed.destroy_process_group() first, or shut down the other model of several ranks",
            )
        self.device = torch.device("cpu")
        if backend == "hccl":
            self.device = torch.device("npu", index)
            torch.npu.set_device(self.device)  # type: ignore[attr-defined]
        store = dist.PrefixStore("devices", control.store)
        with self.exchanging():
            dist.init_process_group(
                backend, store=store, rank=self.rank, world_size=self.size, timeout=timedelta(seconds=timeout)
            )
        c10d._register_process_group(self.name, dist.group.WORLD)  # type: ignore[arg-type]
        self._group: Any = dist.group.WORLD

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See ``ParallelGroup``; in the order of the backend's."""
        total = x.clone(memory_format=torch.contiguous_format)
        with self.exchanging():
            dist.all_reduce(total, group=self._group)
        return total

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """See ``ParallelGroup``."""
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        with self.exchanging():
            dist.all_gather(parts, x.contiguous(), group=self._group)
        return torch.cat(parts, -1)

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """See ``RankGroup``; a tensor of the device is enqueued behind its other work."""
        if x.device.type != self.device.type:
            return self._control.broadcast(x, source)
        sent = x.clone(memory_format=torch.contiguous_format)
        with self.exchanging():
            dist.broadcast(sent, source, group=self._group)
        return sent

    def agree(self, value: int, how: Agreement, name: str = "value") -> int:
        """See ``RankGroup``."""
        return self._control.agree(value, how, name)

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Raise ``CollectiveFailed`` for errors that another rank may have caused."""
        try:
            yield
        except GroupFailed:
            raise
        except RuntimeError as error:
            if not isinstance(error, dist.DistError) and not _EXCHANGE.search(str(error)):
                raise
            line = str(error).strip().partition("\n")[0][:300]
            raise CollectiveFailed(self.rank, f"could not exchange tensors with other ranks: {line}") from error

    def abort(self) -> None:
        """Let this rank leave the exchange that it is in, as far as the backend can; any thread may call it."""
        self._control.abort()
        with suppress(Exception):
            self._group.abort()

    def close(self) -> None:
        """See ``RankGroup``; a second call does nothing."""
        if self._group is not None:
            self._group = None
            with suppress(Exception):  # a backend that has failed
                c10d._unregister_process_group(self.name)  # type: ignore[arg-type]
                dist.destroy_process_group()
        self._control.close()


def exchanging(group: object) -> AbstractContextManager[None]:
    """What turns errors of exchanges inside graphs into ``CollectiveFailed``, where the group knows them."""
    found: Callable[[], AbstractContextManager[None]] = getattr(group, "exchanging", nullcontext)
    return found()


def meet_on_devices(meeting: int, rank: int, size: int, stages: int, timeout: float, backend: Backend) -> DeviceGroup:
    """The group of ranks on this host, each with the one device that it sees, once all have come.

    Args:
        meeting: see ``TorchGroup.of_descriptor``, as for the others.
        rank, size, timeout: as there.
        stages: 1; devices run no pipelines.
        backend: see ``DeviceGroup``.

    Raises:
        GroupFailed: see ``DeviceGroup``.
    """
    return DeviceGroup(TorchGroup.of_descriptor(meeting, rank, size, timeout), backend, 0, timeout)


def visible_devices(count: int, environment: Mapping[str, str]) -> list[str]:
    """The names by which ``ASCEND_RT_VISIBLE_DEVICES`` gives a process each of the devices that this one sees.

    Args:
        count: how many it sees.
        environment: of this process.
    """
    given = [name.strip() for name in environment.get(VISIBLE, "").split(",") if name.strip()]
    return given[:count] if given else [str(number) for number in range(count)]


def environment_of(rank: int, devices: Sequence[str]) -> dict[str, str]:
    """What the environment of a rank on this host has besides: its device alone.

    Args:
        rank: of the process.
        devices: of all ranks, see ``visible_devices``; none on CPUs.
    """
    return {VISIBLE: devices[rank]} if devices else {}
