"""Creates the route that ``codegen`` selects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....passes import TracedGraph
from .aclgraph.aclgraph_route import AclGraphs
from .decode_steps import DecodeCalls, DecodeRoute
from .ge.ge_route import GeGraphs
from .route import Route, Run


def make_route(
    codegen: str,
    traced: TracedGraph,
    eager: Run,
    options: Mapping[str, Any] | None = None,
    *,
    static_decode: bool = False,
    decode: DecodeCalls | None = None,
) -> Route | None:
    """The way that a lowered graph with linked constants runs; None for call by call.

    Args:
        codegen: "ge", "aclgraph" or "none".
        traced: the graph.
        eager: runs it call by call, for steps that a route does not take.
        options: of the toolchain, see ``toolchain_options``.
        static_decode: see ``GeGraphs``.
        decode: a graph of the same inputs that decode steps are to run by, and its calls.
    """
    if decode is not None:
        others = make_route(codegen, traced, eager, options)
        if others is None:
            return None
        by_formula = others.run_by_operator  # where a size of the decode graph was found wrong
        first = make_route(
            codegen, decode.graph, lambda *args: by_formula(args), options, static_decode=static_decode
        )
        assert first is not None
        if isinstance(first, AclGraphs) and first.refusal:
            first.eager = decode.decode
        return DecodeRoute(first, others)
    if codegen == "ge":
        return GeGraphs(traced, eager=eager, options=options, static_decode=static_decode)
    if codegen == "aclgraph":
        return AclGraphs(traced, eager, options=options)
    return None
