"""The order of launches follows data and memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from torch_pagoda.passes.schedule import launches as module
from torch_pagoda.passes.schedule.launches import Cost, Launches

aten = torch.ops.aten


def _attention_over_a_cache() -> dict[str, fx.Node]:
    """Two products, one of which is written into a cache that is read through a view, before and afterwards."""
    graph = fx.Graph()
    tensors = {"x": torch.zeros(4, 8), "w": torch.zeros(8, 8), "cache": torch.zeros(4, 8)}
    nodes: dict[str, fx.Node] = {}

    def keep(name: str, node: fx.Node, example: Any) -> None:
        node.meta["example_value"] = example
        nodes[name] = node

    for name, tensor in tensors.items():
        keep(name, graph.placeholder(name), tensor)
    x, w, cache = (nodes[name] for name in tensors)
    product = torch.zeros(4, 8)
    keep("early", graph.call_function(aten.relu.default, (cache,)), product.clone())
    keep("q", graph.call_function(aten.mm.default, (x, w)), product.clone())
    keep("k", graph.call_function(aten.mm.default, (x, w)), product.clone())
    keep("write", graph.call_function(aten.copy_.default, (cache, nodes["k"])), tensors["cache"])
    keep("view", graph.call_function(aten.view.default, (cache, [8, 4])), tensors["cache"].view(8, 4))
    keep("attend", graph.call_function(aten.mm.default, (nodes["q"], nodes["view"])), torch.zeros(4, 4))
    keep("after", graph.call_function(aten.relu.default, (nodes["write"],)), product.clone())
    graph.output((nodes["attend"], nodes["early"]))
    return nodes


def _launches(nodes: dict[str, fx.Node]) -> Launches:
    graph = nodes["x"].graph
    return Launches(graph, dict.fromkeys(graph.nodes, Cost(1.0, 0.0, 2.0, "cube")))


def test_a_read_follows_the_write_and_a_write_follows_earlier_reads():
    nodes = _attention_over_a_cache()
    launches = _launches(nodes)
    assert nodes["view"] not in launches.nodes
    assert launches.needs(nodes["attend"], nodes["write"])
    assert launches.needs(nodes["attend"], nodes["k"])
    assert launches.needs(nodes["write"], nodes["early"])
    assert launches.needs(nodes["after"], nodes["write"])
    assert not launches.needs(nodes["q"], nodes["write"])
    assert launches.inputs(nodes["attend"]) == [nodes["q"], nodes["write"]]
    assert launches.difference(nodes["write"], nodes["q"]) == [nodes["early"], nodes["k"], nodes["write"]]
    assert launches.difference(nodes["q"], nodes["attend"]) == []


def test_without_memory_the_attention_looks_independent_of_the_write(monkeypatch):
    monkeypatch.setattr(module, "written_arguments", lambda node: [])
    nodes = _attention_over_a_cache()
    assert not _launches(nodes).needs(nodes["attend"], nodes["write"])


def test_the_time_of_a_launch_is_that_of_what_takes_longest():
    assert (Cost(3.0, 1.0, 2.0, "cube").seconds, Cost(3.0, 1.0, 2.0, "cube").memory_bound) == (3.0, True)
    assert (Cost(1.0, 1.0, 2.0, "cube").seconds, Cost(1.0, 1.0, 2.0, "cube").memory_bound) == (2.0, False)
    assert (Cost(3.0, 4.0, 2.0, "cube").seconds, Cost(3.0, 4.0, 2.0, "cube").memory_bound) == (4.0, False)
