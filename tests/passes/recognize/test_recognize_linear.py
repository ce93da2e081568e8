"""Linear layers in ATen graphs: which spellings match, what stays, and that the numbers are bitwise the same."""

from __future__ import annotations

import pytest
import torch
from aten_graphs import aten_of_module, aten_of_tiny_model, run_graph
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from torch_pagoda.passes.graph.fx_nodes import callee
from torch_pagoda.passes.recognize.linear import recognize_linear

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


class Spelled(nn.Module):
    """``function(self, x)`` over parameters w ``[8, 6]``, its transpose's storage wt ``[6, 8]``, and b ``[8]``."""

    def __init__(self, function, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.w = nn.Parameter(torch.randn(8, 6, dtype=dtype), requires_grad=False)
        self.wt = nn.Parameter(torch.randn(6, 8, dtype=dtype), requires_grad=False)
        self.b = nn.Parameter(torch.randn(8, dtype=dtype), requires_grad=False)
        self.conv = Conv1D(8, 6).to(dtype).requires_grad_(False)

    def forward(self, x):
        return self.function(self, x)


def odd_rows(x):
    """The same numbers, two rows of each three skipped: no product over all rows can read it as it is."""
    return torch.cat([x, x, x], 1).view(*x.shape[:-1], 3, x.shape[-1])[..., 0, :].transpose(0, 1)


SPELLINGS = {
    "linear": lambda m, x: F.linear(x, m.w),
    "linear with bias": lambda m, x: F.linear(x, m.w, m.b),
    "matmul with T": lambda m, x: torch.matmul(x, m.w.T),
    "@ with transpose": lambda m, x: x @ m.w.transpose(0, 1),
    "@ with permute": lambda m, x: x @ m.w.permute(1, 0),
    "product with a stored transpose": lambda m, x: x @ m.wt,
    "two dimensions": lambda m, x: F.linear(x.view(-1, 6), m.w),
    "two dimensions with bias": lambda m, x: F.linear(x.reshape(-1, 6), m.w, m.b).view(*x.shape[:-1], 8),
    "four dimensions": lambda m, x: F.linear(x[None], m.w, m.b),
    "Conv1D": lambda m, x: m.conv(x),
    "addmm": lambda m, x: torch.addmm(m.b, x.view(-1, 6), m.wt),
    "computed weight": lambda m, x: F.linear(x, F.normalize(m.w)),
    "computed stored transpose": lambda m, x: x @ (m.wt / m.wt.norm()),
    "rows apart": lambda m, x: F.linear(odd_rows(x), m.w),
    "rows apart with bias": lambda m, x: F.linear(odd_rows(x), m.w, m.b),
    "strided rows": lambda m, x: F.linear(torch.cat([x, x], -1)[..., :6], m.w, m.b),
}


def leftovers(graph):
    return [callee(n) for n in graph.graph.nodes if callee(n) in PRODUCTS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings_match_and_stay_bitwise_equal(name, dtype):
    module = Spelled(SPELLINGS[name], dtype)
    graph = aten_of_module(module, torch.randn(2, 5, 6).to(dtype))
    record = recognize_linear(graph)
    assert (record.matches, record.rejections, leftovers(graph)) == (1, [], [])
    linear = next(n for n in graph.graph.nodes if callee(n) == "linear")
    assert linear.meta["example_value"].shape[-1] == 8
    for tokens in (5, 1, 13):
        x = torch.randn(2, tokens, 6).to(dtype)
        assert torch.equal(run_graph(graph, x), module(x))
    code = graph.module.code
    assert recognize_linear(graph).matches == 0
    graph.recompile()
    assert graph.module.code == code


def test_a_layer_reads_its_parameters_directly():
    graph = aten_of_module(Spelled(SPELLINGS["linear with bias"]), torch.randn(2, 5, 6))
    recognize_linear(graph)
    linear = next(n for n in graph.graph.nodes if callee(n) == "linear")
    assert [a.op for a in linear.args] == ["placeholder"] * 3
    assert [callee(n) for n in graph.graph.nodes if n.op == "call_function"] == ["linear"]


SCALED = {
    "alpha": lambda m, x: torch.addmm(m.b, x.view(-1, 6), m.wt, alpha=2),
    "beta": lambda m, x: torch.addmm(m.b, x.view(-1, 6), m.w.T, beta=0.5),
    "residual": lambda m, x: torch.addmm(x.view(-1, 6) @ m.wt, x.view(-1, 6), m.w.T),
}


@pytest.mark.parametrize("name", SCALED)
def test_scaled_sums_are_near_misses(name):
    graph = aten_of_module(Spelled(SCALED[name]), torch.randn(2, 5, 6))
    record = recognize_linear(graph)
    assert record.matches == (name == "residual")
    reason = "the added tensor is not a bias" if name == "residual" else "scaled"
    assert [reason in r.reason for r in record.rejections] == [True]
    assert leftovers(graph) == ["addmm"]


OTHERS = {
    "activations": lambda m, x: x @ x.transpose(1, 2),
    "einsum": lambda m, x: torch.einsum("bti,oi->bto", x, m.w),
    "no product": lambda m, x: x + 1,
    "batched weights": lambda m, x: torch.bmm(x, m.w.T.expand(2, 6, 8) * x.mean()),
}


@pytest.mark.parametrize("name", OTHERS)
def test_products_of_activations_stay(name):
    graph = aten_of_module(Spelled(OTHERS[name]), torch.randn(2, 5, 6))
    graph.recompile()
    code = graph.module.code
    record = recognize_linear(graph)
    graph.recompile()
    assert (record.matches, record.rejections, graph.module.code) == (0, [], code)


@pytest.mark.parametrize(
    ("name", "layers", "matches"), [("llama", 1, 8), ("llama", 2, 15), ("gpt2", 2, 9), ("mixtral", 2, 11)]
)
def test_whole_models_by_the_layer(name, layers, matches):
    graph = aten_of_tiny_model(name, num_hidden_layers=layers)
    record = recognize_linear(graph)
    assert (record.matches, record.rejections, leftovers(graph)) == (matches, [], [])
