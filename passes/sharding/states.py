"""Rules for operators that keep state: channels of convolutions and scans, value heads of recurrences."""

from __future__ import annotations

from typing import Any

from torch import fx

from ..graph.cut import Cut, Refused, groups_read
from ..graph.fx_nodes import cache_index, shape
from .walk import Rule, Walk


def _convolution(walk: Walk, node: fx.Node, cut: Cut) -> None:
    source, weight, bias, _, state = node.args[:5]
    if cut.dim != 2:
        raise Refused("a convolution is cut along its tokens")
    walk.works = walk.holds = True
    walk.demand(source, node, 2, cut.indices)
    walk.demand(weight, node, 0, cut.indices)
    walk.demand(bias, node, 0, cut.indices)
    _hold(walk, node, state, 2, cut)


def _recurrence(walk: Walk, node: fx.Node, cut: Cut) -> None:
    query, key, values, decay, beta = node.args[:5]
    if cut.dim != 2:
        raise Refused("a recurrence is cut along something other than heads")
    walk.works = walk.holds = True
    heads = groups_read(cut.indices, int(shape(values)[2]), int(shape(key)[2]))
    for given in (query, key):
        walk.demand(given, node, 2, heads)
    walk.demand(values, node, 2, cut.indices)
    walk.demand(decay, node, 2 if len(shape(decay)) > 1 else 0, cut.indices)
    walk.demand(beta, node, 2, cut.indices)
    _hold(walk, node, node.args[7], 1, cut)


def _scan(walk: Walk, node: fx.Node, cut: Cut) -> None:
    if cut.dim != 2:
        raise Refused("a scan is cut along its tokens")
    source, step, matrix = node.args[:3]
    walk.works = walk.holds = True
    walk.demand(source, node, 2, cut.indices)
    walk.demand(step, node, 2, cut.indices)
    walk.demand(matrix, node, 0, cut.indices)
    _hold(walk, node, node.args[6], 1, cut)


def _hold(walk: Walk, node: fx.Node, state: Any, dim: int, cut: Cut) -> None:
    """Store a part of a state ``[slots, ...]`` that is cut along ``dim``."""
    walk.demand(state, node, dim, cut.indices)
    index = cache_index(state)
    assert index is not None
    sizes = list(walk.traced.caches[index].shape)  # type: ignore[union-attr]
    sizes[dim - 1] = cut.local
    walk.hold(state, shape=tuple(sizes))


STATES: dict[str, Rule] = {
    "causal_conv1d": _convolution,
    "linear_recurrence": _recurrence,
    "selective_scan": _scan,
}
