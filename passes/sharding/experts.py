"""Routed experts: each rank holds some of them, and skips the ids of the others."""

from __future__ import annotations

from torch import fx

from ...runtime.ops.arguments import MoeArguments
from ..graph.cut import deal
from ..graph.fx_nodes import shape
from .walk import Walk


def spread_experts(walk: Walk, node: fx.Node) -> None:
    """Let every rank hold a part of the experts of ``node``, a ``pagoda::moe``.

    Raises:
        Refused: a weight has no such parts.
    """
    call: MoeArguments[fx.Node] = MoeArguments(*node.args)  # type: ignore[arg-type]
    held = deal(int(shape(call.up)[0]), 1, walk.ranks)
    for weight in (call.up, call.down, call.up_bias, call.down_bias):
        walk.demand(weight, node, 0, held)
    walk.opened = walk.works = True
    walk.finish()
