"""Finds values of a flat graph that depend on a token's index in the step, and not on its sequence.

Token t of a step is not token t of its sequence, and the number of tokens in a step is not a sequence's length. What
a model computes from either must have become a position before it meets a token; this finds what has not, by running
it for three sizes of the step, the last the longest that the model takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..graph.evaluate import Evaluation, is_size
from ..graph.fx_nodes import METADATA_CALLS, argument, callee, is_tensor, storage_key, value
from ..graph.step_sizes import longest_size
from ..graph.table_cut import SIZES
from ..graph.token_dims import reads_tokens, token_dims
from ..graph.traced import TracedGraph
from .dependence import Depends

_UNINITIALIZED = frozenset("empty empty_like new_empty empty_strided".split())
_PICKS_BY_INDEX = frozenset("getitem index_select setitem index_put_ gather index_add_ scatter_".split())
_KEEPS_ROW_NUMBERS = frozenset("to view reshape expand unsqueeze long int repeat_interleave sort".split())


def place_dependent(traced: TracedGraph, depends: dict[fx.Node, Depends]) -> dict[fx.Node, str]:
    """Find constants that meet tokens or positions although they depend on the index in the step: node → how.

    Row numbers, which only pick rows of the step, are left out.
    """
    found = {}
    reads_size: set[fx.Node] = set()
    # What such storage holds is written later, by nodes that are looked at themselves.
    uninitialized = {storage_key(node) for node in traced.graph.nodes if callee(node) in _UNINITIALIZED} - {None}
    for node in traced.graph.nodes:
        if not is_tensor(node) or depends[node] is not Depends.CONSTANT or node.op in ("placeholder", "get_attr"):
            continue
        if any(n in reads_size or _is_token_count(traced, n) for n in node.all_input_nodes) or token_dims(
            traced, node
        ):
            reads_size.add(node)
            if storage_key(node) in uninitialized or not _meets_others(node, depends):
                continue
            if not picks_rows(traced, node):
                reason = _how(traced, node)
                if reason:
                    found[node] = reason
    return found


def picks_rows(traced: TracedGraph, node: fx.Node) -> bool:
    """True when every use picks rows out of a per-token tensor: row numbers, not positions."""
    pending, seen, indexes = [node], set(), 0
    while pending:
        current = pending.pop()
        for user in current.users:
            if user in seen:
                continue
            seen.add(user)
            name = callee(user)
            if name in _PICKS_BY_INDEX:
                source = user.args[0]
                if source is current:
                    pending.append(user)
                elif isinstance(source, fx.Node) and token_dims(traced, source):
                    indexes += 1
                else:
                    return False
            elif name in _KEEPS_ROW_NUMBERS:
                pending.append(user)
            elif not is_size(user):
                return False
    return indexes > 0


def is_every_row(traced: TracedGraph, index: fx.Node) -> bool:
    """Tell whether a constant index takes every row of the step as often as any other, in the order of the rows."""
    for tokens in (*SIZES, longest_size(traced, index)):
        try:
            rows = Evaluation(traced, {traced.token_symbol: tokens})(index).reshape(-1).tolist()
        except Exception:
            return False
        each = range(max(1, len(rows) // tokens))
        if rows not in ([row for row in range(tokens) for _ in each], [row for _ in each for row in range(tokens)]):
            return False
    return True


def _how(traced: TracedGraph, node: fx.Node) -> str:
    """The way in which ``node`` depends on the place in the step, "" when it does not."""
    rows = []
    for tokens in (*SIZES, longest_size(traced, node)):
        try:
            seen = Evaluation(traced, {traced.token_symbol: tokens})(node)
        except Exception as error:
            return f"could not run a constant that depends on the size of the step: {error}"
        for dim in token_dims(traced, node):
            if not _same(seen, seen.narrow(dim, 0, 1).expand_as(seen)):
                return "its values depend on the token's index in the step"
            seen = seen.narrow(dim, 0, 1)
        rows.append(seen)
    if all(_same(rows[0], seen) for seen in rows):
        return ""
    return "its values depend on the number of tokens in the step"


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def _meets_others(node: fx.Node, depends: dict[fx.Node, Depends]) -> bool:
    """Tell whether something that depends on tokens or positions, or the output, reads its elements as values."""
    for user in node.users:
        if callee(user) in METADATA_CALLS and user.args[0] is node:
            continue
        if is_size(user) or (depends[user] is Depends.CONSTANT and user.op != "output"):
            continue
        if node not in set(_index_nodes(user)):
            return True
    return False


def _index_nodes(user: fx.Node) -> Iterator[fx.Node]:
    name = callee(user)
    index: Any = ()
    if name in ("getitem", "setitem", "index_put", "index_put_"):
        index = user.args[1]
    elif name in _PICKS_BY_INDEX:
        index = argument(user, 2, "index")
    return (n for n in pytree.tree_leaves(index) if isinstance(n, fx.Node))


def _is_token_count(traced: TracedGraph, node: fx.Node) -> bool:
    if is_tensor(node):
        return False
    return any(reads_tokens(traced, size) for size in pytree.tree_leaves(value(node)))
