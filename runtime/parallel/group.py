"""The ranks of a group as the runtime sees them, and the error of a group that has failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import torch

from ..cache.pool_plan import CacheCounts
from ..npu_errors.device_lost import DeviceLost
from ..ops.collectives import ParallelGroup
from .stage_values import StageValue

Agreement = Literal["min", "max", "equal"]


class GroupFailed(DeviceLost):
    """A rank ended, raised or stopped, so no rank computes any more.

    Attributes:
        rank: the one that failed.
        reason: what became of it.
    """

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} {reason}")
        self.rank = rank
        self.reason = reason


class CollectiveFailed(GroupFailed):
    """A rank did not take part in an exchange; ``rank`` is that one, or where nobody knows, the one that noticed."""


class RankGroup(ParallelGroup, Protocol):
    """A group with which ranks also decide together.

    Every method but ``close`` is called on all ranks, in one order, and raises ``CollectiveFailed`` where another
    rank does not take part.

    Attributes:
        seconds: that this rank has spent in ``all_reduce`` and ``all_gather``.
    """

    @property
    def seconds(self) -> float: ...

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """The ``x`` of rank ``source``, which has the same shape and dtype on all ranks."""

    def agree(self, value: int, how: Agreement, name: str = "value") -> int:
        """The least or the largest ``value`` of all ranks.

        Raises:
            GroupFailed: with ``"equal"``, on every rank, if they differ; ``name`` says in what.
        """

    def abort(self) -> None:
        """Let this rank leave the exchange that it is in, and enter no other; any thread may call it."""

    def close(self) -> None:
        """Leave the group."""


class StageGroup(RankGroup, Protocol):
    """A group whose ranks run the stages of a pipeline. ``all_reduce`` and ``all_gather`` are among those of one
    stage."""

    def pass_on(self, values: Sequence[torch.Tensor]) -> None:
        """Send values to the rank of the next stage that has this one's place; returns before they have arrived."""

    def receive(self, values: Sequence[StageValue], tokens: int) -> list[torch.Tensor]:
        """What the rank of the stage before passed on, in the order in which it did.

        Args:
            values: what that is.
            tokens: of the step.
        """


def least_counts(counts: CacheCounts, group: RankGroup) -> CacheCounts:
    """Of each number the least of all ranks.

    Raises:
        GroupFailed: ranks have other groups of layers.
    """
    group.agree(len(counts.device), "equal", "number of groups of layers")
    blocks, slots = counts.host
    return CacheCounts(
        tuple(group.agree(count, "min") for count in counts.device),
        (group.agree(blocks, "min"), group.agree(slots, "min")),
    )
