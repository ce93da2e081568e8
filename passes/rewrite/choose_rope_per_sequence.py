"""Let every token choose its rotary table by the length of its own sequence (longrope).

Matches:
    n = max(position_ids) + 1                      # over all tokens of the step
    inv_freq = where(n > limit, long, short)       # one table for all of them
    cos, sin = f(inv_freq, position_ids)
Becomes:
    cos = where(token_lengths > limit, f(long, position_ids), f(short, position_ids));  sin alike
Why:
    in a flat step the longest sequence would choose for its batch mates, and a chunk of a prompt would choose by
    where the chunk ends. ``token_lengths`` is what the sequence has when it runs alone with a cache.

Level 0.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..graph.fx_nodes import argument, callee, is_tensor, mutated_arguments, shape, storage_key
from ..graph.record import PassRecord
from ..graph.rewrite_each import rewrite_each
from ..graph.traced import TracedGraph, UnsupportedModel
from ..proof.dependence import Depends, dependences

_COMPARISONS = {"gt": operator.gt, "ge": operator.ge, "lt": operator.lt, "le": operator.le}


def choose_rope_per_sequence(traced: TracedGraph) -> PassRecord:
    """Make tables that were chosen by the longest position choose per token. Flat (paged) graphs only."""

    def step(node: fx.Node) -> str | None:
        if callee(node) != "where" or len(node.args) != 3:
            return None
        limit = _length_condition(traced, node.args[0])
        if limit is None:
            return None
        comparison, number = limit
        reason = _replace(traced, node, comparison, number)
        if not reason:
            traced.notes.rope_switch = int(number) - (comparison in ("ge", "lt"))
        return reason

    return rewrite_each(traced, "choose_rope_per_sequence", step, traced.graph.nodes if traced.paged else ())


def _length_condition(traced: TracedGraph, node: Any) -> tuple[str, float] | None:
    """(comparison, number) when ``node`` compares max(position_ids) + c with a constant, c folded in."""
    if callee(node) not in _COMPARISONS or not isinstance(node, fx.Node):
        return None
    left, right = node.args
    if isinstance(right, fx.Node) or not isinstance(left, fx.Node):
        return None
    limit = float(right)  # type: ignore[arg-type]
    while callee(left) in ("add", "sub") and not isinstance(left.args[1], fx.Node):
        limit = limit - left.args[1] if callee(left) == "add" else limit + left.args[1]  # type: ignore[operator]
        left = left.args[0]  # type: ignore[assignment]
    if callee(left) not in ("max", "amax") or len(left.args) != 1 or left.kwargs:
        return None
    if not isinstance(left.args[0], fx.Node) or left.args[0].name != traced.position_ids:
        return None
    return callee(node), limit + 1  # max(position) + 1 is the length


def _replace(traced: TracedGraph, choice: fx.Node, comparison: str, limit: float) -> str:
    depends = dependences(traced)
    region = _per_position_region(choice, depends)
    exits = [n for n in region if any(u not in region and not mutated_arguments(u) for u in n.users)]
    symbol = traced.token_symbol
    dims: dict[fx.Node, int] = {}
    for node in exits:
        found = [
            i for i, s in enumerate(shape(node)) if isinstance(s, torch.SymInt) and symbol in s.node.expr.free_symbols
        ]
        if len(found) != 1:
            return f"{node.name} depends on the longest position but has no token axis to choose along"
        dims[node] = found[0]
    lengths = traced.step_input("token_lengths")
    with traced.graph.inserting_before(choice):
        chosen = traced.call(getattr(torch, comparison), lengths, limit)
    branches = [_Branch(choice, choice.args[1]), _Branch(choice, choice.args[2])]
    inside = set(region)
    for node in region[1:]:
        with traced.graph.inserting_before(node.next):
            for branch in branches:
                branch.copy(traced, node)
            if node in dims:
                condition = chosen
                for at in range(len(shape(node))):
                    if at != dims[node]:
                        condition = traced.method("unsqueeze", condition, at)
                new = traced.call(torch.where, condition, branches[0].copies[node], branches[1].copies[node])
                node.replace_all_uses_with(new, delete_user_cb=lambda u: u not in inside)
    for node in reversed(region):
        if mutated_arguments(node) and not node.users:
            traced.graph.erase_node(node)
    return ""


class _Branch:
    """Copies of the region's nodes with one of the two tables in place of the choice."""

    def __init__(self, choice: fx.Node, table: Any) -> None:
        self.copies: dict[fx.Node, Any] = {choice: table}
        self.held: dict[int | None, Any] = {}

    def copy(self, traced: TracedGraph, node: fx.Node) -> None:
        """Insert the copy of ``node``; a copy into a buffer only notes what the buffer would hold."""
        if targets := mutated_arguments(node):
            if callee(node) != "copy_":
                raise UnsupportedModel(
                    f"{node.name} writes a rotary table into a buffer by something other than copy_"
                )
            (target,) = targets
            self.copies[node] = self.held[storage_key(target)] = self._lookup(argument(node, 1, "src"))
            return
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._lookup)
        if node.op == "call_method":
            self.copies[node] = traced.method(str(node.target), *args, **kwargs)
        else:
            self.copies[node] = traced.call(node.target, *args, **kwargs)

    def _lookup(self, node: fx.Node) -> Any:
        return self.copies[node] if node in self.copies else self.held.get(storage_key(node), node)


def _per_position_region(choice: fx.Node, depends: dict[fx.Node, Depends]) -> list[fx.Node]:
    """``choice`` and everything computed from it and from positions alone, in graph order; the model's own
    buffers that the choice is copied into are followed through the copy."""
    inside: set[fx.Node] = {choice}
    order = list(choice.graph.nodes)
    carriers: set[int] = set()
    for node in order[order.index(choice) + 1 :]:
        if depends[node] > Depends.POSITION or node.op in ("output", "placeholder"):
            continue
        key = storage_key(node)
        reads = any(n in inside or storage_key(n) in carriers for n in node.all_input_nodes)
        if not reads or not is_tensor(node):
            continue
        inside.add(node)
        if key is not None and mutated_arguments(node):
            carriers.add(key)
    return [n for n in order if n in inside]
