"""Provenance: decoder layers by module list, and what a graph holds counted by modules and functions."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutput

from torch_pagoda.compiler.capture.aten import to_aten
from torch_pagoda.compiler.capture.trace import capture
from torch_pagoda.passes.graph.provenance import (
    decoder_layers,
    frames,
    launches_work,
    operator_name,
    scopes,
    source_line,
)
from torch_pagoda.reports.expected import KINDS, expected_matches, per_layer
from torch_pagoda.reports.regions import region
from torch_pagoda.runtime.ops import OPERATORS

VOCAB, HIDDEN, HEADS, DIM = 53, 32, 4, 8


def test_operators_declare_kinds_that_are_reported():
    assert {own.facts.kind for own in OPERATORS.values()} == {"", *KINDS}


class ToyRMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def rotate_half(x):
    return torch.cat((-x[..., DIM // 2 :], x[..., : DIM // 2]), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin):
    cos, sin = cos[:, None], sin[:, None]
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class ToyAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))

    def forward(self, x, table):
        q, k, v = (part(x).view(1, -1, HEADS, DIM).transpose(1, 2) for part in self.parts[:3])
        q, k = apply_rotary_pos_emb(q, k, *table)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.parts[3](y.transpose(1, 2).reshape(1, -1, HIDDEN))


class ToyGatedMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.both, self.down = nn.Linear(HIDDEN, 48), nn.Linear(24, HIDDEN)

    def forward(self, x):
        gate, up = self.both(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class ToyPlainMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 48), nn.Linear(48, HIDDEN)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class ToyExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(ToyGatedMLP() for _ in range(3))

    def forward(self, x, shares):
        return sum(shares[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class ToySparseMoeBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts, self.shared = nn.Linear(HIDDEN, 3), ToyExperts(), ToyGatedMLP()

    def forward(self, x):
        shares = self.router(x).softmax(-1)
        return self.experts(x, shares) + self.shared(x)


class ToyDecoderLayer(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.norm, self.attention, self.second_norm, self.mlp = ToyRMSNorm(), ToyAttention(), ToyRMSNorm(), mlp

    def forward(self, x, table):
        x = x + self.attention(self.norm(x), table)
        return x + self.mlp(self.second_norm(x))


class ToyModel(nn.Module):
    """Three decoder layers with different MLPs, and two module lists that hold no decoder layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.stem = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(2))
        self.layers = nn.ModuleList(
            ToyDecoderLayer(mlp) for mlp in (ToyGatedMLP(), ToyPlainMLP(), ToySparseMoeBlock())
        )
        self.final_norm = ToyRMSNorm()
        self.head = nn.Linear(HIDDEN, VOCAB)
        self.requires_grad_(False).eval()

    def forward(self, input_ids, position_ids, use_cache=False, return_dict=True):
        x = self.embed(input_ids)
        for part in self.stem:
            x = part(x)
        angles = position_ids[..., None] * torch.arange(DIM, device=x.device) / DIM
        table = angles.cos(), angles.sin()
        for layer in self.layers:
            x = layer(x, table)
        return CausalLMOutput(logits=self.head(self.final_norm(x)))


@pytest.fixture(scope="module")
def untouched():
    captured = capture(ToyModel())
    return to_aten(captured.traced, captured.context)


@pytest.fixture(scope="module")
def layers(untouched):
    return decoder_layers(untouched.graph)


def test_layers_are_the_entries_of_the_outermost_list_with_attention(layers):
    assert layers.lists == ("layers",)
    assert layers.paths == ("layers.0", "layers.1", "layers.2")


def test_everything_of_a_layer_belongs_to_it_and_nothing_else_does(untouched, layers):
    for node in untouched.graph.nodes:
        stack = scopes(node)
        inside = [scope.path for scope in stack if scope.path in layers.paths]
        assert (node in layers.of) == bool(inside)
        if inside:
            assert layers.paths[layers.of[node]] == inside[0]


def test_nodes_without_provenance_belong_where_their_readers_do(untouched):
    graph = untouched.copy().graph
    stripped = [n for n in graph.nodes if operator_name(n) == "aten.rsqrt"]
    for node in stripped:
        node.meta.pop("nn_module_stack")
    found = decoder_layers(graph)
    assert [found.of.get(n) for n in stripped] == [0, 0, 1, 1, 2, 2, None]


def test_what_layers_share_belongs_to_none(untouched):
    """A table that a pass puts into the first layer, because the first reader is there, is no work of that layer."""
    copied = untouched.copy()
    first = next(n for n in copied.graph.nodes if operator_name(n) == "aten.cos")
    inside = next(n for n in copied.graph.nodes if operator_name(n) == "aten.rsqrt")
    first.meta["nn_module_stack"] = inside.meta["nn_module_stack"]
    assert decoder_layers(copied.graph).of[first] == 0
    assert first not in decoder_layers(copied.graph, tokens=copied.placeholder(copied.input_ids)).of


def test_views_sizes_inputs_and_constants_launch_nothing(untouched):
    working = {operator_name(n) for n in untouched.graph.nodes if launches_work(n)}
    assert working >= {"aten.mm", "aten.silu", "aten.embedding", "aten.rsqrt", "aten.cat"}
    idle = {operator_name(n) for n in untouched.graph.nodes if n.op == "call_function"} - working
    assert idle <= {
        *("aten.view", "aten._unsafe_view", "aten.t", "aten.transpose", "aten.slice", "aten.split", "getitem"),
        *("aten.unsqueeze", "aten.expand", "aten.arange", "aten.sym_size", "eq", "aten._assert_scalar", "aten.alias"),
    }


def test_counts_by_provenance(untouched, layers):
    expected = expected_matches(untouched.graph, layers)
    assert [{k: v for k, v in counts.items() if v} for counts in per_layer(expected, layers)] == [
        {"attention": 1, "norm": 2, "rope": 2, "gated_mlp": 1},
        {"attention": 1, "norm": 2, "rope": 2, "activation": 1},
        # The experts' own products count with the block, the shared expert's by itself.
        {"attention": 1, "norm": 2, "rope": 2, "gated_mlp": 1, "moe": 1},
    ]
    assert Counter(e.kind for e in expected if e.layer < 0) == {"norm": 1}
    assert {e.spelling for e in expected if e.kind == "norm"} == {"rms"}
    assert {e.spelling for e in expected if e.kind == "attention"} == {"sdpa"}
    assert {e.module for e in expected if e.kind == "moe"} == {"layers.2.mlp.experts"}


def test_regions(untouched):
    by_operator = {operator_name(n): region(n) for n in untouched.graph.nodes if launches_work(n)}
    assert by_operator["aten.rsqrt"] == "norm"
    assert by_operator["aten.neg"] == "rope"
    assert by_operator["aten.silu"] == by_operator["aten.gelu"] == "activation"
    assert by_operator["aten.mm"] == "projection"
    assert by_operator["aten.embedding"] == ""


def test_source_lines_name_this_file(untouched):
    node = next(n for n in untouched.graph.nodes if operator_name(n) == "aten.neg")
    assert frames(node)[-1].function == "rotate_half"
    assert source_line(node).startswith("test_explain_expected.py:") and "torch.cat" in source_line(node)
