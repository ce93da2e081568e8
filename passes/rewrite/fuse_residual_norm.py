"""Fuse the addition to the residual stream with the norm that reads it.

Matches:
    s = x + residual; y = pagoda::rms_norm(s, ...)        # or layer_norm; s may have other users
Becomes:
    y, s = pagoda::add_rms_norm(x, residual, ...)
Why it is faster:
    the sum is normalized while it is still in the cache.

Level 2.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..graph.fx_nodes import callee, is_tensor, shape, value
from ..graph.record import PassRecord
from ..graph.rewrite_each import rewrite_each
from ..graph.traced import TracedGraph

_FUSED: dict[Any, Any] = {
    torch.ops.pagoda.rms_norm.default: torch.ops.pagoda.add_rms_norm.default,
    torch.ops.pagoda.layer_norm.default: torch.ops.pagoda.add_layer_norm.default,
}


def fuse_residual_norm(traced: TracedGraph) -> PassRecord:
    """Replace sums and the first norm over each by one operator that returns both."""

    def step(norm: fx.Node) -> str | None:
        if norm.op != "call_function" or norm.target not in _FUSED:
            return None
        total = norm.args[0]
        if not isinstance(total, fx.Node) or callee(total) != "add.Tensor":
            return None
        # In front of whatever reads the sum first.
        place = min(total.users)
        reason = _refusal(total)
        if not reason and any(n >= place for n in norm.all_input_nodes if n is not total):
            reason = "its scale is computed after the sum"
        if reason:
            return reason
        with traced.before(place, like=norm):
            both = traced.call(_FUSED[norm.target], *total.args, *norm.args[1:])
            normed = traced.call(operator.getitem, both, 0)
            new_total = traced.call(operator.getitem, both, 1)
        traced.substitute(norm, normed)
        traced.substitute(total, new_total)
        return ""

    return rewrite_each(traced, "fuse_residual_norm", step)


def _refusal(total: fx.Node) -> str:
    """The reason why a sum cannot be taken into the norm; "" when it can."""
    a, b = total.args[:2]
    if not (isinstance(a, fx.Node) and isinstance(b, fx.Node) and is_tensor(a) and is_tensor(b)):
        return "the added value is a number"
    if total.kwargs.get("alpha", 1) != 1:
        return f"the sum is scaled by alpha={total.kwargs['alpha']}"
    if not str(shape(a)) == str(shape(b)) == str(shape(total)):
        return f"{tuple(shape(a))} and {tuple(shape(b))} are broadcast"
    if not value(a).dtype == value(b).dtype == value(total).dtype:
        return f"{value(a).dtype} and {value(b).dtype} are added"
    return ""
