"""Give every attention a paged KV cache.

Matches:
    pagoda::attention(q, k, v, mask=None, is_causal=True, ...)       # in a flat [1, T] step
Becomes:
    pagoda::paged_attention(q, k, v, key_cache_i, value_cache_i, slot_mapping, block_table, ...)
                                                           # in int8 also key_scale_i, value_scale_i
Why it is faster:
    keys and values of earlier tokens are read from the cache instead of being computed again, in blocks that any
    number of sequences share one pool of.

Layers that look back equally far form a group; each group has its own slots and block tables, so that blocks can be
let go where a window has passed. Caches are numbered by the (k, v) pair, so layers that share keys and values share
a cache.

Level 0.
"""

from __future__ import annotations

from torch import fx

from ...runtime.program import CacheSpec
from ...runtime.step_metadata import GROUP_FIELDS
from ..graph.attention_node import PAGED_ATTENTION, AttentionCall, attention_nodes
from ..graph.fx_nodes import is_dynamic, shape, value
from ..graph.record import PassRecord
from ..graph.rewrite_each import rewrite_each
from ..graph.traced import TracedGraph


def insert_paged_cache(traced: TracedGraph) -> PassRecord:
    """Replace every causal ``pagoda::attention`` of a flat step by ``pagoda::paged_attention``."""
    windows: list[int] = []  # one group of layers for each
    caches: dict[tuple[fx.Node, fx.Node, int], tuple[fx.Node, ...]] = {}

    def step(node: fx.Node) -> str | None:
        call = AttentionCall.of(node)
        reason = _refusal(call)
        if reason:
            return reason
        if call.sliding_window not in windows:
            windows.append(call.sliding_window)
        # On an NPU the captured graphs and padded steps know one block table.
        group = windows.index(call.sliding_window) if traced.npu is None else 0
        pair = (call.key, call.value, call.sliding_window)
        if pair not in caches:
            caches[pair] = traced.add_cache(
                CacheSpec(
                    num_kv_heads=int(shape(call.key)[1]),
                    key_dim=int(shape(call.key)[3]),
                    value_dim=int(shape(call.value)[3]),
                    dtype=traced.cache_dtype or value(call.key).dtype,
                    sliding_window=call.sliding_window,
                    group=group,
                )
            )
        key_cache, value_cache, *scales = caches[pair]
        metadata = [
            *(traced.step_input(field, group) for field in GROUP_FIELDS),
            *(traced.step_input(field) for field in ("query_start_loc", "seq_lens")),
        ]
        with traced.graph.inserting_before(node):
            new = traced.call(
                PAGED_ATTENTION,
                call.query,
                call.key,
                call.value,
                key_cache,
                value_cache,
                *metadata,
                call.sinks,
                call.alibi_slopes,
                call.scale,
                call.sliding_window,
                call.chunk,
                call.softcap,
                *(scales or (None, None)),
                call.selected,
                call.relative_bias,
            )
        new.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
        node.replace_all_uses_with(new)
        traced.graph.erase_node(node)
        return ""

    return rewrite_each(traced, "insert_paged_cache", step, attention_nodes(traced) if traced.paged else ())


def _refusal(call: AttentionCall) -> str:
    """The reason why this attention cannot take a paged cache; "" when it can."""
    if call.attn_mask is not None:
        return "its mask was not classified"
    if not call.is_causal:
        return "it is not causal: tokens would see later tokens"
    query, key, val = shape(call.query), shape(call.key), shape(call.value)
    if is_dynamic(query[0]) or int(query[0]) != 1 or int(key[0]) != 1:
        return f"its batch size is {query[0]}: the flat step must keep batch 1"
    if str(query[2]) != str(key[2]):
        return f"it attends from {query[2]} tokens to {key[2]}: cross-attention or a cache of its own"
    if not is_dynamic(query[2]):
        return f"its number of tokens is fixed at {query[2]}"
    if any(is_dynamic(s) for s in (query[1], query[3], key[1], key[3], val[1], val[3])):
        return "its heads or head size vary with the number of tokens"
    if int(val[1]) != int(key[1]):
        return f"{key[1]} key heads but {val[1]} value heads"
    return ""
