"""All ranks of one program in one process, node by node: the reference for what processes do together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx

from ...passes import TracedGraph
from .float32_run import Float32Graph, NodeByNode

_pagoda, _functional = torch.ops.pagoda, torch.ops._c10d_functional


class Lockstep(NodeByNode):
    """A graph that every rank runs, each over its own constants and caches, with collectives computed jointly.

    Args:
        graphs: of the ranks, in order.
        constants: as for ``NodeByNode``.

    Raises:
        ValueError: the ranks' graphs differ.
    """

    def __init__(self, graphs: Sequence[TracedGraph], constants: Collection[str]) -> None:
        calls = [[(node.op, node.name, node.target) for node in traced.graph.nodes] for traced in graphs]
        if any(other != calls[0] for other in calls):
            raise ValueError("the ranks' graphs differ; all ranks have to run one graph")
        super().__init__(graphs[0].module, constants)
        self._ranks = len(graphs)

    def ranks(self, calls: Sequence[Sequence[Sequence[Any]]]) -> list[Sequence[Any]]:
        """The results of several calls.

        Args:
            calls: of each, the values of the inputs on every rank.

        Raises:
            RuntimeError: a result differs between ranks in a bit.
        """
        yielded = self.together([given[rank] for rank in range(self._ranks) for given in calls])
        first = yielded[: len(calls)]
        for rank in range(1, self._ranks):
            for own, results in zip(first, yielded[rank * len(calls) :], strict=False):
                if not torch.equal(own[0], results[0]):
                    raise RuntimeError(f"rank {rank} computes other logits than rank 0")
        return first

    def _run(self, node: fx.Node, runs: Any, mode: AbstractContextManager[Any]) -> None:
        count = len(runs) // self._ranks
        own = [runs[rank * count : (rank + 1) * count] for rank in range(self._ranks)]
        joint = _JOINT.get(node.target)
        if joint is None:
            for part in own:
                super()._run(node, part, mode)
            return
        for together in zip(*own, strict=True):
            found = joint([values[node.args[0]] for values in together])
            for values in together:
                values[node] = found.clone()


class LockstepFloat32(Lockstep, Float32Graph):
    """The same computed in float32."""


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


_JOINT: dict[Any, Callable[[Sequence[torch.Tensor]], torch.Tensor]] = {
    _pagoda.all_reduce.default: _sum,
    _functional.all_reduce.default: _sum,
    _functional.all_gather_into_tensor.default: lambda parts: torch.cat(list(parts)),
    _pagoda.all_gather.default: lambda parts: torch.cat(list(parts), -1),
}
