"""What depends on weights alone is computed once, and only that."""

from __future__ import annotations

import pytest
import torch
from aten_graphs import aten_of_model, aten_of_module, run_graph
from torch import nn
from torch.nn import functional as F

from torch_pagoda.compiler.link.linker import link
from torch_pagoda.compiler.verify.self_check import check, reference_of_model
from torch_pagoda.passes.graph.fx_nodes import callee
from torch_pagoda.passes.rewrite import fold_constants as module
from torch_pagoda.passes.rewrite.fold_constants import fold_constants

from tiny_models import build_tiny_model


class Scaled(nn.Module):
    """Calls ``function(self, x)``."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.linspace(-1, 1, 6))
        self.register_buffer("table", torch.linspace(0, 1, 12).view(2, 6))

    def forward(self, x):
        return self.function(self, x)


def operators(graph):
    return [callee(n) for n in graph.graph.nodes if n.op == "call_function"]


def paged_graph(function, x):
    graph = aten_of_module(Scaled(function), x.clone())
    graph.paged = True
    return graph


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x * torch.tensor([0.5, 2, 3, 4, 5, 6]),
        lambda m, x: x * torch.tensor([0.5])[0],
        lambda m, x: torch.tensor(0.95) - x,
        lambda m, x: (x > 0).int() * torch.tensor(0.5),
        lambda m, x: x.sum() + torch.tensor(0.5, dtype=torch.float64),
    ],
    ids=["dims", "view of dims", "first operand", "of another kind", "wider than a result without dims"],
)
def test_literal_tensors_become_inputs(function):
    x = torch.randn(2, 5, 6)
    graph = paged_graph(function, x)
    before = run_graph(graph, x)
    assert fold_constants(graph).matches == 1
    assert "get_attr" not in {node.op for node in graph.graph.nodes}
    assert [name for name in graph.constants if name.startswith("folded")] == ["folded_0"]
    assert torch.equal(run_graph(graph, x), before) and run_graph(graph, x).dtype is before.dtype
    assert fold_constants(graph).matches == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x * torch.tensor(0.95),
        lambda m, x: x + torch.tensor([1, 2]).sum(),
        lambda m, x: x / torch.tensor(512, dtype=torch.float64).sqrt(),
        lambda m, x: torch.sub(x, torch.tensor(0.3), alpha=2),
    ],
    ids=["mul", "add", "div", "sub"],
)
def test_literals_without_dims_become_numbers(function, dtype):
    x = torch.randn(2, 5, 6).to(dtype)
    graph = paged_graph(function, x)
    before = run_graph(graph, x)
    assert fold_constants(graph).matches == 1
    assert "get_attr" not in {node.op for node in graph.graph.nodes} and len(operators(graph)) == 1
    assert not [name for name in graph.constants if name.startswith("folded")]
    assert torch.equal(run_graph(graph, x), before) and run_graph(graph, x).dtype is before.dtype
    assert fold_constants(graph).matches == 0


def test_a_literal_is_a_number_for_some_and_an_input_for_others():
    def both_ways(m, x):
        c = torch.tensor(0.95)
        return x * c + (c - x)

    x = torch.randn(2, 5, 6)
    graph = paged_graph(both_ways, x)
    before = run_graph(graph, x)
    assert fold_constants(graph).matches == 1
    assert [name for name in graph.constants if name.startswith("folded")] == ["folded_0"]
    (product,) = (n for n in graph.graph.nodes if callee(n) == "mul.Tensor")
    assert product.args[1] == torch.tensor(0.95).item()
    assert torch.equal(run_graph(graph, x), before)


def test_a_constant_without_dims_is_no_symbol():
    """AOTAutograd would take its float for one that Dynamo has to specialize, and refuse the graph."""
    graph = paged_graph(lambda m, x: x * torch.exp(m.weight.double()).sum(), torch.randn(2, 5, 6))
    assert fold_constants(graph).matches == 1
    (folded,) = (node for node in graph.placeholders if node.name.startswith("folded"))
    assert folded.meta["example_value"].dim() == 0 and folded.meta["example_value"].item_memo is None
    assert not [symbol for symbol in graph.fake_mode.shape_env.var_to_range if "f" in str(symbol)]


@pytest.mark.parametrize(
    ("function", "left"),
    [
        (lambda m, x: x * F.softplus(m.weight), ["mul.Tensor"]),
        (lambda m, x: x * torch.exp(m.weight * m.weight).sum(), ["mul.Tensor"]),
        (lambda m, x: x * m.weight.float().neg().unsqueeze(0).expand(2, 1, 6), ["unsqueeze", "expand", "mul.Tensor"]),
        (lambda m, x: x * m.table.repeat(1, 2)[0, 3:9].sin(), ["mul.Tensor"]),
    ],
)
def test_constants_are_computed_once(function, left):
    x = torch.randn(2, 5, 6)
    graph = paged_graph(function, x)
    before = run_graph(graph, x)
    assert fold_constants(graph).matches == 1
    assert operators(graph) == left
    assert graph.notes.folded, "their sources are guarded"
    assert torch.equal(run_graph(graph, x), before)
    assert fold_constants(graph).matches == 0


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x * m.weight.unsqueeze(0),
        lambda m, x: x.sin() * m.weight,
        lambda m, x: x + torch.full((6,), 2.0),
        lambda m, x: x * m.weight[None, None].repeat(1, x.shape[1], 1),
        lambda m, x: x * F.dropout(m.weight, 0.5),
        lambda m, x: x * (m.table.add_(1) * 2)[0],
    ],
    ids=["view", "data", "literal", "dynamic size", "random", "written"],
)
def test_other_things_are_not(function):
    graph = paged_graph(function, torch.randn(2, 5, 6))
    graph.recompile()
    code = graph.module.code
    assert fold_constants(graph).matches == 0
    graph.recompile()
    assert graph.module.code == code


def test_large_constants_and_drop_in_graphs_stay(monkeypatch):
    x = torch.randn(2, 5, 6)
    graph = paged_graph(lambda m, x: x * m.weight.exp(), x)
    monkeypatch.setattr(module, "_MOST_BYTES", 20)
    (rejection,) = fold_constants(graph).rejections
    assert "(6,) would stay in memory" in rejection.reason
    monkeypatch.undo()
    graph.paged = False
    assert fold_constants(graph).matches == 0
    assert "exp" in operators(graph)


@pytest.mark.parametrize(("name", "matches"), [("llama", 0), ("gptj", 2), ("diffllama", 2)])
def test_models(name, matches):
    model = build_tiny_model(name)
    graph = aten_of_model(model)
    assert fold_constants(graph).matches == matches
    graph.recompile()
    assert check(link(graph, graph.module), reference_of_model(model)).ok
