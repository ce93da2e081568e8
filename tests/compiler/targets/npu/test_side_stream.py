"""Branches on a second stream of a captured graph: their place, the events around them, and what events have to keep.

On graphs written here, whose streams and events are stand-ins, or through npugraph_ex; those of lowered models are in
``test_scheduled_captures``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from branched_graphs import inputs, layered
from placed_schedules import checked_side_stream, why_unordered
from stream_operators import OPERATORS, enter, keep, leave, record, text, wait
from torch import fx
from torch._functorch.aot_autograd import aot_module_simplified

from torch_pagoda.compiler.targets.npu.aclgraph import side_stream
from torch_pagoda.compiler.targets.npu.aclgraph.aclgraph_route import aclgraph_options
from torch_pagoda.compiler.targets.npu.aclgraph.side_stream import (
    EVENTS_PER_BRANCH,
    StreamOperators,
    use_side_stream,
)
from torch_pagoda.compiler.targets.npu.schedules import side_branches

aten = torch.ops.aten


def named(graph: fx.Graph, target: Any) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is target]


def test_branches_follow_what_they_read_between_two_events():
    module, plain = layered(), layered()
    assert side_branches.counted_branches(module.graph) == 2
    assert checked_side_stream(module, "side", OPERATORS) == ""
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    names = [node.args[0] if node.target in (record, wait) else node.name for node in calls]
    enters, leaves, keeps = (named(module.graph, target) for target in (enter, leave, keep))
    layer = [
        [
            "f_0",
            "side_fork_0",
            enters[0].name,
            "side_fork_0",
            "b1_0",
            "view_0",
            "b2_0",
            "side_join_0",
            leaves[0].name,
        ],
        ["a1_0", "write_0", "a2_0", "side_join_0", keeps[0].name, "j_0"],
    ]
    assert names[:15] == [*layer[0], *layer[1]]
    assert names[15:17] == ["f_1", "side_fork_1"] and len(names) == 30
    assert [node.args for node in keeps] == [(node, "side") for node in calls if node.name in ("f_0", "f_1")]
    assert enters[0].args == (["_user_stream_label"], ["side"])
    found, expected = inputs(), inputs()
    torch.testing.assert_close(module(*found), plain(*expected), rtol=0, atol=0)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_graph_without_notes_stays_as_it_is():
    module = layered()
    for node in module.graph.nodes:
        node.meta.clear()
    before = text(module.graph)
    assert use_side_stream(module, "side", OPERATORS) == "" and text(module.graph) == before


@pytest.mark.parametrize(
    ("target", "which", "fault"),
    [
        (record, 0, "waits for side_fork_0, which nothing has recorded before"),
        (record, 1, "waits for side_join_0, which nothing has recorded before"),
        (wait, 0, "b1_0 on the second stream may begin before f_0 is done"),
        (wait, 1, "j_0 on the main stream may begin before b2_0 is done"),
        (wait, 2, "b1_1 on the second stream may begin before f_1 is done"),
        (wait, 3, "j_1 on the main stream may begin before b2_1 is done"),
        (keep, 0, "memory of f_0 may be used again while b1_0 reads it"),
    ],
)
def test_an_event_left_out_is_found(target, which, fault):
    module = layered()
    use_side_stream(module, "side", OPERATORS)
    assert why_unordered(module.graph, OPERATORS) == ""
    module.graph.erase_node(named(module.graph, target)[which])
    assert fault in why_unordered(module.graph, OPERATORS)


@pytest.mark.parametrize(
    ("first", "second", "fault"),
    [
        (0, 2, "waits for side_fork_1, which nothing has recorded before"),
        (1, 3, "waits for side_join_1, which nothing has recorded before"),
        (0, 1, "waits for side_join_0, which nothing has recorded before"),
    ],
)
def test_waits_that_are_swapped_are_found(first, second, fault):
    module = layered()
    use_side_stream(module, "side", OPERATORS)
    waits = named(module.graph, wait)
    waits[first].args, waits[second].args = waits[second].args, waits[first].args
    assert fault in why_unordered(module.graph, OPERATORS)


def test_a_wait_that_comes_too_late_is_found():
    module = layered()
    use_side_stream(module, "side", OPERATORS)
    joins = {node.name: node for node in module.graph.nodes if node.name.startswith("j_")}
    joins["j_0"].append(named(module.graph, wait)[1])
    assert "j_0 on the main stream may begin before b2_0" in why_unordered(module.graph, OPERATORS)


def test_events_recorded_before_the_work_are_found():
    module = layered()
    use_side_stream(module, "side", OPERATORS)
    (first,) = (node for node in module.graph.nodes if node.name == "b1_1")
    first.prepend(named(module.graph, record)[3])
    assert "j_1 on the main stream may begin before b2_1" in why_unordered(module.graph, OPERATORS)


@pytest.mark.parametrize("given", [{"side_reads": "cache"}, {"side_writes": True}])
def test_a_branch_that_touches_what_the_graph_writes_stays_on_the_main_stream(given):
    module = layered(**given)
    before = text(module.graph)
    assert "touches memory that the graph writes" in use_side_stream(module, "side", OPERATORS)
    assert text(module.graph) == before


def test_a_write_that_does_not_wait_for_the_branch_that_reads_is_found(monkeypatch):
    """Were a branch let read what the main stream writes."""
    monkeypatch.setattr(side_branches, "written_arguments", lambda node: [])
    module = layered(side_reads="cache")
    (write, join) = (node for node in module.graph.nodes if node.name in ("write_1", "j_1"))
    with module.graph.inserting_before(join):
        module.graph.call_function(aten.copy_.default, write.args, name="late")
    with pytest.raises(AssertionError, match="late on the main stream may begin before b1_1 is done"):
        checked_side_stream(module, "side", OPERATORS)


def test_a_read_that_was_moved_in_front_of_the_write_is_found(monkeypatch):
    """The order that is held is that of the graph before anything was moved."""
    monkeypatch.setattr(side_branches, "written_arguments", lambda node: [])
    monkeypatch.setattr(side_branches, "listed", lambda nodes, members: [])
    module = layered(1, side_reads="cache")
    with pytest.raises(AssertionError, match="b1_0 on the second stream may begin before write_0 is done"):
        checked_side_stream(module, "side", OPERATORS)


def test_a_branch_with_a_launch_of_others_in_the_middle_stays_on_the_main_stream():
    module = layered(1)
    (middle,) = (node for node in module.graph.nodes if node.name == "view_0")
    middle.target, middle.args = aten.neg.default, middle.args[:1]
    assert "view_0 lies between" in use_side_stream(module, "side", OPERATORS)


def test_an_npugraph_ex_with_other_functions_is_a_reason(monkeypatch):
    def other() -> StreamOperators:
        raise AttributeError("module has no attribute _create_event_by_name")

    monkeypatch.setattr(side_stream.StreamOperators, "of_npugraph_ex", other)
    assert "_create_event_by_name" in use_side_stream(layered(), "side")


# Through npugraph_ex, which captures on the CPU


def captured(monkeypatch: pytest.MonkeyPatch, mutate: Any = lambda graph, operators: None) -> tuple[float, Any]:
    """How far results of four replays are from those of the graph itself, and the graph that code was made of."""
    from captured_graphs import captured_graphs

    final: list[fx.Graph] = []

    def edit(gm: fx.GraphModule, example_inputs: Any = None, config: Any = None) -> None:
        assert checked_side_stream(gm, "pagoda_side_test") == ""
        mutate(gm.graph, StreamOperators.of_npugraph_ex())

    def compile_fx(gm: fx.GraphModule, given: Any) -> Any:
        npugraph_ex = torch.npu.npugraph_ex  # type: ignore[attr-defined]
        return npugraph_ex.compile_fx(gm, given, aclgraph_options(4, {}, edit))

    with captured_graphs() as graphs, torch.no_grad():
        from npugraph_ex._acl_concrete_graph.fx2acl_converter import AclConcreteGraph

        write = AclConcreteGraph._codegen_fx_forward

        def noted(concrete: Any, gm: fx.GraphModule, *args: Any) -> Any:
            final.append(gm.graph)
            return write(concrete, gm, *args)

        monkeypatch.setattr(AclConcreteGraph, "_codegen_fx_forward", noted)
        plain, places = layered(), inputs()
        run = aot_module_simplified(
            layered(), places, fw_compiler=compile_fx, decompositions={}, keep_inference_input_mutations=True
        )
        worst = 0.0
        for n in range(5):
            given = [tensor + n for tensor in inputs()]
            for place, tensor in zip(places, given, strict=True):
                place.copy_(tensor)
            found, expected = [*run(*places), *places[1:]], [*plain(*given), *given[1:]]
            worst = max(worst, *(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)))
    (graph,) = graphs
    assert graph.replays == 5 and len(graph.side_calls) == 4
    return worst, final[0]


@pytest.mark.torchair
def test_npugraph_ex_keeps_streams_and_events(monkeypatch):
    difference, graph = captured(monkeypatch)
    operators = StreamOperators.of_npugraph_ex()
    assert difference == 0 and why_unordered(graph, operators) == ""
    # Two a branch, and its own: one at the begin, one at the end.
    assert len(named(graph, operators.record)) == len(named(graph, operators.wait)) == 2 * EVENTS_PER_BRANCH + 2


@pytest.mark.torchair
@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_replays_differ_where_a_wait_is_left_out(which, monkeypatch):
    def mutate(graph: fx.Graph, operators: StreamOperators) -> None:
        graph.erase_node(named(graph, operators.wait)[which])

    difference, graph = captured(monkeypatch, mutate)
    assert "may begin before" in why_unordered(graph, StreamOperators.of_npugraph_ex())
    assert difference > 0
