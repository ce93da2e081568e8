"""Views of weights, described by sizes and strides."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torch_pagoda.compiler.warm_start.restore import _view_of_weight

MODEL = nn.Linear(4, 3, bias=False).requires_grad_(False)


@pytest.mark.parametrize(
    "view",
    [
        lambda weight: weight.t(),
        lambda weight: weight.reshape(4, 3),
        lambda weight: weight.unflatten(1, (2, 2)).permute(1, 0, 2),
        lambda weight: weight[None],
        lambda weight: weight.flatten(),
    ],
)
def test_a_view_is_found_and_made_again(view):
    tensor = view(MODEL.weight)
    found = _view_of_weight(tensor, MODEL)
    assert found is not None and found[0] == "weight"
    again = MODEL.weight.as_strided(*found[1])
    assert torch.equal(again, tensor) and again.stride() == tensor.stride()


@pytest.mark.parametrize(
    "view",
    [
        lambda weight: weight.clone(),
        lambda weight: weight[1:],
        lambda weight: weight[:2],
        lambda weight: weight.view(torch.int32),
    ],
)
def test_what_does_not_hold_all_elements_is_none(view):
    assert _view_of_weight(view(MODEL.weight), MODEL) is None
