"""Fetch weights of a schedule on a stream of their own of the graph that npugraph_ex captures.

Matches:
    p; w1; w2; m(x, weight)                          # notes ask for bytes of the weight behind p
Becomes:
    p; record(begin); enter(fetches); wait(begin); npu_prefetch(weight, None, bytes); exit(); w1; w2; m(x, weight)
Why it is faster:
    see ``passes.schedule.schedule_prefetch``.

Nothing waits for a fetch: m finds what has come by then. A fetch makes no tensor and reads weights alone, which stay
where they are, so the allocator need not know of it. npugraph_ex itself lets the stream begin behind the graph's
inputs and end before its outputs.
"""

from __future__ import annotations

import logging

import torch
from torch import fx

from ..graph_launches import NotPlaced, is_fetch
from ..prefetches import by_start, placed_fetches, why_misplaced
from .side_stream import StreamOperators

log = logging.getLogger(__name__)


def use_prefetch_stream(gm: fx.GraphModule, label: str, operators: StreamOperators | None = None) -> str:
    """Edit ``gm``, in which branches have their second stream already; "", or why it stays as it is.

    Args:
        gm: a graph that AOTAutograd made, with notes on its nodes.
        label: of the stream; the names of its events begin with it.
        operators: what to insert beside ``npu_prefetch``; npugraph_ex's by default.
    """
    graph = gm.graph
    try:
        operators = operators or StreamOperators.of_npugraph_ex()
        fetches = placed_fetches(graph, operators.launches(graph))
    except (ImportError, AttributeError, NotPlaced) as error:
        return str(error)
    kept = set(graph.nodes)
    events: list[str] = []
    for behind, group in by_start(fetches).items():
        events.append(event := f"{label}_begin_{len(events)}")
        with graph.inserting_before(behind.next):
            graph.call_function(operators.record, (event, True))
            graph.call_function(operators.enter, (["_user_stream_label"], [label]))
            graph.call_function(operators.wait, (event, True))
            for fetch in group:
                graph.call_function(torch.ops.npu.npu_prefetch.default, (fetch.weight, None, fetch.bytes))
            graph.call_function(operators.exit, ())
    if reason := why_misplaced(graph, fetches, fetch_begins(graph, operators, label)):
        for node in [node for node in reversed(graph.nodes) if node not in kept]:
            graph.erase_node(node)
        return reason
    for event in events:
        operators.create(event)
    graph.lint()
    gm.recompile()
    log.info("%d weights are fetched before they are read", len(fetches))
    return ""


def fetch_begins(graph: fx.Graph, operators: StreamOperators, label: str) -> dict[fx.Node, fx.Node | None]:
    """Call that fetches → the last launch of the main stream that it waits for; None for none, or another stream.

    Args:
        graph: with streams and events.
        operators: that these are.
        label: of the stream for fetches.
    """
    launches = set(operators.launches(graph))
    stack: list[str] = []
    last: fx.Node | None = None
    recorded: dict[str, fx.Node | None] = {}
    waited: fx.Node | None = None
    found: dict[fx.Node, fx.Node | None] = {}
    place = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if node.target is operators.enter:
            stack.append(str(dict(zip(*node.args[:2], strict=True))["_user_stream_label"]))
        elif node.target is operators.exit:
            stack.pop()
        elif node.target is operators.record and not stack:
            recorded[str(node.args[0])] = last
        elif node.target is operators.wait and stack[-1:] == [label]:
            come = recorded.get(str(node.args[0]))
            if come is not None and (waited is None or place[come] > place[waited]):
                waited = come
        elif is_fetch(node):
            found[node] = waited if stack[-1:] == [label] else None
        elif node in launches and not stack:
            last = node
    return found
