"""Cut a tensor into parts in one launch.

Matches:
    slice(y, dim, 0, n1), slice(y, dim, n1, n2), ...      # that tile a dim of y
    clone(part), ...                                      # of every part of a split, where calls are captured
Becomes:
    split_with_sizes(y, [n1, n2 - n1, ...], dim)
    split_with_sizes_copy(y, ...)                         # where calls are captured, and no copy of a part again
Why it is faster:
    one split is one launch, each slice or copy another.

Level 0.
"""

from __future__ import annotations

import itertools
import operator

import torch
from torch import fx

from ...graph.data_movement import RESHAPES
from ...graph.fx_nodes import callee, shape
from ...graph.record import PassRecord
from ...graph.rewrite_each import rewrite_each
from ...graph.traced import TracedGraph
from .slices import slice_of

_aten = torch.ops.aten


def split_products(traced: TracedGraph) -> PassRecord:
    """Let slices that tile one dim of a tensor be one split."""

    captures = traced.npu is not None and traced.npu.graph_mode == "aclgraph"

    def step(node: fx.Node) -> str | None:
        if captures and callee(node) == "split_with_sizes":
            return _copied_at_once(traced, node)
        slices = [user for user in node.users if callee(user) == "slice.Tensor"]
        if len(slices) < 2:
            return None
        cuts = [found for user in slices if (found := slice_of(user)) is not None]
        dims = {found.dim for found in cuts}
        if len(dims) != 1 or len(cuts) < len(slices):
            return None
        (dim,) = dims
        spans = sorted({(found.start, found.end) for found in cuts})
        if spans[0][0] != 0 or spans[-1][1] != shape(node)[dim]:
            return None
        if any(a[1] != b[0] for a, b in itertools.pairwise(spans)):
            return None
        with traced.before(min(slices)):
            split = _aten.split_with_sizes_copy.default if captures else _aten.split_with_sizes.default
            whole = traced.call(split, node, [end - start for start, end in spans], dim)
            items = [traced.call(operator.getitem, whole, i) for i in range(len(spans))]
        for user, found in zip(slices, cuts, strict=True):
            traced.substitute(user, items[spans.index((found.start, found.end))])
        if captures:
            for item in items:
                _copied_once(traced, item)
        return ""

    return rewrite_each(traced, "split_products", step)


def _copied_once(traced: TracedGraph, part: fx.Node) -> None:
    """Drop the copy of a part that is one, where nothing else reads it."""
    node = part
    while len(node.users) == 1:
        (user,) = node.users
        if callee(user) == "clone":
            traced.substitute(user, node)
            return
        if callee(user) not in RESHAPES:
            return
        node = user


def _copied_at_once(traced: TracedGraph, split: fx.Node) -> str | None:
    """Let a split whose parts are all copied make the copies."""
    copies = [list(part.users) for part in split.users]
    if len(copies) < 2 or not all(len(users) == 1 and callee(users[0]) == "clone" for users in copies):
        return None
    with traced.before(split):
        whole = traced.call(_aten.split_with_sizes_copy.default, *split.args)
        for (copy,) in copies:
            part = copy.args[0]
            traced.substitute(copy, traced.call(operator.getitem, whole, part.args[1]))  # type: ignore[union-attr]
    return ""
