"""Recognize rows that are handed to the next token.

Matches:
    cat([first, x[:, :-1]], dim=1)         # [1, T, C]; first, [1, 1, C], is made of weights
    pad(x, (0, 0, 1, -1))
Becomes:
    where(position_ids < 1, first, pagoda::causal_conv1d_seq(x, [1, 0]))
Why it is faster:
    in a flat step the row before is another sequence's or an earlier step's: it is kept in a state.

Level 0.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from ..graph.evaluate import Evaluation, at_sizes
from ..graph.fx_nodes import argument, callee, closure, is_tensor, shape, value
from ..graph.record import NoMatch, PassRecord
from ..graph.rewrite_each import rewrite_each
from ..graph.token_delay import insert_delayed, same_numbers
from ..graph.token_dims import token_dims
from ..graph.traced import TracedGraph

_CUTS = ("getitem", "narrow", "slice")


def recognize_token_shift(traced: TracedGraph) -> PassRecord:
    """Replace every shift along the tokens by a convolution of one tap. Flat (paged) graphs only."""

    def step(node: fx.Node) -> str | None:
        name = callee(node)
        if name not in ("cat", "concat", "concatenate", "pad") or not value(node).dtype.is_floating_point:
            return None
        if token_dims(traced, node) != [1] or len(shape(node)) != 3:
            return None
        found: tuple[fx.Node, fx.Node | None] | None = _padded(node) if name == "pad" else _joined(traced, node)
        if found is None:
            return None
        rows, first = found
        if first is not None and not _is_of_weights(traced, first):
            return f"the input of its first token ({first.name}) depends on the tokens"
        if value(rows).dtype is not value(node).dtype:
            return f"{value(rows).dtype} rows become {value(node).dtype} ones"
        with traced.before(node):
            new = insert_delayed(traced, rows, 1, first)
        if not same_numbers(traced, node, new, [rows] if first is None else [rows, first]):
            raise NoMatch("it does not pass every row to the next token")
        traced.substitute(node, new)
        return ""

    return rewrite_each(traced, "recognize_token_shift", step, list(traced.graph.nodes) if traced.paged else ())


def _joined(traced: TracedGraph, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The rows that are shifted, and what stands in front of them; None where this is not a shift."""
    parts = argument(node, 0, "tensors")
    dim = argument(node, 1, "dim", node.kwargs.get("axis", 0))
    if dim not in (1, -2) or len(parts) != 2:
        return None
    first, rest = parts
    if token_dims(traced, first) or not _sizes_fit(traced, first, rest) or callee(rest) not in _CUTS:
        return None
    rows: Any = rest.args[0]
    return (rows, first) if is_tensor(rows) and str(shape(rows)) == str(shape(node)) else None


def _is_of_weights(traced: TracedGraph, node: fx.Node) -> bool:
    needed = closure(node, Evaluation(traced, {}).reads)
    return all(n.name in traced.constants for n in needed if n.op == "placeholder" and is_tensor(n))


def _sizes_fit(traced: TracedGraph, first: fx.Node, rest: fx.Node) -> bool:
    """True for one row in front of all rows but one."""
    sizes = {traced.token_symbol: 9}
    front, behind = (at_sizes(shape(n), sizes) for n in (first, rest))
    return len(front) == len(behind) == 3 and front[:2] == (1, 1) and behind[:2] == (1, 8)


def _padded(node: fx.Node) -> tuple[fx.Node, None] | None:
    pads, mode, filling = (argument(node, i, n) for i, n in ((1, "pad"), (2, "mode"), (3, "value")))
    if list(pads) != [0, 0, 1, -1]:
        return None
    if mode not in (None, "constant") or filling:
        raise NoMatch(f"its first token gets {mode or 'constant'} {filling}, not zeros")
    return node.args[0], None  # type: ignore[return-value]
