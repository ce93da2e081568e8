"""Fetches of weights in static decode graphs, through the real torchair: operators, control edges, numbers."""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import pytest
import torch
from fetched_graphs import BYTES, fetching, inputs
from placed_schedules import dependency_fetch_begins, why_misplaced
from scheduled_models import SLOW, assert_an_engine_places, assert_static_graphs_serve, prefetched, scheduled
from torch import fx

from torch_pagoda.compiler.costs import schedules
from torch_pagoda.compiler.targets.npu.ge.weight_prefetch import fetch_weights
from torch_pagoda.compiler.targets.npu.schedules.graph_launches import graph_launches, is_fetch
from torch_pagoda.compiler.targets.npu.schedules.prefetches import placed_fetches
from torch_pagoda.npu_tools.offline.conversion import convert
from torch_pagoda.npu_tools.offline.decode_graphs import static_decode_graph
from torch_pagoda.npu_tools.offline.ge_graph import GeGraph

MODELS = ["gpt_neox", "qwen2_moe", "deepseek_v3"]
SCHEDULES = [*((model_type, False) for model_type in MODELS), ("deepseek_v3", True)]
"""Models, and whether branches have a stream of their own; beside these deepseek_v3 alone leaves a window."""


def text(graph: fx.Graph) -> list[str]:
    return [str(node.format_node()) for node in graph.nodes]


def calls(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if is_fetch(node)]


def faults(graph: fx.Graph) -> str:
    return why_misplaced(graph, placed_fetches(graph, graph_launches(graph)), dependency_fetch_begins(graph))


