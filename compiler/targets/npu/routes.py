"""The route that ``codegen`` asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....passes import TracedGraph
from .aclgraph.aclgraph_route import AclGraphs
from .decode_steps import DecodeRoute
from .ge.ge_route import GeGraphs
from .route import Route, Run


def make_route(
    codegen: str,
    traced: TracedGraph,
    eager: Run,
    options: Mapping[str, Any] | None = None,
    *,
    static_decode: bool = False,
    decode: TracedGraph | None = None,
) -> Route | None:
    """The way that a lowered graph with linked constants runs; None for call by call.

    Args:
        codegen: "ge", "aclgraph" or "none".
        traced: the graph.
        eager: runs it call by call, for steps that a route does not take.
        options: of the toolchain, see ``toolchain_options``.
        static_decode: see ``GeGraphs``.
        decode: a graph of the same inputs that decode steps are to run by, see ``decode_steps``.
    """
    if decode is not None:
        first = make_route(codegen, decode, eager, options, static_decode=static_decode)
        second = make_route(codegen, traced, eager, options)
        return None if first is None or second is None else DecodeRoute(first, second)
    if codegen == "ge":
        return GeGraphs(traced, eager=eager, options=options, static_decode=static_decode)
    if codegen == "aclgraph":
        return AclGraphs(traced, eager, options=options)
    return None
