"""Mark weights that can be fetched into the L2 cache while launches before their reader leave the memory idle.

Matches:
    p; w1; w2; m(x, weight)          # w1 and w2 wait for no memory, m waits for its weight all the time
Becomes:
    the same nodes; meta["custom"]["pagoda_prefetch"] of p and m says how many bytes of the weight are fetched as soon
    as p is done (see ``note``)
Why it is faster:
    m finds these bytes in the L2 cache, which is read faster than the memory. By shapes only, not measured.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..graph.custom_notes import clear_custom_notes, custom_note, put_custom_note
from ..graph.fx_nodes import argument, value
from ..graph.provenance import launches_work, operator_name
from ..graph.record import PassRecord
from ..graph.traced import TracedGraph
from .launches import Cost
from .schedule_branches import Branch

PREFETCH = "pagoda_prefetch"
"""Key, in ``node.meta["custom"]``, of what is fetched behind a node and of what it reads of that; see ``note``."""
LEAST_WINDOW = 5e-6
"""Seconds: in less than that so little is fetched that the launch of the fetch costs as much."""
LEAST_FETCH = 1e-6
"""Seconds that the memory takes for the smallest fetch."""
BANDWIDTH_SHARE = 0.5
"""Of the memory's bandwidth, what a fetch is taken to get beside other launches; an assumption."""
L2_SHARE = 0.5
"""Of the L2 cache, what holds fetched weights and all that is read until they are; the rest is others'."""

WEIGHTS: Mapping[str, tuple[tuple[int, str], ...]] = {
    "npu.npu_linear": ((1, "weight"),),
    "npu.npu_quant_matmul": ((1, "x2"),),
    "npu.npu_weight_quant_batchmatmul": ((1, "weight"),),
    "npu.npu_transpose_batchmatmul": ((1, "weight"),),
    "npu.npu_mla_prolog_v3": ((1, "weight_dq"), (4, "weight_dkv_kr"), (2, "weight_uq_qr"), (3, "weight_uk")),
}
"""Operator → its weights of which every byte is read, as (position, name) of arguments, in the order of reading."""
_EXPERTS = frozenset({"npu.npu_grouped_matmul", "npu.npu_grouped_matmul_swiglu_quant_v2"})


@dataclass(frozen=True)
class L2Cache:
    """An L2 cache and the memory behind it.

    Attributes:
        size: bytes.
        bandwidth: with which it is read, bytes per second.
        memory_bandwidth: with which the memory behind it is read, likewise.
    """

    size: int
    bandwidth: float
    memory_bandwidth: float


@dataclass(frozen=True)
class Fetch:
    """A weight, or the beginning of one, that is fetched into the L2 cache.

    Attributes:
        weight: the graph input that it is.
        name: of the argument of ``reader`` that takes it.
        bytes: that are fetched, from its first on.
        behind: the launch after which that begins.
        window: launches that leave the memory idle meanwhile, in order.
        reader: the launch that reads the weight.
        idle: seconds for which the memory is idle in ``window``.
        gain: seconds that ``reader`` is shorter by, predicted.
    """

    weight: fx.Node
    name: str
    bytes: int
    behind: fx.Node
    window: tuple[fx.Node, ...]
    reader: fx.Node
    idle: float
    gain: float


def schedule_prefetch(
    traced: TracedGraph, costs: Mapping[fx.Node, Cost], cache: L2Cache, branches: Sequence[Branch] = ()
) -> tuple[PassRecord, list[Fetch]]:
    """Annotate what is fetched in ``traced``; its nodes, their order and their arguments stay.

    Each weight is fetched once, for the first launch that reads it. Launches of a branch, on either stream, and
    the one that waits for both count as leaving no memory idle, and nothing is fetched for them or across them.

    Args:
        traced: a lowered graph.
        costs: of its launches in a decode step.
        cache: that of the chip.
        branches: that run on a second stream, from ``schedule_branches``.

    Returns:
        the record and the fetches, in launch order.
    """
    record = PassRecord("schedule_prefetch")
    side = {node for branch in branches for node in branch.side}
    order = [node for node in traced.graph.nodes if launches_work(node) and node not in side]
    beside = {node for branch in branches for node in (*branch.main, branch.join)} - side
    found: list[Fetch] = []
    windows = list(_windows(order, costs, beside, record))
    stops = sorted({*(window.start for window in windows), *map(order.index, beside), len(order)})
    for window in windows:
        following = order[window.end : next(stop for stop in stops if stop >= window.end)]
        fetched = {fetch.weight for fetch in found}
        found += _of_window(traced, window, following, costs, cache, fetched, record)
    clear_custom_notes(traced.graph, PREFETCH)
    for number, fetch in enumerate(found):
        note(fetch.behind, fetch.reader, number, fetch.name, fetch.bytes, int(L2_SHARE * cache.size))
    record.matches = len(found)
    return record, found


def note(behind: fx.Node, reader: fx.Node, number: int, name: str, size: int, most: int) -> None:
    """Annotate both ends of a fetch.

    Args:
        behind: gets ``number`` among "starts".
        reader: gets ``number`` → (name, size, most) in "reads".
        number: of the fetch, which no other has.
        name: of the argument that takes the weight.
        size: bytes that are fetched.
        most: bytes that all fetched weights may have that are not read yet.
    """
    for node in (behind, reader):
        known = custom_note(node, PREFETCH) or {"starts": (), "reads": {}}
        if node is behind:
            known = {**known, "starts": (*known["starts"], number)}
        if node is reader:
            known = {**known, "reads": {**known["reads"], number: (name, size, most)}}
        put_custom_note(node, PREFETCH, known)


