"""Graphs run in float32, several calls at a time: as if each had run by itself."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torch_pagoda.compiler.verify.deferred_weights import ChangedWeight
from torch_pagoda.compiler.verify.float32_run import Float32Graph

from toy_lm import ToyLM, captured, sdpa


def graph_of(function, *inputs):
    graph = make_fx(function, tracing_mode="fake")(*inputs)
    for node in graph.graph.nodes:
        node.meta["example_value"] = node.meta.get("val")
    return graph


def names(graph):
    return [node.name for node in graph.graph.nodes if node.op == "placeholder"]


def test_calls_do_not_see_what_others_write_into_a_constant():
    """As longrope's table, which is made anew for every length."""

    def scaled_by_the_largest(x, table):
        table.copy_(x.amax(0))
        return (x * table,)

    x, table = torch.rand(3, 4), torch.zeros(4)
    graph = graph_of(scaled_by_the_largest, x, table)
    run = Float32Graph(graph, names(graph)[1:])
    calls = [(torch.rand(3, 4), table) for _ in range(3)]
    for (given, _), (found,) in zip(calls, run.together(calls), strict=True):
        torch.testing.assert_close(found, given * given.amax(0))
    assert not table.any()


@pytest.mark.parametrize("rows", [10, 100_000])
def test_large_weights_are_read_some_rows_at_a_time(rows, monkeypatch):
    """The result is the same, and no more than a part of the weight is made at once."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(rows, 8).bfloat16(), requires_grad=False)
    x, ids = torch.randn(5, 8).bfloat16(), torch.tensor([[1, 7], [3, 0]])

    def model(x, ids, weight):
        return torch.nn.functional.linear(x, weight), torch.nn.functional.embedding(ids, weight)

    graph = graph_of(model, x, ids, weight)
    for node in graph.graph.nodes:  # as recognized graphs hold them
        if node.target is torch.ops.aten.t.default:
            product = next(iter(node.users))
            product.target = torch.ops.aten.linear.default
            product.args = (product.args[0], node.args[0])
            graph.graph.erase_node(node)
    graph.recompile()
    made = []
    monkeypatch.setattr(ChangedWeight, "make", lambda self: made.append(self) or self.rows(slice(None)))
    changed = ChangedWeight(weight, 2.0, 0.0)
    product, looked_up = Float32Graph(graph, ())(x, ids, changed)
    torch.testing.assert_close(product, x.float() @ weight.float().t() * 2)
    torch.testing.assert_close(looked_up, weight.float()[ids] * 2)
    assert len(made) == (1 if rows == 10 else 0)


def test_together_is_one_by_one():
    traced = captured(ToyLM(sdpa).to(torch.bfloat16)).traced
    traced.recompile()
    run = Float32Graph(traced.module, traced.constants)
    calls = []
    for length in (5, 9, 3):
        ids = torch.arange(length)[None]
        given = {**traced.constants, traced.input_ids: ids, traced.position_ids: ids}
        calls.append([given.get(node.name, length) for node in traced.placeholders])
    for call, together in zip(calls, run.together(calls), strict=True):
        assert torch.equal(run(*call)[0], together[0]) and together[0].dtype is torch.float32
