"""The loop of a pass: what a step says becomes matches and near misses, in the order of the nodes."""

from __future__ import annotations

import pytest
import torch
from aten_graphs import aten_of_module
from torch import nn

from torch_pagoda.passes.graph.fx_nodes import callee
from torch_pagoda.passes.graph.record import NoMatch
from torch_pagoda.passes.graph.rewrite_each import rewrite_each


class Chain(nn.Module):
    def forward(self, x):
        return (x.relu() + x.tanh()).sigmoid()


@pytest.fixture
def graph():
    return aten_of_module(Chain(), torch.zeros(1, 4, 8))


def test_matches_and_reasons_are_kept_in_order(graph):
    def step(node):
        if callee(node) == "sigmoid":
            raise NoMatch("it is raised")
        return {"relu": "", "tanh": "it is returned"}.get(callee(node))

    record = rewrite_each(graph, "mine", step)
    assert (record.name, record.matches) == ("mine", 1)
    assert [(r.node, r.reason) for r in record.rejections] == [
        ("tanh", "it is returned"),
        ("sigmoid", "it is raised"),
    ]


def test_erased_nodes_are_not_looked_at_and_dead_ones_go(graph):
    seen = []

    def step(node):
        seen.extend([callee(node)] if node.op == "call_function" else [])
        if callee(node) != "relu":
            return None
        (total,) = node.users
        (last,) = total.users
        last.replace_all_uses_with(node)
        graph.graph.erase_node(last)
        graph.graph.erase_node(total)
        return ""

    record = rewrite_each(graph, "mine", step)
    assert seen == ["relu", "tanh"]
    assert record.matches == 1
    assert [callee(node) for node in graph.graph.nodes if node.op == "call_function"] == ["relu"]


def test_only_the_given_nodes(graph):
    nodes = [node for node in graph.graph.nodes if callee(node) == "tanh"]
    assert rewrite_each(graph, "mine", lambda node: "", nodes).matches == 1
    assert rewrite_each(graph, "mine", lambda node: "", ()).matches == 0
