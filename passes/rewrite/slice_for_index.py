"""Let an index of neighboring entries that are known be a slice.

Matches:
    index(x, [None, ..., [i, i + 1, ...]])           # a literal list in the model's code
Becomes:
    slice(x, dim, i, i + n)
Why it is faster:
    a view instead of a copy that reads an index tensor. Falcon takes its only key and value head this way.

Level 1: bitwise equal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..graph.fx_nodes import callee, is_dynamic, shape
from ..graph.record import PassRecord
from ..graph.rewrite_each import rewrite_each
from ..graph.traced import TracedGraph

_aten = torch.ops.aten
_LONGEST = 1024


def slice_for_index(traced: TracedGraph) -> PassRecord:
    """Replace indices by literal lists that count up."""

    def step(node: fx.Node) -> str | None:
        if node.target is not _aten.index.Tensor:
            return None
        arguments: Any = node.args
        source, indices = arguments
        given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
        if len(given) != 1:
            return None
        dim, index = given[0]
        entries = _literal(traced, index)
        size = shape(source)[dim]
        if not entries or is_dynamic(size):
            return None
        first = entries[0] + int(size) if entries[0] < 0 else entries[0]
        if any(e != entries[0] + i for i, e in enumerate(entries)) or entries[0] < 0 <= entries[-1]:
            return None
        with traced.before(node):
            traced.substitute(node, traced.call(_aten.slice.Tensor, source, dim, first, first + len(entries)))
        return ""

    return rewrite_each(traced, "slice_for_index", step)


def _literal(traced: TracedGraph, index: fx.Node) -> list[int] | None:
    """The entries of an index that stands in the model's code."""
    while callee(index) in ("lift_fresh_copy", "lift_fresh"):
        index = index.args[0]
    if index.op != "get_attr":
        return None
    tensor = getattr(traced.module, str(index.target), None)
    known = isinstance(tensor, torch.Tensor) and tensor.dim() == 1 and tensor.dtype in (torch.int64, torch.int32)
    return tensor.tolist() if known and tensor.numel() <= _LONGEST else None
