"""Recognizers over three layers that are alike: none stops behind the first, and none leaves out the one between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from aten_graphs import aten_of_module, run_graph
from torch import nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

from torch_pagoda.compiler.link.linker import link
from torch_pagoda.compiler.options import CompileOptions, selected_passes
from torch_pagoda.compiler.verify.self_check import STATE_SCHEDULE, check, reference_of_model

from toy_lm import DYNAMO_PASSES, HIDDEN, ToyLM, causal_mask, repeat_kv, sdpa, traced

LAYERS = 3


class Layer(nn.Module):
    """A place for every recognizer of ATen graphs."""

    width, heads, experts = 16, 2, 4

    def __init__(self) -> None:
        super().__init__()
        width = self.width
        self.rms_norm, self.layer_norm = LlamaRMSNorm(width), nn.LayerNorm(width)
        self.gated_norm = MambaRMSNormGated(width, width)
        self.query, self.key, self.gate, self.up, self.down, self.plain, self.router = (
            nn.Linear(width, size, bias=False) for size in (width, width, width, width, width, width, self.experts)
        )
        self.expert_up = nn.Parameter(torch.randn(self.experts, width, 2 * width))
        self.expert_down = nn.Parameter(torch.randn(self.experts, width, width))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        normed = self.rms_norm(x)
        heads = (linear(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2) for linear in (self.query, self.key))
        query, key = apply_rotary_pos_emb(*heads, cos, sin)
        x = x + (query * key).transpose(1, 2).flatten(-2)
        x = x + self.down(F.silu(self.gate(x)) * self.up(x)) + F.gelu(self.plain(self.layer_norm(x)))
        x = x + self.gated_norm(x, normed)
        return x + self.mixture(x.reshape(-1, self.width)).view(x.shape)

    def mixture(self, x: torch.Tensor) -> torch.Tensor:
        chosen, ids = self.router(x).topk(2, 1)
        scores = torch.full((len(x), self.experts), -torch.inf).scatter_(1, ids, chosen).sigmoid()
        rows = x.repeat(self.experts, 1) * scores.transpose(0, 1).reshape(-1, 1)
        gate, up = torch.bmm(rows.view(self.experts, -1, self.width), self.expert_up).chunk(2, -1)
        return torch.bmm(up * F.gelu(gate), self.expert_down).view(self.experts, -1, self.width).sum(0)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS)).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frequencies = 1.0 / 10.0 ** torch.arange(0, 1, 2 * Layer.heads / Layer.width)
        angles = (torch.arange(x.shape[1])[None, :, None] * frequencies).repeat(1, 1, 2)
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin())
        return x


def test_places_in_aten_graphs() -> None:
    module = Layers()
    graph = aten_of_module(module, torch.randn(1, 5, Layer.width))
    passes = selected_passes(CompileOptions(target="cpu"), "aten")
    records = [entry.apply(graph) for entry in passes]
    found = {r.name: r.matches for r in records if r.name.startswith("recognize_")}
    in_a_layer = {
        "recognize_linear": 7,
        "recognize_moe": 1,
        "recognize_moe_routing": 1,
        "recognize_rms_norm": 2,
        "recognize_layer_norm": 1,
        "recognize_activation": 3,
        "recognize_gated_norm": 1,
        "recognize_gated_activation": 1,
        "recognize_rope": 2,
    }
    assert found == {name: LAYERS * count for name, count in in_a_layer.items()}
    x = torch.randn(1, 9, Layer.width)
    torch.testing.assert_close(run_graph(graph, x), module(x), atol=1e-4, rtol=1e-4)


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    scores = q @ repeat_kv(k).mT * 0.3
    return torch.softmax(scores + torch.where(hidden, -torch.inf, 0.0), dim=-1) @ repeat_kv(v)


def over_chosen_keys(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    mask, weights = causal_mask(pos), v[:, 1, :, :4].sigmoid()
    scores = F.relu(q.transpose(1, 2) @ k[:, 0].transpose(-1, -2).unsqueeze(1) * 0.25)
    scores = (weights.unsqueeze(-2) @ scores).squeeze(-2).masked_fill(~mask[:, 0], -torch.inf)
    chosen = scores.topk(min(6, scores.shape[-1]), dim=-1).indices
    dropped = torch.ones_like(scores, dtype=torch.bool).scatter(-1, chosen, False)
    return F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), attn_mask=mask & ~dropped.unsqueeze(1))


def with_a_bias(m: ToyLM, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    rows, places = q @ m.position_table[: q.shape[-1], :5], torch.arange(q.shape[2])
    distance = (places[:, None] - places[None, :])[None, None]
    bias = rows.gather(-1, distance.clamp(0, 4).expand(*rows.shape[:2], -1, -1))
    bias = bias.masked_fill((distance < 0) | (distance >= 5), 0.0)
    mask = torch.where(causal_mask(pos), bias, torch.finfo(bias.dtype).min)
    return F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), attn_mask=mask)


def attend(m: ToyLM, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    for _ in range(LAYERS):
        q = q + sdpa(m, q, k, v, pos)
        q = q + by_hand(q, k, v, ~causal_mask(pos))
        q = q + over_chosen_keys(q, k, v, pos)
        q = q + with_a_bias(m, q, k, v, pos)
    return q


def placed(m: ToyLM, hidden: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    return hidden + m.position_table[pos]


def mix(m: ToyLM, hidden: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    taps = m.position_table[:4].T[:, None] * 0.5
    for _ in range(LAYERS):
        hidden = hidden + F.conv1d(F.pad(hidden.mT, (3, 0)), taps, groups=HIDDEN).mT
        hidden = 0.5 * hidden + F.pad(m.q(hidden), (0, 0, 1, -1))
    return hidden


ATTENTION = {
    "recognize_sdpa": 3,
    "recognize_eager_attention": 1,
    "recognize_indexed_attention": 1,
    "recognize_relative_bias": 1,
    "classify_masks": 4,
    "insert_paged_cache": 4,
    "insert_index_cache": 1,
}
MIXERS = {"recognize_short_conv": 1, "recognize_token_shift": 1}


@pytest.mark.parametrize(
    ("attention", "before", "in_a_layer"),
    [(attend, placed, ATTENTION), (sdpa, mix, MIXERS)],
    ids=["attention", "mixers"],
)
def test_places_in_graphs_of_dynamo(attention: Any, before: Any, in_a_layer: dict[str, int]) -> None:
    model = ToyLM(attention, before=before)
    graph = traced(model)
    found = {entry.name: entry.apply(graph).matches for entry in DYNAMO_PASSES}
    assert {name: found[name] for name in in_a_layer} == {name: LAYERS * n for name, n in in_a_layer.items()}
    graph.recompile()
    verdict = check(link(graph, graph.module), reference_of_model(model, STATE_SCHEDULE))
    assert verdict.ok, verdict
