"""Branches that a schedule gives to a second stream, in a graph that AOTAutograd made of a lowered one.

Notes on nodes (``passes.schedule.schedule_branches``) survive AOTAutograd; what it adds between annotated nodes has
none. The launches of a branch follow one another, behind the last launch that any of them needs. In this order they
are launched before the work that runs concurrently with them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from torch import fx

from .....passes.graph.custom_notes import custom_note
from .....passes.graph.fx_nodes import written_arguments
from .....passes.schedule.launches import listed, memory_of
from .....passes.schedule.schedule_branches import ANNOTATION
from .graph_launches import NotPlaced

MOST_TOKENS = 256
"""Steps of more tokens run without a second stream: their products keep the cubes busy. An assumption; vLLM stops its
own second stream for shared experts there (its pull request 28879), on another vendor's devices."""


def counted_branches(graph: fx.Graph) -> int:
    """How many branches the notes on the nodes of a graph name."""
    return len(_annotated(graph))


def place_branches(
    graph: fx.Graph, launches: Sequence[fx.Node], needs: Mapping[fx.Node, int]
) -> list[tuple[fx.Node, ...]]:
    """Put the nodes of each branch one behind the other; the branches, in the order of the graph.

    Args:
        graph: its nodes carry notes.
        launches: of the graph.
        needs: the launches that each waits for, as ``dependencies`` has them.

    Raises:
        NotPlaced: a branch has a node that is not its own in the middle, touches memory that the graph writes, or
            cannot precede what needs it. The order may have changed; see ``put_in_order``.
    """
    memory = memory_of(graph, launches)
    written = frozenset().union(*(memory[place] for node in launches for place in written_arguments(node)))
    computing, found = set(launches), []
    for annotated in _annotated(graph).values():
        branch = _with_views(graph, annotated, computing)
        own = set(branch)
        for node in branch:
            if any(memory[given] & written for given in (node, *node.all_input_nodes)):
                raise NotPlaced(f"{node.name} touches memory that the graph writes")
        outside = {given for node in branch for given in node.all_input_nodes} - own
        outside |= {other for node in branch for other in listed(launches, needs.get(node, 0))} - own
        _move_behind(graph, branch, outside)
        found.append(branch)
    place = {node: i for i, node in enumerate(graph.nodes)}
    for node, i in place.items():
        early = next((given for given in node.all_input_nodes if place[given] > i), None)
        early = early or next((other for other in listed(launches, needs.get(node, 0)) if place[other] > i), None)
        if early is not None:
            raise NotPlaced(f"{node.name} needs {early.name}, which cannot precede it")
    return sorted(found, key=lambda branch: place[branch[0]])


def put_in_order(order: Sequence[fx.Node]) -> None:
    """Give the nodes of a graph the order of a list of all of them."""
    for before, node in itertools.pairwise(order):
        before.append(node)


def _annotated(graph: fx.Graph) -> dict[str, list[fx.Node]]:
    """Branch → its annotated nodes, in order."""
    found: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        note = custom_note(node, ANNOTATION)
        if note is not None and node.op == "call_function":
            found.setdefault(note["branch"], []).append(node)
    return found


def _with_views(graph: fx.Graph, annotated: Sequence[fx.Node], computing: set[fx.Node]) -> tuple[fx.Node, ...]:
    """The nodes of a branch with what lies between them, in order.

    Raises:
        NotPlaced: a launch lies between them.
    """
    own = set(annotated)
    behind, before = set(own), set(own)
    for node in graph.nodes:
        if not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
    for node in reversed(graph.nodes):
        if node in before:
            before.update(node.all_input_nodes)
    between = behind & before
    foreign = next((node for node in graph.nodes if node in between - own and node in computing), None)
    if foreign is not None:
        raise NotPlaced(f"{foreign.name} lies between the nodes of a branch and is none of them")
    return tuple(node for node in graph.nodes if node in between)


def _move_behind(graph: fx.Graph, branch: Sequence[fx.Node], outside: set[fx.Node]) -> None:
    """Move the nodes of a branch behind the last one of ``outside``, and behind the graph's inputs."""
    last = None
    for node in graph.nodes:
        if node.op == "placeholder" or node in outside:
            last = node
    assert last is not None, "a branch reads something"
    for node in branch:
        last.append(node)
        last = node
