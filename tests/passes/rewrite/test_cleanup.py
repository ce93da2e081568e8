"""No-ops and repeated calls in ATen graphs: what goes is bitwise nothing."""

from __future__ import annotations

import pytest
import torch
from aten_graphs import aten_of_module, aten_of_tiny_model, run_graph
from torch import fx, nn
from torch.nn import functional as F

from torch_pagoda.compiler.pass_runs import run_passes
from torch_pagoda.passes import PASSES, TracedGraph
from torch_pagoda.passes.graph.fx_nodes import callee
from torch_pagoda.passes.rewrite.remove_noops import remove_noops
from torch_pagoda.passes.rewrite.share_subexpressions import share_subexpressions


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def operators(graph):
    return [callee(n) for n in graph.graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.dropout(x, 0.5, training=False).sin(),
        lambda x: (x * 1.0).sin() / 1,
        lambda x: x[:, 0:].contiguous().sin(),
        lambda x: torch.cat([x], -1).sin(),
        lambda x: x.to(torch.float32).view(x.shape).expand_as(x).sin(),
        lambda x: x.clone().sin(),
    ],
)
def test_noops_go(function):
    x = torch.randn(2, 5, 6)
    graph = aten_of_module(Call(function), x)
    remove_noops(graph)
    assert operators(graph) == ["sin"]
    assert remove_noops(graph).matches == 0
    assert torch.equal(run_graph(graph, x), function(x))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.transpose(0, 1).contiguous().sin(),
        lambda x: (x * 2).sin(),
        lambda x: (x + 0.0).sin(),
        lambda x: x[:, 1:].sin(),
        lambda x: torch.cat([x, x], -1).sin(),
        lambda x: x.to(torch.float64).sin(),
        lambda x: x.clone(),
    ],
    ids=["other strides", "factor", "negative zero", "slice", "two", "dtype", "a result of its own"],
)
def test_what_does_something_stays(function):
    x = torch.randn(2, 5, 6)
    graph = aten_of_module(Call(function), x)
    before = operators(graph)
    assert remove_noops(graph).matches == 0 and operators(graph) == before
    found = run_graph(graph, x)
    assert torch.equal(found, function(x)) and found.data_ptr() != x.data_ptr()


def test_equal_calls_are_shared():
    def function(x):
        return (x.float().cos() * 2 + x.float().cos() * 2.0 + x.cos() * True).sin()

    x = torch.randn(2, 5, 6)
    graph = aten_of_module(Call(function), x)
    assert operators(graph).count("cos") == 3
    assert share_subexpressions(graph).matches
    assert operators(graph).count("cos") == 1
    assert operators(graph).count("mul.Tensor") == 3, "2, 2.0 and True are different numbers"
    assert share_subexpressions(graph).matches == 0
    assert torch.equal(run_graph(graph, x), function(x))


def test_random_numbers_are_not_shared():
    x = torch.randn(2, 5, 6)
    graph = aten_of_module(Call(lambda x: torch.rand_like(x) - torch.rand_like(x)), x)
    share_subexpressions(graph)
    assert operators(graph).count("rand_like") == 2


def test_what_is_written_to_is_not_shared():
    def function(x):
        first = x.sin()
        x.add_(1)
        return first + x.sin()

    x = torch.randn(2, 5, 6)
    graph = aten_of_module(Call(function), x.clone())
    share_subexpressions(graph)
    assert torch.equal(run_graph(graph, x.clone()), function(x.clone()))


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_layers_share_the_rotary_tables(name):
    graph = aten_of_tiny_model(name)
    share_subexpressions(graph)
    kinds = 2 if name == "gemma3_text" else 1
    names = operators(graph)
    assert names.count("cos") == names.count("sin") == kinds
    assert names.count("unsqueeze") <= 2 * kinds + 4


def test_zero_matches_cost_nothing():
    """5,000 nodes without a pattern: the same graph. (benchmarks/pass_seconds.py says how long that takes.)"""
    graph = fx.Graph()
    node = graph.placeholder("x")
    mode = torch._subclasses.FakeTensorMode()
    with mode:
        example = torch.empty(4, 6)
    node.meta["example_value"] = example
    for i in range(5000):
        node = graph.call_function(torch.ops.aten.sub.Tensor, (node, float(i)))
        node.meta["example_value"] = example
    graph.output((node,))
    module = fx.GraphModule({}, graph)
    traced = TracedGraph(module, mode, {}, paged=False)
    before = list(graph.nodes)
    for entry in PASSES:
        if entry.stage == "aten":
            (record,) = run_passes(traced, [entry])
            assert record.matches == 0 and not record.rejections, entry.name
    assert traced.module is module and list(traced.graph.nodes) == before
