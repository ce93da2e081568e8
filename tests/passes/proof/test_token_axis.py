"""The proof that no operator mixes tokens: every kind of mixing is found, per-token work and routing pass."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from torch_pagoda.passes.proof.token_axis import mixers

from toy_lm import DYNAMO_PASSES, HIDDEN, VOCAB, ToyLM, sdpa, traced


def found_in(before):
    graph = traced(ToyLM(sdpa, before=before))
    for entry in DYNAMO_PASSES:
        entry.apply(graph)
    return [r.reason for r in mixers(graph)]


def shift(m, h, pos):
    return h + F.pad(h, (0, 0, 1, 0))[:, :-1]


def convolution(m, h, pos):
    kernel = torch.full((HIDDEN, 1, 3), 0.3)
    return F.conv1d(h.transpose(1, 2), kernel, padding=1, groups=HIDDEN).transpose(1, 2)


MIXING = {
    "mean over tokens": (lambda m, h, pos: h - h.mean(1, keepdim=True), "mean runs over the tokens"),
    "sum of all": (lambda m, h, pos: h / h.sum(), "sum runs over all tokens"),
    "cumsum": (lambda m, h, pos: h.cumsum(1), "cumsum runs over the tokens"),
    "softmax over tokens": (lambda m, h, pos: h.softmax(dim=1), "softmax runs over the tokens"),
    "roll": (lambda m, h, pos: torch.roll(h, 1, 1), "roll runs over the tokens"),
    "flip": (lambda m, h, pos: h + h.flip(1), "flip runs over the tokens"),
    "shift": (shift, "pad shifts"),
    "convolution": (convolution, "conv1d runs along the tokens"),
    "product": (lambda m, h, pos: h @ (h.transpose(1, 2) @ h), "matmul sums over the tokens"),
    "einsum": (lambda m, h, pos: h + torch.einsum("btd,btd->bd", h, h)[:, None], "sums over the tokens"),
    "first token": (lambda m, h, pos: h + h[:, :1], "cut out"),
    "maximum position": (lambda m, h, pos: h * pos.max(), "max runs over all tokens"),
    "number of tokens": (lambda m, h, pos: h * h.shape[1], "number of tokens"),
    "halves": (lambda m, h, pos: h + h.narrow(1, 0, 1), "narrow cuts the step's tokens apart"),
    "one token": (lambda m, h, pos: h + h.select(1, 0)[:, None], "select cuts the step's tokens apart"),
    "chunks": (lambda m, h, pos: h + h.chunk(1, dim=1)[0].sum(-1, keepdim=True), "chunk cuts"),
    "end of a table": (lambda m, h, pos: h + (torch.arange(90.0) ** 2)[-h.shape[1] :, None], "place in the step"),
    "end of positions": (lambda m, h, pos: h + torch.arange(90.0)[-h.shape[1] :, None], "place in the step"),
    "far into a table": (
        lambda m, h, pos: h + (torch.arange(90.0) ** 2)[30 : 30 + h.shape[1], None],
        "place in the step",
    ),
    "reversed places": (lambda m, h, pos: h + (h.shape[1] - torch.arange(h.shape[1]))[:, None], "number of tokens"),
    "filled with a count": (lambda m, h, pos: h * torch.full((), h.shape[1]), "number of tokens in the step"),
    "fixed row": (lambda m, h, pos: h + h[:, torch.tensor([0])], "picked by an index"),
    "rows before": (lambda m, h, pos: h + h[:, torch.arange(h.shape[1]) - 1], "picked by an index"),
    "earlier row": (lambda m, h, pos: h.index_select(1, torch.arange(h.shape[1]) // 2), "index_select moves rows"),
    "unit vectors along tokens": (lambda m, h, pos: F.normalize(h), "normalize runs over the tokens"),
    "cosine along tokens": (lambda m, h, pos: h * F.cosine_similarity(h, h + 1)[:, None], "cosine_similarity runs"),
    "length of all": (lambda m, h, pos: h / torch.linalg.vector_norm(h), "linalg_vector_norm runs over all"),
    "hstack": (lambda m, h, pos: torch.hstack([h, h])[:, : h.shape[1]], "joined along the tokens"),
    "norm over all": (lambda m, h, pos: F.layer_norm(h, h.shape[1:]), "layer_norm runs over the tokens"),
}


@pytest.mark.parametrize("name", MIXING)
def test_mixing_is_found(name):
    before, reason = MIXING[name]
    assert any(reason in r for r in found_in(before)), found_in(before)


class CountsTokens(ToyLM):
    """Positions made by counting the tokens that are no padding, as RoBERTa can."""

    def forward(self, input_ids, position_ids, use_cache=False, return_dict=True):
        counted = (input_ids != 1).cumsum(1)
        return super().forward((input_ids + counted) % VOCAB, position_ids)


def test_a_count_of_token_ids_is_no_routing():
    graph = traced(CountsTokens(sdpa))
    for entry in DYNAMO_PASSES:
        entry.apply(graph)
    assert [r.reason for r in mixers(graph)] == ["cumsum runs over the tokens"]


def experts(m, h, pos):
    flat = h.view(-1, HIDDEN)
    weight, choice = flat[:, :4].softmax(-1).topk(2, dim=-1)
    order = torch.argsort(choice.view(-1))
    rows = flat.repeat_interleave(2, 0)[order] * 0.5
    back = torch.empty_like(rows)
    back[order] = rows
    return h + (back.view(-1, 2, HIDDEN) * weight[..., None]).sum(1).view(h.shape)


def inverse_permutation(m, h, pos):
    flat = h.view(-1, HIDDEN)
    order = torch.argsort(flat[:, :4].argmax(-1))
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0])
    return (flat[order] * 2.0)[back].view(h.shape)


PER_TOKEN = {
    "inverse permutation": inverse_permutation,
    "norm": lambda m, h, pos: F.layer_norm(h, (HIDDEN,)) * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6),
    "gate": lambda m, h, pos: F.silu(h) * h.sigmoid() + h.clamp(min=-1).softmax(-1),
    "heads": lambda m, h, pos: torch.stack(h.view(1, -1, 4, 8).unbind(2), 2).sum(2).repeat(1, 1, 4),
    "split": lambda m, h, pos: torch.cat([h[..., HIDDEN // 2 :], h.chunk(2, -1)[0]], dim=-1),
    "einsum": lambda m, h, pos: torch.einsum("btd,de->bte", h, m.o.weight),
    "experts": experts,
    "every row": lambda m, h, pos: h[:, torch.arange(h.shape[1]).repeat_interleave(2)].view(1, -1, 2, HIDDEN).sum(2),
    "unit vectors": lambda m, h, pos: F.normalize(h, dim=-1) + torch.linalg.vector_norm(h, dim=-1, keepdim=True),
    "filled": lambda m, h, pos: h + torch.zeros(h.shape[1], 1) + h.new_ones(h.shape),
    "positions": lambda m, h, pos: h + torch.arange(90.0)[30 : 30 + h.shape[1], None],
    "table of positions": lambda m, h, pos: h + (torch.arange(90.0) ** 2)[2 : 2 + h.shape[1]][:, None],
}


@pytest.mark.parametrize("name", PER_TOKEN)
def test_per_token_work_passes(name):
    assert found_in(PER_TOKEN[name]) == []
