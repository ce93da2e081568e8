"""The route that ``codegen`` asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....passes import TracedGraph
from .aclgraph.aclgraph_route import AclGraphs
from .ge.ge_route import GeGraphs
from .route import Route, Run


def make_route(
    codegen: str,
    traced: TracedGraph,
    eager: Run,
    options: Mapping[str, Any] | None = None,
    *,
    static_decode: bool = False,
) -> Route | None:
    """The way that a lowered graph with linked constants runs; None for call by call.

    Args:
        codegen: "ge", "aclgraph" or "none".
        traced: the graph.
        eager: runs it call by call, for steps that a route does not take.
        options: of the toolchain, see ``toolchain_options``.
        static_decode: see ``GeGraphs``.
    """
    if codegen == "ge":
        return GeGraphs(traced, eager=eager, options=options, static_decode=static_decode)
    if codegen == "aclgraph":
        return AclGraphs(traced, eager, options=options)
    return None
