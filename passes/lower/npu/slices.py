"""Parts of tensors, read off the nodes that cut them out in one way or another."""

from __future__ import annotations

from typing import NamedTuple

from torch import fx

from ...graph.fx_nodes import argument, callee, shape, value


class Slice(NamedTuple):
    """``source[start:end]`` along ``dim``, which counts from the front; all bounds are numbers."""

    source: fx.Node
    dim: int
    start: int
    end: int


def slice_of(node: fx.Node) -> Slice | None:
    """The slice that ``node`` is, alone or as part of a split; None where it is neither or its bounds vary."""
    if callee(node) == "slice.Tensor":
        source = argument(node, 0, "input")
        dim = argument(node, 1, "dim", 0) % len(shape(node))
        start, end, step = (argument(node, i, name) for i, name in ((2, "start"), (3, "end"), (4, "step")))
        size = shape(source)[dim]
        first, last = (0 if start is None else start), (size if end is None else end)
        if step not in (None, 1) or not all(isinstance(x, int) for x in (size, first, last)):
            return None
        first, last = (x + size if x < 0 else x for x in (first, last))
        return Slice(source, dim, first, min(last, size))
    if callee(node) == "getitem":
        parts, index = argument(node, 0, ""), argument(node, 1, "")
        if callee(parts) not in ("split.Tensor", "split_with_sizes"):
            return None
        dim = argument(parts, 2, "dim", 0) % len(shape(node))
        sizes = [part.shape[dim] for part in value(parts)]
        if not all(isinstance(x, int) for x in sizes):
            return None
        start = sum(sizes[:index])
        return Slice(argument(parts, 0, ""), dim, start, start + sizes[index])
    return None


def last_dim_slice(node: fx.Node) -> tuple[fx.Node, int, int] | None:
    """``(source, start, end)`` if ``node`` is ``source[..., start:end]``; else None."""
    found = slice_of(node)
    if found is None or found.dim != len(shape(node)) - 1:
        return None
    return found.source, found.start, found.end


def whole_of_halves(first: fx.Node, second: fx.Node) -> fx.Node | None:
    """The tensor whose last dim has ``first`` as its left and ``second`` as its right half; None if there is none."""
    left, right = last_dim_slice(first), last_dim_slice(second)
    if left is None or right is None or left[0] is not right[0]:
        return None
    size = shape(left[0])[-1]
    return left[0] if left[1:] == (0, size // 2) and right[1:] == (size // 2, size) and size % 2 == 0 else None
