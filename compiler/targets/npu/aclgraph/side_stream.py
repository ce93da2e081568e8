"""Puts the branches of a schedule on a second stream in the graph that npugraph_ex captures.

Matches:
    f; a1; a2; b1; b2; j(a2, b2)                     # b1 and b2 annotated, b1 reads f
Becomes:
    f; record(fork)
    enter(side); wait(fork); b1; b2; record(join); exit()
    a1; a2
    wait(join); keep(f); j(a2, b2)
Why it is faster:
    see ``passes.schedule.schedule_branches``.

These events alone order one stream behind the other: each launch must come behind all that it needed before, for
data or for memory. npugraph_ex itself lets the second stream begin behind the graph's inputs and end before its
outputs.

The allocator gives memory to the stream that asks for it. What the main stream made is kept until the branch that
reads it has been waited for. What the second stream made may go to a later branch once the main stream has launched
its readers: so every branch waits for all that was launched on the main stream before it.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .....passes.schedule.launches import dependencies, memory_of
from ..schedules.graph_launches import NotPlaced, graph_launches
from ..schedules.side_branches import place_branches, put_in_order

log = logging.getLogger(__name__)

EVENTS_PER_BRANCH = 2
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
    for number in range(len(branches)):
        for name in _events(label, number):
            operators.create(name)
    graph.lint()
    gm.recompile()
    log.info("running %d branches on a second stream", len(branches))
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
