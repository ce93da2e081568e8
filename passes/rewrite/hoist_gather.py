"""Select the rows whose logits are requested as early as the last attention allows.

Matches:
    y = index_select(f(a, b, ..., W), 1, logits_rows)      # f works on every token by itself; a, b, ...: [1, T, ...]
Becomes:
    y = f(index_select(a, 1, logits_rows), index_select(b, 1, logits_rows), ..., W)
Why it is faster:
    the final norm, and the output projection and MLP of the last layer, run for one row of a prompt instead of all.

Level 2: a matrix product of fewer rows may add in another order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ...runtime.ops import OPERATORS
from ..graph.data_movement import RESHAPES
from ..graph.fx_nodes import CUT_DIM_AT, argument, callee, is_dynamic, is_tensor, shape, value
from ..graph.provenance import launches_work
from ..graph.record import PassRecord
from ..graph.traced import TracedGraph

_ELEMENTWISE = frozenset("add.Tensor sub.Tensor mul.Tensor div.Tensor neg tanh sigmoid _to_copy clone".split())


def hoist_gather(traced: TracedGraph) -> PassRecord:
    """Move the gather of ``logits_rows`` over what works on every token by itself."""
    record = PassRecord("hoist_gather")
    gather = next((node for node in traced.graph.nodes if _is_gather(node)), None)
    if gather is None:
        return record
    inside = _region(gather)
    if not any(launches_work(node) for node in inside):
        return record
    sources = {n for node in inside for n in node.all_input_nodes if n not in inside and _rows_dim(n) is not None}
    for source in sorted(sources):
        users = [user for user in source.users if user in inside]
        with traced.before(min(users), like=gather):
            gathered = traced.call(gather.target, source, _rows_dim(source), gather.args[2])  # type: ignore[arg-type]
        for user in users:
            user.replace_input_with(source, gathered)
    for node in sorted(inside):
        if callee(node) in RESHAPES:
            node.args = (node.args[0], [-1 if is_dynamic(size) else int(size) for size in shape(node)])
        traced.propagate(node)
    traced.substitute(gather, gather.args[0])  # type: ignore[arg-type]
    record.matches = 1
    return record


def _is_gather(node: fx.Node) -> bool:
    if callee(node) != "index_select":
        return False
    source, dim, rows = node.args
    return _rows_dim(source) == dim and callee(rows) == "placeholder" and rows.name == "logits_rows"  # type: ignore[union-attr]


def _region(gather: fx.Node) -> set[fx.Node]:
    """The nodes that work on every token by itself and that nothing but the gather needs."""
    inside: set[fx.Node] = set()
    wanted = set(gather.all_input_nodes)
    node = gather.prev
    while node.op == "call_function":
        if node in wanted and _is_per_token(node) and all(user is gather or user in inside for user in node.users):
            inside.add(node)
            wanted.update(node.all_input_nodes)
        node = node.prev
    # One result of an operator whose other results are needed for all tokens.
    return inside - {node for node in inside if callee(node) == "getitem" and node.args[0] not in inside}


def _is_per_token(node: fx.Node) -> bool:
    """Tell whether row i of each result depends on row i of the operands alone."""
    name = callee(node)
    if name == "getitem":
        return _rows_dim(node) is not None
    results = [v for v in pytree.tree_leaves(value(node)) if isinstance(v, torch.Tensor)]
    if not results or any(_rows_dim(v) is None for v in results):
        return False
    first, others = node.all_input_nodes[0], node.all_input_nodes[1:]
    if name in CUT_DIM_AT:
        rows, rank = _rows_dim(first), len(shape(first))
        dim = argument(node, CUT_DIM_AT[name], "dim", 0)
        return not others and rows is not None and dim not in (rows, rows - rank)
    if name in RESHAPES:
        return _rows_dim(first) is not None and _row(first) == _row(node)
    fixed = [n for n in node.all_input_nodes if _rows_dim(n) is None]
    if any(not is_tensor(n) or any(is_dynamic(size) for size in shape(n)) for n in fixed):
        return False
    # Counted from the end, as broadcasting does.
    places = {dim - len(shape(n)) for n in node.all_input_nodes if (dim := _rows_dim(n)) is not None}
    own = OPERATORS.get(node.target)  # type: ignore[call-overload]
    if name in _ELEMENTWISE or (own and own.facts.over == "elements"):
        return len(places) == 1
    return (name == "linear" or (own and own.facts.over == "rows")) and places == {-2} and first not in fixed


def _rows_dim(item: Any) -> int | None:
    """The dim that counts tokens: the only one of a varying size, the first, or the second after one of size 1."""
    sizes = tuple(item.shape) if isinstance(item, torch.Tensor) else shape(item)
    varying = [i for i, size in enumerate(sizes) if is_dynamic(size)]
    if len(varying) != 1 or any(size != 1 for size in sizes[: varying[0]]):
        return None
    return varying[0]


def _row(node: fx.Node) -> tuple[Any, ...]:
    """The sizes of one token's part."""
    return shape(node)[_rows_dim(node) + 1 :]  # type: ignore[operator]
