"""Views of a graph that is called kernel by kernel are made by methods of tensors."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from torch_pagoda.compiler.targets.cpu.kernels import kernel_calls

aten = torch.ops.aten

_VIEWS = [
    (aten.view.default, ([4, 2, 6],)),
    (aten.transpose.int, (0, 1)),
    (aten.transpose.int, (-1, 0)),
    (aten.unsqueeze.default, (1,)),
    (aten.squeeze.dim, (0,)),
    (aten.slice.Tensor, ()),
    (aten.slice.Tensor, (1,)),
    (aten.slice.Tensor, (1, 3)),
    (aten.slice.Tensor, (1, 3, 9)),
    (aten.slice.Tensor, (1, None, -2)),
    (aten.slice.Tensor, (-1, 2, 4)),
    (aten.slice.Tensor, (1, 2, 9223372036854775807)),
    (aten.slice.Tensor, (1, 1, 11, 3)),
]


@pytest.mark.parametrize(("target", "arguments"), _VIEWS, ids=lambda x: str(x))
def test_views_are_the_same(target: torch._ops.OpOverload, arguments: tuple[object, ...]) -> None:
    graph = fx.Graph()
    graph.output((graph.call_function(target, (graph.placeholder("x"), *arguments)),))
    x = torch.arange(48.0).view(4, 12)
    expected = target(x, *arguments)
    (found,) = kernel_calls(fx.GraphModule(torch.nn.Module(), graph))(x)
    assert torch.equal(found, expected)
    assert found.data_ptr() == expected.data_ptr()
    assert found.stride() == expected.stride()


def test_bounds_that_the_graph_computes() -> None:
    graph = fx.Graph()
    x, n = graph.placeholder("x"), graph.placeholder("n")
    end = graph.call_function(operator.add, (n, 1))
    graph.output((graph.call_function(aten.slice.Tensor, (x, 1, n, end)),))
    run = kernel_calls(fx.GraphModule(torch.nn.Module(), graph))
    x = torch.arange(48.0).view(4, 12)
    assert torch.equal(run(x, 5)[0], x[:, 5:6])


def test_no_view_is_dispatched() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    for target, arguments in _VIEWS[:4]:
        x = graph.call_function(target, (x, *arguments))
    x = graph.call_function(aten.slice.Tensor, (x, 1, 0, 1))
    graph.output((x,))
    module = fx.GraphModule(torch.nn.Module(), graph)
    kernel_calls(module)
    assert "torch.ops.aten" not in module.code
