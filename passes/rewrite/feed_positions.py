"""Feed the step's positions to models that make their own.

Matches:
    arange(T) + c,  cumsum(ones(T)) - 1, ...   # numbers that turn out to be position + c when run
    table[:T]                                  # a stored table cut to the number of tokens
Becomes:
    position_ids + c
    index_select(table, position_ids)
Why:
    in a flat step of many sequences token t of the step is not token t of its sequence.

Level 0.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from ..graph.evaluate import Evaluation
from ..graph.fx_nodes import callee, closure, is_tensor, shape, value
from ..graph.limits import find_limits
from ..graph.record import PassRecord
from ..graph.rewrite_each import rewrite_each
from ..graph.token_dims import token_dims
from ..graph.traced import TracedGraph
from ..proof.dependence import Depends, dependences
from ..proof.step_place import picks_rows

_TOKENS = 7
_MORE_TOKENS = 12
_MOST_TOKENS = 1 << 20
_LARGEST_OFFSET = 16


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
        if len(dims) > 1:
            return None
        try:
            seen = Evaluation(traced, {traced.token_symbol: _TOKENS})(node)
        except Exception as reason:
            return f"could not be run: {reason}"
        if seen.shape[dims[0]] != _TOKENS or picks_rows(traced, node):
            return None
        table = _table(traced, node)
        whole = seen if table is None else Evaluation(traced, {traced.token_symbol: _TOKENS})(table)
        if _same_for_all(seen, dims[0]) and _same_for_all(whole, dims[0]):
            return None
        replacement = _positions_like(traced, node, seen, dims[0]) or _table_rows(traced, node, seen, dims[0])
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


def _same_for_all(seen: torch.Tensor, dim: int) -> bool:
    return bool((seen == seen.narrow(dim, 0, 1)).all())


def _positions(traced: TracedGraph) -> fx.Node:
    """The ``[1, T]`` positions placeholder, added when the model has none."""
    if not traced.position_ids:
        traced.add_position_input()
    return traced.placeholder(traced.position_ids)


def _positions_like(traced: TracedGraph, node: fx.Node, seen: torch.Tensor, dim: int) -> fx.Node | None:
    """position_ids + c in the shape and type of ``node``, if that is what ``node`` is."""
    if seen.numel() != _TOKENS or seen.dtype == torch.bool:
        return None
    flat = seen.reshape(-1)
    offset = flat[0].item()
    if not torch.equal(flat, (torch.arange(_TOKENS) + offset).to(seen.dtype)):
        return None
    longer = Evaluation(traced, {traced.token_symbol: _tokens_to_run(traced, node)})(node).reshape(-1)
    if len(longer) < _MORE_TOKENS or not torch.equal(longer, (torch.arange(len(longer)) + offset).to(seen.dtype)):
        return None  # counted from the end of the step, or up to a limit
    traced.notes.fold(Evaluation(traced, {}).sources(node))
    positions = _positions(traced)
    with traced.graph.inserting_before(node):
        new = traced.method("squeeze", positions, 0)
        for at in range(seen.dim()):
            if at != dim:
                new = traced.method("unsqueeze", new, at)
        if value(new).dtype != seen.dtype:
            new = traced.method("to", new, seen.dtype)
        if offset:
            new = traced.call(torch.add, new, offset)
    return new


def _tokens_to_run(traced: TracedGraph, node: fx.Node) -> int:
    """A number of tokens that is beyond every limit, or that the model does not go beyond."""
    limits = find_limits(traced, closure(node, Evaluation(traced, {}).reads))
    beyond = 2 + math.ceil(max(*limits.literals, limits.fixed, limits.table, _MORE_TOKENS))
    return max(_MORE_TOKENS, min(beyond, traced.max_positions or beyond, _MOST_TOKENS))


def _table(traced: TracedGraph, node: fx.Node) -> fx.Node | None:
    """The table that ``node`` cuts to the number of tokens; None where it cuts none."""
    if callee(node) not in ("getitem", "narrow", "slice") or not isinstance(node.args[0], fx.Node):
        return None
    table = node.args[0]
    return None if token_dims(traced, table) or len(shape(table)) != len(shape(node)) else table


def _table_rows(traced: TracedGraph, node: fx.Node, seen: torch.Tensor, dim: int) -> fx.Node | None:
    """index_select(table, positions + c), if ``node`` is a stored table cut to the number of tokens."""
    table = _table(traced, node)
    if table is None:
        return None
    stored = Evaluation(traced, {traced.token_symbol: _TOKENS})(table)
    rows = stored.shape[dim]
    tokens = min(max(rows, _MORE_TOKENS), traced.max_positions or rows)
    longer = Evaluation(traced, {traced.token_symbol: tokens})(node)
    for offset in range(min(_LARGEST_OFFSET, max(rows - _TOKENS, 0)) + 1):
        index = torch.arange(_TOKENS) + offset
        more = torch.arange(min(tokens, rows - offset)) + offset
        if (
            rows >= _TOKENS + offset
            and torch.equal(stored.index_select(dim, index), seen)
            and torch.equal(stored.index_select(dim, more), longer)
        ):
            positions = _positions(traced)
            with traced.graph.inserting_before(node):
                index_node = traced.method("squeeze", positions, 0)
                if offset:
                    index_node = traced.call(torch.add, index_node, offset)
                return traced.call(torch.index_select, table, dim, index_node)
    return None
