"""Weights that were moved after compiling are noticed; values may change in place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torch_pagoda.compiler import WeightGuard


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
    with pytest.raises(RuntimeError, match=r"'0.weight' of Sequential was written to.*compile the model again"):
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
