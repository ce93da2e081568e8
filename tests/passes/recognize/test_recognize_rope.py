"""Rotary embeddings in ATen graphs: every way to write them, near misses, and grouping."""

from __future__ import annotations

import pytest
import torch
from aten_graphs import aten_of_module, aten_of_tiny_model, run_graph
from torch import nn

from torch_pagoda.compiler.verify.fake_values import propagate
from torch_pagoda.passes.graph.fx_nodes import callee, shape
from torch_pagoda.passes.recognize.linear import recognize_linear
from torch_pagoda.passes.recognize.rope import recognize_rope
from torch_pagoda.passes.rewrite.group_rope import group_rope
from torch_pagoda.passes.rewrite.share_subexpressions import share_subexpressions

HEADS, KV_HEADS, DIM = 3, 1, 8
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}


class Rotary(nn.Module):
    """Scores of rotated queries and keys: ``rotate(q, k, cos, sin)`` with tables ``[1, T, width]``."""

    def __init__(self, rotate, width=DIM, dtype=torch.float32, heads_first=True):
        super().__init__()
        torch.manual_seed(0)
        self.rotate, self.width, self.heads_first = rotate, width, heads_first
        self.q = nn.Linear(6, HEADS * DIM, dtype=dtype)
        self.k = nn.Linear(6, KV_HEADS * DIM, dtype=dtype)
        self.requires_grad_(False)

    def tables(self, x):
        frequencies = 1.0 / (100.0 ** (torch.arange(0, self.width, 2) / self.width))
        angles = torch.arange(x.shape[1])[None, :, None] * frequencies
        if self.rotate in (complex_product,):
            return torch.polar(torch.ones_like(angles), angles), None
        if self.rotate in (split_halves, split_pairs):
            pass
        elif self.rotate in (pairs, partial_pairs):
            angles = angles.repeat_interleave(2, -1)
        else:
            angles = torch.cat((angles, angles), -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    def forward(self, x):
        q = self.q(x).view(*x.shape[:-1], HEADS, DIM)
        k = self.k(x).view(*x.shape[:-1], KV_HEADS, DIM)
        if self.heads_first:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        q, k = self.rotate(q, k, *self.tables(x))
        if not self.heads_first:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        return q @ k.transpose(-1, -2)


def half(x):
    a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-b, a), -1)


def both(rotate):
    def apply(q, k, cos, sin):
        return rotate(q, cos, sin), rotate(k, cos, sin)

    return apply


def _llama(x, cos, sin):
    return x * cos[:, None] + half(x) * sin[:, None]


def _partial(x, cos, sin):
    width = cos.shape[-1]
    turned = _llama(x[..., :width], cos, sin)
    return torch.cat((turned, x[..., width:]), -1)


def _behind(x, cos, sin):
    width = cos.shape[-1]
    return torch.cat((x[..., :-width], _llama(x[..., -width:], cos, sin)), -1)


