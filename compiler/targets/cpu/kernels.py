"""The CPU target with our kernels called one after the other."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ....passes import TracedGraph
from ....runtime.ops import CPU_FUNCTIONS

VIEW_METHODS = {
    torch.ops.aten.view.default: "view",
    torch.ops.aten.transpose.int: "transpose",
    torch.ops.aten.squeeze.dim: "squeeze",
    torch.ops.aten.unsqueeze.default: "unsqueeze",
}
"""Views that a method of tensors makes in half the time: a decode step makes hundreds."""


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
        if node.op != "call_function":
            continue
        if node.target in CPU_FUNCTIONS:
            node.target = CPU_FUNCTIONS[node.target]
        elif node.target in VIEW_METHODS and not node.kwargs:
            node.op, node.target = "call_method", VIEW_METHODS[node.target]
        elif node.target is torch.ops.aten.slice.Tensor and not node.kwargs:
            _index(node)
    module.recompile()
    return GraphCalls(module)


def _index(node: fx.Node) -> None:
    """Write a slice along one dim as indexing."""
    given: list[Any] = [*node.args, *[0, None, None, 1][len(node.args) - 1 :]]
    source, dim, start, end, step = given
    if isinstance(dim, int) and dim >= 0:
        node.target, node.args = operator.getitem, (source, (*[slice(None)] * dim, slice(start, end, step)))
