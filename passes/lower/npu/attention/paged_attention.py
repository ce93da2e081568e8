"""Paged attention for Ascend.

Matches:
    pagoda::paged_attention(q, k, v, key_cache, value_cache, slot_mapping, block_table, query_start_loc, ...)
Becomes:
    npu_scatter_pa_kv_cache(k, v, key_cache, value_cache, slot_mapping, cache_mode="Norm")
    npu_fused_infer_attention_score(q, key_cache, value_cache, ...)      # _v2 where there are sinks
        TND: the tokens of all sequences one after the other, for prefill, chunked prefill and decode alike
        TND with heads padded to 128, or BSH with sequences padded to the longest, where TND does not take the heads;
        to two tokens at least, since masks and windows have no effect where there is one query per sequence
    or, where no form is legal (soft caps, ALiBi, chunks), the ATen operators of the formula over gathered blocks
With int8 caches, which the kernel reads for one new token per sequence at most:
    k8, s = npu_dynamic_quant(k)                            # v likewise; or the ATen operators of its formula
    npu_scatter_pa_kv_cache(k8, v8, key_cache, value_cache, slot_mapping, cache_mode="Norm")
    npu_scatter_nd_update_(key_scale, [block, head, offset] of the slots, s)      # and value_scale
    the formula over gathered blocks, dequantized, with a note that decode steps can have the kernel
    (``decode_attention``); where they cannot, scales are written at [block, offset]
Why it is faster:
    one kernel reads the blocks where they lie. The caches stay whole graph inputs that are written once and read
    afterwards: any other use makes the graph engine copy them in every step.

Level 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .....runtime.npu_target import Product
from .....runtime.ops.attention.gathered_attention import gathered_attention
from .....runtime.ops.attention.int8_rows import quantize_rows
from .....runtime.ops.npu.limits import violations
from .....runtime.ops.npu.limits.attention import MASK_SIZE
from ....graph.attention_node import PAGED_ATTENTION, PagedAttentionCall
from ....graph.fx_nodes import cache_index, callee, shape, value
from ....graph.record import PassRecord
from ....graph.traced import TracedGraph, UnsupportedModel
from ..call import Call
from ..sink_transposes import transposes_heads
from ..site import Site, lower_each
from .attention_form import LEAST_QUERIES, AttentionForm
from .attention_probe import why_wrong
from .attention_routes import Heads, routes_by_traffic
from .cache_rows import block_and_offset, write_rows
from .decode_attention import note_decoded, why_not_decoded

_npu, _aten = torch.ops.npu, torch.ops.aten
GATHERED = "gathered"
DECODED = "gathered, by the kernel at decode"


def lower_npu_paged_attention(traced: TracedGraph) -> PassRecord:
    """Lower every paged attention of the graph; its caches get the layout and block size of the target."""
    routes: dict[fx.Node, str] = {}

    def lower(site: Site, *_: Any) -> None:
        site.replace_heads_first(site.node, _PagedAttention(site, routes).lower())

    return lower_each(traced, "lower_npu_paged_attention", {PAGED_ATTENTION: lower})


class _PagedAttention:
    """One call, its arguments by name.

    Args:
        site: of the call.
        routes: key cache → how the attention that wrote it was lowered; layers that share a cache share the route.

    Raises:
        UnsupportedModel: it reads keys that an indexer chooses; ``latent.attention`` lowers what there is an operator
            for.
    """

    def __init__(self, site: Site, routes: dict[fx.Node, str]) -> None:
        self.site, self.traced, self.routes = site, site.traced, routes
        self.call = call = PagedAttentionCall.of(site.node)
        if call.selected is not None:
            reasons = "; ".join(f"{route}: {reason}" for route, reason in site.refused)
            left_out = (
                "absorb_latent_attention, which lowers it, was left out (by opt_level, passes or the self-check)"
            )
            remedy = "use target='cpu'" if call.key_scale is None else "give kv_cache_dtype='auto'"
            raise UnsupportedModel(
                f"no operator of {site.target.soc} attends keys that an indexer chooses as {site.node.name} does: "
                f"{reasons or left_out}; {remedy}"
            )
        self.query, self.key, self.value = call.query, call.key, call.value
        self.key_cache, self.value_cache = call.key_cache, call.value_cache
        self.key_scale, self.value_scale = call.key_scale, call.value_scale
        self.slot_mapping, self.block_table = call.slot_mapping, call.block_table
        self.sinks, self.alibi_slopes, self.scale = call.sinks, call.alibi_slopes, call.scale
        self.sliding_window, self.chunk, self.softcap = call.sliding_window, call.chunk, call.softcap
        self.heads = Heads(
            int(shape(self.query)[1]), int(shape(self.key)[1]), int(shape(self.key)[3]), int(shape(self.value)[3])
        )

    def lower(self) -> fx.Node:
        """The result, ``[1, T, H, Dv]``."""
        if _rotates_norms(self.query) and _rotates_norms(self.key):
            self.site.refuse(
                "npu.npu_qkv_rms_norm_rope_cache",
                "its number of tokens is fixed when the graph is made, and documents disagree whether the attention "
                "kernel reads the 16-bit caches in FRACTAL_NZ that it writes",
            )
        route = self._route()
        if self.key_cache not in self.routes:
            self.routes[self.key_cache] = route
            self._write(self._stored_heads(route), by_head=route == DECODED and self.key_scale is not None)
        if route in (GATHERED, DECODED):
            rows = self._gathered(route)
        elif route == "BSH":
            rows = self._padded_sequences()
        else:
            rows = self._tokens(route)
        return self.traced.call(_aten.reshape.default, rows, [1, -1, self.heads.heads, self.heads.value_dim])

    def _stored_heads(self, route: str) -> Heads:
        return self.heads.padded() if route == "TND padded" else self.heads

    def _route(self) -> str:
        """The first legal one, or what the cache was written for."""
        if self.key_cache in self.routes:
            return self.routes[self.key_cache]
        unknown = (("soft cap", self.softcap), ("ALiBi", self.alibi_slopes), ("chunks", self.chunk))
        for what, there in unknown:
            if there:
                self.site.refuse(self._kernel_name, f"it knows no {what}")
                return GATHERED
        if self.key_scale is not None:
            only = "it reads paged int8 caches for one query token per sequence alone"
            reason = why_not_decoded(self.traced, self.call, self.heads)
            if reason:
                self.site.refuse(self._kernel_name, f"{only}, and not there either: {reason}")
                return GATHERED
            self.site.refuse(self._kernel_name, f"{only}: decode steps can run by it, all others run by the formula")
            return DECODED
        for route in routes_by_traffic(self.heads, sinks=self.sinks is not None):
            form, tried_on = self._form(route), self.site.target.tried_on
            reasons = violations(self._imagined(form))
            if not reasons and tried_on:
                reasons = list(filter(None, [why_wrong(form, tried_on)]))
            if not reasons:
                return route
            self.site.refuse(f"{self._kernel_name} {route}", "; ".join(reasons))
        if self.site.target.product is Product.INFERENCE:
            reason = why_not_decoded(self.traced, self.call, self.heads)
            taken = "decode steps can run by it, all others run by the formula"
            self.site.refuse("npu.npu_incre_flash_attention", reason or f"it takes one query per sequence: {taken}")
            if not reason:
                return DECODED
        return GATHERED

    @property
    def _kernel_name(self) -> str:
        return "npu.npu_fused_infer_attention_score" + ("" if self.sinks is None else "_v2")

    def _form(self, route: str) -> AttentionForm:
        layout, has_sinks = "BSH" if route == "BSH" else "TND", self.sinks is not None
        size, dtype = self.site.target.block_size, value(self.query).dtype
        return AttentionForm(
            layout, self._stored_heads(route), self.scale, self.sliding_window, size, dtype, has_sinks
        )

    def _imagined(self, form: AttentionForm) -> Call:
        """The kernel's call on tensors of the shapes that the form would give it."""
        like = value(self.query)
        tokens, sequences = like.shape[2], value(self.block_table).shape[0]
        with self.traced.fake_mode:
            blocks = [like.new_empty(shape) for shape in form.cache_shapes(value(self.key_cache).shape[0])]
            query = like.new_empty(form.query_shape(sequences, tokens))
            sinks = None if self.sinks is None else like.new_empty(form.heads.heads)
            mask = torch.empty(MASK_SIZE, MASK_SIZE, dtype=torch.int8)
        overload, kwargs = form.call([1], [1], self.block_table, mask, sinks)
        return Call.make(overload, self.site.target, query, *blocks, **kwargs)

    def _by_token(self, node: fx.Node, dim: int) -> fx.Node:
        """``[1, H, T, D]`` as ``[T, H, dim]``, heads filled up with zeros."""
        heads, own = int(shape(node)[1]), int(shape(node)[3])
        rows = self.traced.call(_aten.reshape.default, self.site.tokens_first(node), [-1, heads, own])
        if dim > own:
            return self.site.aten(_aten.constant_pad_nd.default, rows, [0, dim - own])
        return self.site.dense(rows)

    def _write(self, stored: Heads, *, by_head: bool) -> None:
        """Store the step's keys and values, once per cache: a second write would make the engine copy it.

        Scales of int8 go to ``[block, head, offset]`` if ``by_head``.
        """
        index = cache_index(self.key_cache)
        assert index is not None
        size = self.site.target.block_size
        self.traced.lay_out_cache(index, size, stored.key_dim, stored.value_dim, scales_by_head=by_head)
        key, val = self._by_token(self.key, stored.key_dim), self._by_token(self.value, stored.value_dim)
        if self.key_scale is not None:
            key, key_scale = self._rounded(key)
            val, value_scale = self._rounded(val)
            heads = self.heads.kv_heads if by_head else None
            self._write_rows((self.key_scale, key_scale), (self.value_scale, value_scale), heads=heads)
        pair = (self.key_cache, self.value_cache)
        done = self.site.call(
            _npu.npu_scatter_pa_kv_cache.default, key, val, *pair, self.slot_mapping, cache_mode="Norm"
        )
        if done is None:
            self._write_rows((self.key_cache, key), (self.value_cache, val))

    def _rounded(self, rows: fx.Node) -> tuple[fx.Node, fx.Node]:
        """``[T, H, D]`` in int8, and a float32 scale ``[T, H]`` for each token and head.

        The operator's scales are ``quantize_rows``'s, max / 127, where these are normal numbers; on the device scales
        and quotients are rounded once more, so that a number halfway between two integers may become either. What
        becomes of a row with a NaN and no infinity is the device's word; one with an infinity comes back as NaN.
        """
        both = self.site.call(_npu.npu_dynamic_quant.default, rows)
        if both is None:
            stored, scale = self.site.inline(quantize_rows, rows)
            return stored, scale
        return self.site.item(both, 0), self.site.item(both, 1)

    def _write_rows(self, *written: tuple[fx.Node | None, fx.Node], heads: int | None = None) -> None:
        """Row by row, at (block, offset), where no operator writes both caches at once; with ``heads`` number by
        number, at (block, head, offset).
        """
        block, offset = block_and_offset(self.site, self.slot_mapping)
        if heads is None:
            place = self.traced.call(_aten.stack.default, [block, offset], -1)
        else:
            place = self.site.inline(_places_by_head, block, offset, heads)
        for cache, rows in written:
            assert cache is not None
            remedy = "" if self.key_scale is None else "give kv_cache_dtype='auto'"
            write_rows(self.site, cache, place, rows, remedy)

    def _tokens(self, route: str) -> fx.Node:
        """``[T, H, Dv]`` by the kernel in layout TND."""
        stored = self._stored_heads(route)
        query = self._by_token(self.query, stored.key_dim)
        rows = self._attend(route, query, self.traced.step_input("query_ends"))
        if stored.value_dim > self.heads.value_dim:
            rows = self.site.aten(_aten.slice.Tensor, rows, -1, 0, self.heads.value_dim)
        return rows

    def _padded_sequences(self) -> fx.Node:
        """``[T, H * Dv]`` by the kernel in layout BSH, sequences padded to the longest of the step and to two."""
        rows = self.traced.call(
            _aten.reshape.default,
            self._by_token(self.query, self.heads.key_dim),
            [-1, self.heads.heads * self.heads.key_dim],
        )
        query = self.site.aten(_aten.index.Tensor, rows, [self.traced.step_input("padded_tokens", LEAST_QUERIES)])
        padded = self._attend("BSH", query, self.traced.step_input("query_lens"))
        rows = self.traced.call(_aten.reshape.default, padded, [-1, self.heads.heads * self.heads.value_dim])
        return self.site.aten(
            _aten.index_select.default, rows, 0, self.traced.step_input("row_of_token", LEAST_QUERIES)
        )

    def _attend(self, route: str, query: fx.Node, query_lens: fx.Node) -> fx.Node:
        blocks = []
        for cache in (self.key_cache, self.value_cache):
            _, size, heads, dim = shape(cache)
            blocks.append(self.traced.call(_aten.reshape.default, cache, [-1, int(size), int(heads) * int(dim)]))
        sinks = None if self.sinks is None else self.site.cast(self.sinks, value(self.query).dtype)
        mask, kv_lens = causal_mask(self.traced, self.query), self.traced.step_input("kv_lens")
        overload, kwargs = self._form(route).call(query_lens, kv_lens, self.block_table, mask, sinks)
        results = self.site.call(overload, query, *blocks, **kwargs)
        assert results is not None, self.site.refused
        return self.site.item(results, 0)

    def _gathered(self, route: str) -> fx.Node:
        """``[T, H, Dv]`` by ATen operators over the blocks of each sequence, gathered."""
        out: fx.Node = self.site.inline(
            gathered_attention,
            self.call,
            self._by_token(self.query, self.heads.key_dim),
            self.traced.step_input("padded_tokens"),
            self.traced.step_input("row_of_token"),
            route == DECODED and self.key_scale is not None,
        )
        if route == DECODED and not why_not_decoded(self.traced, self.call, self.heads):
            note_decoded(self.traced, out, self.call, self.heads)
        return out


