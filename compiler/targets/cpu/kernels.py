"""The CPU target with our kernels called one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from ....passes import TracedGraph
from ....runtime.ops import CPU_FUNCTIONS


def call_kernels(traced: TracedGraph) -> Callable[..., Sequence[Any]]:
    """Run a traced graph as it is, its ``pagoda::`` operators without torch's dispatcher.

    Returns:
        a function of the placeholders' values, in order, that returns the graph's outputs.
    """
    return kernel_calls(traced.copy().module)


def kernel_calls(module: fx.GraphModule) -> Callable[..., Sequence[Any]]:
    """Likewise for a graph module of one's own, which is changed."""
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target in CPU_FUNCTIONS:
            node.target = CPU_FUNCTIONS[node.target]
    module.recompile()
    return module.forward
