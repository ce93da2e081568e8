"""Put the branches of a schedule on a second stream of the graph that npugraph_ex captures.

Matches:
    f; a1; a2; b1; b2; j(a2, b2)                     # b1 and b2 annotated, b1 reads f
Becomes:
    f; record(fork)
    enter(side); wait(fork); b1; b2; record(join); exit()
    a1; a2
    wait(join); keep(f); j(a2, b2)
Why it is faster:
    see ``passes.schedule.schedule_branches``.

These events alone order one stream behind the other. So a graph is looked at once they are in it
(``why_unordered``): each launch must come behind all that it needed before, for data or for memory. npugraph_ex
itself lets the second stream begin behind the graph's inputs and end before its outputs.

The allocator gives memory to the stream that asks for it. What the main stream made is kept until the branch that
reads it has been waited for. What the second stream made may go to a later branch once the main stream has launched
its readers: so every branch waits for all that was launched on the main stream before it.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .....passes.schedule.launches import dependencies, listed, memory_of
from ..graph_launches import NotPlaced, graph_launches
from ..side_branches import place_branches, put_in_order

log = logging.getLogger(__name__)

EVENTS_PER_BRANCH = 2
_MAIN = ""
_numbers = itertools.count()


@dataclass(frozen=True)
class StreamOperators:
    """Calls that stand in a graph for streams and events.

    Attributes:
        enter: ``(keys, values)``: what follows is for the stream that value ``_user_stream_label`` names.
        exit: ``()``: what follows is for the stream from before ``enter``.
        record: ``(event, True)``: an event that comes when all that was launched on this stream before is done.
        wait: ``(event, True)``: what follows on this stream begins when the event has come.
        keep: ``(tensor, label)``: a stream reads the tensor's memory.
        create: makes an event of a name, before any graph runs.
    """

    enter: Callable[..., Any]
    exit: Callable[..., Any]
    record: Callable[..., Any]
    wait: Callable[..., Any]
    keep: Callable[..., Any]
    create: Callable[[str], None]

    def launches(self, graph: fx.Graph) -> list[fx.Node]:
        """The launches of a graph, without these calls."""
        own = (self.enter, self.exit, self.record, self.wait, self.keep)
        return [node for node in graph_launches(graph) if node.target not in own]

    @classmethod
    def of_npugraph_ex(cls) -> StreamOperators:
        """Those of npugraph_ex; the function that makes events is none of its public ones.

        Raises:
            ImportError, AttributeError: this npugraph_ex has other ones.
        """
        import npugraph_ex.ops._tagged_event
        import npugraph_ex.scope  # noqa: F401
        from npugraph_ex._acl_concrete_graph.graph_pass import _create_event_by_name

        own = torch.ops.npugraph_ex
        return cls(
            enter=own.scope_enter.default,
            exit=own.scope_exit.default,
            record=own.tagged_event_record.default,
            wait=own.tagged_event_wait.default,
            keep=own.record_tagged_stream.default,
            create=_create_event_by_name,
        )


def new_label() -> str:
    """The beginning of names of streams that no other graph of this process has."""
    return f"pagoda_{next(_numbers)}"


def use_side_stream(gm: fx.GraphModule, label: str, operators: StreamOperators | None = None) -> str:
    """Edit ``gm``, in which operators write graph inputs in place already; "", or why it stays as it is.

    Args:
        gm: a graph that AOTAutograd made, with notes on its nodes.
        label: of the second stream; the names of its events begin with it.
        operators: what to insert; npugraph_ex's by default.
    """
    graph = gm.graph
    order = list(graph.nodes)
    launches = graph_launches(graph)
    needs, _ = dependencies(graph, launches)
    try:
        operators = operators or StreamOperators.of_npugraph_ex()
        branches = place_branches(graph, launches, needs)
    except (ImportError, AttributeError, NotPlaced) as error:
        put_in_order(order)
        return str(error)
    memory = memory_of(graph, launches)
    made_here = frozenset(launches)
    for number, branch in enumerate(branches):
        read_across = [given for given in _outside(branch) if memory[given] & made_here]
        _insert_events(graph, branch, read_across, operators, label, number)
    reason = why_unordered(graph, operators, launches, needs)
    if reason:
        kept = set(order)
        for node in [node for node in reversed(graph.nodes) if node not in kept]:
            graph.erase_node(node)
        put_in_order(order)
        return reason
    for number in range(len(branches)):
        for name in _events(label, number):
            operators.create(name)
    graph.lint()
    gm.recompile()
    log.info("%d branches run on a second stream", len(branches))
    return ""


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


def _outside(branch: Sequence[fx.Node]) -> list[fx.Node]:
    """What the nodes of a branch read of others, each once."""
    own = set(branch)
    return list(dict.fromkeys(given for node in branch for given in node.all_input_nodes if given not in own))


def _events(label: str, number: int) -> tuple[str, str]:
    """The names of the events of a branch: when it may begin, and when it is done."""
    return f"{label}_fork_{number}", f"{label}_join_{number}"


def _insert_events(
    graph: fx.Graph,
    branch: Sequence[fx.Node],
    read_across: Sequence[fx.Node],
    operators: StreamOperators,
    label: str,
    number: int,
) -> None:
    """Insert the events and the scope of a branch, whose nodes follow each other."""
    fork, join = _events(label, number)
    own = set(branch)
    users = {user for node in branch for user in node.users} - own
    after, reader = False, None
    for node in graph.nodes:
        after = after or node is branch[-1]
        if after and (node in users or node.op == "output"):
            reader = node
            break
    assert reader is not None, "a graph has an output"
    with graph.inserting_before(branch[0]):
        graph.call_function(operators.record, (fork, True))
        graph.call_function(operators.enter, (["_user_stream_label"], [label]))
        graph.call_function(operators.wait, (fork, True))
    with graph.inserting_before(branch[-1].next):
        graph.call_function(operators.record, (join, True))
        graph.call_function(operators.exit, ())
    with graph.inserting_before(reader):
        graph.call_function(operators.wait, (join, True))
        for given in read_across:
            graph.call_function(operators.keep, (given, label))
