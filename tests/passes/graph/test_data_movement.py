"""What is called a movement of data moves data only."""

from __future__ import annotations

import operator

import pytest
import torch
from torch.utils import _pytree as pytree

from torch_pagoda.passes.graph import data_movement
from torch_pagoda.passes.graph.data_movement import CAST_CALLS, MOVES, REARRANGING_CALLS

ARGUMENTS = {
    "_unsafe_view": ([6, 4],),
    "adjoint": (),
    "broadcast_to": ([5, 2, 3, 4],),
    "expand": ([5, 2, 3, 4],),
    "flatten": (1, 2),
    "movedim": (0, 1),
    "permute": ([2, 0, 1],),
    "repeat": ([2, 1, 1],),
    "repeat_interleave": (2,),
    "reshape": ([6, 4],),
    "select.int": (1, 2),
    "slice.Tensor": (1, 0, 2),
    "split.Tensor": (2, 1),
    "split_with_sizes": ([1, 2], 1),
    "squeeze.dim": (0,),
    "squeeze.dims": ([0],),
    "swapaxes": (0, 1),
    "swapdims": (0, 1),
    "to": (torch.float32,),
    "transpose": (0, 1),
    "transpose.int": (0, 1),
    "type": (torch.float32,),
    "type_as": (torch.ones(1),),
    "unbind.int": (1,),
    "unflatten": (2, [2, 2]),
    "unsqueeze": (0,),
    "view": ([6, 4],),
}


def called(name, x):
    """Result of an ATen operator, or of a method of a tensor."""
    if name == "getitem":
        return operator.getitem(x.unbind(0), 1)
    if name in data_movement.JOINS:
        return getattr(torch.ops.aten, name).default([x, x])
    arguments = ARGUMENTS.get(name, ())
    if name in MOVES:
        packet, _, overload = name.partition(".")
        return getattr(getattr(torch.ops.aten, packet), overload or "default")(x, *arguments)
    method = getattr(x[0] if name == "t" else x, name)
    return method(*arguments) if callable(method) else method


@pytest.mark.parametrize("name", sorted(MOVES | REARRANGING_CALLS | CAST_CALLS))
def test_every_element_comes_from_the_operand(name):
    x = torch.arange(24.0).view(2, 3, 4)
    for result in pytree.tree_leaves(called(name, x)):
        assert result.numel()
        assert torch.isin(result.double(), x.double()).all()
