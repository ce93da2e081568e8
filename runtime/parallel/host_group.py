"""The ranks of one host: they decide by torch's process group, and exchange tensors in memory that they share."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from ..ops.native import FLOAT_CODES, kernel_function
from .group import Agreement, RankGroup
from .shared_group import SharedGroup
from .stage_group import meet_in_stages
from .torch_group import TorchGroup

_PATH_BYTES = 1024


class HostGroup:
    """A :class:`~.group.RankGroup` of processes on one host.

    Args:
        control: of the same ranks; what they decide goes through it.
        tensors: likewise; what graphs exchange does.
    """

    def __init__(self, control: TorchGroup, tensors: SharedGroup) -> None:
        self.rank, self.size, self.name = control.rank, control.size, control.name
        self._control, self._tensors = control, tensors
        self.all_gather = tensors.all_gather

    @property
    def seconds(self) -> float:
        """See ``RankGroup``."""
        return self._tensors.seconds

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See ``ParallelGroup``; what the kernel does not add, such as float64, goes through ``control``."""
        return (self._tensors if x.dtype in FLOAT_CODES else self._control).all_reduce(x)

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """See ``RankGroup``."""
        return self._control.broadcast(x, source)

    def agree(self, value: int, how: Agreement, name: str = "value") -> int:
        """See ``RankGroup``."""
        return self._control.agree(value, how, name)

    def abort(self) -> None:
        """Let all ranks leave the exchange that they are in; any thread may call it."""
        self._tensors.stop("another rank has failed")
        self._control.abort()

    def close(self) -> None:
        """See ``RankGroup``."""
        self._tensors.close()
        self._control.close()


def meet_on_host(meeting: int, rank: int, size: int, stages: int, timeout: float) -> RankGroup:
    """The group of ranks on this host, once all have come.

    Args:
        meeting: see ``TorchGroup.of_descriptor``, as for the others.
        rank, size, timeout: as there.
        stages: that they run, of a pipeline.

    Raises:
        CollectiveFailed: the other ranks did not come.
    """

    def open_group(name: str, own: int, count: int) -> TorchGroup:
        return TorchGroup.of_descriptor(meeting, own, count, timeout, name)

    control = open_group("all", rank, size)
    return on_host(control) if stages == 1 else meet_in_stages(control, size // stages, open_group, on_host)


def on_host(control: TorchGroup) -> RankGroup:
    """A group for the ranks of another one, all on this host; that one where a rank has no kernels.

    Raises:
        CollectiveFailed: a rank did not take part.
    """
    if not control.agree(int(kernel_function("pagoda_shared_all_reduce") is not None), "min"):
        return control
    if control.rank:
        path = bytes(control.broadcast(torch.zeros(_PATH_BYTES, dtype=torch.uint8), 0).tolist()).rstrip(b"\0")
        tensors = SharedGroup.join(Path(path.decode()), control.rank, control.name)
        tensors.meet()
        return HostGroup(control, tensors)
    with tempfile.TemporaryDirectory(prefix="torch_pagoda-") as folder:
        tensors = SharedGroup.create(Path(folder), control.size, control.name)
        control.broadcast(torch.tensor(list(folder.encode().ljust(_PATH_BYTES, b"\0")), dtype=torch.uint8), 0)
        tensors.meet()  # the folder is needed no more
    return HostGroup(control, tensors)
