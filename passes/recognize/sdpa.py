"""Recognize torch's scaled_dot_product_attention.

Matches:
    F.scaled_dot_product_attention(q, k', v', attn_mask=mask, is_causal=c, scale=s, enable_gqa=g)
    where k' and v' may be k and v with repeated heads, in any spelling
Becomes:
    pagoda::attention(q, k, v, mask, ..., scale=s, is_causal=c)     # k, v un-repeated
Why it is faster:
    the repeated keys and values are never made, and the call no longer hides behind whichever decomposition the
    backend picks for its shapes, so later passes can give it a paged cache.

Level 0.
"""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from ..graph.attention_node import insert_attention
from ..graph.evaluate import DependsOnData, Evaluation, small_sizes
from ..graph.fx_nodes import argument, callee, is_tensor, shape, value
from ..graph.head_layout import find_layout
from ..graph.record import PassRecord
from ..graph.rewrite_each import rewrite_each
from ..graph.traced import TracedGraph


def recognize_sdpa(traced: TracedGraph) -> PassRecord:
    """Replace every scaled_dot_product_attention by ``pagoda::attention``."""

    def step(node: fx.Node) -> str | None:
        return _replace(traced, node) if callee(node) == "scaled_dot_product_attention" else None

    return rewrite_each(traced, "recognize_sdpa", step)


def _replace(traced: TracedGraph, node: fx.Node) -> str:
    """Rewrite one call; return why not, or "" when done."""
    query, key, val = (argument(node, i, name) for i, name in enumerate(("query", "key", "value")))
    mask = argument(node, 3, "attn_mask")
    dropout = argument(node, 4, "dropout_p", 0.0)
    causal = argument(node, 5, "is_causal", False)
    scale = argument(node, 6, "scale")
    grouped = argument(node, 7, "enable_gqa", False)
    if isinstance(causal, fx.Node):
        causal = value(causal)
    if not isinstance(dropout, (int, float)) or dropout:
        return f"dropout_p={dropout} is active"
    if not isinstance(causal, bool):
        return "is_causal depends on a size; only constants are supported"
    if len(shape(query)) != 4:
        return f"the query has rank {len(shape(query))}, not [batch, heads, tokens, dim]"
    scale_value = _number(traced, scale) if scale is not None else 1.0 / math.sqrt(int(shape(query)[-1]))
    if scale_value is None:
        return "the scale is computed from data"
    if mask is not None and not is_tensor(mask):
        return "attn_mask is not a tensor"
    key_layout, value_layout = find_layout(key), find_layout(val)
    if key_layout is None or value_layout is None:
        return f"key rank {len(shape(key))} and value rank {len(shape(val))} are not both 4"
    if grouped is False and int(shape(key)[1]) not in (1, int(shape(query)[1])):
        return f"{shape(key)[1]} key heads for {shape(query)[1]} query heads without enable_gqa"
    with traced.graph.inserting_before(node):
        new = insert_attention(
            traced, query, key, val, key_layout, value_layout, mask=mask, scale=scale_value, is_causal=causal
        )
    new.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
    node.replace_all_uses_with(new)
    traced.graph.erase_node(node)
    return ""


def _number(traced: TracedGraph, item: Any) -> float | None:
    if not isinstance(item, fx.Node):
        return float(item)
    evaluation = Evaluation(traced, small_sizes(item))
    try:
        number = float(evaluation(item))
    except (DependsOnData, TypeError, ValueError, RuntimeError):
        return None
    traced.notes.fold(evaluation.sources(item))
    return number
