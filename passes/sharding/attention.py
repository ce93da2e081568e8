"""Rule for paged attention: query heads, and the KV heads that they read, repeated where ranks exceed them."""

from __future__ import annotations

import numpy as np
from torch import fx

from ...runtime.ops.arguments import PagedAttentionArguments
from ..graph.cut import Cut, Refused, groups_read
from ..graph.fx_nodes import shape
from .walk import Rule, Walk


def _paged_attention(walk: Walk, node: fx.Node, cut: Cut) -> None:
    if cut.dim != 1:
        raise Refused("attention is cut along something other than heads")
    call: PagedAttentionArguments[fx.Node] = PagedAttentionArguments(*node.args)  # type: ignore[arg-type]
    heads = groups_read(cut.indices, int(shape(call.query)[1]), int(shape(call.key)[1]))
    walk.works = walk.holds = True
    walk.demand(call.query, node, 1, cut.indices)
    for given in (call.key, call.value):
        walk.demand(given, node, 1, heads)
    for given in (call.key_cache, call.value_cache, call.key_scale, call.value_scale):
        walk.demand(given, node, 2, heads)
    for given in (call.sinks, call.alibi_slopes):
        walk.demand(given, node, 0, cut.indices)
    if call.relative_bias is not None:
        walk.demand(call.relative_bias, node, 1, cut.indices)
    in_order = np.concatenate(heads).tolist() == list(range(int(shape(call.key)[1])))
    walk.hold(call.key_cache, num_kv_heads=len(heads[0]), head_ranks=walk.ranks if in_order else 0)


ATTENTION: dict[str, Rule] = {"paged_attention": _paged_attention}
