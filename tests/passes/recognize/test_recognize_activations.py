"""Activations and gated activations in ATen graphs."""

from __future__ import annotations

import math

import pytest
import torch
from aten_graphs import aten_of_module, aten_of_tiny_model, run_graph
from torch import nn
from torch.nn import functional as F

from torch_pagoda.passes.graph.fx_nodes import callee
from torch_pagoda.passes.recognize.activation import recognize_activation
from torch_pagoda.passes.recognize.gated_activation import recognize_gated_activation


class Spelled(nn.Module):
    """``function(gate, up)`` of two linears."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.gate, self.up = nn.Linear(6, 8), nn.Linear(6, 8)
        self.requires_grad_(False)

    def forward(self, x):
        return self.function(self.gate(x), self.up(x))


def gelu_new(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def gelu_fast(x):
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


KINDS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: torch.square(F.relu(x)),
    "sigmoid": torch.sigmoid,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}
OTHER_SPELLINGS = {
    "gelu_tanh": gelu_new,
    "gelu_tanh ": gelu_fast,
    "gelu": lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "silu": lambda x: x * torch.sigmoid(x),
    "relu2": lambda x: F.relu(x).pow(2),
    "relu2 ": lambda x: (r := F.relu(x)) * r,
}
CASES = [*KINDS.items(), *OTHER_SPELLINGS.items()]


@pytest.mark.parametrize(("kind", "function"), CASES, ids=[f"{k}-{i}" for i, (k, _) in enumerate(CASES)])
@pytest.mark.parametrize("gated", [False, True])
def test_spelling(kind, function, gated):
    module = Spelled((lambda g, u: function(g) * u) if gated else (lambda g, u: function(g) + u))
    x = torch.randn(2, 5, 6)
    graph = aten_of_module(module, x)
    assert recognize_activation(graph).matches == 1
    assert recognize_gated_activation(graph).matches == gated
    calls = [n for n in graph.graph.nodes if callee(n) in ("activation", "gated_activation")]
    (call,) = calls
    assert call.args[2 if gated else 1] == kind.strip()
    for tokens in (1, 7):
        x = torch.randn(2, tokens, 6)
        torch.testing.assert_close(run_graph(graph, x), module(x), atol=1e-5, rtol=1e-4)
    assert recognize_activation(graph).matches == recognize_gated_activation(graph).matches == 0


def test_up_times_gate_is_the_same():
    module, x = Spelled(lambda g, u: u * F.silu(g)), torch.randn(2, 5, 6)
    graph = aten_of_module(module, x)
    recognize_activation(graph)
    assert recognize_gated_activation(graph).matches == 1
    torch.testing.assert_close(run_graph(graph, x), module(x))


NEAR_MISSES = {
    "the gate is read twice": (lambda g, u: (a := F.silu(g)) * u + a, "2 users"),
    "shapes differ": (lambda g, u: F.silu(g) * u[..., :1], "differ in shape"),
    "a number": (lambda g, u: F.silu(g) * 3.0 + u, "by a number"),
    "by itself": (lambda g, u: (a := F.silu(g)) * a + u, "by itself"),
}


@pytest.mark.parametrize("kind", NEAR_MISSES)
def test_near_miss_says_why(kind):
    function, reason = NEAR_MISSES[kind]
    module, x = Spelled(function), torch.randn(2, 5, 6)
    graph = aten_of_module(module, x)
    recognize_activation(graph)
    record = recognize_gated_activation(graph)
    assert not record.matches and reason in record.rejections[0].reason
    torch.testing.assert_close(run_graph(graph, x), module(x))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.05 * torch.pow(x, 3.0)))),
        lambda x: 30 * torch.tanh(x / 30),
        lambda x: F.relu(x).pow(3),
        lambda x: x * torch.sigmoid(1.6 * x),
        lambda x: F.relu(x) - F.relu(x - 20),
        lambda x: F.relu(x) - F.relu(x - 5000.0),
        lambda x: F.relu(x) - 4096 * F.relu(x / 4096 - 4096),
        lambda x: F.silu(x) - F.relu(0.01 * x - 30) * 100,
    ],
    ids=["other constants", "softcap", "third power", "other slope", "clipped", "far", "scaled", "scaled silu"],
)
def test_functions_that_are_alike_stay_what_they_are(function):
    module, x = Spelled(lambda g, u: function(g) + u), torch.randn(2, 5, 6)
    graph = aten_of_module(module, x)
    recognize_activation(graph)
    torch.testing.assert_close(run_graph(graph, x), module(x), atol=1e-6, rtol=1e-5)
    x = x.sign() * torch.logspace(0, 9, x.numel()).view_as(x)
    torch.testing.assert_close(run_graph(graph, x), module(x), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(
    ("name", "gated", "plain"),
    [("llama", 1, 0), ("phi3", 1, 0), ("gemma2", 1, 0), ("gpt2", 0, 1), ("bloom", 0, 1), ("arcee", 0, 1)],
)
def test_counts_grow_with_the_layers(name, gated, plain, layers):
    kinds = {"layer_types": ["full_attention"] * layers} if name == "gemma2" else {}
    graph = aten_of_tiny_model(name, num_hidden_layers=layers, **kinds)
    assert recognize_activation(graph).matches == layers
    assert recognize_gated_activation(graph).matches == gated * layers
    left = [callee(n) for n in graph.graph.nodes if callee(n) in ("silu", "gelu", "relu", "erf")]
    assert not left and [callee(n) for n in graph.graph.nodes].count("activation") == plain * layers
