"""A one-layer causal LM whose attention is spelled by a function, for tests of passes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

from torch_pagoda.compiler.capture.trace import Captured
from torch_pagoda.passes import PASSES, TracedGraph

from shared_graphs import capture

DYNAMO_PASSES = [entry for entry in PASSES if entry.stage == "dynamo"]
VOCAB, HIDDEN, HEADS, KV_HEADS, DIM = 61, 32, 4, 2, 8

Attention = Callable[["ToyLM", torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class ToyLM(nn.Module):
    """embedding → attention(self, q, k, v, position_ids) → head.

    q is ``[1, HEADS, T, DIM]``, k and v ``[1, KV_HEADS, T, DIM]``; the function returns ``[1, HEADS, T, DIM]``.
    ``before`` and ``after`` change the hidden states in front of and behind the attention.
    """

    def __init__(
        self,
        attention: Attention,
        *,
        before: Callable[[ToyLM, torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        finish: Callable[[torch.Tensor], torch.Tensor] | None = None,
        tied_head_bias: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.before, self.finish = attention, before, finish
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.q = nn.Linear(HIDDEN, HEADS * DIM, bias=False)
        self.k = nn.Linear(HIDDEN, KV_HEADS * DIM, bias=False)
        self.v = nn.Linear(HIDDEN, KV_HEADS * DIM, bias=False)
        self.o = nn.Linear(HEADS * DIM, HIDDEN, bias=False)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=tied_head_bias)
        self.sinks = nn.Parameter(torch.randn(HEADS))
        self.register_buffer("causal_table", torch.ones(256, 256).tril().bool())
        self.register_buffer("position_table", torch.randn(256, HIDDEN))
        self.register_buffer("slopes", torch.tensor([0.5, 0.25, 0.125, 0.0625]))
        for p in self.parameters():
            p.requires_grad_(False)
            if p.dim() == 2:
                p.mul_(3.0)
        self.eval()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        use_cache: bool = False,
        return_dict: bool = True,
    ) -> CausalLMOutput:
        batch, tokens = input_ids.shape
        hidden = self.embedding(input_ids)
        if self.before is not None:
            hidden = self.before(self, hidden, position_ids)
        q = self.q(hidden).view(batch, tokens, HEADS, DIM).transpose(1, 2)
        k = self.k(hidden).view(batch, tokens, KV_HEADS, DIM).transpose(1, 2)
        v = self.v(hidden).view(batch, tokens, KV_HEADS, DIM).transpose(1, 2)
        out = self.attention(self, q, k, v, position_ids)
        hidden = hidden + self.o(out.transpose(1, 2).reshape(batch, tokens, HEADS * DIM))
        logits = self.head(hidden)
        return CausalLMOutput(logits=logits if self.finish is None else self.finish(logits))


def repeat_kv(x: torch.Tensor, n: int = HEADS // KV_HEADS) -> torch.Tensor:
    b, h, t, d = x.shape
    return x[:, :, None].expand(b, h, n, t, d).reshape(b, h * n, t, d)


def causal_mask(position_ids: torch.Tensor, window: int = 0, chunk: int = 0) -> torch.Tensor:
    """``[1, 1, T, T]`` bool, made of positions as transformers does it."""
    i, j = position_ids[:, None, :, None], position_ids[:, None, None, :]
    mask = j <= i
    if window:
        mask = mask & (i - j < window)
    if chunk:
        mask = mask & (i // chunk == j // chunk)
    return mask


def sdpa(model: ToyLM, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    """The plainest spelling."""
    mask = causal_mask(pos)
    return nn.functional.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), attn_mask=mask)


def traced(model: nn.Module) -> TracedGraph:
    return captured(model).traced


def captured(model: nn.Module) -> Captured:
    return capture(model)


def run(graph: TracedGraph, tokens: int, seed: int = 1) -> torch.Tensor:
    """Logits of a graph without caches for one sequence of random tokens."""
    graph.recompile()
    ids = torch.randint(0, VOCAB, (1, tokens), generator=torch.Generator().manual_seed(seed))
    given = {graph.input_ids: ids, graph.position_ids: torch.arange(tokens)[None], **graph.constants}
    with torch.no_grad():
        return graph.module(*[given.get(n.name, tokens) for n in graph.placeholders])[0]
