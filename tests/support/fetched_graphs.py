"""Graphs whose notes ask for weights to be fetched, as AOTAutograd leaves them."""

from __future__ import annotations

import torch
from torch import fx

import torch_pagoda.runtime.ops.npu  # noqa: F401  registers the operators
from torch_pagoda.passes.schedule.schedule_prefetch import note

aten, npu = torch.ops.aten, torch.ops.npu
SIZE = 64
BYTES = 4 * SIZE * SIZE
MOST = 2 * BYTES


def fetching(layers: int = 2, *, weights: int = 1, most: int = MOST, part: bool = False) -> fx.GraphModule:
    """Layers of ``p = x @ w; a = sin(p); b = cos(a); m = b @ w1; m = m @ w2 …``, whose ``weights`` behind ``b`` are
    fetched behind p: half of each first one, all of the others. With ``part`` the readers take parts of weights."""
    graph = fx.Graph()

    def keep(node: fx.Node, *shape: int) -> fx.Node:
        node.meta["val"] = torch.empty(shape or (SIZE, SIZE), device="meta")
        return node

    x = keep(graph.placeholder("x"))
    names = [[f"w{i}_{j}" for j in range(weights + 1)] for i in range(layers)]
    given = [[keep(graph.placeholder(name)) for name in each] for each in names]
    for i, (first, *fetched) in enumerate(given):
        p = x = keep(graph.call_function(npu.npu_linear.default, (x, first), name=f"p_{i}"))
        for name, function in (("a", aten.sin.default), ("b", aten.cos.default)):
            x = keep(graph.call_function(function, (x,), name=f"{name}_{i}"))
        for j, weight in enumerate(fetched):
            if part:
                weight = graph.call_function(aten.slice.Tensor, (weight, 0, 0, SIZE // 2))
                weight = keep(weight, SIZE // 2, SIZE)
            x = keep(graph.call_function(npu.npu_linear.default, (x, weight), name=f"m{j}_{i}"))
            note(p, x, i * weights + j, "weight", BYTES if j else BYTES // 2, most)
    graph.output((x,))
    return fx.GraphModule({}, graph)


def inputs(layers: int = 2, weights: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    count = 1 + layers * (weights + 1)
    return [torch.randn(SIZE, SIZE, generator=generator) / SIZE**0.5 for _ in range(count)]
