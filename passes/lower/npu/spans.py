"""Which part of another tensor's last dim a node is, however it was cut out."""

from __future__ import annotations

from torch import fx

from ...fx_nodes import argument, callee, shape, value


def span(node: fx.Node) -> tuple[fx.Node, int, int] | None:
    """``(source, start, end)`` if ``node`` is ``source[..., start:end]``; else None."""
    rank = len(shape(node))
    if callee(node) == "slice.Tensor":
        source, dim = argument(node, 0, "input"), argument(node, 1, "dim", 0)
        start, end, step = (argument(node, i, name) for i, name in ((2, "start"), (3, "end"), (4, "step")))
        if dim % rank != rank - 1 or step not in (None, 1):
            return None
        size = shape(source)[-1]
        first, last = (0 if start is None else start), (size if end is None else end)
        if not all(isinstance(x, int) for x in (size, first, last)):
            return None
        first, last = (x + size if x < 0 else x for x in (first, last))
        return source, first, min(last, size)
    if callee(node) == "getitem":
        parts, index = argument(node, 0, ""), argument(node, 1, "")
        if callee(parts) not in ("split.Tensor", "split_with_sizes"):
            return None
        source = argument(parts, 0, "")
        if argument(parts, 2, "dim", 0) % rank != rank - 1:
            return None
        sizes = [part.shape[-1] for part in value(parts)]
        if not all(isinstance(x, int) for x in sizes):
            return None
        start = sum(sizes[:index])
        return source, start, start + sizes[index]
    return None


def whole_of_halves(first: fx.Node, second: fx.Node) -> fx.Node | None:
    """The tensor whose last dim has ``first`` as its left and ``second`` as its right half; None if there is none."""
    left, right = span(first), span(second)
    if left is None or right is None or left[0] is not right[0]:
        return None
    size = shape(left[0])[-1]
    return left[0] if left[1:] == (0, size // 2) and right[1:] == (size // 2, size) and size % 2 == 0 else None