def weight_arguments(node: fx.Node) -> Iterator[tuple[str, Any]]:
    """The arguments of a launch that are its weights, with their names, in the order in which they are read."""
    for position, name in WEIGHTS.get(operator_name(node).removesuffix("_functional"), ()):
        yield name, argument(node, position, name)


def whole_input(given: Any) -> fx.Node | None:
    """The graph input that a node is, or all of whose elements it shows; None where there is none."""
    node = given
    while isinstance(node, fx.Node) and getattr(node.target, "is_view", False):
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.op != "placeholder":
        return None
    return node if _tensor(node).numel() == _tensor(given).numel() else None


def stored_bytes(node: fx.Node) -> int:
    """Bytes of the tensor of a graph input whose sizes are numbers."""
    tensor = _tensor(node)
    return tensor.numel() * tensor.element_size()


def _tensor(node: fx.Node) -> torch.Tensor:
    known = value(node)
    tensor: torch.Tensor = node.meta["val"] if known is None else known
    return tensor


@dataclass(frozen=True)
class _Window:
    """Launches ``start`` to ``end`` (without) of the main stream, behind ``behind``, that wait for no memory."""

    start: int
    end: int
    behind: fx.Node
    launches: tuple[fx.Node, ...]
    idle: float


def _windows(
    order: Sequence[fx.Node], costs: Mapping[fx.Node, Cost], busy: Collection[fx.Node], record: PassRecord
) -> Iterator[_Window]:
    """Runs of launches that leave the memory idle for long enough, each as long as it can be; none of ``busy``."""
    start = 0
    while start < len(order):
        first, end = order[start], start
        while end < len(order) and not costs[order[end]].memory_bound and (order[end] in busy) == (first in busy):
            end += 1
        launches = tuple(order[start:end])
        idle = sum(costs[node].seconds - costs[node].memory for node in launches)
        what = f"{first.name} and what follows leave" if len(launches) > 1 else f"{first.name} leaves"
        if launches and end < len(order):
            if idle < LEAST_WINDOW:
                short = f"{idle * 1e6:.1f} µs, less than {LEAST_WINDOW * 1e6:.0f}"
                record.reject(first, f"{what} the memory idle for {short}")
            elif first in busy:
                record.reject(first, f"{what} the memory to a branch on the second stream")
            elif not start:
                record.reject(first, f"{what} the memory idle, and no launch before says when")
            else:
                yield _Window(start, end, order[start - 1], launches, idle)
        start = max(end, start + 1)


def _of_window(
    traced: TracedGraph,
    window: _Window,
    following: Sequence[fx.Node],
    costs: Mapping[fx.Node, Cost],
    cache: L2Cache,
    fetched: set[fx.Node],
    record: PassRecord,
) -> Iterator[Fetch]:
    """What is fetched in a window for the launches behind it, up to the next window or branch."""
    left = int(BANDWIDTH_SHARE * cache.memory_bandwidth * window.idle)
    room = int(L2_SHARE * cache.size) - _moved(window.launches, costs, cache)
    least = LEAST_FETCH * cache.memory_bandwidth
    found = False
    for reader in following:
        saved = 0
        for name, weight in _weights(traced, reader, costs, record):
            size = min(stored_bytes(weight), left, room)
            if weight in fetched:
                record.reject(reader, f"{weight.name} is fetched for an earlier launch")
            elif size >= least:
                gain = _gain(costs[reader], cache, saved + size) - _gain(costs[reader], cache, saved)
                yield Fetch(weight, name, size, window.behind, window.launches, reader, window.idle, gain)
                fetched.add(weight)
                saved, left, room, found = saved + size, left - size, room - size, True
        room -= _moved([reader], costs, cache) - saved
        if left < least:
            return
        if room < least:
            record.reject(reader, f"{reader.name} and what precedes it fill {L2_SHARE:.0%} of the L2 cache")
            return
    if not found:
        first = window.launches[0]
        record.reject(first, f"{first.name} and what follows leave the memory idle, and no weight is waited for then")


def _weights(
    traced: TracedGraph, reader: fx.Node, costs: Mapping[fx.Node, Cost], record: PassRecord
) -> Iterator[tuple[str, fx.Node]]:
    """The weights of a launch that waits for them, with the names of its arguments."""
    if not costs[reader].memory_bound:
        return
    if operator_name(reader) in _EXPERTS:
        record.reject(reader, f"{reader.name} reads those experts that tokens are sent to, known only then")
    constants = traced.constants.keys() | traced.notes.made_when_linked
    for name, given in weight_arguments(reader):
        weight = whole_input(given)
        if weight is None or weight.name not in constants:
            record.reject(reader, f"{name} of {reader.name} is not a weight of the model as it lies")
        else:
            yield name, weight


def _moved(nodes: Sequence[fx.Node], costs: Mapping[fx.Node, Cost], cache: L2Cache) -> int:
    return int(sum(costs[node].memory for node in nodes) * cache.memory_bandwidth)


def _gain(cost: Cost, cache: L2Cache, size: int) -> float:
    """Seconds that a launch is shorter by with so many of its bytes in the cache."""
    memory = cost.memory - size * (1 / cache.memory_bandwidth - 1 / cache.bandwidth)
    return cost.seconds - max(memory, cost.compute, cost.floor)
