"""Graphs of ATen with branches that their notes give to a second stream."""

from __future__ import annotations

import torch
from torch import fx

from torch_pagoda.passes.schedule.schedule_branches import ANNOTATION, SIDE

aten = torch.ops.aten


def layered(layers: int = 2, side_reads: str = "f", side_writes: bool = False) -> fx.GraphModule:
    """Layers of ``f; a1; write a1 to the cache; a2 reads the cache; b1; view; b2; a2 + b2``, the b annotated."""
    graph = fx.Graph()
    x, caches = graph.placeholder("x"), [graph.placeholder(f"cache_{i}") for i in range(layers)]
    for i, cache in enumerate(caches):
        f = graph.call_function(aten.mul.Tensor, (x, 0.5), name=f"f_{i}")
        a = graph.call_function(aten.sin.default, (f,), name=f"a1_{i}")
        graph.call_function(aten.copy_.default, (cache, a), name=f"write_{i}")
        a = graph.call_function(aten.cos.default, (cache,), name=f"a2_{i}")
        b = graph.call_function(aten.exp.default, ({"f": f, "cache": cache}[side_reads],), name=f"b1_{i}")
        side = [b]
        b = graph.call_function(aten.view.default, (b, [4, 3]), name=f"view_{i}")
        b = graph.call_function(aten.tanh.default, (b,), name=f"b2_{i}")
        side.append(b)
        if side_writes:
            side.append(graph.call_function(aten.copy_.default, (cache, b), name=f"b3_{i}"))
        for node in side:
            node.meta["custom"] = {ANNOTATION: {"stream": SIDE, "branch": f"layer_{i}"}}
        x = graph.call_function(aten.add.Tensor, (a, b), name=f"j_{i}")
    graph.output((x,))
    return fx.GraphModule({}, graph)


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 3, generator=generator) for _ in range(3)]
