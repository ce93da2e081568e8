"""Compute once what is computed several times from the same inputs.

Matches:
    y1 = f(x, ...); y2 = f(x, ...)         # f without side effects and without randomness
Becomes:
    y1 = f(x, ...)
Why it is faster:
    every layer casts and unsqueezes the rotary tables for itself; some models compute whole tables per layer.

Level 1: bitwise equal.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from ..graph.fx_nodes import is_pure, storage_key, writers_by_storage
from ..graph.record import PassRecord
from ..graph.rewrite_each import rewrite_each
from ..graph.traced import TracedGraph


def share_subexpressions(traced: TracedGraph) -> PassRecord:
    """Merge equal calls of pure operators. What reads a storage that the graph writes into is left alone."""
    written = writers_by_storage(traced.graph)
    first: dict[Any, fx.Node] = {}

    def step(node: fx.Node) -> str | None:
        if node.op != "call_function" or not is_pure(node.target):
            return None
        if written and any(storage_key(n) in written for n in (node, *node.all_input_nodes)):
            return None
        key = (node.target, _hashable(node.args), _hashable(node.kwargs))
        earlier = first.setdefault(key, node)
        if earlier is node:
            return None
        node.replace_all_uses_with(earlier)
        traced.graph.erase_node(node)
        return ""

    return rewrite_each(traced, "share_subexpressions", step)


def _hashable(item: Any) -> Any:
    """``item`` with containers as tuples, and 1, 1.0 and True told apart."""
    if isinstance(item, dict):
        return tuple((k, _hashable(v)) for k, v in sorted(item.items()))
    if isinstance(item, list | tuple):
        return tuple(_hashable(x) for x in item)
    if isinstance(item, slice):
        return ("slice", _hashable((item.start, item.stop, item.step)))
    return item if isinstance(item, fx.Node) else (type(item), str(item))
