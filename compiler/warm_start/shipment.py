"""What the other ranks of a program are told of it, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from ...runtime.parallel.leader import LeaderProgram
from ..link.linker import LinkedProgram
from .record import Sources
from .restore import StoredProgram

AnyProgram: TypeAlias = LinkedProgram | LeaderProgram
"""This process's own, or that of several ranks."""


@dataclass(frozen=True)
class Shipment:
    """A program that every rank makes for itself, over its parts of the weights.

    Attributes:
        program: the graph, and what its inputs receive.
        sources: where the module's tensors are in the checkpoint's files; None: the module has to be loaded.
        packs: lay weights out for the matrix kernels.
    """

    program: StoredProgram
    sources: Sources | None
    packs: bool


class OtherRanks(Protocol):
    """The ranks besides this one that will run a program."""

    def load(self, shipment: Shipment) -> None:
        """Let them make their parts; returns at once."""

    def lead(self, program: LinkedProgram) -> LeaderProgram:
        """The program of all ranks, of which ``program`` is this one's part; waits for the others."""
