"""What schedules put into graphs, held against the graphs as they were: fetches of weights, streams and events."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import pytest
from torch import fx

from torch_pagoda.compiler.targets.npu.aclgraph import aclgraph_route
from torch_pagoda.compiler.targets.npu.aclgraph.prefetch_stream import use_prefetch_stream
from torch_pagoda.compiler.targets.npu.aclgraph.side_stream import StreamOperators, use_side_stream
from torch_pagoda.compiler.targets.npu.ge import scheduled
from torch_pagoda.compiler.targets.npu.ge.weight_prefetch import fetch_weights
from torch_pagoda.compiler.targets.npu.schedules.graph_launches import graph_launches, is_fetch
from torch_pagoda.compiler.targets.npu.schedules.prefetches import PlacedFetch, placed_fetches
from torch_pagoda.passes.schedule.launches import dependencies, listed, memory_of
from torch_pagoda.passes.schedule.schedule_prefetch import stored_bytes, whole_input

_MAIN = ""


def check_every_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace what puts schedules into graphs by the functions below."""
    monkeypatch.setattr(aclgraph_route, "use_side_stream", checked_side_stream)
    monkeypatch.setattr(aclgraph_route, "use_prefetch_stream", checked_prefetch_stream)
    monkeypatch.setattr(scheduled, "fetch_weights", checked_fetches)


def checked_side_stream(gm: fx.GraphModule, label: str, operators: StreamOperators | None = None) -> str:
    """``use_side_stream``; what events do not keep in order of the graph before is a failure."""
    launches = graph_launches(gm.graph)
    needs, _ = dependencies(gm.graph, launches)
    if reason := use_side_stream(gm, label, operators):
        return reason
    fault = why_unordered(gm.graph, operators or StreamOperators.of_npugraph_ex(), launches, needs)
    assert not fault, fault
    return ""


def checked_prefetch_stream(gm: fx.GraphModule, label: str, operators: StreamOperators | None = None) -> str:
    """``use_prefetch_stream``; a fetch that is not as the notes ask for is a failure."""
    if reason := use_prefetch_stream(gm, label, operators):
        return reason
    operators = operators or StreamOperators.of_npugraph_ex()
    fetches = placed_fetches(gm.graph, operators.launches(gm.graph))
    fault = why_misplaced(gm.graph, fetches, stream_fetch_begins(gm.graph, operators, label))
    assert not fault, fault
    return ""


def checked_fetches(gm: fx.GraphModule) -> str:
    """``fetch_weights``; a fetch that is not as the notes ask for is a failure."""
    if reason := fetch_weights(gm):
        return reason
    fetches = placed_fetches(gm.graph, graph_launches(gm.graph))
    fault = why_misplaced(gm.graph, fetches, dependency_fetch_begins(gm.graph))
    assert not fault, fault
    return ""


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


def stream_fetch_begins(graph: fx.Graph, operators: StreamOperators, label: str) -> dict[fx.Node, fx.Node | None]:
    """Call that fetches → the last launch of the main stream that it waits for; None for none, or another stream.

    Args:
        graph: with streams and events.
        operators: that these are.
        label: of the stream for fetches.
    """
    launches = set(operators.launches(graph))
    stack: list[str] = []
    last: fx.Node | None = None
    recorded: dict[str, fx.Node | None] = {}
    waited: fx.Node | None = None
    found: dict[fx.Node, fx.Node | None] = {}
    place = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if node.target is operators.enter:
            stack.append(str(dict(zip(*node.args[:2], strict=True))["_user_stream_label"]))
        elif node.target is operators.exit:
            stack.pop()
        elif node.target is operators.record and not stack:
            recorded[str(node.args[0])] = last
        elif node.target is operators.wait and stack[-1:] == [label]:
            come = recorded.get(str(node.args[0]))
            if come is not None and (waited is None or place[come] > place[waited]):
                waited = come
        elif is_fetch(node):
            found[node] = waited if stack[-1:] == [label] else None
        elif node in launches and not stack:
            last = node
    return found


