"""Move the transpose from ``[B, T, H, D]`` to ``[B, H, T, D]`` behind what works on each head by itself.

Matches:
    f(transpose(x, 1, 2))                 # f cuts, norms or scales along the last dim
Becomes:
    transpose(f(x), 1, 2)
Why it is faster:
    Ascend's attention and rotation read tokens first. One right in front of them is not carried out; one
    that something else stands behind is a copy.

Level 0.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ...graph.fx_nodes import CUT_DIM_AT, callee, eliminate_dead_code, is_tensor, shape, value
from ...graph.record import PassRecord
from ...graph.traced import TracedGraph

_aten = torch.ops.aten
_ALONG_THE_LAST_DIM = frozenset({"rms_norm", "layer_norm"})
_OF_ONE_TENSOR = frozenset({"mul.Tensor", "mul.Scalar", "div.Tensor", "neg", "_to_copy"})


def transposes_heads(node: fx.Node) -> bool:
    """Tell whether ``node`` exchanges dims 1 and 2 of a tensor of rank 4."""
    if len(shape(node)) != 4:
        return False
    args: tuple[Any, ...] = node.args
    if callee(node) == "transpose.int":
        return {d % 4 for d in args[1:]} == {1, 2}
    return callee(node) == "permute" and [d % 4 for d in args[1]] == [0, 2, 1, 3]


def sink_transposes(traced: TracedGraph) -> PassRecord:
    """Exchange each transpose with the operators behind it, as far as they let it."""
    record = PassRecord("sink_transposes")
    pending = [node for node in traced.graph.nodes if transposes_heads(node)]
    while pending:
        transpose = pending.pop()
        for user in list(transpose.users):
            transposed = _exchange(traced, transpose, user)
            pending += transposed
            record.matches += bool(transposed)
    if record.matches:
        eliminate_dead_code(traced.graph)
    return record


def _exchange(traced: TracedGraph, transpose: fx.Node, user: fx.Node) -> list[fx.Node]:
    """The transposes behind what stands for ``user`` now; [] when it stays."""
    others = [n for n in user.all_input_nodes if n is not transpose]
    if user.args[0] is not transpose or any(is_tensor(n) and len(shape(n)) > 1 for n in others):
        return []  # the other operand would have to be transposed too
    name, source = callee(user), transpose.args[0]
    args: list[Any] = list(user.args[1:])
    if name in CUT_DIM_AT:
        at = CUT_DIM_AT[name]
        if len(user.args) <= at:
            return []
        dim = args[at - 1] % 4
        args[at - 1] = {1: 2, 2: 1}.get(dim, dim)
    elif name not in _ALONG_THE_LAST_DIM and name not in _OF_ONE_TENSOR:
        return []
    with traced.before(user):
        moved = traced.call(user.target, source, *args, **user.kwargs)
        if not isinstance(value(moved), list | tuple):
            back = traced.call(_aten.transpose.int, moved, 1, 2)
            traced.substitute(user, back)
            return [back]
        transposes = []
        for item in list(user.users):
            part = traced.call(operator.getitem, moved, item.args[1])
            back = traced.call(_aten.transpose.int, part, 1, 2)
            traced.substitute(item, back)
            transposes.append(back)
    return transposes
