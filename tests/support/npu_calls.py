"""The calls of ``npu::`` operators in a graph, held against the limits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from torch_pagoda.passes import TracedGraph
from torch_pagoda.passes.lower.npu.call import Call
from torch_pagoda.passes.lower.npu.rope import overwritable
from torch_pagoda.runtime.npu_target import NpuTarget
from torch_pagoda.runtime.ops.npu.limits import violations


def npu_calls(traced: TracedGraph, target: NpuTarget) -> Iterator[tuple[fx.Node, Call]]:
    """Every call of an ``npu::`` operator in a graph."""
    for node in traced.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "npu":
            yield node, Call.of(node, target)


def illegal_calls(traced: TracedGraph, target: NpuTarget) -> list[str]:
    """The ``npu::`` calls of a graph that break a limit, or write into what others read, each with its reasons."""
    return [
        f"{node.name} ({call.name}): {'; '.join(reasons)}"
        for node, call in npu_calls(traced, target)
        if (reasons := [*violations(call), *_read_by_others(node)])
    ]


def _read_by_others(node: fx.Node) -> Iterator[str]:
    if node.target is torch.ops.npu.npu_apply_rotary_pos_emb.default:
        for written in node.args[:2]:
            if not overwritable(written):  # type: ignore[arg-type]
                yield f"it writes into {written}, which others read"
