"""Weights that were moved after compiling are noticed; values may change in place."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torch_pagoda.compiler import CompileOptions, WeightGuard
from torch_pagoda.compiler.build import build_program

from toy_lm import ToyLM, causal_mask, repeat_kv, sdpa


@pytest.fixture
def model():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return model


def test_values_may_change_in_place(model):
    guard = WeightGuard(model)
    with torch.no_grad():
        model[0].weight.add_(1.0)
    model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
    model.to(torch.float32)
    guard.check()


def convert(model):
    model.to(torch.bfloat16)


def assign(model):
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


def replace_buffer(model):
    model[1].running_mean = torch.zeros(4)


def add_adapter(model):
    model[0].register_parameter("lora", nn.Parameter(torch.zeros(2)))


def untie(model):
    model[2].weight = nn.Parameter(model[0].weight.detach().clone())


def test_values_of_copied_weights_may_not_change(model):
    guard = WeightGuard(model, [model[0].weight])
    guard.check()
    with torch.no_grad():
        model[0].bias.add_(1.0)
    guard.check()
    model.load_state_dict(model.state_dict())
    with pytest.raises(RuntimeError, match=r"'0.weight' of Sequential was written to.*recompile the model"):
        guard.check()


def attention_by_hand(of_scores):
    def attention(m, q, k, v, pos):
        return torch.softmax(of_scores(m, q @ repeat_kv(k).mT, pos), -1) @ repeat_kv(v)

    return attention


def hide(scores, pos):
    return scores.masked_fill(~causal_mask(pos), -torch.inf)


def slope(m, scores, pos):
    distance = pos[:, None, None, :] - pos[:, None, :, None]
    return scores + torch.where(causal_mask(pos), m.slopes[:, None, None] * distance, -1e9)


def at_places(m, hidden, pos):
    return hidden + F.embedding(m.places[:, : hidden.shape[1]], m.position_table)


READ_OFF = {
    "temperature": (attention_by_hand(lambda m, scores, pos: hide(scores * m.temperature, pos)), None),
    "lowest": (attention_by_hand(lambda m, scores, pos: scores.masked_fill(~causal_mask(pos), m.lowest)), None),
    "causal_table": (
        lambda m, q, k, v, pos: F.scaled_dot_product_attention(
            q, repeat_kv(k), repeat_kv(v), attn_mask=m.causal_table[: q.shape[2], : q.shape[2]]
        ),
        None,
    ),
    "slopes": (attention_by_hand(slope), None),
    "places": (sdpa, at_places),
}
"""Tensor → attention and embedding of a model that passes read numbers of it off."""


@pytest.mark.parametrize("name", READ_OFF)
def test_numbers_that_passes_read_off_tensors_may_not_change(name):
    attention, before = READ_OFF[name]
    model = ToyLM(attention, before=before)
    model.temperature = nn.Parameter(torch.tensor(0.25), requires_grad=False)
    model.register_buffer("lowest", torch.tensor(-1e9))
    model.register_buffer("places", torch.arange(256)[None])
    program = build_program(model, CompileOptions(codegen="none", target="cpu"))
    guard = WeightGuard(model, program.copied_weights, program.merged_weights)
    model.q.weight.mul_(2.0)
    guard.check()
    getattr(model, name).copy_(getattr(model, name).clone())
    with pytest.raises(RuntimeError, match=rf"'{name}' of ToyLM was written to.*constants computed from it"):
        guard.check()


@pytest.mark.parametrize("change", [convert, assign, replace_buffer, add_adapter, untie])
def test_moved_weights_are_noticed(model, change):
    guard = WeightGuard(model)
    guard.check()
    change(model)
    with pytest.raises(RuntimeError, match="after the model was compiled"):
        guard.check()


def test_writes_are_counted_once(model):
    """They empty the prefix cache."""
    guard = WeightGuard(model)
    assert not guard.written_since_last_time()
    with torch.no_grad():
        model[0].bias.add_(1.0)
    assert guard.written_since_last_time()
    assert not guard.written_since_last_time()
