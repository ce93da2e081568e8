"""Norms in ATen graphs: which spellings match, what is left alone and why, and that the numbers stay."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from aten_graphs import aten_of_module, aten_of_tiny_model, run_graph
from torch import nn
from torch.nn import functional as F

from torch_pagoda.passes.graph.fx_nodes import callee, shape
from torch_pagoda.passes.recognize import rms_norm
from torch_pagoda.passes.recognize.layer_norm import recognize_layer_norm
from torch_pagoda.passes.recognize.rms_norm import recognize_rms_norm
from torch_pagoda.passes.rewrite.fuse_residual_norm import fuse_residual_norm
from torch_pagoda.passes.rewrite.share_subexpressions import share_subexpressions

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


class Spelled(nn.Module):
    """``function(self, x)`` over a scale w and a bias b of 6."""

    def __init__(self, function, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.w = nn.Parameter(1 + 0.3 * torch.randn(6, dtype=dtype), requires_grad=False)
        self.b = nn.Parameter(torch.randn(6, dtype=dtype), requires_grad=False)

    def forward(self, x):
        return self.function(self, x)


def root(x, eps=1e-5):
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def llama(m, x):
    h = x.to(torch.float32)
    return m.w * (h * root(h)).to(x.dtype)


def centred(x):
    return x - x.mean(-1, keepdim=True)


RMS = {
    "llama": llama,
    "gemma": lambda m, x: ((x.float() * root(x.float())) * (1.0 + m.w.float())).type_as(x),
    "scaled in float32": lambda m, x: (m.w.float() * (x.float() * root(x.float()))).to(x.dtype),
    "rms_norm": lambda m, x: F.rms_norm(x, (6,), m.w, 1e-5),
    "without scale": lambda m, x: (x.float() * root(x.float())).type_as(x),
    "divided by the root": lambda m, x: (
        m.w * (x.float() / torch.sqrt(x.float().square().mean(-1, True) + 1e-5)).to(x.dtype)
    ),
    "power of minus a half": lambda m, x: (
        m.w * (x.float() * (x.float().pow(2).mean(-1, True) + 1e-5).pow(-0.5)).to(x.dtype)
    ),
    "a product with itself": lambda m, x: (
        m.w * (x.float() * torch.rsqrt((x.float() * x.float()).mean(-1, True) + 1e-5)).to(x.dtype)
    ),
}
LAYER = {
    "layer_norm": lambda m, x: F.layer_norm(x, (6,), m.w, m.b, 1e-5),
    "layer_norm without bias": lambda m, x: F.layer_norm(x, (6,), m.w, None, 1e-5),
    "layer_norm without parameters": lambda m, x: F.layer_norm(x, (6,)),
    "cohere": lambda m, x: (m.w.float() * (centred(x.float()) * root(centred(x.float())))).to(x.dtype),
}


def test_rows_in_float32_under_a_scale_in_half_precision() -> None:
    """Mamba keeps its residual stream so."""
    module = Spelled(llama, torch.bfloat16)
    x = torch.randn(2, 5, 6)
    graph = aten_of_module(module, x)
    record = recognize_rms_norm(graph)
    assert record.matches == 1 and not record.rejections
    found = run_graph(graph, x)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, module(x), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", [*RMS, *LAYER])
def test_spelling(kind, dtype):
    module = Spelled((RMS | LAYER)[kind], dtype)
    x = torch.randn(2, 5, 6).to(dtype)
    graph = aten_of_module(module, x)
    share_subexpressions(graph)  # as it comes before in the list
    recognize, name = (recognize_rms_norm, "rms_norm") if kind in RMS else (recognize_layer_norm, "layer_norm")
    record = recognize(graph)
    assert record.matches == 1 and not record.rejections
    calls = [callee(n) for n in graph.graph.nodes if n.op == "call_function"]
    assert [c for c in calls if c != "getitem"] == [name]
    for tokens in (1, 5, 9):
        x = torch.randn(2, tokens, 6).to(dtype)
        torch.testing.assert_close(run_graph(graph, x), module(x), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    again = [callee(n) for n in graph.graph.nodes]
    assert recognize(graph).matches == 0
    assert [callee(n) for n in graph.graph.nodes] == again


def reread(m, x):
    r = root(x)
    return m.w * (x * r) + r


NEAR_MISSES = {
    "the root is read again": (reread, torch.float32, "2 users"),
    "another tensor is scaled": (lambda m, x: (x + 1) * root(x) * m.w, torch.float32, "not the squared one"),
    "statistics in half precision": (lambda m, x: m.w * (x * root(x)), torch.bfloat16, "bfloat16"),
}


@pytest.mark.parametrize("kind", NEAR_MISSES)
def test_near_miss_says_why(kind):
    function, dtype, reason = NEAR_MISSES[kind]
    module, x = Spelled(function, dtype), torch.randn(2, 5, 6).to(dtype)
    graph = aten_of_module(module, x)
    before = [n.name for n in graph.graph.nodes]
    record = recognize_rms_norm(graph)
    assert not record.matches and reason in record.rejections[0].reason
    assert [n.name for n in graph.graph.nodes] == before
    assert torch.equal(run_graph(graph, x), module(x))


OTHERS = {
    "no eps": lambda m, x: m.w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))),
    "mean over tokens": lambda m, x: m.w * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-5)),
    "fourth power": lambda m, x: m.w * (x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-5)),
    "eps that is a tensor": lambda m, x: m.w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + m.b[0].abs())),
    "two dims": lambda m, x: F.layer_norm(x[..., None] + m.b, (6, 6)).sum(-1),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_no_norm_stays(kind):
    module, x = Spelled(OTHERS[kind]), torch.randn(2, 5, 6)
    graph = aten_of_module(module, x)
    before = [n.name for n in graph.graph.nodes]
    assert recognize_rms_norm(graph).matches == recognize_layer_norm(graph).matches == 0
    assert [n.name for n in graph.graph.nodes] == before
    torch.testing.assert_close(run_graph(graph, x), module(x))


PARTIAL = {
    # The scale is one number per head and dim: the norm is taken, the product stays.
    "a scale of two dims": lambda m, x: x * root(x) * (m.w[:, None] * m.b).sum(0, keepdim=True),
    # The scale depends on the tokens.
    "a scale per token": lambda m, x: x * root(x) * x.amax(1, keepdim=True),
    "scaled twice": lambda m, x: x * root(x) * m.w * m.b,
    "an output in float32": lambda m, x: m.w.float() * (x.float() * root(x.float())),
}


# Taken in half precision the others are not norms.
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, torch.float32) for kind in PARTIAL), ("an output in float32", torch.bfloat16)],
    ids=str,
)
def test_only_what_belongs_to_the_norm_is_taken(kind, dtype):
    module, x = Spelled(PARTIAL[kind], dtype), torch.randn(2, 5, 6).to(dtype)
    graph = aten_of_module(module, x)
    assert recognize_rms_norm(graph).matches == 1
    found, expected = run_graph(graph, x), module(x)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gemma", "scaled in float32"])
def test_a_norm_that_would_round_elsewhere_stays(kind, monkeypatch):
    """The casts are followed, and the norm is run: one that was followed wrongly is found by its last bits."""
    follow = rms_norm.follow_scale

    def inverted(normalized, dtype):
        found = follow(normalized, dtype)
        return dataclasses.replace(found, round_before_scale=not found.round_before_scale)

    monkeypatch.setattr(rms_norm, "follow_scale", inverted)
    half = torch.bfloat16
    record = recognize_rms_norm(aten_of_module(Spelled(RMS[kind], half), torch.randn(2, 5, 6).to(half)))
    assert record.matches == 0
    assert "rounds elsewhere than pagoda::rms_norm" in record.rejections[0].reason


def test_eps_and_rounding_are_recorded():
    for kind, dtype, expected in (
        ("llama", torch.bfloat16, (1e-5, 0.0, True)),
        ("gemma", torch.bfloat16, (1e-5, 1.0, False)),
        ("scaled in float32", torch.bfloat16, (1e-5, 0.0, False)),
        ("llama", torch.float32, (1e-5, 0.0, False)),
    ):
        graph = aten_of_module(Spelled(RMS[kind], dtype), torch.randn(2, 5, 6).to(dtype))
        recognize_rms_norm(graph)
        (norm,) = [n for n in graph.graph.nodes if callee(n) == "rms_norm"]
        assert norm.args[2:] == expected
        assert norm.args[1].op == "placeholder", "the stored parameter, not what was computed from it"


RESIDUAL = {
    "both are read": lambda m, x: (s := x + x.sin()) * 0.5 + llama(m, s),
    "only the norm is read": lambda m, x: llama(m, x + x.sin()),
    "layer norm": lambda m, x: (s := x + x.sin()) + F.layer_norm(s, (6,), m.w, m.b),
    "the sum is read before the norm": lambda m, x: (s := x + x.sin()).cos() + llama(m, s),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", RESIDUAL)
def test_residual_additions_join_the_norm(kind, dtype):
    module, x = Spelled(RESIDUAL[kind], dtype), torch.randn(2, 5, 6).to(dtype)
    graph = aten_of_module(module, x)
    recognize_rms_norm(graph), recognize_layer_norm(graph)
    adds = [callee(n) for n in graph.graph.nodes].count("add.Tensor")
    assert fuse_residual_norm(graph).matches == 1
    graph.graph.lint()
    names = [callee(n) for n in graph.graph.nodes]
    assert names.count("add.Tensor") == adds - 1
    assert ("add_layer_norm" if kind == "layer norm" else "add_rms_norm") in names
    torch.testing.assert_close(run_graph(graph, x), module(x), atol=2 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert fuse_residual_norm(graph).matches == 0


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda m, x: llama(m, x + 1.0), "a number"),
        (lambda m, x: llama(m, x + m.b), "broadcast"),
        (lambda m, x: llama(m, torch.add(x, x.sin(), alpha=2)), "alpha=2"),
    ],
)
def test_other_sums_stay(function, reason):
    module, x = Spelled(function), torch.randn(2, 5, 6)
    graph = aten_of_module(module, x)
    recognize_rms_norm(graph)
    record = fuse_residual_norm(graph)
    assert not record.matches and reason in record.rejections[0].reason
    torch.testing.assert_close(run_graph(graph, x), module(x))


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(("name", "norms", "fused"), [("llama", 2, 2), ("qwen3", 4, 2), ("gemma2", 4, 2)])
def test_counts_grow_with_the_layers(name, norms, fused, layers):
    kinds = {} if name == "llama" else {"layer_types": ["full_attention"] * layers}
    graph = aten_of_tiny_model(name, num_hidden_layers=layers, **kinds)
    assert recognize_rms_norm(graph).matches == norms * layers + 1
    assert fuse_residual_norm(graph).matches == fused * layers
    tokens = [n for n in graph.graph.nodes if callee(n) == "add_rms_norm"]
    assert all(isinstance(shape(n.args[0])[1], torch.SymInt) for n in tokens)
