"""Graphs as plain data and back."""

from __future__ import annotations

import io
import math
import operator

import pytest
import torch
from torch import fx

from torch_pagoda.compiler.warm_start.graph_data import CannotStore, from_data, to_data

aten = torch.ops.aten


def example() -> fx.Graph:
    """All kinds of nodes and arguments."""
    graph = fx.Graph()
    x, n = graph.placeholder("x"), graph.placeholder("s0")
    y = graph.call_function(aten.mm.default, (x, x))
    y = graph.call_function(aten.to.dtype, (y, torch.float64), {"memory_format": torch.contiguous_format})
    y = graph.call_function(operator.getitem, (y, (slice(None, n, 1), [0, 1])))
    y = graph.call_function(aten.reshape.default, (y, [-1]))
    y = graph.call_function(aten.mul.Tensor, (y, graph.call_function(operator.mul, (n, 2))))
    ones = graph.call_function(
        aten.full.default,
        ([2], 0.5),
        {"dtype": torch.float64, "device": torch.device("cpu"), "layout": torch.strided},
    )
    y = graph.call_function(aten.mul.Tensor, (y, float("inf")), name="the_name")
    graph.output(((y, ones, None, True),))
    return graph


def through_a_file(data):
    buffer = io.BytesIO()
    torch.save(data, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def test_graph_comes_back():
    graph = example()
    copy = from_data(through_a_file(to_data(graph)))
    assert [str(n.format_node()) for n in copy.graph.nodes] == [str(n.format_node()) for n in graph.nodes]
    assert [n.target for n in copy.graph.nodes] == [n.target for n in graph.nodes]
    x = torch.randn(2, 2)
    expected = fx.GraphModule({}, graph)(x, 2)
    found = copy(x, 2)
    assert torch.equal(found[0][0], expected[0][0])
    assert torch.equal(found[0][1], torch.full([2], 0.5, dtype=torch.float64))


def test_own_operators_come_back():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops.pagoda.rms_norm.default, (x, x, 1e-6)))
    (call,) = (n for n in from_data(to_data(graph)).graph.nodes if n.op == "call_function")
    assert call.target is torch.ops.pagoda.rms_norm.default


def test_attributes_are_refused():
    graph = fx.Graph()
    graph.output(graph.get_attr("weight"))
    with pytest.raises(CannotStore, match="get_attr"):
        to_data(graph)


def test_functions_without_a_name_are_refused():
    graph = fx.Graph()
    graph.output(graph.call_function(lambda x: x, (graph.placeholder("x"),)))
    with pytest.raises(CannotStore, match="lambda"):
        to_data(graph)


def test_tensors_as_arguments_are_refused():
    graph = fx.Graph()
    graph.output(graph.call_function(aten.add.Tensor, (graph.placeholder("x"), torch.ones(2))))
    with pytest.raises(CannotStore, match="Tensor"):
        to_data(graph)


def test_what_is_gone_raises():
    rows = to_data(example())
    gone = [(op, name, target.replace("aten.mm", "aten.no_such"), args, kw) for op, name, target, args, kw in rows]
    with pytest.raises(ValueError, match=r"there is no 'operator aten\.no_such\.default'"):
        from_data(gone)


@pytest.mark.parametrize("name", ["operator.mul", "math.ceil", "torch.sym_max"])
def test_arithmetic_comes_back(name):
    module, _, attribute = name.partition(".")
    function = getattr({"operator": operator, "math": math, "torch": torch}[module], attribute)
    graph = fx.Graph()
    graph.output(graph.call_function(function, (graph.placeholder("n"), 3)[: 1 if module == "math" else 2]))
    assert from_data(through_a_file(to_data(graph)))(2) == {"mul": 6, "ceil": 2, "sym_max": 3}[attribute]


FORBIDDEN = [
    "torch:os.system",
    "torch.os.system",
    "torch.sym_max.__globals__",
    "_operator:methodcaller",
    "operator.attrgetter",
    "builtins.eval",
    "math.factorial",
    "operator higher_order.cond.default",
    "operator quantized.linear.default",
    "operator torch.os.system",
    "operator aten.__class__.mro",
    "operator aten.add.__call__",
    "operator aten.add",
    "",
]


@pytest.mark.parametrize("name", FORBIDDEN, ids=str)
def test_other_functions_are_refused(name):
    rows = [
        ("placeholder", "x", "x", ("tuple",), {}),
        ("call_function", "y", name, ("tuple", ("node", "x")), {}),
        ("output", "output", "output", ("tuple", ("node", "y")), {}),
    ]
    with pytest.raises(ValueError, match="there is no"):
        from_data(rows)


def test_what_cannot_be_read_is_not_written():
    graph = fx.Graph()
    graph.output(graph.call_function(torch.nn.functional.silu, (graph.placeholder("x"),)))
    with pytest.raises(CannotStore, match="silu"):
        to_data(graph)
    graph = fx.Graph()
    graph.output(graph.call_method("reshape", (graph.placeholder("x"), -1)))
    with pytest.raises(CannotStore, match="call_method"):
        to_data(graph)
