"""Fuse the addition to the residual stream with the norm that reads it.

Matches:
    s = x + residual; y = pagoda::rms_norm(s, ...)        # or layer_norm; s may have other users
Becomes:
    y, s = pagoda::add_rms_norm(x, residual, ...)
Why it is faster:
    the sum is normalised while it is still in the cache.

Level 2.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from ..fx_nodes import callee, eliminate_dead_code, is_tensor, module_path, shape, value
from ..record import PassRecord, Rejection
from ..traced import TracedGraph

NAME = "fuse_residual_norm"

_FUSED = {
    torch.ops.pagoda.rms_norm.default: torch.ops.pagoda.add_rms_norm.default,
    torch.ops.pagoda.layer_norm.default: torch.ops.pagoda.add_layer_norm.default,
}


def fuse_residual_norm(traced: TracedGraph) -> PassRecord:
    """Replace sums and the first norm over each by one operator that returns both."""
    record = PassRecord(NAME)
    for norm in list(traced.graph.nodes):
        if norm.op != "call_function" or norm.target not in _FUSED:
            continue
        total = norm.args[0]
        if not isinstance(total, fx.Node) or callee(total) != "add.Tensor":
            continue
        reason = _refusal(total)
        if reason:
            record.rejections.append(Rejection(norm.name, reason, module_path(norm)))
            continue
        # The operator stands where the sum was: everything that the norm reads besides is older.
        with traced.before(norm):
            both = traced.call(_FUSED[norm.target], *total.args, *norm.args[1:])
            normed = traced.call(operator.getitem, both, 0)
            new_total = traced.call(operator.getitem, both, 1)
        if not _move_up(traced, (both, normed, new_total), total, norm):
            for node in (new_total, normed, both):
                traced.graph.erase_node(node)
            record.rejections.append(Rejection(norm.name, "its scale is computed after the sum", module_path(norm)))
            continue
        traced.substitute(norm, normed)
        traced.substitute(total, new_total)
        record.matches += 1
    if record.matches:
        eliminate_dead_code(traced.graph)
    return record


def _refusal(total: fx.Node) -> str:
    """Why a sum cannot be taken into the norm; "" when it can."""
    a, b = total.args[:2]
    if not (isinstance(a, fx.Node) and isinstance(b, fx.Node) and is_tensor(a) and is_tensor(b)):
        return "what is added is a number"
    if total.kwargs.get("alpha", 1) != 1:
        return f"the sum is scaled by alpha={total.kwargs['alpha']}"
    if not str(shape(a)) == str(shape(b)) == str(shape(total)):
        return f"{tuple(shape(a))} and {tuple(shape(b))} are broadcast"
    if not value(a).dtype == value(b).dtype == value(total).dtype:
        return f"{value(a).dtype} and {value(b).dtype} are added"
    return ""


def _move_up(traced: TracedGraph, nodes: tuple[fx.Node, ...], total: fx.Node, norm: fx.Node) -> bool:
    """Move the fused operator in front of the sum's first other user; False if it reads what comes later."""
    others = [u for u in total.users if u is not norm and u not in nodes]
    first = min([norm, *others])
    if first is norm:
        return True
    if any(argument >= first for argument in nodes[0].all_input_nodes):
        return False
    for node in nodes:
        first.prepend(node)
    return True