def _places_by_head(block: torch.Tensor, offset: torch.Tensor, heads: int) -> torch.Tensor:
    """``[T, heads, 3]``: (block, head, offset) of each token's heads."""
    head = torch.arange(heads, device=block.device, dtype=block.dtype)
    places = torch.broadcast_tensors(block.unsqueeze(1), head.unsqueeze(0), offset.unsqueeze(1))
    return torch.stack(places, -1)


def _rotates_norms(node: fx.Node) -> bool:
    """Tell whether ``node`` is what an RMS norm of each head and a rotation make, one after the other."""
    rotation = node.args[0] if transposes_heads(node) else node
    source = rotation.args[0] if callee(rotation) == "npu_rotary_mul" else None
    if callee(rotation) == "getitem" and callee(rotation.args[0]) == "npu_apply_rotary_pos_emb":
        source = rotation.args[0].args[rotation.args[1]]
    return source is not None and callee(source) == "getitem" and callee(source.args[0]) == "npu_rms_norm"


def causal_mask(traced: TracedGraph, like: fx.Node) -> fx.Node:
    """The mask that the causal and band modes read: 1 above the diagonal is masked out, whatever the lengths are."""
    device = value(like).device
    return traced.shared_constant(
        "npu_causal_mask", lambda: torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.int8, device=device).triu_(1)
    )