def dependency_fetch_begins(graph: fx.Graph) -> dict[fx.Node, fx.Node | None]:
    """Call that fetches → the launch that makes what it depends on; None for none."""
    found: dict[fx.Node, fx.Node | None] = {}
    for node in graph.nodes:
        if is_fetch(node):
            made = node.args[1]
            while isinstance(made, fx.Node) and made.target is operator.getitem:
                made = made.args[0]
            found[node] = made if isinstance(made, fx.Node) else None
    return found


def why_unordered(
    graph: fx.Graph,
    operators: StreamOperators,
    launches: Sequence[fx.Node] | None = None,
    needs: Mapping[fx.Node, int] | None = None,
) -> str:
    """The first thing that events do not keep in order, or "".

    Args:
        graph: with streams and events.
        operators: that these are.
        launches: of the graph as it was before; those that it has by default.
        needs: the launches that each waited for in that graph, as ``dependencies`` has them.
    """
    if launches is None:
        launches = operators.launches(graph)
    if needs is None:
        needs, _ = dependencies(graph, launches)
    return _Streams(graph, operators, launches, needs).first_fault()


class _Streams:
    """The streams of a graph as its nodes are launched, one after the other."""

    def __init__(
        self,
        graph: fx.Graph,
        operators: StreamOperators,
        launches: Sequence[fx.Node],
        needs: Mapping[fx.Node, int],
    ) -> None:
        self._graph, self._operators, self._launches, self._needs = graph, operators, launches, needs
        self._place = {node: i for i, node in enumerate(launches)}
        self._memory = memory_of(graph, launches)
        self._stream_of: dict[fx.Node, str] = {}
        self._stack = [_MAIN]
        self._launched: dict[str, int] = {_MAIN: 0}  # on each stream
        self._done: dict[str, int] = {_MAIN: 0}  # when the next launch of a stream begins
        self._recorded: dict[str, int] = {}
        self._read_across: list[tuple[fx.Node, fx.Node]] = []  # a launch of another stream, and what it reads

    def first_fault(self) -> str:
        """What ``why_unordered`` answers."""
        for node in self._graph.nodes:
            fault = self._launch(node) if node in self._place else self._follow(node)
            if fault:
                return fault
        if self._read_across:
            reader, source = self._read_across[0]
            return f"memory of {source.name} may be used again while {reader.name} reads it"
        return ""

    def _follow(self, node: fx.Node) -> str:
        """Take notice of a node that launches nothing."""
        stream = self._stack[-1]
        if node.target is self._operators.enter:
            label = str(dict(zip(*node.args[:2], strict=True))["_user_stream_label"])  # type: ignore[call-overload]
            self._stack.append(label)
            self._done.setdefault(label, 0)
            self._launched.setdefault(label, 0)
        elif node.target is self._operators.exit:
            self._stack.pop()
        elif node.target is self._operators.record:
            self._recorded[str(node.args[0])] = self._done[stream]
        elif node.target is self._operators.wait:
            if node.args[0] not in self._recorded:
                return f"{node.name} waits for {node.args[0]}, which nothing has recorded before"
            self._done[stream] |= self._recorded[str(node.args[0])]
        elif node.target is self._operators.keep:
            kept = self._memory[node.args[0]]  # type: ignore[index]
            done = self._done[stream]
            self._read_across = [
                (reader, source)
                for reader, source in self._read_across
                if source not in kept or not done >> self._place[reader] & 1
            ]
        elif node.op == "output":
            missing = listed(self._launches, (1 << len(self._launches)) - 1 & ~self._done[_MAIN])
            return f"the graph ends before {missing[0].name} is done" if missing else ""
        return ""

    def _launch(self, node: fx.Node) -> str:
        stream = self._stack[-1]
        where = "on the second stream" if stream != _MAIN else "on the main stream"
        if missing := listed(self._launches, self._needs[node] & ~self._done[stream]):
            return f"{node.name} {where} may begin before {missing[0].name} is done"
        if stream != _MAIN and (missing := listed(self._launches, self._launched[_MAIN] & ~self._done[stream])):
            return f"{node.name} {where} may take memory that {missing[0].name} still reads"
        own = 1 << self._place[node]
        self._done[stream] |= own
        self._launched[stream] |= own
        self._stream_of[node] = stream
        if stream != _MAIN:
            read = frozenset().union(*(self._memory[given] for given in node.all_input_nodes))
            self._read_across += [(node, source) for source in read if self._stream_of.get(source, stream) != stream]
        return ""
