"""Boundaries between the stages of a pipeline: the places in a finished graph where it is parted, and what crosses
there.

A graph is parted between two layers, where the fewest bytes cross, so that the stages hold about as many bytes of
weights. What writes into a cache or into another tensor, and all that reads it, stays on one side. What follows from
the step alone (rotary tables) does not cross: each stage that reads it computes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from ...runtime.ops.linear.stored_weight import StoredWeight
from ...runtime.parallel.stage_values import StageValue
from ...runtime.program import is_cache_input
from .fx_nodes import is_dynamic, is_pure, shape, storage_key, value, written_arguments
from .notes import Boundary
from .provenance import decoder_layers
from .traced import TracedGraph, UnsupportedModel


def shared_nodes(graph: fx.Graph, input_ids: str) -> set[fx.Node]:
    """Nodes that follow from constants and from the step, but not from its tokens: every stage may compute them."""
    written = set()
    for node in graph.nodes:
        for target in written_arguments(node):
            while target.op != "placeholder" and target.args and isinstance(target.args[0], fx.Node):
                target = target.args[0]
            written.add(target)
    shared: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            if node not in written and not is_cache_input(node.name) and node.name != input_ids:
                shared.add(node)
        elif node.op == "call_function" and _is_pure(node) and shared.issuperset(node.all_input_nodes):
            shared.add(node)
    return shared


def _is_pure(node: fx.Node) -> bool:
    """Arithmetic on the number of tokens is, too."""
    is_arithmetic = getattr(node.target, "__module__", "") in ("_operator", "math", "torch")
    return is_pure(node.target) or (is_arithmetic and not written_arguments(node))


def own_nodes(graph: fx.Graph, shared: set[fx.Node]) -> list[fx.Node]:
    """The nodes that belong to one stage each, in order."""
    return [n for n in graph.nodes if n.op not in ("placeholder", "output") and n not in shared]


@dataclass(frozen=True)
class Piece:
    """A part of a graph between two places where it can be parted.

    Attributes:
        first: name of its first node.
        received: what crosses in front of it.
        weight_bytes: of the weights that it reads.
        caches: indices of those that it reads.
        layers: numbers of the decoder layers in it.
    """

    first: str
    received: tuple[StageValue, ...]
    weight_bytes: int
    caches: frozenset[int]
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Pieces:
    """All pieces of a graph.

    Attributes:
        pieces: in order.
        reason: why there are not more of them, for a message; "" where each layer is one.
    """

    pieces: tuple[Piece, ...]
    reason: str = ""


def choose_boundaries(traced: TracedGraph, stages: int) -> tuple[Boundary, ...]:
    """The boundaries of so many stages, the most bytes of weights of one of which are as few as can be.

    Raises:
        UnsupportedModel: the graph can be parted in fewer places.
    """
    if stages == 1:
        return ()
    found = pieces_of(traced)
    starts = deal(found.pieces, stages, found.reason)
    return tuple(Boundary(piece.first, piece.received) for piece in map(found.pieces.__getitem__, starts))


def parted(graphs: Sequence[TracedGraph], stages: int) -> list[TracedGraph]:
    """Copies of the graphs of one stage's ranks with boundaries: of so many stages, or as many as there can be."""
    bounds = choose_boundaries(graphs[0], min(stages, most_stages(pieces_of(graphs[0]).pieces)))
    copies = [traced.copy() for traced in graphs]
    for traced in copies:
        traced.notes.boundaries = bounds
    return copies


def deal(pieces: Sequence[Piece], stages: int, reason: str = "") -> list[int]:
    """The pieces that stages but the first begin with, each of which holds a cache if any piece does.

    Raises:
        UnsupportedModel: there are fewer stages; ``reason`` says why.
    """
    dealt = _dealt(pieces, stages)
    if dealt is None:
        most = most_stages(pieces)
        into = f"can be parted into {most} stages at most" if most > 1 else "cannot be parted into stages"
        raise UnsupportedModel(f"pipeline_parallel_size={stages}: its layers {into}{reason}; lower it to {most}")
    return dealt


def most_stages(pieces: Sequence[Piece]) -> int:
    """The number of stages that pieces can be dealt to."""
    return next(n for n in range(len(pieces), 0, -1) if _dealt(pieces, n) is not None)


def pieces_of(traced: TracedGraph) -> Pieces:
    """The pieces of a graph, parted wherever it can be."""
    places = _Places(traced)
    bounds = [0, *places.found, len(places.nodes)]
    pieces = []
    for start, end in pairwise(bounds):
        nodes = places.nodes[start:end]
        read = places.read_by(nodes)
        caches = frozenset(int(name.rpartition("_")[2]) for name in read if is_cache_input(name))
        layers = sorted({places.layers[node] for node in nodes if node in places.layers})
        weights = sum(_bytes_of(traced, name) for name in read)
        pieces.append(Piece(nodes[0].name, places.values.get(start, ()), weights, caches, tuple(layers)))
    return Pieces(tuple(pieces), places.reason)


