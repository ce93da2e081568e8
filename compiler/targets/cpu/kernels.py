"""The CPU target with our kernels called one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from ....passes import TracedGraph
from ....runtime.ops import OPERATORS


class GraphCalls:
    """A function of the values of a graph's placeholders, in order, that returns its outputs.

    Attributes:
        module: the graph.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self._forward: Callable[..., Sequence[Any]] = module.forward

    def __call__(self, *args: Any) -> Sequence[Any]:
        return self._forward(*args)


def call_kernels(traced: TracedGraph) -> GraphCalls:
    """Run a traced graph as it is, its ``pagoda::`` operators without torch's dispatcher."""
    return kernel_calls(traced.copy().module)


def kernel_calls(module: fx.GraphModule) -> GraphCalls:
    """Likewise for a graph module of one's own, which is changed."""
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target in OPERATORS:
            node.target = OPERATORS[node.target].cpu
    module.recompile()
    return GraphCalls(module)
