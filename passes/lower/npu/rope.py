"""Rotary position embedding for Ascend.

Matches:
    q', k' = pagoda::rope([q, k], cos, sin, mode, start, rounds)      # [B, H, T, D], tables [B or 1, T, R]
Becomes:
    npu_apply_rotary_pos_emb(q, k, cos, sin)                           # [B, T, H, D], tables [B, T, 1, D]; GE graphs
    npu_rotary_mul(q, cos, sin), npu_rotary_mul(k, cos, sin)           # tables [B or 1, T, 1, R]
        with a matrix [D, D] and tables filled up with 1 and 0 where some dims are not rotated
    npu_interleave_rope(q, cos, sin)                                   # pairs to halves, R = 64; elsewhere a copy
                                                                       # that makes halves, then npu_rotary_mul
    with the dims that are not rotated cut off before and joined after where the chip takes no matrix; where none of
    these is legal, the unfused ATen operators
Why it is faster:
    one launch for both tensors, or for each. The tables' layout is made once per step, for all layers.

npu_apply_rotary_pos_emb writes into q and k, so it gets such as nothing else reads.

Level 0.
"""

from __future__ import annotations

import torch
from torch import fx

from ....runtime.npu_target import Product
from ....runtime.ops.attention.rope import rope_reference
from ...graph.data_movement import MOVES, RESHAPES, TRANSPOSES, UNIT_DIMS
from ...graph.fx_nodes import callee, shape, storage_key, value
from ...graph.record import PassRecord
from ...graph.traced import TracedGraph
from .site import Site, lower_each
from .slices import slice_of

_pagoda, _npu, _aten = torch.ops.pagoda, torch.ops.npu, torch.ops.aten
_VIEWS = RESHAPES | TRANSPOSES | UNIT_DIMS
_WITH_MATRIX = (Product.A2, Product.A3)
"""Chips whose npu_rotary_mul takes a matrix in place of a mode."""


def lower_npu_rope(traced: TracedGraph) -> PassRecord:
    """Lower every rotation of the graph."""
    return lower_each(traced, "lower_npu_rope", {_pagoda.rope.default: _rope})


def _rope(site: Site, xs: list[fx.Node], cos: fx.Node, sin: fx.Node, mode: str, start: int, rounds: bool) -> None:
    items = list(site.node.users)
    rotated = _rotate_both(site, [xs[item.args[1]] for item in items], cos, sin, mode)  # type: ignore[index]
    for i, item in enumerate(items):
        x = xs[item.args[1]]  # type: ignore[index]
        new = site.item(rotated, i) if rotated is not None else _rotate(site, x, cos, sin, mode, start)
        if new is None:
            (formula,) = site.inline(rope_reference, [x], cos, sin, mode, start, rounds)
            site.traced.substitute(item, formula)
        else:
            site.replace_heads_first(item, new)
    site.traced.graph.erase_node(site.node)


def _rotate_both(site: Site, xs: list[fx.Node], cos: fx.Node, sin: fx.Node, mode: str) -> fx.Node | None:
    """Two tensors rotated by one operator, which writes into them; None where it is not legal."""
    # Tables of one sequence are for one: the operator does not repeat them.
    whole = all(shape(x)[-1] == shape(cos)[-1] and shape(x)[0] == shape(cos)[0] for x in xs)
    if len(xs) != 2 or xs[0] is xs[1] or not whole or mode != "half" or not all(map(overwritable, xs)):
        return None
    stored = [site.tokens_first(x) for x in xs]
    tables = [_table(site, table, xs[0], axis=2) for table in (cos, sin)]
    return site.call(_npu.npu_apply_rotary_pos_emb.default, *stored, *tables, "BSND", "half")


def overwritable(node: fx.Node) -> bool:
    """Return True if only one node reads the memory of ``node``, and ``node`` is not an input of the graph."""
    readers = 1
    while node.op == "call_function":
        if len(node.users) > readers:
            return False
        part = slice_of(node)
        if part is not None:
            others = _parts(part.source, part.dim)
            if others is None or any(a < part.end and part.start < b for a, b in others if (a, b) != part[2:]):
                return False
            node, readers = part.source, len(part.source.users)
        elif callee(node) in _VIEWS:
            node, readers = node.args[0], 1  # type: ignore[assignment]
        else:
            made: fx.Node = node.args[0] if callee(node) == "getitem" else node  # type: ignore[assignment]
            # Views of other kinds than these share the memory of what they are made of.
            return callee(made) not in MOVES and storage_key(node) not in map(storage_key, made.all_input_nodes)
    return False