class _Places:
    """The places where a graph can be parted.

    Attributes:
        nodes: those that belong to one stage each.
        found: of them, the indices of those that a stage may begin with, in order.
        values: of each such index, what crosses there.
        layers: decoder layer of each node of one.
        reason: why there are not more of them, for a message.
    """

    def __init__(self, traced: TracedGraph) -> None:
        self._traced = traced
        self._shared = shared_nodes(traced.graph, traced.input_ids)
        self.nodes = own_nodes(traced.graph, self._shared)
        self._at = {node: i for i, node in enumerate(self.nodes)}
        self._last = {
            node: max((self._at.get(user, len(self.nodes)) for user in node.users), default=i)
            for node, i in self._at.items()
        }
        self.layers = decoder_layers(traced.graph).of
        self._written, self._inside = self._memory_that_is_written()
        self.values: dict[int, tuple[StageValue, ...]] = {}
        self.found, self.reason = [], ""
        for first, end in self._windows():
            possible = [(self._bytes(found), -at) for at in range(first, end + 1) if (found := self._crossing(at))]
            if possible:
                self.found.append(-min(possible)[1])
            else:
                self.reason = ", as some of them share a cache or another tensor"

    def _memory_that_is_written(self) -> tuple[set[int], list[tuple[int, int]]]:
        """Storages that the graph writes into, and of each the first and the last node that touches it."""
        keys: set[Any] = {storage_key(n) for n in self._traced.placeholders if is_cache_input(n.name)}
        keys |= {storage_key(target) for node in self.nodes for target in written_arguments(node)}
        keys.discard(None)
        spans: dict[int, tuple[int, int]] = {}
        for i, node in enumerate(self.nodes):
            for touched in (node, *node.all_input_nodes):
                key = storage_key(touched)
                if key in keys:
                    spans[key] = (spans.get(key, (i, i))[0], i)
        return keys, list(spans.values())

    def _windows(self) -> list[tuple[int, int]]:
        """Between each two layers, the first and the last place behind the products of one and before those of the
        next."""
        spans: dict[int, tuple[int, int]] = {}
        for i, node in enumerate(self.nodes):
            if (layer := self.layers.get(node)) is not None and self._is_product(node):
                spans[layer] = (spans.get(layer, (i, i))[0], i)
        layers = sorted(spans)
        return [
            (spans[before][1] + 1, spans[layer][0])
            for before, layer in pairwise(layers)
            if spans[before][1] < spans[layer][0]
        ]

    def _is_product(self, node: fx.Node) -> bool:
        """It reads a matrix or a cache."""
        read = [n for n in node.all_input_nodes if n.op == "placeholder" or n in self._shared]
        sources = {source for n in read for source in self._sources(n)}
        return any(is_cache_input(source.name) or self._is_weight(source) for source in sources)

    def _is_weight(self, source: fx.Node) -> bool:
        is_step = source.name in self._traced.step_inputs or source.name == self._traced.position_ids
        return not is_step and len(shape(source)) > 1

    def _sources(self, node: fx.Node) -> set[fx.Node]:
        """The graph's inputs that a shared node is made of."""
        if node.op == "placeholder":
            return {node}
        return {source for n in node.all_input_nodes for source in self._sources(n)}

    def read_by(self, nodes: Sequence[fx.Node]) -> set[str]:
        """Names of the graph's inputs that nodes are made of, as far as no other node of one stage is in between."""
        read = {n for node in nodes for n in node.all_input_nodes if n not in self._at}
        return {source.name for n in read for source in self._sources(n)}

    def _crossing(self, at: int) -> tuple[StageValue, ...] | None:
        """What crosses in front of the node with this index; None where the graph cannot be parted there."""
        if at >= len(self.nodes) or any(first < at <= last for first, last in self._inside):
            return None
        live = [node for node in self.nodes[:at] if self._last[node] >= at]
        found = [self._value(node) for node in live]
        if not found or None in found:
            return None
        self.values[at] = tuple(found)  # type: ignore[arg-type]
        return self.values[at]

    def _value(self, node: fx.Node) -> StageValue | None:
        fake = value(node)
        if not isinstance(fake, torch.Tensor) or storage_key(node) in self._written:
            return None
        symbol, sizes = self._traced.token_symbol, list[int | None]()
        for size in shape(node):
            if is_dynamic(size) and size.node.expr != symbol:
                return None
            sizes.append(None if is_dynamic(size) else int(size))
        return StageValue(node.name, fake.dtype, tuple(sizes))

    @staticmethod
    def _bytes(values: Sequence[StageValue]) -> int:
        return sum(math.prod(value.shape(64)) * value.dtype.itemsize for value in values)


def _bytes_of(traced: TracedGraph, name: str) -> int:
    if name in traced.notes.merged and name not in traced.constants:
        return sum(_bytes_of(traced, source) for source in traced.notes.merged[name])
    tensor = traced.constants.get(name)
    if tensor is None:
        return 0
    return tensor.stored_bytes if isinstance(tensor, StoredWeight) else tensor.numel() * tensor.element_size()


def _dealt(pieces: Sequence[Piece], stages: int) -> list[int] | None:
    """See ``deal``; None where there are fewer stages."""
    without = not any(piece.caches for piece in pieces)
    best: Mapping[int, tuple[int, list[int]]] = {0: (0, [])}  # end → largest stage up to there, and where they begin
    for _ in range(stages):
        ends: dict[int, tuple[int, list[int]]] = {}
        for start, (largest, begun) in best.items():
            size, holds = 0, without
            for end, piece in enumerate(pieces[start:], start + 1):
                size, holds = size + piece.weight_bytes, holds or bool(piece.caches)
                most = max(largest, size)
                if holds and (end not in ends or most < ends[end][0]):
                    ends[end] = most, [*begun, end]
        best = ends
    return best[len(pieces)][1][:-1] if len(pieces) in best else None
