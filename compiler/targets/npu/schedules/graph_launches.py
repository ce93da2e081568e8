"""The launches of a graph that AOTAutograd made of a lowered one."""

from __future__ import annotations

import torch
from torch import fx

_FETCH = "npu.npu_prefetch.default"


class NotPlaced(ValueError):
    """A part of a schedule that a graph cannot follow. The message says which node and why."""


def graph_launches(graph: fx.Graph) -> list[fx.Node]:
    """The calls of an ATen graph that compute or move elements, in order: no views, sizes and parts of results, and
    no fetches into the cache."""
    return [
        node
        for node in graph.nodes
        if node.op == "call_function"
        and isinstance(node.target, torch._ops.OpOverload | torch._ops.HigherOrderOperator)
        and not getattr(node.target, "is_view", False)
        and not isinstance(node.meta.get("val"), int | float | torch.SymInt | torch.SymFloat)
        and not is_fetch(node)
    ]


def is_fetch(node: fx.Node) -> bool:
    """True for ``npu_prefetch(weight, dependency, max_size)``, which fetches so many bytes, or all where there are
    fewer, into the L2 cache."""
    return node.op == "call_function" and str(node.target) == _FETCH
