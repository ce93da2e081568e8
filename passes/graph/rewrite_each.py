"""The loop that most passes share: visits each node once, counts matches, records reasons of near misses."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import fx

from .fx_nodes import eliminate_dead_code
from .record import NoMatch, PassRecord
from .traced import TracedGraph


def rewrite_each(
    traced: TracedGraph,
    name: str,
    step: Callable[[fx.Node], str | None],
    nodes: Iterable[fx.Node] | None = None,
) -> PassRecord:
    """Let ``step`` rewrite the nodes of a graph one by one, and remove what nothing reads any longer.

    Args:
        traced: the graph; it is edited in place.
        name: of the pass.
        step: function of a node. It returns "" when it has rewritten what the node is part of; the reason when that
            looks like a match and was left alone, which it may raise as ``NoMatch`` too; and None for any other node.
        nodes: those to look at; by default all that the graph has at first. Those erased on the way are skipped.
    """
    record = PassRecord(name)
    if nodes is None:
        nodes = traced.graph.nodes
    for node in list(nodes):
        if node._erased:
            continue
        try:
            reason = step(node)
        except NoMatch as why:
            record.reject(node, str(why))
            continue
        if reason:
            record.reject(node, reason)
        record.matches += reason == ""
    if record.matches:
        eliminate_dead_code(traced.graph)
    return record
