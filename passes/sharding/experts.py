"""Routed experts: groups of ranks hold different ones; within a group each rank holds a part of their features."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import fx

from ...runtime.ops.arguments import MoeArguments
from ..graph.cut import ZERO, Cut, Indices, deal, first_only
from ..graph.fx_nodes import shape
from ..graph.traced import TracedGraph, UnsupportedModel
from .slices import column_unit
from .walk import Walk

_ROWS: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "plain": lambda held, size: held,
    "halves": lambda held, size: np.concatenate([held, np.where(held == ZERO, ZERO, held + size)]),
    "interleaved": lambda held, size: np.where(held == ZERO, ZERO, np.stack([2 * held, 2 * held + 1])).T.ravel(),
}
"""By layout, the rows of ``up`` that make features, of so many."""


def expert_groups(traced: TracedGraph, count: int) -> int:
    """The number of groups of ranks that hold different ones of ``count`` experts.

    Raises:
        UnsupportedModel: more are asked for than there are experts.
    """
    asked = traced.expert_groups
    if asked is None:
        return max(n for n in range(1, traced.ranks + 1) if traced.ranks % n == 0 and n <= count)
    if asked > count:
        raise UnsupportedModel(
            f"expert_parallel_size={asked} is more than the {count} experts of a layer; use {count} or less"
        )
    return asked


def hold_experts(walk: Walk, node: fx.Node) -> None:
    """Let every rank hold a part of the experts of ``node``, a ``pagoda::moe``.

    Raises:
        Refused: a weight has no such parts.
        UnsupportedModel: as ``expert_groups``.
    """
    call: MoeArguments[fx.Node] = MoeArguments(*node.args)  # type: ignore[arg-type]
    count, ranks = int(shape(call.up)[0]), walk.ranks
    walk.expert_groups = groups = expert_groups(walk.traced, count)
    size = ranks // groups
    outer = deal(count, 1, groups)
    experts = tuple(outer[rank // size] for rank in range(ranks))

    def demand(weight: fx.Node | None, dim: int, of_size: Indices) -> None:
        """Let ranks hold their experts of a weight, and of these what ``of_size`` says of the ranks of a group."""
        inner = Cut(dim, tuple(of_size[rank % size] for rank in range(ranks)))
        if size == 1:
            walk.demand(weight, node, 0, experts)
        elif groups == 1:
            walk.demand(weight, node, dim, inner.indices)
        else:
            walk.demand(weight, node, 0, experts, inner)

    features, outputs = map(int, shape(call.down)[1:] if call.transposed else reversed(shape(call.down)[1:]))
    held = deal(features, column_unit(walk.traced.constants.get(call.down.name)), size)
    rows = tuple(_ROWS[call.layout](part, features) for part in held)
    demand(call.up, 2 if call.transposed else 1, rows)
    demand(call.up_bias, 1, rows)
    demand(call.down, 1 if call.transposed else 2, held)
    demand(call.down_bias, 1, first_only(outputs, size))
    walk.opened = walk.works = True
    walk.finish()
