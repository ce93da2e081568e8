"""Matrix products for Ascend.

Matches:
    linear(x, W, b)                                   # x of any rank
    slice(y, -1, 0, n1), slice(y, -1, n1, n2), ...    # that tile the last dim of y
Becomes:
    npu_linear(x as a matrix, W, b)
    split_with_sizes(y, [n1, n2 - n1, ...], -1)
Why it is faster:
    the transposition of W is an attribute of the product; as an operator of its own it would copy the weight in
    every step. One split is one launch, each slice another.
"""

from __future__ import annotations

import itertools
import operator
from typing import Any

import torch
from torch import fx

from ....runtime.ops import npu  # noqa: F401  registers the operators
from ...fx_nodes import argument, callee, eliminate_dead_code, is_dynamic, shape
from ...record import PassRecord
from ...traced import TracedGraph
from .site import Site

_aten = torch.ops.aten


def lower_npu_linears(traced: TracedGraph) -> PassRecord:
    """Lower every ``aten.linear``."""
    record = PassRecord("lower_npu_linears")
    for node in list(traced.graph.nodes):
        if node.target is not _aten.linear.default:
            continue
        site = Site(traced, node, record)
        x, weight, bias = argument(node, 0, "input"), argument(node, 1, "weight"), argument(node, 2, "bias")
        if len(shape(weight)) != 2:
            continue
        with traced.before(node):
            if callee(weight) == "t":  # stored [in, out], as the product reads it
                new = _stored_transposed(site, x, weight.args[0], bias)
            else:
                rows = traced.call(_aten.reshape.default, x, [-1, int(shape(x)[-1])])
                new = site.call(torch.ops.npu.npu_linear.default, rows, weight, bias)
            if new is None:
                site.done()
                continue
            new = traced.call(_aten.reshape.default, new, _sizes_like(traced, node, int(shape(weight)[0])))
        traced.substitute(node, new)
        site.done()
    if record.matches:
        eliminate_dead_code(traced.graph)
    return record


def _stored_transposed(site: Site, x: fx.Node, weight: fx.Node, bias: fx.Node | None) -> fx.Node:
    rows = site.traced.call(_aten.reshape.default, x, [-1, int(shape(x)[-1])])
    if bias is None:
        return site.aten(_aten.mm.default, rows, weight)
    return site.aten(_aten.addmm.default, bias, rows, weight)


def _sizes_like(traced: TracedGraph, node: fx.Node, features: int) -> list[Any]:
    """Sizes for a view with the leading dims of ``node``, one of which may vary."""
    leading = shape(node)[:-1]
    varying = [i for i, size in enumerate(leading) if is_dynamic(size)]
    if len(varying) > 1:
        x = argument(node, 0, "input")
        sizes = [traced.call(_aten.sym_size.int, x, i) if i in varying else int(s) for i, s in enumerate(leading)]
        return [*sizes, features]
    return [-1 if i in varying else int(size) for i, size in enumerate(leading)] + [features]


def split_products(traced: TracedGraph) -> PassRecord:
    """Let slices that tile one dim of a tensor be one split."""
    record = PassRecord("split_products")
    for node in list(traced.graph.nodes):
        slices = [user for user in node.users if callee(user) == "slice.Tensor"]
        if len(slices) < 2:
            continue
        cuts = [cut for user in slices if (cut := _cut(user)) is not None]
        dims = {cut[0] for cut in cuts}
        if len(dims) != 1 or len(cuts) < len(slices):
            continue
        (dim,) = dims
        spans = sorted({(start, end) for _, start, end in cuts})
        if spans[0][0] != 0 or spans[-1][1] != shape(node)[dim]:
            continue
        if any(a[1] != b[0] for a, b in itertools.pairwise(spans)):
            continue
        with traced.before(min(slices)):
            copies = traced.npu is not None and traced.npu.graph_mode == "aclgraph"
            split = _aten.split_with_sizes_copy.default if copies else _aten.split_with_sizes.default
            whole = traced.call(split, node, [end - start for start, end in spans], dim)
            items = [traced.call(operator.getitem, whole, i) for i in range(len(spans))]
        for user, (_, start, end) in zip(slices, cuts, strict=True):
            traced.substitute(user, items[spans.index((start, end))])
        record.matches += 1
    return record


def _cut(node: fx.Node) -> tuple[int, int, int] | None:
    """``(dim, start, end)`` of a slice whose bounds are known; None for others."""
    source, dim = argument(node, 0, "input"), argument(node, 1, "dim", 0) % len(shape(node))
    start, end, step = (argument(node, i, name) for i, name in ((2, "start"), (3, "end"), (4, "step")))
    size = shape(source)[dim]
    first, last = (0 if start is None else start), (size if end is None else end)
    if step not in (None, 1) or is_dynamic(size) or not all(isinstance(x, int) for x in (first, last)):
        return None
    first, last = (x + int(size) if x < 0 else x for x in (first, last))
    return dim, first, min(last, int(size))