def test_weights_are_fetched_behind_what_a_launch_makes():
    module, plain = fetching(weights=2), fetching(weights=2)
    assert fetch_weights(module) == "" and faults(module.graph) == ""
    assert [(str(node.args[0]), str(node.args[1]), node.args[2]) for node in calls(module.graph)] == [
        (f"w{i}_{j}", f"p_{i}", size) for i in (0, 1) for j, size in ((1, BYTES // 2), (2, BYTES))
    ]
    names = [node.name for node in module.graph.nodes if node.op == "call_function"]
    assert names[0] == "p_0" and names[3:5] == ["a_0", "b_0"]
    torch.testing.assert_close(module(*inputs(weights=2)), plain(*inputs(weights=2)), rtol=0, atol=0)


def test_behind_a_launch_of_several_results_one_of_them_is_waited_for():
    module = fetching()
    (p,) = (node for node in module.graph.nodes if node.name == "p_0")
    p.target, p.meta["val"] = torch.ops.npu.npu_rms_norm.default, (p.meta["val"], p.meta["val"][:, :1])
    with module.graph.inserting_before(p.next):
        part = module.graph.call_function(operator.getitem, (p, 0))
    part.meta["val"] = p.meta["val"][0]
    p.replace_all_uses_with(part, delete_user_cb=lambda user: user is not part)
    assert fetch_weights(module) == "" and faults(module.graph) == ""
    made = calls(module.graph)[0].args[1]
    assert made.target is operator.getitem and made.args == (p, 0)


def test_behind_a_launch_that_makes_nothing_no_weight_is_fetched():
    module = fetching()
    next(node for node in module.graph.nodes if node.name == "p_1").meta["val"] = None
    before = text(module.graph)
    assert fetch_weights(module) == "p_1 makes no tensor to fetch behind" and text(module.graph) == before


def _dependency(name: str) -> Any:
    def mutate(graph: fx.Graph) -> None:
        last = calls(graph)[-1]
        node = next(node for node in graph.nodes if node.name == name)
        last.args = (last.args[0], node, last.args[2])

    return mutate


def _behind_its_reader(graph: fx.Graph) -> None:
    next(node for node in graph.nodes if node.name == "m0_1").append(calls(graph)[-1])


def _twice(graph: fx.Graph) -> None:
    with graph.inserting_before(calls(graph)[0]):
        graph.call_function(calls(graph)[0].target, calls(graph)[0].args)


@pytest.mark.parametrize(
    ("mutate", "fault"),
    [
        (_dependency("m0_0"), "begins behind m0_0 and not behind p_1"),
        (_dependency("x"), "begins behind x and not behind p_1"),
        (_behind_its_reader, "fetches w1_1 behind m0_1, which reads it"),
        (_twice, "fetches w0_1 once more"),
    ],
)
def test_a_fetch_that_is_not_as_planned_is_found(mutate, fault):
    module = fetching()
    fetch_weights(module)
    mutate(module.graph)
    assert fault in faults(module.graph)


def _check(graph: GeGraph, weights: list[tuple[str, int]], behind: list[Counter[str]]) -> None:
    """Each weight is fetched once, in the order of the plan, one behind the other and behind what it waits for."""
    fetches = graph.of_type("Cmo")
    assert [(node.inputs["src"].rpartition(":")[0], node.attributes["max_size"]) for node in fetches] == weights
    assert all(node.attributes["type"] == 6 and set(node.inputs) == {"src"} for node in fetches)
    for i, node in enumerate(fetches):
        others = [name for name in node.after if graph[name].type != "Cmo"]
        assert len(others) == 1 and graph[others[0]].type in behind[i]
        assert fetches[i - 1].name in node.after or not i
    (end,) = graph.of_type("NetOutput")
    assert end.after == (fetches[-1].name,)
    assert [node.name for node in graph if node.after] == [*(node.name for node in fetches), end.name]


@pytest.mark.torchair
def test_torchair_makes_a_fetch_of_it_and_leaves_all_else():
    plain = fetching()
    for node in plain.graph.nodes:
        node.meta.pop("custom", None)
    found, other = convert(fetching(), inputs(), dynamic=False), convert(plain, inputs(), dynamic=False)
    first, second = found.of_type("Cmo")
    assert first.after == ("MatMul",) and second.after == ("MatMul_2", first.name)
    _check(found, [("w0_1", BYTES // 2), ("w1_1", BYTES // 2)], [Counter(["MatMul"])] * 2)
    kept = [node for node in found if node.type not in ("Cmo", "NetOutput")]
    assert [(n.name, n.type, n.inputs, n.after) for n in kept] == [
        (n.name, n.type, n.inputs, n.after) for n in other if n.type != "NetOutput"
    ]
    assert len(found.computing()) == len(other.computing())
    assert not convert(fetching(), inputs()).count("Cmo"), "dynamic graphs fetch nothing"


@pytest.mark.torchair
@pytest.mark.parametrize(("model_type", "streams"), SCHEDULES)
def test_static_graphs_fetch_the_weights_of_the_plan(model_type, streams):
    traced, found, _ = prefetched(model_type, "ge", streams=streams)
    graph = static_decode_graph(traced)
    plain = static_decode_graph(scheduled(model_type, "ge", schedule=streams, on=SLOW)[0])
    assert bool(graph.schedules()) == streams
    launches = [Counter(node.type for node in each.computing()) for each in (graph, plain)]
    assert found and launches[0] == launches[1] and graph.schedules() == plain.schedules()
    assert len(graph.cache_copies()) == len(plain.cache_copies())
    kinds = {"npu_linear": "MatMul", "npu_grouped_matmul": "GroupedMatmul"}
    behind = [Counter([kinds[str(fetch.behind.target).split(".")[1]]]) for fetch in found]
    _check(graph, [(fetch.weight.name, fetch.bytes) for fetch in found], behind)
    # What reads a weight stands behind its fetch.
    order = {node.name: i for i, node in enumerate(graph)}
    for node in graph.of_type("Cmo"):
        source = node.inputs["src"]
        readers = [other for other in graph if source in other.inputs.values() and other is not node]
        assert readers and all(order[reader.name] > order[node.name] for reader in readers)


@pytest.mark.torchair
@pytest.mark.parametrize(("model_type", "streams"), SCHEDULES)
def test_static_graphs_with_fetches_serve_the_same(model_type, streams):
    assert_static_graphs_serve(prefetched(model_type, "ge", streams=streams)[0], "fetch_weights")


@pytest.mark.torchair
def test_an_engine_fetches_and_says_what_it_cannot(monkeypatch, caplog):
    monkeypatch.setattr(schedules, "chip", lambda soc: SLOW)
    assert assert_an_engine_places("prefetch", "fetch_weights", monkeypatch, caplog, "gpt_neox").matches > 0
