"""Weights that a schedule fetches into the L2 cache, in a graph that AOTAutograd made of a lowered one.

Notes on nodes (``passes.schedule.schedule_prefetch``) survive AOTAutograd. A fetch computes nothing and is waited for
by nothing, so it cannot be wrong, but it can be useless or in the way: when it begins too early or too late, holds
more than its share of the cache, or is made twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from .....passes.graph.custom_notes import custom_note
from .....passes.schedule.schedule_prefetch import PREFETCH, weight_arguments, whole_input
from .graph_launches import NotPlaced


@dataclass(frozen=True)
class PlacedFetch:
    """A fetch that notes ask for.

    Attributes:
        weight: the graph input that is fetched.
        bytes: of it.
        most: bytes that all fetched weights may have that are not read yet.
        behind: the launch after which that begins.
        reader: the launch that reads the weight.
    """

    weight: fx.Node
    bytes: int
    most: int
    behind: fx.Node
    reader: fx.Node


def counted_fetches(graph: fx.Graph) -> int:
    """How many launches have fetches begin behind them, by the notes on the nodes of a graph."""
    return sum(bool(_note(node).get("starts")) for node in graph.nodes)


def placed_fetches(graph: fx.Graph, launches: Sequence[fx.Node]) -> list[PlacedFetch]:
    """The fetches that the notes on the nodes of ``graph`` ask for, in the order of their readers.

    Args:
        graph: its nodes carry notes.
        launches: of the graph.

    Raises:
        NotPlaced: an end of a fetch is not there, or does not read a weight as it lies.
    """
    starts = {number: node for node in launches for number in _note(node).get("starts", ())}
    found: dict[int, PlacedFetch] = {}
    for node in launches:
        given = dict(weight_arguments(node))
        for number, (name, size, most) in _note(node).get("reads", {}).items():
            weight = whole_input(given.get(name))
            if name not in given:
                continue  # AOTAutograd made several nodes of the reader, and this is another one
            if weight is None:
                raise NotPlaced(f"{name} of {node.name} is not an input of the graph as it lies")
            if number not in starts:
                raise NotPlaced(f"the launch behind which {weight.name} is fetched is not in the graph")
            if number in found:
                raise NotPlaced(f"{found[number].reader.name} and {node.name} both read fetch {number}")
            found[number] = PlacedFetch(weight, size, most, starts[number], node)
    if missing := starts.keys() - found.keys():
        raise NotPlaced(f"nothing reads what is fetched behind {starts[min(missing)].name}")
    return list(found.values())


def by_start(fetches: Sequence[PlacedFetch]) -> dict[fx.Node, list[PlacedFetch]]:
    """Launch → the fetches that begin behind it."""
    found: dict[fx.Node, list[PlacedFetch]] = {}
    for fetch in fetches:
        found.setdefault(fetch.behind, []).append(fetch)
    return found


def _note(node: fx.Node) -> Mapping[str, Any]:
    note: Mapping[str, Any] = custom_note(node, PREFETCH) or {}
    return note if node.op == "call_function" else {}
