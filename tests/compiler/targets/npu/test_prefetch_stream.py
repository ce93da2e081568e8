"""Fetches of weights on a stream of a captured graph: their place, their events, and what is found to be wrong.

On graphs written here, whose streams and events are stand-ins, or of lowered models through the real npugraph_ex.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fetched_graphs import BYTES, fetching, inputs
from lowered_models import LIMITS, assert_same, served
from placed_schedules import stream_fetch_begins, why_misplaced, why_unordered
from scheduled_models import prefetched, scheduled
from stream_operators import OPERATORS, enter, record, text, wait
from torch import fx

from torch_pagoda.compiler.targets.npu.aclgraph import prefetch_stream
from torch_pagoda.compiler.targets.npu.aclgraph.aclgraph_route import AclGraphs
from torch_pagoda.compiler.targets.npu.aclgraph.prefetch_stream import use_prefetch_stream
from torch_pagoda.compiler.targets.npu.aclgraph.side_stream import StreamOperators
from torch_pagoda.compiler.targets.npu.schedules import schedule_options
from torch_pagoda.compiler.targets.npu.schedules.graph_launches import NotPlaced, is_fetch
from torch_pagoda.compiler.targets.npu.schedules.prefetches import counted_fetches, placed_fetches
from torch_pagoda.passes.schedule.schedule_prefetch import PREFETCH, whole_input

aten, npu = torch.ops.aten, torch.ops.npu


def named(graph: fx.Graph, name: str) -> fx.Node:
    return next(node for node in graph.nodes if node.name == name)


def calling(graph: fx.Graph, target: Any) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is target]


def fetched(*args: Any, **kwargs: Any) -> fx.GraphModule:
    module = fetching(*args, **kwargs)
    assert use_prefetch_stream(module, "fetch", OPERATORS) == ""
    return module


def faults(module: fx.GraphModule) -> str:
    graph = module.graph
    return why_misplaced(
        graph, placed_fetches(graph, OPERATORS.launches(graph)), stream_fetch_begins(graph, OPERATORS, "fetch")
    )


def test_weights_are_fetched_behind_an_event_of_the_main_stream():
    module, plain = fetched(weights=2), fetching(weights=2)
    assert counted_fetches(plain.graph) == 2
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    names = [node.args[0] if node.target in (record, wait) else node.target.__name__ for node in calls]
    layer = ["fetch_begin_{0}", "enter", "fetch_begin_{0}", "npu_prefetch.default", "npu_prefetch.default", "leave"]
    assert names[1:7] == [name.format(0) for name in layer] and names[12:18] == [name.format(1) for name in layer]
    assert calls[0].name == "p_0" and [node.name for node in calls[7:11]] == ["a_0", "b_0", "m0_0", "m1_0"]
    fetches = [node for node in calls if is_fetch(node)]
    assert [(node.args[0].name, *node.args[1:]) for node in fetches] == [
        (f"w{i}_{j}", None, size) for i in (0, 1) for j, size in ((1, BYTES // 2), (2, BYTES))
    ]
    assert calling(module.graph, enter)[0].args == (["_user_stream_label"], ["fetch"])
    assert why_unordered(module.graph, OPERATORS) == "" and faults(module) == ""
    torch.testing.assert_close(module(*inputs(weights=2)), plain(*inputs(weights=2)), rtol=0, atol=0)


def test_a_graph_without_notes_stays_as_it_is():
    module = fetching()
    for node in module.graph.nodes:
        node.meta.pop("custom", None)
    before = text(module.graph)
    assert use_prefetch_stream(module, "fetch", OPERATORS) == "" and text(module.graph) == before
    assert counted_fetches(module.graph) == 0


def _behind_its_reader(graph: fx.Graph) -> None:
    named(graph, "m0_0").append(next(node for node in graph.nodes if is_fetch(node)))


def _twice(graph: fx.Graph) -> None:
    first = next(node for node in graph.nodes if is_fetch(node))
    with graph.inserting_before(first):
        graph.call_function(first.target, first.args)


def _bytes(size: int) -> Callable[[fx.Graph], None]:
    def mutate(graph: fx.Graph) -> None:
        first = next(node for node in graph.nodes if is_fetch(node))
        first.args = (*first.args[:2], size)

    return mutate


def _another_weight(graph: fx.Graph) -> None:
    first = next(node for node in graph.nodes if is_fetch(node))
    first.args = (named(graph, "w0_0"), *first.args[1:])


def _waits_for(event: str) -> Callable[[fx.Graph], None]:
    def mutate(graph: fx.Graph) -> None:
        last = calling(graph, wait)[-1]
        last.args = (event, True)

    return mutate


def _without_wait(graph: fx.Graph) -> None:
    graph.erase_node(calling(graph, wait)[0])


def _recorded_early(graph: fx.Graph) -> None:
    named(graph, "p_1").prepend(calling(graph, record)[1])


def _recorded_late(graph: fx.Graph) -> None:
    """All of the fetch comes behind a launch that was to run meanwhile."""
    place = named(graph, "a_1")
    nodes = list(graph.nodes)
    first = nodes.index(calling(graph, record)[1])
    for node in reversed(nodes[first : first + 5]):
        place.append(node)


def _on_the_main_stream(graph: fx.Graph) -> None:
    named(graph, "a_0").prepend(next(node for node in graph.nodes if is_fetch(node)))


def _left_out(graph: fx.Graph) -> None:
    graph.erase_node(next(node for node in graph.nodes if is_fetch(node)))


@pytest.mark.parametrize(
    ("mutate", "fault"),
    [
        (_behind_its_reader, "fetches w0_1 behind m0_0, which reads it"),
        (_twice, "fetches w0_1 once more"),
        (_bytes(BYTES), f"fetches {BYTES} bytes of w0_1, which has {BYTES}, where {BYTES // 2} are asked for"),
        (_bytes(1), "fetches 1 bytes of w0_1"),
        (_another_weight, "fetches w0_0, which no launch waits for"),
        (_waits_for("fetch_begin_0"), "begins behind p_0 and not behind p_1"),
        (_without_wait, "begins behind nothing and not behind p_0"),
        (_recorded_early, "begins behind m0_0 and not behind p_1"),
        (_recorded_late, "begins behind a_1 and not behind p_1"),
        (_on_the_main_stream, "begins behind nothing and not behind p_0"),
        (_left_out, "nothing fetches w0_1 for m0_0"),
    ],
)
def test_a_fetch_that_is_not_as_planned_is_found(mutate, fault):
    module = fetched()
    assert faults(module) == ""
    mutate(module.graph)
    assert fault in faults(module)


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"most": BYTES // 4}, f"leaves {BYTES // 2} fetched bytes unread, more than {BYTES // 4}"),
        ({"weights": 2, "most": BYTES}, f"leaves {BYTES * 3 // 2} fetched bytes unread, more than {BYTES}"),
    ],
)
def test_fetches_that_fill_too_much_of_the_cache_are_found(given, fault):
    assert fault in faults(fetched(**given))


@pytest.mark.parametrize(
    ("given", "change", "reason"),
    [
        ({"part": True}, {}, "weight of m0_0 is not an input of the graph as it lies"),
        ({}, {"p_0": {}}, "the launch behind which w0_1 is fetched is not in the graph"),
        ({}, {"m0_0": {}}, "nothing reads what is fetched behind p_0"),
        ({}, {"m0_1": {"starts": (), "reads": {0: ("weight", 1, 1)}}}, "m0_0 and m0_1 both read fetch 0"),
    ],
)
def test_notes_that_cannot_be_followed_leave_the_graph(given, change, reason):
    module = fetching(**given)
    for name, noted in change.items():
        named(module.graph, name).meta["custom"] = {PREFETCH: noted}
    before = text(module.graph)
    assert reason in use_prefetch_stream(module, "fetch", OPERATORS)
    assert text(module.graph) == before


def test_an_npugraph_ex_with_other_functions_is_a_reason(monkeypatch):
    def other() -> StreamOperators:
        raise AttributeError("module has no attribute _create_event_by_name")

    monkeypatch.setattr(prefetch_stream.StreamOperators, "of_npugraph_ex", other)
    assert "_create_event_by_name" in use_prefetch_stream(fetching(), "fetch")


def test_sizes_are_planned_for_what_fetches_take():
    traced, found, _ = prefetched("qwen2_moe", streams=True)
    plain = scheduled("qwen2_moe", schedule=False)[0]
    alone = prefetched("qwen2_moe")[0]
    routes = [AclGraphs(each, each.module) for each in (traced, alone, plain)]
    assert [route.needs.streams for route in routes] == [3, 2, 1]
    starts = len({fetch.behind for fetch in found})
    assert routes[0].needs.side_events == 2 * 2 + starts and routes[1].needs.side_events == 4
    for route in routes[:2]:
        route.reserve(4, 512, 4096)
        assert [tokens for tokens in route.planned if route.is_scheduled(tokens)] == [1, 2, 3, 4]


# Through the real npugraph_ex


@pytest.mark.torchair
@pytest.mark.parametrize(
    ("model_type", "streams"),
    [("llama", False), ("gpt_neox", False), ("qwen2_moe", False), ("qwen2_moe", True), ("deepseek_v3", False)],
)
def test_captures_fetch_weights_with_the_same_numbers(model_type, streams):
    from captured_graphs import captured_graphs, final_graphs

    traced, found, _ = prefetched(model_type, streams=streams)
    plain = scheduled(model_type, schedule=False)[0]
    route, without = AclGraphs(traced, traced.module, budget=2), AclGraphs(plain, plain.module, budget=2)
    weights = {fetch.weight.name: fetch.bytes for fetch in found}
    assert weights
    with captured_graphs() as graphs, final_graphs() as final:
        expected = served(plain, without)
        launches = sorted(len(graph.calls) for graph in graphs)
        graphs.clear()
        final.clear()
        assert_same(served(traced, route), expected, tolerance=1e-12)
    assert not route.eager_steps and route.captured == without.captured
    fetches = [[call for call in graph.calls if "npu_prefetch" in str(call.function)] for graph in graphs]
    assert sorted(len(g.calls) - len(f) for g, f in zip(graphs, fetches, strict=True)) == launches
    decode = [tokens for tokens, _ in route.captured if tokens <= LIMITS["max_num_seqs"]]
    with_fetches = [calls for calls in fetches if calls]
    assert 0 < len(decode) == len(with_fetches) < len(graphs)
    for calls in with_fetches:
        taken = {call.args[0].data_ptr(): call.args[2] for call in calls}
        assert len(calls) == len(taken) == len(weights)
        assert taken == {traced.constants[name].data_ptr(): size for name, size in weights.items()}
        assert len({id(call.stream) for call in calls}) == 1
    assert len(final) == 2, "one graph for decode steps, one for the others"
    operators = StreamOperators.of_npugraph_ex()
    (graph,) = (graph for graph in final if any(map(is_fetch, graph.nodes)))
    assert all(why_unordered(each, operators) == "" for each in final)
    label = next(
        node.args[1][0]
        for node in graph.nodes
        if node.target is operators.enter and str(node.args[1][0]).endswith("_fetch")
    )
    begins = stream_fetch_begins(graph, operators, label)
    for call, behind in begins.items():
        assert behind is not None and behind.meta["custom"][PREFETCH]["starts"]
        weight = whole_input(call.args[0])
        readers = [node for node in weight.users if node is not call]
        order = list(graph.nodes)
        assert all(order.index(call) < order.index(reader) for reader in readers)


@pytest.mark.torchair
def test_a_fetch_that_has_no_place_is_left_out_and_said(monkeypatch, caplog):
    from captured_graphs import captured_graphs

    def misses(*_: Any) -> Any:
        raise NotPlaced("nothing reads what is fetched")

    monkeypatch.setattr(prefetch_stream, "placed_fetches", misses)
    traced = prefetched("llama")[0]
    route = AclGraphs(traced, traced.module, budget=2)
    with captured_graphs() as graphs, caplog.at_level(logging.WARNING, schedule_options.__name__):
        assert_same(served(traced, route), served(traced, traced.module))
    assert not any("npu_prefetch" in str(call.function) for graph in graphs for call in graph.calls)
    assert "no weight is fetched before it is read: nothing reads what is fetched" in caplog.text
    assert set(route.dropped_schedules) == {"prefetch"}


def test_where_nothing_is_captured_the_schedule_is_left_out():
    traced, fetches, _ = prefetched("gemma2")
    route = AclGraphs(traced, traced.module)
    assert fetches and route.plan(2, 16, 64) == 0
    assert route.dropped_schedules == {"prefetch": f"nothing is captured: {route.refusal}"}
