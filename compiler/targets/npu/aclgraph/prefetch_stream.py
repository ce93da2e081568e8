"""Prefetches the weights of a schedule on a stream of its own in the graph that npugraph_ex captures.

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

from ..schedules.graph_launches import NotPlaced
from ..schedules.prefetches import by_start, placed_fetches
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
    for event in events:
        operators.create(event)
    graph.lint()
    gm.recompile()
    log.info("prefetching %d weights", len(fetches))
    return ""
