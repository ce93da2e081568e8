"""All ranks of one program in one process, node by node: the reference for what processes do together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx

from ...passes import TracedGraph
from ..link.linkage import Linkage
from ..link.stages import stage_of
from .float32_run import Float32Graph, NodeByNode

_pagoda, _functional = torch.ops.pagoda, torch.ops._c10d_functional


class Lockstep(NodeByNode):
    """A graph that every rank runs, each over its own constants and caches, with collectives computed jointly.

    Args:
        modules: the ranks' graphs, in order.
        constants: as for ``NodeByNode``.

    Raises:
        ValueError: the ranks' graphs differ.
    """

    def __init__(self, modules: Sequence[fx.GraphModule], constants: Collection[str]) -> None:
        calls = [[_call(node) for node in module.graph.nodes] for module in modules]
        if any(other != calls[0] for other in calls):
            raise ValueError("the ranks' graphs differ; all ranks have to make the same calls in one order")
        super().__init__(modules[0], constants)
        self._ranks = len(modules)
        nodes = {node.name: node for node in modules[0].graph.nodes}
        self._numbers = [_own_arguments(module.graph, nodes) for module in modules]

    def ranks(self, calls: Sequence[Sequence[Sequence[Any]]]) -> list[list[Sequence[Any]]]:
        """The results of several calls, on every rank.

        Args:
            calls: of each, the values of the inputs on every rank.
        """
        yielded = self.together([given[rank] for rank in range(self._ranks) for given in calls])
        return [yielded[i :: len(calls)] for i in range(len(calls))]

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


def same_logits(results: Sequence[Sequence[Any]]) -> Sequence[Any]:
    """The result of a call that all ranks have yielded.

    Raises:
        RuntimeError: it differs between ranks in a bit.
    """
    for rank, own in enumerate(results):
        if not torch.equal(own[0], results[0][0]):
            raise RuntimeError(f"rank {rank} computes other logits than rank 0")
    return results[0]


class LockstepStages:
    """The stages of a pipeline one after the other, all ranks of each in lockstep.

    Args:
        kind: ``Lockstep``, or the same in float32.
        graphs: of the ranks of one stage, over all stages.
        linkage: of them.
        constants: as for ``NodeByNode``.
    """

    def __init__(
        self,
        kind: type[Lockstep],
        graphs: Sequence[TracedGraph],
        linkage: Linkage,
        constants: Collection[str],
    ) -> None:
        self._names = linkage.inputs
        self._stages = []
        for stage in range(len(linkage.boundaries) + 1):
            of_ranks = [stage_of(traced.graph, linkage, stage) for traced in graphs]
            own = of_ranks[0][1]
            self._stages.append((own, kind([module for module, _ in of_ranks], constants)))

    def ranks(self, calls: Sequence[Sequence[Sequence[Any]]]) -> list[list[Sequence[Any]]]:
        """As ``Lockstep.ranks``, of calls of the whole graph."""
        given = [[dict(zip(self._names, args, strict=True)) for args in call] for call in calls]
        passed: list[list[Sequence[Any]]] = [[() for _ in call] for call in calls]
        for own, stage in self._stages:
            inputs = own.inputs[: len(own.inputs) - len(own.received)]
            passed = stage.ranks(
                [
                    [[*map(values.__getitem__, inputs), *before] for values, before in zip(*call, strict=True)]
                    for call in zip(given, passed, strict=True)
                ]
            )
        return passed


class LockstepFloat32(Lockstep, Float32Graph):
    """The same computed in float32."""


def _call(node: fx.Node) -> tuple[Any, ...]:
    """What a node calls, and with which arguments, but for those that each rank has its own of."""
    arguments = () if node.target in _NUMBERED else (node.args, node.kwargs)
    return node.op, node.name, node.target, fx.map_arg(arguments, lambda given: given.name)


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
