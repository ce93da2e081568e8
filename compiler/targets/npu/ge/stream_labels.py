"""Label the branches of a schedule with a second stream, for static graphs of the graph engine.

Matches:
    f; a1; a2; b1; b2; j(a2, b2)                     # b1 and b2 annotated, b1 reads f
Becomes:
    f; enter(side); b1; b2; exit(); a1; a2; j(a2, b2)
Why it is faster:
    see ``passes.schedule.schedule_branches``. Dynamic graphs ignore labels: they are launched operator by operator.

torchair writes the label to each operator between the two. The graph engine orders streams by the edges of its graph,
which is functional: every launch that another needs is behind an edge. So there are no events, and no control edges.
"""

from __future__ import annotations

import torch
from torch import fx

from .....passes.schedule.launches import dependencies
from ..schedules.graph_launches import NotPlaced, graph_launches
from ..schedules.side_branches import place_branches, put_in_order

LABEL = "pagoda_side"


def label_branches(gm: fx.GraphModule) -> str:
    """Edit ``gm``, a graph that torchair's AOTAutograd made, with notes on its nodes; "", or why it stays as it is.

    Needs torchair.
    """
    import torchair.scope  # noqa: F401  defines the operators

    graph = gm.graph
    order = list(graph.nodes)
    launches = graph_launches(graph)
    try:
        branches = place_branches(graph, launches, dependencies(graph, launches)[0])
    except NotPlaced as error:
        put_in_order(order)
        return str(error)
    for branch in branches:
        with graph.inserting_before(branch[0]):
            # As torchair's npu_stream_switch writes them; GE reads the last from CANN 9.0 on.
            labels = {"_user_stream_label": LABEL, "_user_stream_priority": "0", "_enable_inner_parallel": "True"}
            keys, values = list(labels), list(labels.values())
            graph.call_function(torch.ops.air.scope_enter.default, (keys, values))
        with graph.inserting_before(branch[-1].next):
            graph.call_function(torch.ops.air.scope_exit.default, ())
    graph.lint()
    gm.recompile()
    return ""
