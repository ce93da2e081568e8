"""Compute complex numbers as pairs of real ones.

Matches:
    view_as_real(f(polar(r, a)))           # f rearranges: unsqueeze, view, expand, slice ...
Becomes:
    stack([f(r * cos(a)), f(r * sin(a))], -1)
    where only a half is read: that half, without the stack
Why:
    Ascend's graph engine knows no complex numbers, nor does torchair convert polar; models with rotations by complex
    products (DeepSeek-V2) keep such tables once their rotations are recognized.

Level 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ...graph.fx_nodes import callee, shape
from ...graph.record import NoMatch, PassRecord
from ...graph.rewrite_each import rewrite_each
from ...graph.traced import TracedGraph

_aten = torch.ops.aten
_REARRANGES = frozenset(
    {"unsqueeze", "squeeze.dim", "view", "reshape", "expand", "permute", "transpose.int", "slice.Tensor", "clone"}
)
"""What does the same to the tensor of real parts and to that of imaginary ones."""
_SIZE = "sym_size.int"

Halves = tuple[fx.Node, fx.Node]


def spell_out_complex(traced: TracedGraph) -> PassRecord:
    """Replace complex numbers that are made by ``polar`` and read as real ones."""

    def step(node: fx.Node) -> str | None:
        if callee(node) != "polar":
            return None
        radius, angle = node.args
        rearranged = _read_as_real(node)
        with traced.before(node):
            cos, sin = traced.call(_aten.cos.default, angle), traced.call(_aten.sin.default, angle)
            halves = traced.call(_aten.mul.Tensor, radius, cos), traced.call(_aten.mul.Tensor, radius, sin)
        made: dict[Any, Halves] = {node: halves}
        for user in rearranged:
            real, imaginary = made[user.args[0]]
            rest: Any = user.args[1:]
            with traced.before(user):
                if callee(user) == "view_as_real":
                    _substitute_pair(traced, user, (real, imaginary))
                elif callee(user) == _SIZE:
                    _measure(traced, user, real)
                else:
                    made[user] = (
                        traced.call(user.target, real, *rest, **user.kwargs),
                        traced.call(user.target, imaginary, *rest, **user.kwargs),
                    )
        return ""

    return rewrite_each(traced, "spell_out_complex", step)


def _read_as_real(node: fx.Node) -> list[fx.Node]:
    """What is made of complex numbers, in the graph's order, down to where they are read as real ones.

    Raises:
        NoMatch: something else reads them.
    """
    found: set[fx.Node] = set()
    pending = [node]
    while pending:
        for user in pending.pop().users:
            if callee(user) not in _REARRANGES | {"view_as_real", _SIZE}:
                raise NoMatch(f"{user.name} ({callee(user)}) reads complex numbers")
            if user not in found and callee(user) in _REARRANGES:
                pending.append(user)
            found.add(user)
    return sorted(found)


def _substitute_pair(traced: TracedGraph, node: fx.Node, halves: Halves) -> None:
    """Let two tensors stand for ``[..., 2]``, and where one of them is selected for what is selected."""
    last = len(shape(node)) - 1
    for user in list(node.users):
        args: Any = user.args
        if callee(user) == "select.int" and args[1] in (last, -1):
            traced.substitute(user, halves[args[2]])
        elif callee(user) == _SIZE and args[1] != last:
            _measure(traced, user, halves[0])
    if node.users:
        traced.substitute(node, traced.call(_aten.stack.default, list(halves), -1))


def _measure(traced: TracedGraph, size: fx.Node, tensor: fx.Node) -> None:
    """Let the size of another tensor stand for one."""
    size.replace_all_uses_with(traced.call(_aten.sym_size.int, tensor, size.args[1]))
    traced.graph.erase_node(size)
