"""Fetch weights of a schedule, in static graphs of the graph engine.

Matches:
    p; w1; w2; m(x, weight)                          # notes ask for bytes of the weight behind p
Becomes:
    p; npu_prefetch(weight, p, bytes); w1; w2; m(x, weight)
Why it is faster:
    see ``passes.schedule.schedule_prefetch``. Dynamic graphs are launched operator by operator, on one stream.

torchair makes a ``Cmo`` of it, with a control edge from p. It puts all of a graph one behind the other, in the order
in which they stand there, which is that of their readers; the last one ends before the graph does.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from ..schedules.graph_launches import NotPlaced, graph_launches
from ..schedules.prefetches import by_start, placed_fetches


def fetch_weights(gm: fx.GraphModule) -> str:
    """Edit ``gm``, a graph of torchair's AOTAutograd with notes on its nodes; "", or why it stays as it is."""
    graph = gm.graph
    kept = set(graph.nodes)
    try:
        fetches = placed_fetches(graph, graph_launches(graph))
        for behind, group in by_start(fetches).items():
            with graph.inserting_before(behind.next):
                made = _tensor_of(graph, behind)
                for fetch in group:
                    graph.call_function(torch.ops.npu.npu_prefetch.default, (fetch.weight, made, fetch.bytes))
    except NotPlaced as error:
        for node in [node for node in reversed(graph.nodes) if node not in kept]:
            graph.erase_node(node)
        return str(error)
    graph.lint()
    gm.recompile()
    return ""


def _tensor_of(graph: fx.Graph, launch: fx.Node) -> fx.Node:
    """A tensor that a launch makes.

    Raises:
        NotPlaced: it makes none.
    """
    made = launch.meta.get("val")
    if isinstance(made, torch.Tensor):
        return launch
    index = next((user.args[1] for user in launch.users if user.target is operator.getitem), 0)
    if not isinstance(made, tuple | list) or not isinstance(made[int(index)], torch.Tensor):  # type: ignore[arg-type]
        raise NotPlaced(f"{launch.name} makes no tensor to fetch behind")
    part = graph.call_function(operator.getitem, (launch, index))
    part.meta["val"] = made[int(index)]  # type: ignore[arg-type]
    return part