def _parts(source: fx.Node, dim: int) -> list[tuple[int, int]] | None:
    """Bounds of all parts along a dim that a tensor is read by; None where something else reads it, or one twice."""
    found = []
    for user in source.users:
        for cut in user.users if callee(user) in ("split.Tensor", "split_with_sizes") else (user,):
            part = slice_of(cut)
            if part is None or part.source is not source or part.dim != dim:
                return None
            found.append((part.start, part.end))
    return found if len(found) == len(set(found)) else None


def _rotate(site: Site, x: fx.Node, cos: fx.Node, sin: fx.Node, mode: str, start: int) -> fx.Node | None:
    """``x``, ``[B, H, T, D]``, rotated, as ``[B, T, H, D]``; None where no operator is legal."""
    rotary, dim = int(shape(cos)[-1]), int(shape(x)[-1])
    x = site.tokens_first(x)
    rest = dim - start - rotary
    if rotary == dim:
        return _rotate_all(site, x, cos, sin, mode)
    if mode != "interleaved_to_half" and site.target.product in _WITH_MATRIX:
        cosines, sines = (
            site.traced.call(_aten.constant_pad_nd.default, table, [start, rest], fill)
            for table, fill in ((cos, 1.0), (sin, 0.0))
        )
        rotated = _rotate_all(site, x, cosines, sines, mode, slice(start, start + rotary))
        if rotated is not None:
            return rotated
    sizes = [size for size in (start, rotary, rest) if size]
    split = site.aten(_aten.split_with_sizes.default, x, sizes, -1)
    parts = [site.item(split, i) for i in range(len(sizes))]
    rotated = _rotate_all(site, parts[1 if start else 0], cos, sin, mode)
    if rotated is None:
        return None
    parts[1 if start else 0] = rotated
    return site.aten(_aten.cat.default, parts, -1)


def _rotate_all(
    site: Site, x: fx.Node, cos: fx.Node, sin: fx.Node, mode: str, part: slice | None = None
) -> fx.Node | None:
    """All dims of ``x``, ``[B, T, H, D]``, rotated; those of ``part`` where the tables leave the others alone."""
    if mode == "interleaved_to_half":
        rotated = _pairs_to_halves(site, x, cos, sin)
        return rotated if rotated is not None else _rotate_all(site, _halves_of_pairs(site, x), cos, sin, "half")
    rotate = None
    if part is not None or (mode == "interleaved" and site.target.product is not Product.A5):
        rotate = _rotation_matrix(site.traced, x, mode, part or slice(0, int(shape(x)[-1])))
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
    tall = site.dense(site.traced.call(_aten.reshape.default, x, [-1, heads, 1, dim]))
    tables = [site.cast(table, value(x).dtype) for table in (cos, sin)]
    tables = [site.traced.call(_aten.reshape.default, table, [-1, 1, 1, dim]) for table in tables]
    rotated = site.call(_npu.npu_interleave_rope.default, tall, *tables)
    return None if rotated is None else site.traced.call(_aten.reshape.default, rotated, [1, -1, heads, dim])


def _halves_of_pairs(site: Site, x: fx.Node) -> fx.Node:
    """``cat(x[..., 0::2], x[..., 1::2], -1)`` by one copy."""
    pairs = site.traced.call(_aten.unflatten.int, x, -1, [int(shape(x)[-1]) // 2, 2])
    halves = site.dense(site.traced.call(_aten.transpose.int, pairs, -1, -2))
    return site.traced.call(_aten.flatten.using_ints, halves, -2, -1)


def _table(site: Site, table: fx.Node, x: fx.Node, axis: int) -> fx.Node:
    """``[B or 1, T, R]`` in the dtype of ``x``, with an axis for the heads."""
    return site.traced.call(_aten.unsqueeze.default, site.cast(table, value(x).dtype), axis)


def _rotation_matrix(traced: TracedGraph, x: fx.Node, mode: str, part: slice) -> fx.Node:
    """``[D, D]``: ``x @ matrix`` is what the sines multiply, for dims ``part`` of ``x``, and 0 for the others."""
    dim, dtype = int(shape(x)[-1]), value(x).dtype
    name = f"rotate_{mode}_{part.start}_{part.stop}_of_{dim}_{str(dtype).removeprefix('torch.')}"

    def make() -> torch.Tensor:
        matrix = torch.zeros(dim, dim, dtype=dtype, device=value(x).device)
        dims = torch.arange(part.start, part.stop)
        first, second = (dims[::2], dims[1::2]) if mode == "interleaved" else dims.chunk(2)
        matrix[second, first] = -1
        matrix[first, second] = 1
        return matrix

    return traced.shared_constant(name, make)
