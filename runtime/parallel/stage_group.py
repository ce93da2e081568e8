"""The ranks of a pipeline: those of a stage exchange tensors, and pass values on to those of the next stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..ops.collectives import GROUP
from .group import Agreement, CollectiveFailed, RankGroup
from .stage_values import StageValue, pack_values, packed_bytes, unpack_values
from .torch_group import Sending, TorchGroup

OpenGroup = Callable[[str, int, int], TorchGroup]
"""Of a name, this process's number and the number of ranks: a group of some of the ranks, over one store."""


class PipelineGroup:
    """All ranks of a pipeline (``group.StageGroup``). The first ones are those of the last stage.

    Args:
        control: all ranks; what they decide goes through it.
        tensors: those of this stage; None where that is this one alone.
        before: this rank and that of the stage before; None in the first one.
        behind: this rank and that of the next stage; None in the last one.
    """

    def __init__(
        self,
        control: TorchGroup,
        tensors: RankGroup | None,
        before: TorchGroup | None,
        behind: TorchGroup | None,
    ) -> None:
        self.rank, self.name = control.rank, GROUP
        self.size = 1 if tensors is None else tensors.size
        self._control, self._tensors, self._before, self._behind = control, tensors, before, behind
        self._sending: Sending | None = None

    @property
    def seconds(self) -> float:
        """See ``RankGroup``; with this stage's ranks."""
        return 0.0 if self._tensors is None else self._tensors.seconds

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See ``ParallelGroup``; the sum of this stage's ranks."""
        return x.clone() if self._tensors is None else self._tensors.all_reduce(x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """See ``ParallelGroup``; of this stage's ranks."""
        return x.clone() if self._tensors is None else self._tensors.all_gather(x)

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """See ``RankGroup``; of all ranks."""
        return self._control.broadcast(x, source)

    def agree(self, value: int, how: Agreement, name: str = "value") -> int:
        """See ``RankGroup``; of all ranks."""
        return self._control.agree(value, how, name)

    def pass_on(self, values: Sequence[torch.Tensor]) -> None:
        """See ``StageGroup``; waits until those before have arrived, so that one step is on its way at most."""
        if self._behind is None:
            raise CollectiveFailed(self.rank, "runs the last stage, behind which there is none")
        packed = pack_values(values)
        if self._sending is not None:
            self._sending.wait()
        self._sending = self._behind.begin_broadcast(packed, 0)

    def receive(self, values: Sequence[StageValue], tokens: int) -> list[torch.Tensor]:
        """See ``StageGroup``."""
        if self._before is None:
            raise CollectiveFailed(self.rank, "runs the first stage, before which there is none")
        packed = torch.empty(packed_bytes(values, tokens), dtype=torch.uint8)
        self._before.begin_broadcast(packed, 0).wait()
        return unpack_values(packed, values, tokens)

    def abort(self) -> None:
        """Let this rank leave the exchange that it is in, and enter no other; any thread may call it."""
        for group in self._groups:
            group.abort()

    def close(self) -> None:
        """See ``RankGroup``."""
        self._sending = None
        for group in self._groups:
            group.close()

    @property
    def _groups(self) -> list[RankGroup]:
        return [group for group in (self._before, self._behind, self._tensors, self._control) if group is not None]


def meet_in_stages(
    control: TorchGroup, size: int, open_group: OpenGroup, share_memory: Callable[[TorchGroup], RankGroup]
) -> PipelineGroup:
    """The group of a pipeline, once all ranks have come.

    Args:
        control: all ranks.
        size: ranks of each stage.
        open_group: makes the groups of some of them.
        share_memory: makes a group that exchanges tensors of one of ranks that do so over TCP.

    Raises:
        CollectiveFailed: the other ranks did not come.
    """
    stages = control.size // size
    stage, place = stages - 1 - control.rank // size, control.rank % size
    tensors = None if size == 1 else share_memory(open_group(f"stage {stage}", place, size))
    # One after the other, from the first stage on: each waits for the rank at its other end.
    before = open_group(f"boundary {stage} {place}", 1, 2) if stage else None
    behind = open_group(f"boundary {stage + 1} {place}", 0, 2) if stage < stages - 1 else None
    return PipelineGroup(control, tensors, before, behind)
