"""Rules for operators that move elements: views, transposes, slices, splits, concatenations."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import fx

from ..graph.cut import Cut, Refused, shifted, through_view, within
from ..graph.fx_nodes import argument, is_dynamic, shape
from .walk import ItemsRule, Rule, Walk


def _sized(node: fx.Node, place: int, cut: Cut) -> tuple[fx.Node, tuple[Any, ...]]:
    """The arguments of an operator that names the sizes of its result, those of a rank."""
    sizes = list(node.args[place])  # type: ignore[arg-type]
    sizes[cut.dim] = cut.local
    return node, (*node.args[:place], sizes, *node.args[place + 1 :])


def _view(walk: Walk, node: fx.Node, cut: Cut) -> None:
    source: Any = node.args[0]
    found = through_view(shape(source), shape(node), cut)
    walk.demand(source, node, found.dim, found.indices)
    walk.edit(functools.partial(_sized, node, 1, cut))


def _transpose(walk: Walk, node: fx.Node, cut: Cut) -> None:
    source, *dims = node.args
    first, second = (dim % len(shape(node)) for dim in dims)  # type: ignore[operator]
    walk.demand(source, node, {first: second, second: first}.get(cut.dim, cut.dim), cut.indices)


def _t(walk: Walk, node: fx.Node, cut: Cut) -> None:
    walk.demand(node.args[0], node, 1 - cut.dim, cut.indices)


def _permute(walk: Walk, node: fx.Node, cut: Cut) -> None:
    source, dims = node.args
    walk.demand(source, node, dims[cut.dim], cut.indices)  # type: ignore[index, arg-type]


def _unsqueeze(walk: Walk, node: fx.Node, cut: Cut) -> None:
    source, dim = node.args
    place: int = dim % len(shape(node))  # type: ignore[operator, assignment]
    if cut.dim != place:
        walk.demand(source, node, cut.dim - (cut.dim > place), cut.indices)
    elif any(len(part) != 1 for part in cut.indices):
        raise Refused("a new dim is cut")


def _squeeze(walk: Walk, node: fx.Node, cut: Cut) -> None:
    source, dim = node.args
    place: int = dim % len(shape(source))  # type: ignore[operator, assignment]
    gone = len(shape(source)) > len(shape(node)) and cut.dim >= place
    walk.demand(source, node, cut.dim + gone, cut.indices)


def _expand(walk: Walk, node: fx.Node, cut: Cut) -> None:
    source: Any = node.args[0]
    dim = cut.dim - (len(shape(node)) - len(shape(source)))
    if dim >= 0 and not (isinstance(shape(source)[dim], int) and shape(source)[dim] == 1):
        walk.demand(source, node, dim, cut.indices)
    walk.edit(functools.partial(_sized, node, 1, cut))


def _cat(walk: Walk, node: fx.Node, cut: Cut) -> None:
    sources: Any = node.args[0]
    dim = argument(node, 1, "dim", 0) % len(shape(node))
    first = 0
    for source in sources:
        if dim != cut.dim:
            walk.demand(source, node, cut.dim, cut.indices)
            continue
        size = int(shape(source)[dim])
        walk.demand(source, node, dim, within(cut.indices, first, size))
        first += size
    if dim == cut.dim:
        _check_order(cut, [int(shape(source)[dim]) for source in sources])


def _check_order(cut: Cut, sizes: list[int]) -> None:
    """Raise ``Refused`` unless every rank holds its pieces in the order in which they are joined."""
    owner = np.repeat(np.arange(len(sizes)), sizes)
    if any((np.diff(owner[part]) < 0).any() for part in cut.indices):
        raise Refused("pieces are held in another order than they are joined in")


def _slice(walk: Walk, node: fx.Node, cut: Cut) -> None:
    source: Any = node.args[0]
    dim = argument(node, 1, "dim", 0) % len(shape(source))
    if dim != cut.dim:
        walk.demand(source, node, cut.dim, cut.indices)
        return
    size = shape(source)[dim]
    start = argument(node, 2, "start") or 0
    if argument(node, 4, "step", 1) != 1 or not isinstance(start, int) or is_dynamic(size):
        raise Refused("a slice with steps or with bounds that vary is cut")
    start = start + int(size) if start < 0 else start
    walk.demand(source, node, dim, shifted(cut.indices, start))

    def edited() -> tuple[fx.Node, tuple[Any, ...]]:
        first = _place(walk.cuts[source], Cut(dim, shifted(cut.indices, start)))
        return node, (source, dim, first, first + cut.local)

    walk.edit(edited)


def _place(held: Cut, piece: Cut) -> int:
    """Where a piece begins in what ranks hold.

    Raises:
        Refused: it does not lie at one place on all ranks.
    """
    for first in range(held.local - piece.local + 1):
        pairs = zip(held.indices, piece.indices, strict=True)
        if all(np.array_equal(whole[first : first + piece.local], part) for whole, part in pairs):
            return first
    raise Refused("a slice lies at different places on the ranks")


def _select(walk: Walk, node: fx.Node, cut: Cut) -> None:
    source, dim, _ = node.args
    place: int = dim % len(shape(source))  # type: ignore[operator, assignment]
    walk.demand(source, node, cut.dim + (cut.dim >= place), cut.indices)


def _slice_scatter(walk: Walk, node: fx.Node, cut: Cut) -> None:
    if argument(node, 2, "dim", 0) % len(shape(node)) == cut.dim:
        raise Refused("slice_scatter along what is cut")
    for source in node.args[:2]:
        walk.demand(source, node, cut.dim, cut.indices)


def _new_empty(walk: Walk, node: fx.Node, cut: Cut) -> None:
    walk.edit(functools.partial(_sized, node, 1, cut))


def _split(walk: Walk, node: fx.Node, items: dict[int, Cut]) -> None:
    source: Any = node.args[0]
    rank = len(shape(source))
    dim = argument(node, 2, "dim", 0) % rank
    sizes: Any = node.args[1]
    total = shape(source)[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, int(total) - first) for first in range(0, int(total), sizes)]
    dims = {cut.dim for cut in items.values()}
    if dims != {dim}:
        if len(dims) != 1 or dim in dims:
            raise Refused("parts of a split are cut along different dims")
        walk.demand(source, node, dims.pop(), next(iter(items.values())).indices)
        if len(set(items.values())) != 1:
            raise Refused("parts of a split are cut differently")
        return
    firsts = np.cumsum([0, *sizes]).tolist()
    for i, cut in items.items():
        walk.demand(source, node, dim, shifted(cut.indices, firsts[i]))
    if len(items) != len(sizes):
        raise Refused("a part of a split is not read")
    walk.edit(lambda: (node, (source, [items[i].local for i in range(len(sizes))], dim)))
    walk.retarget(node, torch.ops.aten.split_with_sizes.default)


VIEWS: dict[str, Rule] = {
    **dict.fromkeys(("view", "reshape", "_unsafe_view"), _view),
    "transpose.int": _transpose,
    "t": _t,
    "permute": _permute,
    "unsqueeze": _unsqueeze,
    "squeeze.dim": _squeeze,
    "expand": _expand,
    "cat": _cat,
    "slice.Tensor": _slice,
    "select.int": _select,
    "slice_scatter": _slice_scatter,
    "new_empty": _new_empty,
}
SPLITS: dict[str, ItemsRule] = {"split.Tensor": _split, "split_with_sizes": _split}
