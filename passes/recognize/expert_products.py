"""Products with one matrix per expert, in the forms that transformers uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from ..graph.fx_nodes import argument, callee, is_dynamic, shape

_GROUPED = ("grouped_mm_fallback", "_grouped_mm")
# Where the rows of a product come from: what lies above is not between two products of one block.
_GATHERS = ("index.Tensor", "repeat", "scatter.src", "sort", "topk")
_BETWEEN = 60


@dataclass(frozen=True)
class ExpertProduct:
    """One matrix product per expert.

    Attributes:
        node: the result, ``[rows, out]``, or ``[E, N, out]`` if ``counts`` is None.
        rows: the input, sorted by expert, or one matrix per expert.
        weight: ``[E, out, in]``, or ``[E, in, out]`` if ``transposed``.
        counts: what tells how many rows each expert has; None for ``bmm``.
        cumulative: ``counts`` holds the row after each expert's last, not a number of rows.
    """

    node: fx.Node
    rows: fx.Node
    weight: fx.Node
    transposed: bool
    counts: fx.Node | None
    cumulative: bool = True


def expert_product(node: fx.Node) -> ExpertProduct | None:
    """``node`` as a product per expert; None when it is none."""
    name = callee(node)
    if name in _GROUPED:
        weight, transposed = _stored(node.args[1])
        counts = argument(node, 2, "offs")
        if counts is None or argument(node, 3, "bias") is not None or argument(node, 4, "out_dtype") is not None:
            return None
        return ExpertProduct(node, node.args[0], weight, transposed, counts)
    if name == "bmm":
        weight, transposed = _stored(node.args[1])
        if weight.op == "placeholder" and len(shape(weight)) == 3 and not any(map(is_dynamic, shape(weight))):
            return ExpertProduct(node, node.args[0], weight, transposed, None)
    if name == "cat" and len(node.args) == 1 and len(node.args[0]) > 1:
        return _split_product(node)
    return None


def _stored(weight: Any) -> tuple[fx.Node, bool]:
    """The weight as it is stored, and whether that is ``[E, in, out]``."""
    if callee(weight) == "transpose.int" and sorted(d % 3 for d in weight.args[1:]) == [1, 2]:
        return weight.args[0], False
    return weight, True


def _split_product(cat: fx.Node) -> ExpertProduct | None:
    """``cat([linear(part_i, weight[i])])`` over the parts of a split, one per expert."""
    whole: set[tuple[fx.Node, fx.Node]] = set()
    for i, part in enumerate(cat.args[0]):
        name = callee(part)
        if name == "mm" and callee(part.args[1]) == "t":
            rows, weight = part.args[0], part.args[1].args[0]
        elif name == "linear" and argument(part, 2, "bias") is None:
            rows, weight = part.args[:2]
        else:
            return None
        if callee(weight) != "select.int" or tuple(weight.args[1:]) != (0, i):
            return None
        if callee(rows) != "getitem" or rows.args[1] != i or callee(rows.args[0]) != "split_with_sizes":
            return None
        whole.add((rows.args[0], weight.args[0]))
    if len(whole) != 1:
        return None
    split, weight = whole.pop()
    sizes = split.args[1]
    if len(sizes) != len(cat.args[0]) or len(split.args) > 2 or shape(weight)[0] != len(sizes):
        return None
    counts = {size.args[0].args[0] for i, size in enumerate(sizes) if _is_item(size, i)}
    if len(counts) != 1 or not all(_is_item(size, i) for i, size in enumerate(sizes)):
        return None
    return ExpertProduct(cat, split.args[0], weight, False, counts.pop(), cumulative=False)


def _is_item(size: Any, index: int) -> bool:
    if callee(size) != "_local_scalar_dense" or callee(size.args[0]) != "select.int":
        return False
    return tuple(size.args[0].args[1:]) == (0, index)


def products_before(down: ExpertProduct, products: dict[fx.Node, ExpertProduct]) -> list[fx.Node]:
    """The products, of the kind of ``down``, that its input is made of."""
    found: list[fx.Node] = []
    seen: set[fx.Node] = set()
    pending = [down.rows]
    while pending and len(seen) < _BETWEEN:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in products:
            if (products[node].counts is None) == (down.counts is None):
                found.append(node)
        elif callee(node) not in _GATHERS:
            pending += node.all_input_nodes
    return found


def parts(product: ExpertProduct) -> set[fx.Node]:
    """The nodes between the rows and the result of a product that is spelled expert by expert; else none."""
    found: set[fx.Node] = set()
    pending = list(product.node.all_input_nodes) if callee(product.node) == "cat" else []
    while pending:
        node = pending.pop()
        if node not in (product.rows, product.counts) and node not in found and node.op == "call_function":
            found.add(node)
            pending += node.all_input_nodes
    return found
