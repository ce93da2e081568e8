"""The check of windows longer than the self-check's sequences, on copies of the graphs with the window shrunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import fx

from ...passes import TracedGraph
from ...passes.graph.attention_node import paged_attention_nodes
from ..report import Verdict
from .graph_check import check_graph

_SHRUNK = 8


def check_long_windows(
    original: TracedGraph, paged: TracedGraph, lower: Callable[[TracedGraph], object] | None = None
) -> Verdict | None:
    """Shrink every window and chunk that was too long to run, in the model's own masks and in the rewritten
    attention alike, and compare the two.

    Args:
        original: the graph before any pass.
        paged: the paged graph, its attention not lowered yet.
        lower: lowers what was shrunk, in place; None where that changes nothing.

    Returns:
        the verdict; None when no window is that long.
    """
    literals = paged.notes.followed_literals
    if not literals:
        return None
    shrunk_original, shrunk = original.copy(), paged.copy()
    for literal, names in literals.items():
        for node in shrunk_original.graph.nodes:
            if node.name in names:
                node.args = _swap(node.args, literal)
                node.kwargs = _swap(node.kwargs, literal)
        for node in paged_attention_nodes(shrunk):
            window, chunk = cast("tuple[int, int]", node.args[12:14])
            if abs(window - literal) <= 1:
                window += _SHRUNK - literal
            if chunk == literal:
                chunk = _SHRUNK
            node.args = (*node.args[:12], window, chunk, *node.args[14:])
    if lower is not None:
        lower(shrunk)
    return check_graph(shrunk_original, shrunk)


def _swap(arguments: Any, literal: int) -> Any:
    def one(x: Any) -> Any:
        if type(x) is int and abs(x) == literal:
            return _SHRUNK if x > 0 else -_SHRUNK
        return x

    return fx.node.map_aggregate(arguments, one)