def _every_two(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def _pairs(x, cos, sin):
    return x * cos[:, None] + _every_two(x) * sin[:, None]


def _partial_pairs(x, cos, sin):
    width = cos.shape[-1]
    return torch.cat((_pairs(x[..., :width], cos, sin), x[..., width:]), -1)


def _split_halves(x, cos, sin):
    a, b = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def _split_pairs(x, cos, sin):
    a, b = x[..., ::2], x[..., 1::2]
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


def _deepseek(x, cos, sin):
    batch, heads, tokens, dim = x.shape
    x = x.view(batch, heads, tokens, dim // 2, 2).transpose(4, 3).reshape(batch, heads, tokens, dim)
    return _llama(x, cos, sin)


def _complex(x, table, _):
    turned = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * table[:, None]
    return torch.view_as_real(turned).flatten(3).type_as(x)


def _tokens_first(x, cos, sin):
    return x * cos[:, :, None] + half(x) * sin[:, :, None]


def _backwards(x, cos, sin):
    return x * cos[:, None] - half(x) * sin[:, None]


def _in_float32(x, cos, sin):
    return _llama(x.float(), cos.float(), sin.float()).to(x.dtype)


llama, partial, behind, pairs, partial_pairs = map(both, (_llama, _partial, _behind, _pairs, _partial_pairs))
split_halves, split_pairs, deepseek = map(both, (_split_halves, _split_pairs, _deepseek))
complex_product, tokens_first, in_float32 = map(both, (_complex, _tokens_first, _in_float32))
backwards = both(_backwards)

# function, width of the tables, heads in front of tokens, mode and first rotated dim
SPELLINGS = {
    "halves": (llama, DIM, True, "half", 0),
    "some dims in front": (partial, 4, True, "half", 0),
    "some dims behind": (behind, 4, True, "half", 4),
    "pairs": (pairs, DIM, True, "interleaved", 0),
    "some pairs": (partial_pairs, 4, True, "interleaved", 0),
    "halves of their own": (split_halves, DIM, True, "half", 0),
    "pairs of their own": (split_pairs, DIM, True, "interleaved", 0),
    "pairs to halves": (deepseek, DIM, True, "interleaved_to_half", 0),
    "complex product": (complex_product, DIM, True, "interleaved", 0),
    "tokens in front of heads": (tokens_first, DIM, False, "half", 0),
    "by the negative angle": (backwards, DIM, True, "half", 0),
    "in float32": (in_float32, DIM, True, "half", 0),
}


def graph_of(rotate, width=DIM, heads_first=True, dtype=torch.float32):
    module = Rotary(rotate, width, dtype, heads_first)
    graph = aten_of_module(module, torch.randn(1, 5, 6).to(dtype))
    recognize_linear(graph)
    share_subexpressions(graph)
    return module, graph


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", SPELLINGS)
def test_spelling(kind, dtype):
    rotate, width, heads_first, mode, start = SPELLINGS[kind]
    module, graph = graph_of(rotate, width, heads_first, dtype)
    record = recognize_rope(graph)
    assert record.matches == 2 and not record.rejections
    ropes = [n for n in graph.graph.nodes if callee(n) == "rope"]
    assert [(n.args[3], n.args[4]) for n in ropes] == [(mode, start)] * 2
    assert all(isinstance(shape(n.args[1])[1], torch.SymInt) for n in ropes), "T stays dynamic"
    rounds = dtype == torch.bfloat16 and kind not in ("in float32", "complex product")
    assert [n.args[5] for n in ropes] == [rounds] * 2
    left = [n for n in graph.graph.nodes if callee(n) in ("neg", "stack", "view_as_complex")]
    assert len(left) == (1 if kind == "by the negative angle" else 0)  # its table
    assert recognize_rope(graph).matches == 0
    assert group_rope(graph).matches == 1 and group_rope(graph).matches == 0
    graph.graph.lint()
    for tokens in (1, 5, 9):
        x = torch.randn(1, tokens, 6).to(dtype)
        expected = module(x)
        limit = TOLERANCE[dtype] * float(expected.abs().max().clamp_min(1))
        torch.testing.assert_close(run_graph(graph, x), expected, atol=limit, rtol=0)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("kind", SPELLINGS)
def test_a_fixed_number_of_tokens(kind, tokens):
    rotate, width, heads_first, mode, start = SPELLINGS[kind]
    module, x = Rotary(rotate, width, torch.float32, heads_first), torch.randn(2, tokens, 6)
    graph = aten_of_module(module, x, dynamic=())
    recognize_linear(graph)
    share_subexpressions(graph)
    assert recognize_rope(graph).matches == 2
    assert [n.args[3:5] for n in graph.graph.nodes if callee(n) == "rope"] == [(mode, start)] * 2
    propagate(graph)  # views of the rotated tensors may have to copy
    torch.testing.assert_close(run_graph(graph, x), module(x), atol=1e-4, rtol=1e-4)


def _wrong_sign(x, cos, sin):
    return x * cos[:, None] - half(x) * sin[:, None] * 0.5


def _wrong_order(x, cos, sin):
    return x * cos[:, None] + torch.cat((x[..., DIM // 2 :], x[..., : DIM // 2]), -1) * sin[:, None]


def _norm_of_halves(x, cos, sin):
    return (x * cos[:, None] + half(x) * sin[:, None]) * x.sum()


@pytest.mark.parametrize("function", [_wrong_sign, _wrong_order], ids=["other factor", "no sign"])
def test_what_is_no_rotation_is_a_near_miss(function):
    module, graph = graph_of(both(function))
    before = [n.name for n in graph.graph.nodes]
    record = recognize_rope(graph)
    assert record.matches == 0 and len(record.rejections) == 2
    assert [n.name for n in graph.graph.nodes] == before
    x = torch.randn(1, 7, 6)
    torch.testing.assert_close(run_graph(graph, x), module(x))


def test_what_follows_a_rotation_stays():
    module, graph = graph_of(both(_norm_of_halves))
    assert recognize_rope(graph).matches == 2
    x = torch.randn(1, 7, 6)
    torch.testing.assert_close(run_graph(graph, x), module(x), atol=1e-3, rtol=1e-4)


def test_rotations_with_different_tables_stay_apart():
    def apply(q, k, cos, sin):
        return _llama(q, cos, sin), _llama(k, cos * 2, sin * 2)

    module, graph = graph_of(apply)
    assert recognize_rope(graph).matches == 2
    assert group_rope(graph).matches == 0
    x = torch.randn(1, 7, 6)
    torch.testing.assert_close(run_graph(graph, x), module(x), atol=1e-5, rtol=1e-5)


def test_keys_that_depend_on_rotated_queries_stay_apart():
    def apply(q, k, cos, sin):
        q = _llama(q, cos, sin)
        return q, _llama(k + q.sum(1, keepdim=True), cos, sin)

    module, graph = graph_of(apply)
    assert recognize_rope(graph).matches == 2
    assert group_rope(graph).matches == 0
    x = torch.randn(1, 7, 6)
    torch.testing.assert_close(run_graph(graph, x), module(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(("name", "ropes", "groups"), [("llama", 2, 1), ("gpt_neox", 2, 1), ("deepseek_v2", 2, 0)])
def test_counts_grow_with_the_layers(name, ropes, groups, layers):
    graph = aten_of_tiny_model(name, num_hidden_layers=layers)
    recognize_linear(graph)
    share_subexpressions(graph)
    assert recognize_rope(graph).matches == ropes * layers
    share_subexpressions(graph)
    assert group_rope(graph).matches == groups * layers
    tables = {n.args[1] for n in graph.graph.nodes if callee(n) == "rope"}
    assert len(tables) == 1, "one table for all layers"
