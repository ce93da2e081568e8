"""Counts of the two GE graphs for decode steps: the dynamic and the static one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ...compiler.targets.npu.flat_graph import cache_inputs
from ...compiler.targets.npu.ge.static_decode import decode_inputs
from ...compiler.targets.npu.ge.static_graph import air_attention, static_graph
from ...passes import TracedGraph
from ...passes.graph.fx_nodes import value
from ...runtime.program import StateSpec
from .conversion import convert
from .ge_graph import GeGraph


@dataclass(frozen=True)
class GraphCounts:
    """Counts of a GE graph.

    Attributes:
        operators: nodes of any kind.
        host_nodes: nodes computed on the host before any launch, such as Shape, Pack and Gather.
        host_inputs: inputs that arrive on the host.
        unknown_sizes: inputs with an unknown size.
        launches: nodes that launch a kernel.
        cache_copies: nodes that copy a cache.
    """

    operators: int
    host_nodes: int
    host_inputs: int
    unknown_sizes: int
    launches: int
    cache_copies: int

    @classmethod
    def of(cls, graph: GeGraph, caches: Iterable[str]) -> GraphCounts:
        """Count the nodes of ``graph``; its inputs ``caches`` are caches."""
        data = [node for node in graph if node.type == "Data"]
        read = [name for name in caches if name in graph.inputs]
        return cls(
            operators=len(graph.nodes),
            host_nodes=sum(node.host for node in graph if node.type != "Data"),
            host_inputs=sum(node.host for node in data),
            unknown_sizes=sum(any(size < 0 for size in node.attributes["shape"]) for node in data),
            launches=len(graph.computing()),
            cache_copies=len(graph.cache_copies(*read)) if read else 0,
        )


def static_decode_graph(
    traced: TracedGraph,
    sequences: int = 4,
    width: int = 4,
    num_blocks: int = 64,
    *,
    drafts: int = 0,
    soc: str = "Ascend910B3",
) -> GeGraph:
    """The static GE graph for decode steps.

    Args:
        traced: a lowered graph.
        sequences: number of sequences in the step.
        width: columns of block tables.
        num_blocks: blocks of each cache, and slots of each state.
        drafts: of each sequence, which the step verifies.
        soc: as for ``convert``.

    Raises:
        NotStatic: the graph has no static form.
        ConversionError: a node cannot be converted.
    """
    assert traced.npu is not None
    sizes = []
    for spec in traced.caches:
        for part in spec.parts():
            shape = part.unit_shape if isinstance(spec, StateSpec) else part.block_shape(traced.npu.block_size)
            sizes.append(torch.empty(num_blocks, *shape, device="meta"))
    inputs = {
        **decode_inputs(traced, sequences, width, drafts),
        **dict(zip(cache_inputs(traced), sizes, strict=True)),
    }
    copy = static_graph(traced, inputs, air_attention())
    return convert(copy.module, copy.values, soc=soc, dynamic=False)


def counted_decode_graphs(traced: TracedGraph, *, soc: str = "Ascend910B3") -> tuple[GraphCounts, GraphCounts]:
    """Counts of the dynamic and the static graph; arguments and errors as above."""
    dynamic = convert(traced.module, [value(node) for node in traced.placeholders], soc=soc)
    names = cache_inputs(traced)
    return GraphCounts.of(dynamic, names), GraphCounts.of(static_decode_graph(traced, soc=soc), names)
