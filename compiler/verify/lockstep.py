"""All ranks of one program in one process, node by node: the reference for what processes do together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
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
            raise ValueError("the ranks' graphs differ; all ranks have to call the same operators in one order")
        super().__init__(graphs[0].module, constants)
        self._ranks = len(graphs)
        nodes = {node.name: node for node in graphs[0].graph.nodes}
        self._numbers = [_own_arguments(traced.graph, nodes) for traced in graphs]

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
            for part, numbers in zip(own, self._numbers, strict=True):
                if node in numbers:
                    node.args, node.kwargs = numbers[node]
                super()._run(node, part, mode)
            if node in self._numbers[0]:
                node.args, node.kwargs = self._numbers[0][node]
            return
        for together in zip(*own, strict=True):
            found = joint([values[node.args[0]] for values in together])
            for values in together:
                values[node] = found.clone()


class LockstepFloat32(Lockstep, Float32Graph):
    """The same computed in float32."""


def _own_arguments(graph: fx.Graph, nodes: Mapping[str, fx.Node]) -> dict[fx.Node, Any]:
    """Arguments of one rank's nodes that hold other numbers on other ranks, such as a range of experts, by the nodes
    of rank 0 that stand for them."""
    found = {}
    for node in graph.nodes:
        if node.target in _NUMBERED:
            found[nodes[node.name]] = fx.map_arg((node.args, node.kwargs), lambda given: nodes[given.name])
    return found


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


_NUMBERED = frozenset({torch.ops.npu.npu_moe_init_routing_v2.default})
"""Operators among whose arguments a rank has numbers of its own."""
_JOINT: dict[Any, Callable[[Sequence[torch.Tensor]], torch.Tensor]] = {
    _pagoda.all_reduce.default: _sum,
    _functional.all_reduce.default: _sum,
    _functional.all_gather_into_tensor.default: lambda parts: torch.cat(list(parts)),
    _pagoda.all_gather.default: lambda parts: torch.cat(list(parts), -1),
}
