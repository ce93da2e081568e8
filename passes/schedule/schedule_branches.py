"""Mark branches of a decode step that can run on a second stream.

Matches:
    a = ... rope, cache write, attention, linear     # main: keeps the memory idle for a while
    b = linear, activation, linear                   # neither needs the other
    a + b
Becomes:
    the same nodes; those of b have meta["custom"]["pagoda_schedule"] == {"stream": "side", "branch": the join's name}
Why it is faster:
    b reads its weights while a launches what is too small to keep memory or cubes busy. By shapes only, not measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from torch import fx

from ..graph.custom_notes import clear_custom_notes, put_custom_note
from ..graph.fx_nodes import written_arguments
from ..graph.provenance import DecoderLayers, decoder_layers
from ..graph.record import PassRecord
from ..graph.traced import TracedGraph
from .launches import Cost, Launches

ANNOTATION = "pagoda_schedule"
"""Key, in ``node.meta["custom"]``, of what a schedule says about a node."""
SIDE = "side"
"""The one stream beside the main one: all layers share it."""
LEAST_LAUNCHES = 2
LEAST_GAIN = 2e-6
"""Seconds: what the two events of a branch cost is not published; a branch has to be worth a launch."""


@dataclass(frozen=True)
class Branch:
    """Launches that run concurrently with others.

    Attributes:
        join: the first launch that needs both.
        side: launches for the second stream, in order.
        main: those that run meanwhile.
        seconds: of ``side`` by itself, predicted.
        gain: seconds that the step is shorter by at most, predicted: all that ``main`` leaves idle counts, though
            ``side`` may be done before.
    """

    join: fx.Node
    side: tuple[fx.Node, ...]
    main: tuple[fx.Node, ...]
    seconds: float
    gain: float


def schedule_branches(traced: TracedGraph, costs: Mapping[fx.Node, Cost]) -> tuple[PassRecord, list[Branch]]:
    """Annotate the branches of ``traced``; its nodes, their order and their arguments stay.

    Args:
        traced: a lowered graph.
        costs: of its launches in a decode step.

    Returns:
        the record and the branches, in launch order.
    """
    record = PassRecord("schedule_branches")
    launches = Launches(traced.graph, costs)
    layers = decoder_layers(traced.graph, tokens=traced.placeholder(traced.input_ids))
    found: list[Branch] = []
    taken: set[fx.Node] = set()
    for join in reversed(launches.nodes):  # the widest of nested branches comes first
        if join in taken:
            continue
        for a, b in combinations(launches.inputs(join), 2):
            sides = launches.difference(a, b), launches.difference(b, a)
            if any(layers.of.keys().isdisjoint(side) for side in sides):
                continue  # made once a step, rotary tables for instance
            if not taken.isdisjoint([*sides[0], *sides[1]]):
                continue
            branch = _branch(launches, layers, join, *sides)
            if isinstance(branch, str):
                record.reject(join, branch)
                continue
            found.append(branch)
            taken.update(branch.side)
            break
    found.reverse()
    clear_custom_notes(traced.graph, ANNOTATION)
    for branch in found:
        for node in branch.side:
            put_custom_note(node, ANNOTATION, {"stream": SIDE, "branch": branch.join.name})
    record.matches = len(found)
    return record, found


def _branch(
    launches: Launches, layers: DecoderLayers, join: fx.Node, a: Sequence[fx.Node], b: Sequence[fx.Node]
) -> Branch | str:
    """The better of the two ways to run two sides beside each other, or the reason against both."""
    ways = [
        _one_way(launches, join, side, [node for node in main if node in layers.of])
        for side, main in ((a, b), (b, a))
    ]
    taken = [way for way in ways if isinstance(way, Branch)]
    if taken:
        return max(taken, key=lambda way: (way.gain, -way.seconds))
    return next(way for way in ways if isinstance(way, str))


def _one_way(launches: Launches, join: fx.Node, side: Sequence[fx.Node], main: Sequence[fx.Node]) -> Branch | str:
    costs = [launches.costs[node] for node in side]
    writing = next((node for node in side if written_arguments(node)), None)
    if writing is not None:
        return f"{writing.name} writes memory that other launches read, which the second stream must not"
    if len(side) < LEAST_LAUNCHES:
        return f"{side[0].name} by itself is too little for a second stream"
    for part in (side, main):
        if all(launches.costs[node].resource == "vector" for node in part):
            return f"{part[0].name} and what follows are vector work alone"
    idle = _idle(launches, main, costs)
    gain = min(launches.seconds(side), idle)
    if gain < LEAST_GAIN:
        return f"{main[0].name} and what follows leave {idle * 1e6:.1f} µs to {side[0].name} and what follows"
    return Branch(join, tuple(side), tuple(main), launches.seconds(side), gain)


def _idle(launches: Launches, main: Sequence[fx.Node], side: Sequence[Cost]) -> float:
    """Seconds for which ``main`` leaves idle what ``side`` needs most, memory or cubes."""
    by_memory = sum(cost.memory for cost in side) >= sum(cost.compute for cost in side)
    costs = [launches.costs[node] for node in main]
    return sum(cost.seconds - (cost.memory if by_memory else cost.compute) for cost in costs)
