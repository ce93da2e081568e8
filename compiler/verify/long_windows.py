"""The check of windows, chunks and choices of keys longer than the self-check's sequences, on copies of the graphs
with shorter ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import fx

from ...passes import TracedGraph
from ...passes.graph.attention_node import paged_attention_nodes
from ...runtime.ops.lightning_indexer import lightning_indexer
from ..report import Verdict
from .graph_check import check_graph

_SHORT_WINDOW = 8


def check_long_windows(
    original: TracedGraph, paged: TracedGraph, lower: Callable[[TracedGraph], object] | None = None
) -> Verdict | None:
    """Shorten every window, chunk and choice of keys that was too long to run, in the model's own masks and in the
    rewritten attention alike, and compare the two.

    Args:
        original: the graph before any pass.
        paged: the paged graph, its attention not lowered yet.
        lower: lowers what was shortened, in place; None where that changes nothing.

    Returns:
        the verdict; None when no window is that long.
    """
    literals = paged.notes.followed_literals
    if not literals:
        return None
    short_original, short = original.copy(), paged.copy()
    for literal, names in literals.items():
        for node in short_original.graph.nodes:
            if node.name in names:
                node.args = _swap(node.args, literal)
                node.kwargs = _swap(node.kwargs, literal)
        for node in paged_attention_nodes(short):
            window, chunk = cast("tuple[int, int]", node.args[12:14])
            if abs(window - literal) <= 1:
                window += _SHORT_WINDOW - literal
            if chunk == literal:
                chunk = _SHORT_WINDOW
            node.args = (*node.args[:12], window, chunk, *node.args[14:])
        for node in short.graph.nodes:
            if node.target is lightning_indexer and node.args[3] == literal:
                node.args = (*node.args[:3], _SHORT_WINDOW, *node.args[4:])
    if lower is not None:
        lower(short)
    return check_graph(short_original, short)


def _swap(arguments: Any, literal: int) -> Any:
    def one(x: Any) -> Any:
        if type(x) is int and abs(x) == literal:
            return _SHORT_WINDOW if x > 0 else -_SHORT_WINDOW
        return x

    return fx.node.map_aggregate(arguments, one)
