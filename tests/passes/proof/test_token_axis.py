"""The proof that no operator mixes tokens: every kind of mixing is found, per-token work and routing pass."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import SwitchTransformersConfig
from transformers.integrations.moe import _grouped_mm
from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersTop1Router

from torch_pagoda.passes.proof.token_axis import mixers

from toy_lm import DYNAMO_PASSES, HIDDEN, VOCAB, ToyLM, sdpa, traced

pagoda = torch.ops.pagoda


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
    "first token": (lambda m, h, pos: h + h[:, :1], "slice of the step"),
    "maximum position": (lambda m, h, pos: h * pos.max(), "max runs over all tokens"),
    "number of tokens": (lambda m, h, pos: h * h.shape[1], "number of tokens"),
    "halves": (lambda m, h, pos: h + h.narrow(1, 0, 1), "narrow splits the step's tokens"),
    "one token": (lambda m, h, pos: h + h.select(1, 0)[:, None], "select splits the step's tokens"),
    "chunks": (lambda m, h, pos: h + h.chunk(1, dim=1)[0].sum(-1, keepdim=True), "chunk splits"),
    "end of a table": (lambda m, h, pos: h + (torch.arange(90.0) ** 2)[-h.shape[1] :, None], "index in the step"),
    "end of positions": (lambda m, h, pos: h + torch.arange(90.0)[-h.shape[1] :, None], "index in the step"),
    "reversed places": (lambda m, h, pos: h + (h.shape[1] - torch.arange(h.shape[1]))[:, None], "number of tokens"),
    "filled with a count": (lambda m, h, pos: h * torch.full((), h.shape[1]), "number of tokens in the step"),
    "fixed row": (lambda m, h, pos: h + h[:, torch.tensor([0])], "picked by an index"),
    "rows of a table": (lambda m, h, pos: h[:, torch.arange(90).clamp(max=60)[: h.shape[1]]], "picked by an index"),
    "rows before": (lambda m, h, pos: h + h[:, torch.arange(h.shape[1]) - 1], "picked by an index"),
    "earlier row": (lambda m, h, pos: h.index_select(1, torch.arange(h.shape[1]) // 2), "index_select moves rows"),
    "unit vectors along tokens": (lambda m, h, pos: F.normalize(h), "normalize runs over the tokens"),
    "cosine along tokens": (lambda m, h, pos: h * F.cosine_similarity(h, h + 1)[:, None], "cosine_similarity runs"),
    "length of all": (lambda m, h, pos: h / torch.linalg.vector_norm(h), "linalg_vector_norm runs over all"),
    "hstack": (lambda m, h, pos: torch.hstack([h, h])[:, : h.shape[1]], "concatenated along the tokens"),
    "norm over all": (lambda m, h, pos: F.layer_norm(h, h.shape[1:]), "layer_norm runs over the tokens"),
    "own norm": (lambda m, h, pos: pagoda.rms_norm(h.mT, None, 1e-5, 0.0, True).mT, "rms_norm runs over the tokens"),
}


@pytest.mark.parametrize("name", MIXING)
def test_mixing_is_found(name):
    before, reason = MIXING[name]
    assert any(reason in r for r in found_in(before)), found_in(before)


class CountsTokens(ToyLM):
    """Positions made by counting the tokens that are not padding, as RoBERTa can."""

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


def flat_choice(h):
    flat = h.view(-1, HIDDEN)
    return flat, flat[:, :4].argmax(-1)


def full_slots(m, h, pos):
    flat, choice = flat_choice(h)
    chosen = F.one_hot(choice, 4)
    taken = (chosen * (chosen.cumsum(0) <= 64)).sum(-1, keepdim=True)
    return (flat * taken).view(h.shape)


def first_of_the_order(m, h, pos):
    flat, choice = flat_choice(h)
    return (flat * (choice.argsort() < 64)[:, None]).view(h.shape)


def first_rows_of_each_expert(m, h, pos):
    flat, choice = flat_choice(h)
    result = torch.zeros_like(flat)
    for e in range(4):
        rows = torch.where(choice == e)[0][:64]
        result.index_add_(0, rows, flat[rows] * e)
    return result.view(h.shape)


def slots_of_experts(m, h, pos):
    flat, choice = flat_choice(h)
    slot = (F.one_hot(choice, 4).cumsum(0) - 1).gather(1, choice[:, None])[:, 0]
    room = torch.zeros(4, 300, HIDDEN)
    room[choice, slot] = flat
    return room[choice, slot].view(h.shape)


def rows_that_fit(m, h, pos):
    flat, choice = flat_choice(h)
    fits = (F.one_hot(choice, 4).cumsum(0) <= 64).all(-1)
    return torch.where(fits[:, None], flat, 0).view(h.shape)


def filled_experts(m, h, pos):
    flat, choice = flat_choice(h)
    counts = torch.zeros(4, dtype=torch.long).scatter_add_(0, choice, torch.ones_like(choice))
    return (flat * (counts <= 64)[choice][:, None]).view(h.shape)


def capped_offsets(m, h, pos):
    flat, choice = flat_choice(h)
    order = choice.argsort()
    ends = choice.float().histc(4, 0, 3).clamp(max=64).cumsum(0, dtype=torch.int32)
    rows = _grouped_mm(flat[order], m.o.weight.expand(4, HIDDEN, HIDDEN), offs=ends)
    return torch.zeros_like(flat).index_add_(0, order, rows).view(h.shape)


def first_of_each_split(m, h, pos):
    flat, choice = flat_choice(h)
    order = choice.argsort()
    sizes = F.one_hot(choice, 4).sum(0).tolist()
    parts = flat[order].split(sizes)
    rows = torch.cat([F.pad(p[:64], (0, 0, 0, p.shape[0] - p[:64].shape[0])) for p in parts])
    return torch.zeros_like(flat).index_add_(0, order, rows).view(h.shape)


def means_of_each_split(m, h, pos):
    flat, choice = flat_choice(h)
    order = choice.argsort()
    parts = flat[order].split(F.one_hot(choice, 4).sum(0).tolist())
    rows = torch.cat([part - part.mean(0, keepdim=True) for part in parts])
    return torch.zeros_like(flat).index_add_(0, order, rows).view(h.shape)


def means_of_experts(m, h, pos):
    flat, choice = flat_choice(h)
    return torch.zeros(4, HIDDEN).index_add_(0, choice, flat)[choice].view(h.shape)


def share_of_an_expert(m, h, pos):
    count = int((flat_choice(h)[1] == 0).sum())
    return h * count


def filled_share_of_an_expert(m, h, pos):
    count = int((flat_choice(h)[1] == 0).sum())
    return h * torch.full((HIDDEN,), count)


def outlier_columns(m, h, pos):
    outliers = (h.abs() > 6).any(dim=(0, 1))
    return torch.where(outliers, h, (h * 16).round() / 16)


JOINT_CHOICES = {
    "capacity": full_slots,
    "first of the order": first_of_the_order,
    "first rows of each expert": first_rows_of_each_expert,
    "slots": slots_of_experts,
    "rows that fit": rows_that_fit,
    "filled experts": filled_experts,
    "capped offsets": capped_offsets,
    "first of each split": first_of_each_split,
    "means of each split": means_of_each_split,
    "clamped order": lambda m, h, pos: h[:, flat_choice(h)[1].argsort().clamp(max=63)],
    "sums of experts": means_of_experts,
    "share of an expert": share_of_an_expert,
    "filled share of an expert": filled_share_of_an_expert,
    "row of an expert's number": lambda m, h, pos: h + h[:, flat_choice(h)[1]],
    "outlier columns": outlier_columns,
    "outliers anywhere": lambda m, h, pos: torch.where((h.abs() > 6).any(), h * 0.5, h),
}


@pytest.mark.parametrize("name", JOINT_CHOICES)
def test_choices_for_all_tokens_do_not_reach_one(name):
    assert found_in(JOINT_CHOICES[name])


class SwitchLM(ToyLM):
    """With a router of transformers whose experts take so many tokens, and leave out those that come later."""

    def __init__(self):
        super().__init__(sdpa, before=type(self).experts)
        config = SwitchTransformersConfig(hidden_size=HIDDEN, num_experts=4, expert_capacity=64)
        self.router = SwitchTransformersTop1Router(config).eval()
        self.up = nn.Parameter(torch.randn(4, HIDDEN, HIDDEN), requires_grad=False)

    def experts(self, h, pos):
        chosen, probabilities, _ = self.router(h)
        return sum(F.linear(h, self.up[e]) * chosen[..., e : e + 1] for e in range(4)) * probabilities


def test_an_expert_of_limited_capacity_is_refused():
    graph = traced(SwitchLM())
    for entry in DYNAMO_PASSES:
        entry.apply(graph)
    assert "choices or comparisons of all tokens" in mixers(graph)[0].reason


def rows_of_each_expert(m, h, pos):
    flat, choice = flat_choice(h)
    order = choice.argsort()
    sizes = F.one_hot(choice, 4).sum(0).tolist()
    rows = torch.cat([part * (e + 1) for e, part in enumerate(flat[order].split(sizes))])
    return torch.zeros_like(flat).index_add_(0, order, rows).view(h.shape)


def loop_over_experts(m, h, pos):
    flat, choice = flat_choice(h)
    result = torch.zeros_like(flat)
    for e in range(4):
        rows = torch.where(choice == e)[0]
        result.index_add_(0, rows, flat[rows] * e)
    return result.view(h.shape)


def rows_where(m, h, pos):
    flat, choice = flat_choice(h)
    result = torch.zeros_like(flat)
    result[choice == 0] = flat[choice == 0] * 2.0
    return result.view(h.shape)


def grouped_products(m, h, pos):
    flat, choice = flat_choice(h)
    ids, order = choice.sort()
    ends = choice.float().histc(4, 0, 3).cumsum(0, dtype=torch.int32)
    rows = _grouped_mm(flat[order], m.o.weight.expand(4, HIDDEN, HIDDEN), offs=ends) + m.position_table[ids]
    return rows[order.argsort()].view(h.shape)


def row_numbers(m, h, pos):
    flat = h.view(-1, HIDDEN)
    order = flat[:, :4].topk(2).indices.view(-1).argsort()
    rows = torch.arange(flat.shape[0]).repeat_interleave(2)[order]
    return torch.zeros_like(flat).index_add_(0, rows, flat[rows] * 0.5).view(h.shape)


PER_TOKEN = {
    "rows of each expert": rows_of_each_expert,
    "loop over experts": loop_over_experts,
    "rows where": rows_where,
    "grouped products": grouped_products,
    "row numbers": row_numbers,
    "masked experts": lambda m, h, pos: sum(h * (h[..., :4].argmax(-1, keepdim=True) == e) * e for e in range(4)),
    "inverse permutation": inverse_permutation,
    "norm": lambda m, h, pos: F.layer_norm(h, (HIDDEN,)) * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6),
    "own norm": lambda m, h, pos: pagoda.rms_norm(pagoda.activation(h.mT, "silu").mT, None, 1e-5, 0.0, True),
    "gate": lambda m, h, pos: F.silu(h) * h.sigmoid() + h.clamp(min=-1).softmax(-1),
    "heads": lambda m, h, pos: torch.stack(h.view(1, -1, 4, 8).unbind(2), 2).sum(2).repeat(1, 1, 4),
    "split": lambda m, h, pos: torch.cat([h[..., HIDDEN // 2 :], h.chunk(2, -1)[0]], dim=-1),
    "einsum": lambda m, h, pos: torch.einsum("btd,de->bte", h, m.o.weight),
    "experts": experts,
    "every row": lambda m, h, pos: h[:, torch.arange(h.shape[1]).repeat_interleave(2)].view(1, -1, 2, HIDDEN).sum(2),
    "unit vectors": lambda m, h, pos: F.normalize(h, dim=-1) + torch.linalg.vector_norm(h, dim=-1, keepdim=True),
    "filled": lambda m, h, pos: h + torch.zeros(h.shape[1], 1) + h.new_ones(h.shape),
    "positions": lambda m, h, pos: h + torch.arange(90.0)[30 : 30 + h.shape[1], None],
    "far into a table": lambda m, h, pos: h + (torch.arange(90.0) ** 2)[30 : 30 + h.shape[1], None],
    "table of positions": lambda m, h, pos: h + (torch.arange(90.0) ** 2)[2 : 2 + h.shape[1]][:, None],
}


@pytest.mark.parametrize("name", PER_TOKEN)
def test_per_token_work_passes(name):
    assert found_in(PER_TOKEN[name]) == []
