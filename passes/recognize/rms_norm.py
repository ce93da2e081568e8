"""Recognize root-mean-square norms.

Matches:
    x * rsqrt(mean(x ** 2, -1) + eps) * (weight [+ 1])
    with x cast to float32 before and back after, before or behind the scale; also x / sqrt(...) and pow(..., -0.5),
    with no scale, and without eps in half precision only when the statistics are taken in float32
Becomes:
    pagoda::rms_norm(x, weight, eps, weight_offset, round_before_scale)
Why it is faster:
    one pass over the row instead of seven operators; and it is what residual additions fuse with.

Level 2. Where half precision rounds is found by following the casts, and compared by running the norm. Source of the
operator: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
"""

from __future__ import annotations

import torch
from torch import fx

from ...runtime.ops.norm.rms_norm import rms_norm_reference
from ..graph.fx_nodes import callee, value
from ..graph.record import NoMatch, PassRecord
from ..graph.rewrite_each import rewrite_each
from ..graph.traced import TracedGraph
from .norm_region import (
    HALF,
    Root,
    cast_source,
    check_rounding,
    follow_scale,
    mean_over_last,
    product_with,
    root_of_mean_square,
)

RMS_NORM = torch.ops.pagoda.rms_norm.default


def recognize_rms_norm(traced: TracedGraph) -> PassRecord:
    """Replace every root-mean-square norm over the last dim by ``pagoda::rms_norm``."""

    def step(node: fx.Node) -> str | None:
        root = root_of_mean_square(node)
        if root is None or _is_centred(root.squares):
            return None
        _replace(traced, root)
        return ""

    return rewrite_each(traced, "recognize_rms_norm", step)


def _is_centred(node: fx.Node) -> bool:
    """``x - mean(x)``: that is a layer norm's."""
    return callee(node) == "sub.Tensor" and mean_over_last(node.args[1]) is node.args[0]


def _replace(traced: TracedGraph, root: Root) -> None:
    """Rewrite the norm around one root."""
    squares = root.squares
    if value(squares).dtype in HALF:
        raise NoMatch(f"its statistics are taken in {value(squares).dtype}")
    users = list(root.node.users)
    if len(users) != 1:
        raise NoMatch(f"the root mean square has {len(users)} users")
    factor = product_with(users[0], root)
    if factor is None:
        raise NoMatch(f"the root mean square goes into {callee(users[0])}")
    normalized = users[0]
    entry = cast_source(squares)
    if factor is not squares:
        if cast_source(factor) is not entry:
            raise NoMatch("the scaled tensor is not the squared one")
        if factor is entry and value(entry).dtype in HALF and value(normalized).dtype in HALF:
            raise NoMatch("the root is rounded before it is multiplied")
    found = None
    if entry is not squares:
        try:
            found = follow_scale(normalized, value(entry).dtype)
        except NoMatch:
            entry = squares  # stays in float32: the cast before it is not the norm's
    if found is None:
        found = follow_scale(normalized, value(entry).dtype)
    rest = (root.eps, found.weight_offset, found.round_before_scale)
    check_rounding(entry, found, lambda x, weight: rms_norm_reference(x, weight, *rest))
    with traced.before(found.output):
        weight = found.weight
        if weight is not None and value(weight).dtype in HALF and value(entry).dtype is torch.float32:
            # A residual stream in float32 under half-precision weights: the product is in float32, too.
            weight = traced.call(torch.ops.aten._to_copy.default, weight, dtype=torch.float32)
        norm = traced.call(RMS_NORM, entry, weight, *rest)
    traced.substitute(found.output, norm)
