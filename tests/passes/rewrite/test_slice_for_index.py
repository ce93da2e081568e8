"""Indices by literal lists that are slices."""

from __future__ import annotations

import pytest
import torch
from aten_graphs import aten_of_module, run_graph
from torch import nn

from torch_pagoda.passes.graph.fx_nodes import callee
from torch_pagoda.passes.rewrite.slice_for_index import slice_for_index


class Picking(nn.Module):
    def __init__(self, pick):
        super().__init__()
        self.pick = pick

    def forward(self, x):
        return self.pick(x) * 2


@pytest.mark.parametrize(
    ("pick", "matches"),
    [
        (lambda x: x[:, :, [-2]], 1),
        (lambda x: x[:, :, [1, 2, 3]], 1),
        (lambda x: x[..., [0]], 1),
        (lambda x: x[:, :, [3, 1]], 0),
        (lambda x: x[:, :, [0, 2]], 0),
        (lambda x: x[:, :, [-1, 0]], 0),
        (lambda x: x[:, :, [[0, 1], [1, 2]]], 0),
        (lambda x: x[:, :, [0, 1], [0, 1]], 0),
    ],
)
def test_only_neighbors_that_count_up(pick, matches):
    x = torch.randn(1, 5, 6, 4)
    graph = aten_of_module(Picking(pick), x)
    assert slice_for_index(graph).matches == matches
    assert sum(callee(n) == "index.Tensor" for n in graph.graph.nodes) == 1 - matches
    assert slice_for_index(graph).matches == 0
    assert torch.equal(run_graph(graph, x), Picking(pick)(x))
