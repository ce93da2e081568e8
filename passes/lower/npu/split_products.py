"""Cut a tensor into parts in one launch.

Matches:
    slice(y, dim, 0, n1), slice(y, dim, n1, n2), ...      # that tile a dim of y
Becomes:
    split_with_sizes(y, [n1, n2 - n1, ...], dim)
Why it is faster:
    one split is one launch, each slice another.

Level 0.
"""

from __future__ import annotations

import itertools
import operator

import torch
from torch import fx

from ...graph.fx_nodes import callee, shape
from ...graph.record import PassRecord
from ...graph.rewrite_each import rewrite_each
from ...graph.traced import TracedGraph
from .slices import slice_of

_aten = torch.ops.aten


def split_products(traced: TracedGraph) -> PassRecord:
    """Let slices that tile one dim of a tensor be one split."""

    def step(node: fx.Node) -> str | None:
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
            copies = traced.npu is not None and traced.npu.graph_mode == "aclgraph"
            split = _aten.split_with_sizes_copy.default if copies else _aten.split_with_sizes.default
            whole = traced.call(split, node, [end - start for start, end in spans], dim)
            items = [traced.call(operator.getitem, whole, i) for i in range(len(spans))]
        for user, found in zip(slices, cuts, strict=True):
            traced.substitute(user, items[spans.index((found.start, found.end))])
        return ""

    return rewrite_each(traced, "split_products", step)
