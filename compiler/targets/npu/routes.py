"""The route that ``codegen`` asks for."""

from __future__ import annotations

from ....passes import TracedGraph
from .aclgraph_route import AclGraphs
from .ge_route import GeGraphs
from .route import Route, Run


def make_route(codegen: str, traced: TracedGraph, eager: Run) -> Route | None:
    """The way that a lowered graph with linked constants runs; None for call by call.

    Args:
        codegen: "ge", "aclgraph" or "none".
        traced: the graph.
        eager: runs it call by call, for steps that a route does not take.
    """
    if codegen == "ge":
        return GeGraphs(traced, eager=eager)
    if codegen == "aclgraph":
        return AclGraphs(traced, eager)
    return None
