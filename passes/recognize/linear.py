"""Finds linear layers in an ATen graph, where each consists of views around a matrix product.

Level 0: the operator runs the very kernels that it stands for.

Matches:
    view(mm(view(x, [M, K]), t(W)), [..., N])          # F.linear without bias, matmul(x, W.T)
    view(addmm(b, view(x, [M, K]), t(W)), [..., N])    # with bias
    mm(x, W), addmm(b, x, W)                           # W is [K, N], as in GPT-2's Conv1D
    view(bmm(expand(x), expand(t(W))), [..., N])       # the same where the rows of x are apart: torch's tracer makes
                                                       # this of them, also where the layer itself takes one product
Becomes:
    aten.linear(x, W, b)                               # aten.linear(x, t(W), b) for [K, N] weights
Why it is faster:
    By itself it is not. A layer becomes one node that reads its parameters, which the passes after it join, fuse
    and pack.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..graph.data_movement import RESHAPES
from ..graph.fx_nodes import callee, is_dynamic, shape, value
from ..graph.record import PassRecord
from ..graph.rewrite_each import rewrite_each
from ..graph.traced import TracedGraph

_aten = torch.ops.aten
_PRODUCTS = (_aten.mm.default, _aten.addmm.default, _aten.bmm.default)


def recognize_linear(traced: TracedGraph) -> PassRecord:
    """Replace products with a fixed matrix by ``aten.linear``.

    A matrix is fixed when it is a graph input or computed from parameters alone; products of activations stay.
    """
    fixed = _computed_from_parameters(traced)

    def step(node: fx.Node) -> str | None:
        if node.op != "call_function" or node.target not in _PRODUCTS:
            return None
        if node.target is _aten.bmm.default:
            return "" if _replace_batched(traced, node, fixed) else None
        weight = _weight(node.args[-1], fixed)
        if weight is None:
            return None
        reason = _refusal(node)
        if not reason:
            _replace(traced, node, weight)
        return reason

    return rewrite_each(traced, "recognize_linear", step)


def _computed_from_parameters(traced: TracedGraph) -> set[fx.Node]:
    fixed: set[fx.Node] = set()
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            if node.name in traced.constants:
                fixed.add(node)
        elif node.op == "call_function" and node.all_input_nodes and fixed.issuperset(node.all_input_nodes):
            fixed.add(node)
    return fixed


def _weight(matrix: Any, fixed: set[fx.Node]) -> tuple[fx.Node, bool] | None:
    """The right side ``[K, N]`` of a product as a weight: the node, and whether it is ``[N, K]`` already."""
    if not isinstance(matrix, fx.Node) or any(map(is_dynamic, shape(matrix))):
        return None
    if _transposes(matrix):
        source = matrix.args[0]
        assert isinstance(source, fx.Node)
        if source in fixed or source.op == "placeholder":
            return source, True
    return (matrix, False) if matrix in fixed else None


def _transposes(node: fx.Node) -> bool:
    """Tell whether ``node`` swaps the axes of a matrix."""
    if len(shape(node)) != 2:
        return False
    if callee(node) == "t":
        return True
    if callee(node) == "transpose.int":
        return {int(axis) % 2 for axis in node.args[1:3]} == {0, 1}  # type: ignore[arg-type]
    return callee(node) == "permute" and [axis % 2 for axis in node.args[1]] == [1, 0]  # type: ignore[union-attr,operator]


def _refusal(node: fx.Node) -> str:
    if node.target is not _aten.addmm.default:
        return ""
    if node.kwargs.get("beta", 1) != 1 or node.kwargs.get("alpha", 1) != 1:
        return "the product or the bias is scaled (addmm with alpha or beta)"
    if shape(node.args[0]) != shape(node)[-1:]:
        return f"the added tensor is not a bias: its shape is {tuple(shape(node.args[0]))}"
    return ""


def _replace(traced: TracedGraph, node: fx.Node, weight: tuple[fx.Node, bool]) -> None:
    bias = node.args[0] if node.target is _aten.addmm.default else None
    rows = node.args[-2]
    assert isinstance(rows, fx.Node)
    x, replaced = rows, [node]
    if callee(rows) in RESHAPES:
        source = rows.args[0]
        assert isinstance(source, fx.Node)
        outputs = list(node.users)
        sizes = (*shape(source)[:-1], shape(node)[-1])
        if (
            outputs
            and len(sizes) > 2
            and all(callee(user) in RESHAPES and same_sizes(shape(user), sizes) for user in outputs)
            and same_sizes(shape(source)[-1:], shape(rows)[-1:])
            and _flattens(source, contiguous=bias is not None)
        ):
            x, replaced = source, outputs
    _insert(traced, node, x, weight, bias, replaced)
    if replaced[0] is not node:
        traced.graph.erase_node(node)


def _replace_batched(traced: TracedGraph, node: fx.Node, fixed: set[fx.Node]) -> bool:
    """Replace a batched product whose batches all read one fixed matrix."""
    matrix = _broadcast_from(node.args[1])
    if matrix is None or len(shape(matrix)) != 2:
        return False
    weight = _weight(matrix, fixed)
    x = _broadcast_from(node.args[0])
    if weight is None or x is None or len(shape(x)) < 3:
        return False
    sizes = (*shape(x)[:-1], shape(node)[-1])
    outputs = list(node.users)
    if not outputs or not all(callee(u) in RESHAPES and same_sizes(shape(u), sizes) for u in outputs):
        if not same_sizes(shape(node), sizes):
            return False
        outputs = [node]
    _insert(traced, node, x, weight, None, outputs)
    if outputs[0] is not node:
        traced.graph.erase_node(node)
    return True


def _broadcast_from(node: Any) -> fx.Node | None:
    """``x`` of ``view(expand(x))``, as matmul makes for a batched product; None for anything else."""
    if callee(node) in RESHAPES:
        node = node.args[0]
    if callee(node) != "expand":
        return None
    source = node.args[0]
    return source if isinstance(source, fx.Node) else None


def _flattens(node: fx.Node, *, contiguous: bool) -> bool:
    """Tell whether the layer itself makes one matrix of all rows of ``node``, whatever the number of tokens.

    ``linear`` and ``matmul`` look at strides to choose between one product and one for each batch; with a bias, any
    layout but a contiguous one is multiplied first and added to afterwards.
    """
    tensor = value(node)
    sizes, strides = tensor.shape, tensor.stride()
    evenly = all(same_sizes((strides[i],), (strides[i + 1] * sizes[i + 1],)) for i in range(len(sizes) - 2))
    if not contiguous:
        return evenly
    return evenly and same_sizes(strides[-2:], (sizes[-1], 1))


def same_sizes(a: Any, b: Any) -> bool:
    """Tell whether two tuples of sizes are equal for every value of their symbols; asking adds no guard."""
    return len(a) == len(b) and all(_expression(x) == _expression(y) for x, y in zip(a, b, strict=True))


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _insert(
    traced: TracedGraph,
    node: fx.Node,
    x: fx.Node,
    weight: tuple[fx.Node, bool],
    bias: Any,
    replaced: list[fx.Node],
) -> None:
    """``aten.linear`` in front of ``node``, in place of ``replaced``, which all hold its result."""
    source, is_rows = weight
    with traced.before(node):
        if not is_rows:
            source = traced.call(_aten.t.default, source)
        arguments = (x, source) if bias is None else (x, source, bias)
        new = traced.graph.call_function(_aten.linear.default, arguments)
    new.meta = dict(node.meta)
    new.meta["example_value"] = value(replaced[0])
    for old in replaced:
        old.replace_all_uses_with(new)
        traced.graph.erase_node(old)
