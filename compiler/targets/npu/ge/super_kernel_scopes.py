"""Mark the super kernels of a schedule, in static graphs of the graph engine.

Matches:
    x; a; view; b; y                                 # a and b have notes of one super kernel
Becomes:
    x; enter(scope); a; view; b; exit(); y
Why it is faster:
    see ``passes.schedule.schedule_super_kernels``. Dynamic graphs ignore scopes.

torchair writes the scope to each operator between the two. What fetches weights in between stays outside: it is
launched by other means. The graph engine reads the attributes of each operator, so a scope may be entered again.
"""

from __future__ import annotations

import itertools

import torch
from torch import fx

from .....passes.graph.custom_notes import custom_note
from .....passes.graph.provenance import operator_name
from .....passes.schedule.schedule_super_kernels import SUPER_KERNEL
from .....passes.schedule.super_kernel_operators import is_copied, why_not_fused
from ..schedules.graph_launches import NotPlaced, graph_launches, is_fetch

OPTIONS = "feed-sync-all=1:stream-fusion=1"
"""Of each scope (torchair's documentation, ``super_kernel_scope.md``): cores that an operator leaves idle take part
in its barriers, without which it hangs; and vector work may run beside cube work where the graph engine gives them
streams of their own."""
_KEYS = ["_super_kernel_scope", "_super_kernel_options"]


def counted_super_kernels(graph: fx.Graph) -> int:
    """How many super kernels the notes on the nodes of a graph name."""
    return len({name for node in graph.nodes if (name := _noted(node))})


def mark_super_kernels(gm: fx.GraphModule) -> str:
    """Edit ``gm``, a graph that torchair's AOTAutograd made, with notes on its nodes; "", or why it stays as it is.

    Needs torchair.
    """
    import torchair.scope  # noqa: F401  defines the operators

    graph = gm.graph
    try:
        kernels = placed_super_kernels(graph)
    except NotPlaced as error:
        return str(error)
    air = torch.ops.air
    for name, launches in kernels.items():
        for part in _without_fetches(launches):
            with graph.inserting_before(part[0]):
                graph.call_function(air.scope_enter.default, (_KEYS, [f"pagoda_{name}", OPTIONS]))
            with graph.inserting_before(part[-1].next):
                graph.call_function(air.scope_exit.default, ())
    graph.lint()
    gm.recompile()
    return ""


def placed_super_kernels(graph: fx.Graph) -> dict[str, list[fx.Node]]:
    """The launches of each super kernel that the notes on the nodes of ``graph`` ask for, in order.

    Raises:
        NotPlaced: one is not fused, or another kernel lies between them.
    """
    found: dict[str, list[fx.Node]] = {}
    before = ""
    launches = {node for node in graph_launches(graph) if node.all_input_nodes}  # constants are folded
    for node in graph.nodes:
        if node not in launches:
            before = "" if is_copied(node) else before
            continue
        name = _noted(node)
        if name:
            if reason := why_not_fused(operator_name(node)):
                raise NotPlaced(f"{node.name} is in no super kernel: {reason}")
            if name in found and name != before:
                raise NotPlaced(f"a kernel that is not of its super kernel lies before {node.name}")
            found.setdefault(name, []).append(node)
        before = name
    return found


def _without_fetches(launches: list[fx.Node]) -> list[list[fx.Node]]:
    """Launches cut where something is fetched in between."""
    parts = [[launches[0]]]
    for before, node in itertools.pairwise(launches):
        between, fetched = before.next, False
        while between is not node:
            fetched, between = fetched or is_fetch(between), between.next
        if fetched:
            parts.append([])
        parts[-1].append(node)
    return parts


def _noted(node: fx.Node) -> str:
    name: str = custom_note(node, SUPER_KERNEL) or ""
    return name if node.op == "call_function" else ""
