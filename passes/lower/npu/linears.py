"""Matrix products for Ascend.

Matches:
    linear(x, W, b)                                   # x of any rank
Becomes:
    npu_linear(x as a matrix, W, b)
Why it is faster:
    the transposition of W is an attribute of the product; as an operator of its own it would copy the weight in
    every step.

Level 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ...graph.fx_nodes import argument, callee, eliminate_dead_code, is_dynamic, shape
from ...graph.record import PassRecord
from ...graph.traced import TracedGraph
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
                site.keep()
                continue
            new = traced.call(_aten.reshape.default, new, sizes_like(traced, node, int(shape(weight)[0])))
        site.replace(new)
    eliminate_dead_code(traced.graph)
    return record


def _stored_transposed(site: Site, x: fx.Node, weight: fx.Node, bias: fx.Node | None) -> fx.Node:
    rows = site.traced.call(_aten.reshape.default, x, [-1, int(shape(x)[-1])])
    if bias is None:
        return site.aten(_aten.mm.default, rows, weight)
    return site.aten(_aten.addmm.default, bias, rows, weight)


def sizes_like(traced: TracedGraph, node: fx.Node, features: int) -> list[Any]:
    """Sizes for a view with the leading dims of ``node``, one of which may vary."""
    leading = shape(node)[:-1]
    varying = [i for i, size in enumerate(leading) if is_dynamic(size)]
    if len(varying) > 1:
        x = argument(node, 0, "input")
        sizes = [traced.call(_aten.sym_size.int, x, i) if i in varying else int(s) for i, s in enumerate(leading)]
        return [*sizes, features]
    return [-1 if i in varying else int(size) for i, size in enumerate(leading)] + [features]
