"""Views of weights: described by sizes and strides, and made again from them, or refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torch_pagoda.compiler.store.stored_program import _view, _view_of_weight

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
    again = _view(MODEL.weight, found[1])
    assert again.data_ptr() == MODEL.weight.data_ptr() and not again.requires_grad
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


@pytest.mark.parametrize(
    "view",
    [
        ((3, 4), (4,)),
        ((3, -4), (4, 1)),
        ((-3, -4), (4, 1)),
        ((3, 4), (4, -1)),
        ((2, 4), (4, 1)),
        ((3, 4), (5, 1)),
        ((12,), (2,)),
        ((), ()),
    ],
)
def test_sizes_and_strides_that_reach_elsewhere_are_refused(view):
    with pytest.raises(ValueError, match="not a view of a weight of \\(3, 4\\)"):
        _view(MODEL.weight, view)
    assert _view(MODEL.weight, ((12,), (1,))).shape == (12,)
