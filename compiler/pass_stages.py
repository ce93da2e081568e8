"""The passes that the options select, by stage, and the places among them where graphs branch off."""

from __future__ import annotations

from typing import NamedTuple

from ..passes import SHARDING, Pass
from ..passes.rewrite.fold_constants import fold_constants
from .options import CompileOptions, selected_passes

_FOR_RANKS = "tensor_parallel_size"
"""The option of the passes that cut a graph for several ranks."""


class Stages(NamedTuple):
    """The passes that the options select.

    Attributes:
        dynamo, weights: those of these stages.
        aten: those on the ATen graph, without ``sharding``.
        lowering: the place among them of the first one that inserts the target's own operators.
        sharding: what cuts layers for several ranks; none for one.
        sharded: the place among them of the first one behind ``sharding``.
    """

    dynamo: list[Pass]
    aten: list[Pass]
    lowering: int
    sharding: list[Pass]
    sharded: int
    weights: list[Pass]

    @classmethod
    def of(cls, options: CompileOptions) -> Stages:
        """Those of these options."""
        passes = selected_passes(options)
        dynamo, aten, weights = ([p for p in passes if p.stage == stage] for stage in ("dynamo", "aten", "weights"))
        sharded = next((i for i, entry in enumerate(aten) if entry.name == SHARDING), len(aten))
        sharding = [entry for entry in aten if entry.option == _FOR_RANKS]
        aten = [entry for entry in aten if entry.option != _FOR_RANKS]
        first = next((i for i, entry in enumerate(aten) if entry.target), len(aten))
        return cls(dynamo, aten, first, sharding, sharded, weights)

    @property
    def folds(self) -> list[Pass]:
        """Those that compute constants ahead."""
        return [entry for entry in self.aten if entry.apply is fold_constants]
