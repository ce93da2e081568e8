"""Weights that a schedule fetches into the L2 cache, in a graph that AOTAutograd made of a lowered one.

Notes on nodes (``passes.schedule.schedule_prefetch``) survive AOTAutograd. A fetch computes nothing and is waited for
by nothing, so it cannot be wrong, but it can be useless or in the way: when it begins too early or too late, holds
more than its share of the cache, or is made twice. So a graph is looked at once its fetches are in it
(``why_misplaced``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from ....passes.graph.custom_notes import custom_note
from ....passes.schedule.schedule_prefetch import PREFETCH, stored_bytes, weight_arguments, whole_input
from .graph_launches import NotPlaced, is_fetch


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
                raise NotPlaced(f"{name} of {node.name} is no input of the graph as it lies")
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


def why_misplaced(graph: fx.Graph, fetches: Sequence[PlacedFetch], begins: Mapping[fx.Node, fx.Node | None]) -> str:
    """The first fetch of ``graph`` that is not as the notes ask for, or "".

    Args:
        graph: with fetches.
        fetches: as asked for.
        begins: call that fetches → the launch that it waits for, None for none.
    """
    asked = {fetch.weight: fetch for fetch in fetches}
    launched: set[fx.Node] = set()
    held: dict[fx.Node, PlacedFetch] = {}
    done: set[fx.Node] = set()
    for node in graph.nodes:
        if not is_fetch(node):
            launched.add(node)
            held = {weight: fetch for weight, fetch in held.items() if fetch.reader is not node}
            continue
        weight = whole_input(node.args[0])
        fetch = None if weight is None else asked.get(weight)
        if weight is None or fetch is None:
            return f"{node.name} fetches {node.args[0]}, which no launch waits for"
        if weight in done:
            return f"{node.name} fetches {weight.name} once more"
        if fetch.reader in launched:
            return f"{node.name} fetches {weight.name} behind {fetch.reader.name}, which reads it"
        if node.args[2] != fetch.bytes or not 0 < fetch.bytes <= stored_bytes(weight):
            return (
                f"{node.name} fetches {node.args[2]} bytes of {weight.name}, which has {stored_bytes(weight)}, "
                f"where {fetch.bytes} are asked for"
            )
        if begins.get(node) is not fetch.behind:
            waited = begins.get(node)
            return (
                f"{node.name} begins behind {'nothing' if waited is None else waited.name} and not behind "
                f"{fetch.behind.name}"
            )
        held[weight] = fetch
        done.add(weight)
        if (size := sum(each.bytes for each in held.values())) > fetch.most:
            return f"{node.name} leaves {size} fetched bytes unread, more than {fetch.most}"
    missing = next((fetch for fetch in fetches if fetch.weight not in done), None)
    return f"nothing fetches {missing.weight.name} for {missing.reader.name}" if missing else ""


def _note(node: fx.Node) -> Mapping[str, Any]:
    note: Mapping[str, Any] = custom_note(node, PREFETCH) or {}
    return note if node.op == "call_function" else {}
