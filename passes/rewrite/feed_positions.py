"""Feed the step's positions to models that make their own.

Matches:
    arange(T) + c,  cumsum(ones(T)) - 1, ...   # numbers that turn out to be position + c when run
    table[c : T + c]                           # a stored table cut to the number of tokens, unless its rows are equal
Becomes:
    position_ids + c                           # the table, too, if all of it is arange + c
    index_select(table, position_ids + c)      # max_positions is then no more than the table has
Why:
    in a flat step of many sequences token t of the step is not token t of its sequence.

Level 0.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from ..graph.evaluate import Evaluation
from ..graph.fx_nodes import callee, is_tensor, shape, storage_key, value, writers_by_storage
from ..graph.record import PassRecord
from ..graph.rewrite_each import rewrite_each
from ..graph.step_sizes import longest_size
from ..graph.table_cut import SIZES, TableCut
from ..graph.token_dims import token_dims
from ..graph.traced import TracedGraph
from ..proof.dependence import Depends, dependences
from ..proof.step_place import picks_rows


def feed_positions(traced: TracedGraph) -> PassRecord:
    """Replace positions that the model derives from the number of tokens. Flat (paged) graphs only."""
    if not traced.paged:
        return PassRecord("feed_positions")
    depends = dependences(traced)

    def step(node: fx.Node) -> str | None:
        if node.op in ("placeholder", "output") or not node.users or not is_tensor(node):
            return None
        dims = token_dims(traced, node)
        if depends[node] is not Depends.CONSTANT or not dims or _reads_fed(node):
            if _reads_fed(node):
                node.meta["fed_positions"] = True
            return None
        if len(dims) > 1 or picks_rows(traced, node):
            return None
        cut = TableCut.of(traced, node)
        if cut is None:
            try:
                replacement = _computed(traced, node, dims[0])
            except Exception as reason:
                return f"could not be run: {reason}"
        elif cut.is_constant:
            return None
        else:
            positions = _positions_like(traced, node, dims[0], [cut.rows], cut.offset)
            replacement = positions or _table_rows(traced, node, cut)
        if replacement is None:
            return None
        replacement.meta["fed_positions"] = True
        node.replace_all_uses_with(replacement)
        return ""

    record = rewrite_each(traced, "feed_positions", step)
    for node in traced.graph.nodes:
        node.meta.pop("fed_positions", None)
    return record


def _reads_fed(node: fx.Node) -> bool:
    return any(n.meta.get("fed_positions") for n in node.all_input_nodes)


def _positions(traced: TracedGraph) -> fx.Node:
    """The ``[1, T]`` positions placeholder, added when the model has none."""
    if not traced.position_ids:
        traced.add_position_input()
    return traced.placeholder(traced.position_ids)


def _computed(traced: TracedGraph, node: fx.Node, dim: int) -> fx.Node | None:
    """position_ids + c for a number per token that is not stored, if that is what it is at every size of the step."""
    runs = []
    for tokens in (*SIZES, longest_size(traced, node)):
        rows = Evaluation(traced, {traced.token_symbol: tokens})(node).movedim(dim, 0)
        if len(rows) != tokens:
            return None
        runs.append(rows)
    return _positions_like(traced, node, dim, runs)


def _positions_like(
    traced: TracedGraph, node: fx.Node, dim: int, runs: list[torch.Tensor], first: int = 0
) -> fx.Node | None:
    """position_ids + c in the shape and type of ``node``, if all ``runs`` count from one number.

    Args:
        traced: the graph.
        node: what it is to stand for, with its tokens along ``dim``.
        dim: that one.
        runs: the numbers of ``node``, or of what it is cut from, with the tokens in front.
        first: where in each run the first token's number stands.
    """
    dtype = runs[0].dtype
    start = runs[0].flatten()[0].item()
    for rows in runs:
        counted = (torch.arange(len(rows)) + start).to(dtype)
        if dtype == torch.bool or rows.numel() != len(rows) or not torch.equal(rows.flatten(), counted):
            return None
    traced.notes.fold(Evaluation(traced, {}).sources(node))
    positions = _positions(traced)
    with traced.graph.inserting_before(node):
        new = traced.method("squeeze", positions, 0)
        for at in range(len(shape(node))):
            if at != dim:
                new = traced.method("unsqueeze", new, at)
        if start + first:
            new = traced.call(torch.add, new, start + first)
        if value(new).dtype != dtype:
            new = traced.method("to", new, dtype)
        if storage_key(new) == storage_key(positions) and storage_key(node) in writers_by_storage(traced.graph):
            new = traced.method("clone", new)
    return new


def _table_rows(traced: TracedGraph, node: fx.Node, cut: TableCut) -> fx.Node | None:
    """The rows of a stored table that stand at the positions. There are no more positions than rows."""
    items = list(node.args[1]) if isinstance(node.args[1], tuple) else [node.args[1]]
    at = [i for i, item in enumerate(items) if isinstance(item, slice) and isinstance(item.stop, fx.Node)]
    if callee(node) == "getitem" and len(at) != 1:
        return None
    rows = len(cut.rows) - cut.offset
    traced.max_positions = min(traced.max_positions or rows, rows)
    positions = _positions(traced)
    with traced.graph.inserting_before(node):
        index = traced.method("squeeze", positions, 0)
        if cut.offset:
            index = traced.call(torch.add, index, cut.offset)
        new = traced.call(torch.index_select, cut.table, cut.dim, index)
        if callee(node) == "getitem":
            items[at[0]] = slice(None)
            if any(item != slice(None) for item in items):
                new = traced.call(operator.getitem, new, tuple(items))
    return new
