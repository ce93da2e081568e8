"""Branches on a second stream of captured graphs, through the real npugraph_ex: code, numbers, sizes."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from lowered_models import LIMITS, assert_same, served
from placed_schedules import why_unordered
from scheduled_models import scheduled

from torch_pagoda.compiler.targets.npu.aclgraph import side_stream
from torch_pagoda.compiler.targets.npu.aclgraph.aclgraph_route import AclGraphs
from torch_pagoda.compiler.targets.npu.aclgraph.side_stream import StreamOperators
from torch_pagoda.compiler.targets.npu.schedules import schedule_options
from torch_pagoda.compiler.targets.npu.schedules.graph_launches import NotPlaced
from torch_pagoda.compiler.targets.npu.sizes.graph_resources import capture_budget


def test_sizes_are_planned_for_what_a_second_stream_takes():
    traced, branches = scheduled("gpt_neox")
    route, plain = (
        AclGraphs(traced, traced.module),
        AclGraphs(scheduled("gpt_neox", schedule=False)[0], traced.module),
    )
    assert (plain.needs.streams, plain.needs.events) == (1, 2 + 1)
    assert (route.needs.streams, route.needs.events) == (2, 2 + 1 + 2 + 2 * len(branches)) and len(branches) == 2
    for soc, sizes in (("Ascend910B2", 64), ("Ascend310P3", 64)):
        assert capture_budget(soc, route.needs)[0] == sizes
    route.reserve(4, 512, 4096)
    assert [tokens for tokens in route.planned if route.is_scheduled(tokens)] == [1, 2, 3, 4]
    route.reserve(1000, 2048, 4096)
    assert [route.is_scheduled(tokens) for tokens in (256, 257, 1000)] == [True, False, False]
    plain.reserve(4, 512, 4096)
    assert not any(map(plain.is_scheduled, plain.planned))


@pytest.mark.torchair
@pytest.mark.parametrize("model_type", ["gpt_neox", "qwen2_moe"])
def test_captures_run_branches_on_a_second_stream_with_the_same_numbers(model_type):
    from captured_graphs import captured_graphs, final_graphs

    traced, branches = scheduled(model_type)
    plain = scheduled(model_type, schedule=False)[0]
    route, without = AclGraphs(traced, traced.module, budget=2), AclGraphs(plain, plain.module, budget=2)
    with captured_graphs() as graphs, final_graphs() as final:
        expected = served(plain, without)
        launches = [len(graph.calls) for graph in graphs]
        assert not any(graph.side_calls for graph in graphs) and not without.eager_steps
        graphs.clear()
        final.clear()
        assert_same(served(traced, route), expected, tolerance=1e-12)
        assert_same(expected, served(plain, plain.module))
    assert not route.eager_steps and route.captured == without.captured
    assert sorted(len(graph.calls) for graph in graphs) == sorted(launches), "the same launches and copies"
    decode = [tokens for tokens, _ in route.captured if tokens <= LIMITS["max_num_seqs"]]
    sided = [graph for graph in graphs if graph.side_calls]
    assert 0 < len(sided) == len(decode) < len(graphs)
    for graph in sided:
        assert graph.replays > 1, "in both orders"
        names = [str(call.function) for call in graph.side_calls]
        assert sum("npu_linear" in name or "matmul" in name for name in names) >= len(branches)
        assert not [name for name in names if "scatter" in name or "attention" in name or "copy_" in name]
    assert len(final) == 2, "one graph for decode steps, one for the others"
    operators = StreamOperators.of_npugraph_ex()
    for graph in final:
        assert why_unordered(graph, operators) == ""
    (sided_graph,) = (graph for graph in final if any(node.target is operators.enter for node in graph.nodes))
    assert sum(node.target is operators.enter for node in sided_graph.nodes) == len(branches)


@pytest.mark.torchair
def test_a_schedule_that_has_no_place_is_left_out_and_said(monkeypatch, caplog):
    from captured_graphs import captured_graphs

    def lies_between(*_: Any) -> Any:
        raise NotPlaced("x lies between the nodes of a branch")

    monkeypatch.setattr(side_stream, "place_branches", lies_between)
    traced, _ = scheduled("gpt_neox")
    route = AclGraphs(traced, traced.module, budget=2)
    with captured_graphs() as graphs, caplog.at_level(logging.WARNING, schedule_options.__name__):
        assert_same(served(traced, route), served(traced, traced.module))
    assert not any(graph.side_calls for graph in graphs)
    assert "no branch runs on a second stream: x lies between" in caplog.text
    assert set(route.dropped_schedules) == {"streams"}
