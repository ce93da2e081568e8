"""What the other ranks of a program are told of it, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch

from ...runtime.parallel.leader import LeaderProgram
from ..link.linker import LinkedProgram
from .canonical import CanonicalGraph
from .record import Sources
from .restore import StoredProgram

AnyProgram: TypeAlias = LinkedProgram | LeaderProgram
"""This process's own, or that of several ranks."""


@dataclass(frozen=True)
class Lowering:
    """What a rank does with a graph that is neither cut nor lowered yet.

    Attributes:
        canonical: what the program's graph leaves out.
        options: fields of ``CompileOptions``, with a definite target and codegen.
        dropped: passes that rank 0's comparisons dropped.
        model: name of its class.
        tolerance: by how much, and in which share of the rows, steps that run as whole graphs may differ from their
            operators; None: what holds for the dtype of the logits.
    """

    canonical: CanonicalGraph
    options: dict[str, Any]
    dropped: list[str]
    model: str
    tolerance: tuple[float, float] | None


@dataclass(frozen=True)
class Shipment:
    """A program that every rank makes for itself, over its parts of the weights.

    Attributes:
        program: the graph, and what its inputs receive.
        sources: where the module's tensors are in the checkpoint's files; None: the module has to be loaded.
        packs: lay weights out for the matrix kernels.
        lowering: where each rank cuts and lowers the graph for its NPU; None: it is rank 0's finished one.
    """

    program: StoredProgram
    sources: Sources | None
    packs: bool
    lowering: Lowering | None = None


class OtherRanks(Protocol):
    """The ranks besides this one that will run a program.

    Attributes:
        device: that this one's part runs on; the model is in the host's memory.
    """

    device: torch.device

    def load(self, shipment: Shipment) -> None:
        """Let them make their parts; returns at once."""

    def lead(self, program: LinkedProgram) -> LeaderProgram:
        """The program of all ranks, of which ``program`` is this one's part; waits for the others."""
