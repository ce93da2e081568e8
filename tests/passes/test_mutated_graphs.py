"""Graphs that almost match: whatever the passes make of them, the numbers stay."""

from __future__ import annotations

import functools

import pytest
import torch
from aten_graphs import aten_of_module, run_graph
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from torch_pagoda.compiler.options import CompileOptions, selected_passes
from torch_pagoda.compiler.pass_runs import run_passes
from torch_pagoda.compiler.verify.fake_values import propagate
from torch_pagoda.passes.graph.fx_nodes import callee, value

HEADS, DIM = 2, 8
SIZE = HEADS * DIM


class Layer(nn.Module):
    """A decoder layer without attention, in transformers' spelling: its passes need nothing else."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.o = (nn.Linear(SIZE, SIZE, bias=False) for _ in range(3))
        self.gate, self.up, self.down = nn.Linear(SIZE, 24), nn.Linear(SIZE, 24), nn.Linear(24, SIZE)
        self.first, self.second = nn.Parameter(torch.rand(SIZE) + 0.5), nn.Parameter(torch.rand(SIZE) + 0.5)
        self.norm = nn.LayerNorm(SIZE)
        self.to(dtype).requires_grad_(False)

    def rms(self, x, weight):
        h = x.to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)
        return weight * h.to(x.dtype)

    def rotate(self, x, cos, sin):
        half = torch.cat((-x[..., DIM // 2 :], x[..., : DIM // 2]), -1)
        return x * cos + half * sin

    def forward(self, x):
        angles = torch.arange(x.shape[1])[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03])
        angles = torch.cat((angles, angles), -1)[None, None]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        h = self.rms(x, self.first)
        q = self.rotate(self.q(h).view(*h.shape[:-1], HEADS, DIM).transpose(1, 2), cos, sin)
        k = self.rotate(self.k(h).view(*h.shape[:-1], HEADS, DIM).transpose(1, 2), cos, sin)
        x = x + self.o((q * k).transpose(1, 2).reshape(x.shape))
        h = self.rms(x, self.second)
        x = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return self.norm(x)


@functools.cache
def original(dtype):
    return aten_of_module(Layer(dtype), torch.randn(1, 5, SIZE).to(dtype))


def floating(node):
    v = value(node)
    return isinstance(v, torch.Tensor) and v.is_floating_point()


def extra_user(graph, node):
    (results,) = graph.output.args
    with graph.before(graph.output):
        mean = graph.call(torch.ops.aten.mean.default, node)
        cast = graph.call(torch.ops.aten._to_copy.default, mean, dtype=value(results[0]).dtype)
        total = graph.call(torch.ops.aten.add.Tensor, results[0], cast)
    graph.output.args = ((total, *results[1:]),)


def swap(graph, node):
    if callee(node) in ("add.Tensor", "mul.Tensor", "sub.Tensor", "div.Tensor"):
        a, b = node.args
        if isinstance(b, torch.fx.Node):
            node.args = (b, a)


def other_number(graph, node):
    node.args = tuple(1.5 * a if type(a) is float else a for a in node.args)
    if callee(node) == "pow.Tensor_Scalar":
        node.args = (node.args[0], 4)


def other_dim(graph, node):
    if callee(node) == "mean.dim":
        node.args = (node.args[0], [1], True)


def put_behind(operator):
    def mutate(graph, node):
        users = list(node.users)
        with graph.graph.inserting_after(node):
            anchor = graph.graph.call_function(operator_module, ())
        with graph.before(anchor):
            new = operator(graph, node)
        graph.graph.erase_node(anchor)
        for user in users:
            user.replace_input_with(node, new)

    return mutate


def operator_module():
    """Marks a place in a graph."""


MUTATIONS = {
    "extra user": extra_user,
    "operands swapped": swap,
    "another number": other_number,
    "another dim": other_dim,
    "scaled": put_behind(lambda g, n: g.call(torch.ops.aten.mul.Tensor, n, 1.5)),
    "negated": put_behind(lambda g, n: g.call(torch.ops.aten.neg.default, n)),
    "through another dtype": put_behind(
        lambda g, n: g.call(
            torch.ops.aten._to_copy.default,
            g.call(torch.ops.aten._to_copy.default, n, dtype=torch.float16),
            dtype=value(n).dtype,
        )
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_numbers_stay(dtype, data):
    graph = original(dtype).copy()
    for _ in range(data.draw(st.integers(1, 2), label="mutations")):
        nodes = [n for n in graph.graph.nodes if n.op == "call_function" and floating(n)]
        node = nodes[data.draw(st.integers(0, len(nodes) - 1), label="node")]
        MUTATIONS[data.draw(st.sampled_from(sorted(MUTATIONS)), label="kind")](graph, node)
    graph.graph.lint()
    propagate(graph)
    x = torch.randn(1, 7, SIZE, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = run_graph(graph, x).float()
    run_passes(graph, selected_passes(CompileOptions(), "aten"))
    found = run_graph(graph, x).float()
    limit = (2e-4 if dtype == torch.float32 else 0.1) * float(
        expected.abs().nan_to_num(posinf=0.0).max().clamp_min(1)
    )
    torch.testing.assert_close(found, expected, atol=limit, rtol=0, equal_nan=True)


def test_the_graph_itself_matches():
    graph = original(torch.float32).copy()
    records = run_passes(graph, selected_passes(CompileOptions(), "aten"))
    matches = {record.name: record.matches for record in records if record.matches}
    expected = {"recognize_rms_norm": 2, "recognize_layer_norm": 1, "recognize_gated_activation": 1, "group_rope": 1}
    expected |= {"recognize_rope": 2, "fuse_residual_norm": 2, "merge_linears": 2, "recognize_linear": 6}
    assert expected.items() <= matches.items()
