"""Multi-head latent attention for Ascend, over the latent.

Matches:
    pagoda::paged_attention(q, k, v, key_cache, value_cache, ...)       # H heads
        k[h], v[h] = [c @ W_uk[h].T, shared], c @ W_uv[h].T             # both parts of one product of the latent c
Becomes:
    npu_scatter_pa_kv_cache(c, shared, key_cache, value_cache, ...)     # one KV head; or an operator that does more
    q'[h] = q[h, own dims] @ W_uk[h]                                    # npu_transpose_batchmatmul
    npu_fused_infer_attention_score(q', c, c, query_rope=q[rest], key_rope=shared, num_key_value_heads=1)
        or npu_sparse_flash_attention(q', c, c, selected, ...), where an indexer chooses the keys
    out[h] = out'[h] @ W_uv[h].T                                        # npu_transpose_batchmatmul
Why it is faster:
    the cache holds one latent per token instead of a key and a value per head (DeepSeek-V3: 576 numbers instead of
    40960), and they are not computed anew for every head.

How the latent, what all heads share and the queries are made is looked at for operators that do that as well; see
``mla_prolog``.

Level 2: products are summed in another order. Source: DeepSeek-AI, DeepSeek-V2: A Strong, Economical, and Efficient
Mixture-of-Experts Language Model, 2024, section 2.1 and appendix C.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import fx

from .....runtime.ops.npu.limits import violations
from .....runtime.ops.npu.limits.attention import MASK_SIZE, UNLIMITED
from .....runtime.ops.npu.limits.sparse_attention import SPARSE_ABSORBED
from ....graph.attention_node import PagedAttentionCall, paged_attention_nodes
from ....graph.fx_nodes import cache_index, eliminate_dead_code, shape, value
from ....graph.record import NoMatch, PassRecord
from ....graph.traced import TracedGraph
from ..attention.indexers import CAUSAL, sequence_ends
from ..attention.paged_attention import causal_mask
from ..call import Call
from ..site import Site
from .layout import LatentKeys, LayoutTracer, add_weight, forget_unread_merges, latent_keys, weight_rows
from .parts import Query, heads_by_token, shared_by_token
from .prolog import Place, prolog, write_normed_and_rotated

LATENT = "npu.npu_fused_infer_attention_score over the latent"
SPARSE = "npu.npu_sparse_flash_attention"

_npu, _aten = torch.ops.npu, torch.ops.aten
_BAND = 4
_ROWS_FIRST, _AS_STORED = [1, 0, 2], [0, 1, 2]


def absorb_latent_attention(traced: TracedGraph) -> PassRecord:
    """Let every attention whose keys and values are made from a latent read that; others are left alone."""
    record = PassRecord("absorb_latent_attention")
    if traced.npu is None:
        return record
    nodes, inputs = list(paged_attention_nodes(traced)), set(traced.placeholders)
    readers, tracer = Counter(node.args[3] for node in nodes), LayoutTracer()
    for node in nodes:
        site = Site(traced, node, record)
        try:
            latent = latent_keys(tracer, node.args[1], node.args[2])  # type: ignore[arg-type]
            if latent is None:
                if PagedAttentionCall.of(node).selected is not None:  # which nothing else lowers
                    raise NoMatch("its keys and values are not made from a latent")
                continue
            if readers[node.args[3]] > 1:
                raise NoMatch("its cache is read by another attention too")
            with traced.before(node):
                new = _LatentAttention(site, tracer, latent).lower()
        except NoMatch as error:
            site.refuse(LATENT if PagedAttentionCall.of(node).selected is None else SPARSE, str(error))
            node.meta["refused"] = tuple(site.refused)
            record.reject(node, str(error))
            continue
        site.replace_heads_first(node, new)
        site.done()
    if record.matches:
        eliminate_dead_code(traced.graph)
        forget_unread_merges(traced)
    for node in [n for n in traced.placeholders if n not in inputs and not n.users]:  # of routes that were refused
        traced.graph.erase_node(node)
        traced.constants.pop(node.name, None)
    return record


class _LatentAttention:
    """One call, its arguments by name.

    Args:
        site: of the call.
        tracer: what runs data movements.
        latent: how its keys and values are made.

    Raises:
        NoMatch: it has no legal form over the latent.
    """

    def __init__(self, site: Site, tracer: LayoutTracer, latent: LatentKeys) -> None:
        self.site, self.traced, self.latent = site, site.traced, latent
        call = PagedAttentionCall.of(site.node)
        query, self.key_cache, self.value_cache = call.query, call.key_cache, call.value_cache
        self.slot_mapping, self.block_table = call.slot_mapping, call.block_table
        self.scale, self.sliding_window = call.scale, call.sliding_window
        self.selected, self.query_start_loc, self.seq_lens = call.selected, call.query_start_loc, call.seq_lens
        self.sinks = None if call.selected is None else call.sinks
        unknown = (
            *(("sinks", self.sinks is None and call.sinks), ("soft cap", call.softcap), ("ALiBi", call.alibi_slopes)),
            *(("chunks", call.chunk), ("bias by distance", call.relative_bias)),
            ("window beside chosen keys", call.selected is not None and call.sliding_window),
        )
        for what, there in unknown:
            if there:
                raise NoMatch(f"it knows no {what}")
        if call.key_scale is not None:
            raise NoMatch("it reads an int8 latent only with int8 queries")
        self.heads = int(shape(query)[1])
        if self.heads != latent.key_rows.heads:
            raise NoMatch(f"{self.heads} heads of queries over {latent.key_rows.heads} of keys")
        self.like = value(query)
        key_name, key_rows = weight_rows(self.traced, latent.product, latent.key_rows)
        value_name, value_rows = weight_rows(self.traced, latent.product, latent.value_rows)
        tokens_first = call.selected is not None or self._takes_tokens_first(value_rows)
        self.layout = "TND" if tokens_first else "TND_NTD"
        self._check()
        self.query = Query.of(tracer, query, latent)
        caches = self.key_cache, self.value_cache
        self.place = Place(site, tracer, latent, self.query, self.slot_mapping, *caches, self.selected)
        # [H, D, latent] and [H, latent, Dv]
        self.key_weight = add_weight(self.traced, f"keys_of_{key_name}", key_rows)
        self.value_weight = add_weight(self.traced, f"values_of_{value_name}", value_rows.transpose(1, 2))

    def _takes_tokens_first(self, value_rows: torch.Tensor) -> bool:
        """Tell whether the last product takes the kernel's results tokens first. Very many heads must be first."""
        with self.traced.fake_mode:
            rows = self.like.new_empty(self.like.shape[2], self.heads, self.latent.latent_dim)
            weight = self.like.new_empty(self.heads, self.latent.latent_dim, value_rows.shape[1])
        product = _npu.npu_transpose_batchmatmul.default
        return not violations(Call.make(product, self.site.target, rows, weight, perm_x1=_ROWS_FIRST))

    def _check(self) -> None:
        """Raise ``NoMatch`` where a call that there is no other route for is not legal."""
        size, latent, rotary = self.site.target.block_size, self.latent.latent_dim, self.latent.rotary_dim
        tokens, blocks = self.like.shape[2], value(self.key_cache).shape[0]
        with self.traced.fake_mode:
            query, query_rope = (self.like.new_empty(tokens, self.heads, dim) for dim in (latent, rotary))
            rows = [self.like.new_empty(tokens, 1, dim) for dim in (latent, rotary)]
            caches = [self.like.new_empty(blocks, size, 1, dim) for dim in (latent, rotary)]
            keys, key_rope = (self.like.new_empty(blocks, size, dim) for dim in (latent, rotary))
            mask = torch.empty(MASK_SIZE, MASK_SIZE, dtype=torch.int8)
        write, slots = _npu.npu_scatter_pa_kv_cache.default, self.slot_mapping
        if self.selected is None:
            attend = _npu.npu_fused_infer_attention_score.default
            given: tuple[Any, ...] = (query, keys, keys)
            kwargs = self._arguments(query_rope, key_rope, [1], [1], mask)
        else:
            attend, given = _npu.npu_sparse_flash_attention.default, (query, caches[0], caches[0])
            indices = value(self.selected).transpose(0, 1)
            given = (*given, indices, self.scale)
            sinks = None if self.sinks is None else value(self.sinks).float()
            kwargs = self._sparse_arguments(query_rope, caches[1], value(self.query_start_loc)[1:], sinks)
        for call in (
            Call.make(attend, self.site.target, *given, **kwargs),
            Call.make(write, self.site.target, *rows, *caches, slots, cache_mode="Norm"),
        ):
            reasons = violations(call)
            if reasons:
                raise NoMatch("; ".join(reasons))

    def lower(self) -> fx.Node:
        """The result, ``[1, T, H, Dv]``."""
        latent, rotary = self.latent.latent_dim, self.latent.rotary_dim
        index = cache_index(self.key_cache)
        assert index is not None
        self.traced.lay_out_cache(index, self.site.target.block_size, latent, rotary, num_kv_heads=1)
        both = prolog(self.place, self.key_weight)
        if both is None:
            rest = write_normed_and_rotated(self.place)
            if rest is None:
                rest = self._write()
            content = heads_by_token(self.site, self.query.content.by_token(self.site))
            both = self._product(content, self.key_weight, tokens_first=True), rest
        attend = self._attend if self.selected is None else self._attend_selected
        return self.traced.call(_aten.unsqueeze.default, self._values(attend(*both)), 0)

    def _write(self) -> fx.Node:
        """Write the latent and what all heads share as they are; the query's part that meets the latter."""
        latent = self.latent
        rows = self.traced.call(_aten.reshape.default, latent.latent, [-1, 1, latent.latent_dim])
        done = self.site.call(
            _npu.npu_scatter_pa_kv_cache.default,
            self.site.dense(rows),
            shared_by_token(self.site, latent),
            self.key_cache,
            self.value_cache,
            self.slot_mapping,
            cache_mode="Norm",
        )
        assert done is not None, self.site.refused
        return self.query.rest_by_token(self.site)

    def _attend(self, query: fx.Node, query_rope: fx.Node) -> fx.Node:
        """Sums of latents, ``[T, H, latent]`` or, in layout TND_NTD, ``[H, T, latent]``."""
        keys, key_rope = (
            self.traced.call(_aten.reshape.default, cache, [-1, self.site.target.block_size, int(shape(cache)[-1])])
            for cache in (self.key_cache, self.value_cache)
        )
        kwargs = self._arguments(
            query_rope,
            key_rope,
            self.traced.step_input("query_ends"),
            self.traced.step_input("kv_lens"),
            causal_mask(self.traced, query),
        )
        results = self.site.call(_npu.npu_fused_infer_attention_score.default, query, keys, keys, **kwargs)
        assert results is not None, self.site.refused
        return self.site.item(results, 0)

    def _attend_selected(self, query: fx.Node, query_rope: fx.Node) -> fx.Node:
        """Sums of the latents that were chosen, ``[T, H, latent]``."""
        assert self.selected is not None
        if self.selected.target is _aten.transpose.int:  # by ``lower_npu_indexers``
            indices: Any = self.selected.args[0]
        else:
            indices = self.traced.call(_aten.transpose.int, self.selected, 0, 1)
        ends = sequence_ends(self.traced, self.query_start_loc)
        sinks = None if self.sinks is None else self.site.cast(self.sinks, torch.float32)
        results = self.site.call(
            _npu.npu_sparse_flash_attention.default,
            *(query, self.key_cache, self.key_cache, self.site.dense(indices), self.scale),
            **self._sparse_arguments(query_rope, self.value_cache, ends, sinks),
        )
        assert results is not None, self.site.refused
        return self.site.item(results, 0)

    def _sparse_arguments(self, query_rope: Any, key_rope: Any, query_ends: Any, sinks: Any) -> dict[str, Any]:
        return {
            "block_table": self.block_table,
            "actual_seq_lengths_query": query_ends,
            "actual_seq_lengths_kv": self.seq_lens,
            "query_rope": query_rope,
            "key_rope": key_rope,
            "sparse_block_size": 1,
            "layout_query": "TND",
            "layout_kv": "PA_BSND",
            "sparse_mode": CAUSAL,
            "attention_mode": SPARSE_ABSORBED,
            "sinks": sinks,
        }

    def _arguments(self, query_rope: Any, key_rope: Any, query_lens: Any, kv_lens: Any, mask: Any) -> dict[str, Any]:
        window = self.sliding_window
        return {
            "query_rope": query_rope,
            "key_rope": key_rope,
            "atten_mask": mask,
            "actual_seq_lengths": query_lens,
            "actual_seq_lengths_kv": kv_lens,
            "block_table": self.block_table,
            "num_heads": self.heads,
            "num_key_value_heads": 1,
            "scale": self.scale,
            "input_layout": self.layout,
            "sparse_mode": _BAND if window else CAUSAL,
            # The band starts that many keys before the query's own.
            "pre_tokens": window - 1 if window else UNLIMITED,
            "next_tokens": 0 if window else UNLIMITED,
            "block_size": self.site.target.block_size,
            "inner_precise": 0,
        }

    def _values(self, rows: fx.Node) -> fx.Node:
        """``[T, H, Dv]``."""
        return self._product(rows, self.value_weight, tokens_first=self.layout == "TND")

    def _product(self, rows: fx.Node, weight: fx.Node, *, tokens_first: bool) -> fx.Node:
        """Each head's rows by its own matrix, ``[T, H, N]``; ``rows`` are ``[T, H, K]`` or ``[H, T, K]``."""
        product = self._fused_product(rows, weight, _ROWS_FIRST if tokens_first else _AS_STORED)
        if product is not None:
            return product
        if tokens_first:
            rows = self.traced.call(_aten.transpose.int, rows, 0, 1)
            product = self._fused_product(self.site.dense(rows), weight, _AS_STORED)
            if product is not None:
                return product
        product = self.site.aten(_aten.bmm.default, rows, weight)
        return self.site.dense(self.traced.call(_aten.transpose.int, product, 0, 1))

    def _fused_product(self, rows: fx.Node, weight: fx.Node, order: list[int]) -> fx.Node | None:
        return self.site.call(
            _npu.npu_transpose_batchmatmul.default,
            rows,
            weight,
            perm_x1=order,
            perm_x2=_AS_STORED,
            perm_y=_ROWS_FIRST,
        )
