"""Rotary position embedding for Ascend.

Matches:
    q', k' = pagoda::rope([q, k], cos, sin, mode, start, rounds)      # [B, H, T, D], tables [B or 1, T, R]
Becomes:
    npu_rotary_mul(q, cos, sin), npu_rotary_mul(k, cos, sin)           # [B, T, H, D], tables [B or 1, T, 1, R]
    npu_interleave_rope(q, cos, sin)                                   # pairs to halves, R = 64
    with the dims that are not rotated cut off before and joined after; where neither is legal, the ATen formula
Why it is faster:
    one launch per tensor. The tables' layout is made once per step, for all layers.

Level 0.
"""

from __future__ import annotations

import torch
from torch import fx

from ....runtime.npu_target import Product
from ....runtime.ops.attention.rope import rope_reference
from ...graph.fx_nodes import shape, value
from ...graph.record import PassRecord
from ...graph.traced import TracedGraph
from .site import Site, lower_each

_pagoda, _npu, _aten = torch.ops.pagoda, torch.ops.npu, torch.ops.aten


def lower_npu_rope(traced: TracedGraph) -> PassRecord:
    """Lower every rotation of the graph."""
    return lower_each(traced, "lower_npu_rope", {_pagoda.rope.default: _rope})


def _rope(site: Site, xs: list[fx.Node], cos: fx.Node, sin: fx.Node, mode: str, start: int, rounds: bool) -> None:
    for item in list(site.node.users):
        x = xs[item.args[1]]  # type: ignore[index]
        rotated = _rotate(site, x, cos, sin, mode, start)
        if rotated is None:
            (formula,) = site.inline(rope_reference, [x], cos, sin, mode, start, rounds)
            site.traced.substitute(item, formula)
        else:
            site.replace_heads_first(item, rotated)
    site.traced.graph.erase_node(site.node)


def _rotate(site: Site, x: fx.Node, cos: fx.Node, sin: fx.Node, mode: str, start: int) -> fx.Node | None:
    """``x``, ``[B, H, T, D]``, rotated, as ``[B, T, H, D]``; None where no operator is legal."""
    rotary, dim = int(shape(cos)[-1]), int(shape(x)[-1])
    x = site.tokens_first(x)
    rest = dim - start - rotary
    parts = []
    if rotary < dim:
        sizes = [size for size in (start, rotary, rest) if size]
        split = site.aten(_aten.split_with_sizes.default, x, sizes, -1)
        parts = [site.item(split, i) for i in range(len(sizes))]
        x = parts[1 if start else 0]
    rotated = _rotate_all(site, x, cos, sin, mode)
    if rotated is None or not parts:
        return rotated
    parts[1 if start else 0] = rotated
    return site.aten(_aten.cat.default, parts, -1)


def _rotate_all(site: Site, x: fx.Node, cos: fx.Node, sin: fx.Node, mode: str) -> fx.Node | None:
    """All dims of ``x``, ``[B, T, H, D]``, rotated."""
    if mode == "interleaved_to_half":
        return _pairs_to_halves(site, x, cos, sin)
    rotate = None
    if mode == "interleaved" and site.target.product is not Product.A5:
        rotate = _pair_rotation_matrix(site.traced, x)
    tables = [_table(site, table, x, axis=2) for table in (cos, sin)]
    name = "half" if mode == "half" else "interleave"
    return site.call(_npu.npu_rotary_mul.default, x, *tables, name, rotate)


def _pairs_to_halves(site: Site, x: fx.Node, cos: fx.Node, sin: fx.Node) -> fx.Node | None:
    """The operator reads ``[B, N, S, D]``; with one token per batch entry that is the layout of ours."""
    if not site.traced.paged:
        heads_first = site.dense(site.traced.call(_aten.transpose.int, x, 1, 2))
        tables = [site.dense(_table(site, table, x, axis=1)) for table in (cos, sin)]
        rotated = site.call(_npu.npu_interleave_rope.default, heads_first, *tables)
        return None if rotated is None else site.traced.call(_aten.transpose.int, rotated, 1, 2)
    # A flat step [1, T, H, D] is [T, H, 1, D]: T entries of the batch with one token each.
    heads, dim = int(shape(x)[2]), int(shape(x)[3])
    tall = site.traced.call(_aten.reshape.default, x, [-1, heads, 1, dim])
    tables = [site.cast(table, value(x).dtype) for table in (cos, sin)]
    tables = [site.traced.call(_aten.reshape.default, table, [-1, 1, 1, dim]) for table in tables]
    rotated = site.call(_npu.npu_interleave_rope.default, tall, *tables)
    return None if rotated is None else site.traced.call(_aten.reshape.default, rotated, [1, -1, heads, dim])


def _table(site: Site, table: fx.Node, x: fx.Node, axis: int) -> fx.Node:
    """``[B or 1, T, R]`` in the dtype of ``x``, with an axis for the heads."""
    return site.traced.call(_aten.unsqueeze.default, site.cast(table, value(x).dtype), axis)


def _pair_rotation_matrix(traced: TracedGraph, x: fx.Node) -> fx.Node:
    """``[D, D]``: ``x @ matrix`` is ``-x1, x0, -x3, x2, …``; the graph engine needs it for this mode."""
    dim, dtype = int(shape(x)[-1]), value(x).dtype
    name = f"rotate_pairs_{dim}_{str(dtype).removeprefix('torch.')}"

    def make() -> torch.Tensor:
        matrix = torch.zeros(dim, dim, dtype=dtype, device=value(x).device)
        even = torch.arange(0, dim, 2)
        matrix[even + 1, even] = -1
        matrix[even, even + 1] = 1
        return matrix

    return traced.shared_constant(name, make)
