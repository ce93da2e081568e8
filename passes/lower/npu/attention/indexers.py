"""Indexers, which choose the keys that attention reads, for Ascend.

Matches:
    selected = pagoda::lightning_indexer(q, k, weights, topk, scale, key_cache, slot_mapping, block_table, ...)
Becomes:
    npu_scatter_nd_update_(key_cache, [block, offset] of the slots, k)
    selected = npu_lightning_indexer(q, key_cache, weights, ..., sparse_count=topk, sparse_mode=3)
Why it is faster:
    one kernel scores the keys where they lie and chooses among them; neither scores nor masks are stored. The cache
    stays a whole graph input that is written once and read afterwards.

The operator has no scale: a positive factor of all scores changes no choice, so those of ``q·k`` and of the weights
are left out, and with them roundings that the weights have not had. Tokens of padding belong to sequences of their
own (``step_padding``). Where two scores are equal the device may choose otherwise than the canonical operator.

Level 0. Source: DeepSeek-AI, DeepSeek-V3.2, 2025.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
from torch import fx

from .....runtime.npu_target import Product
from .....runtime.ops.attention.lightning_indexer import lightning_indexer
from ....graph.fx_nodes import cache_index, callee, shape, value
from ....graph.record import PassRecord
from ....graph.traced import TracedGraph, UnsupportedModel
from ..site import Site, lower_each
from .cache_rows import block_and_offset, write_rows

_npu, _aten = torch.ops.npu, torch.ops.aten
CAUSAL = 3


def lower_npu_indexers(traced: TracedGraph) -> PassRecord:
    """Lower every indexer of the graph; its cache gets the layout and block size of the target.

    Raises:
        UnsupportedModel: the chip has no operator for one.
    """
    if traced.npu is None:
        return PassRecord("lower_npu_indexers")
    written: set[fx.Node] = set()
    return lower_each(traced, "lower_npu_indexers", {lightning_indexer: partial(_indexer, written)})


def sequence_ends(traced: TracedGraph, query_start_loc: fx.Node) -> fx.Node:
    """For each sequence how many tokens it and those before it have in the step, ``[S]`` int32 on the device."""
    return traced.call(_aten.slice.Tensor, query_start_loc, 0, 1, sys.maxsize)


def _indexer(
    written: set[fx.Node],
    site: Site,
    query: fx.Node,
    key: fx.Node,
    weights: fx.Node,
    topk: int,
    scale: float,
    key_cache: fx.Node,
    slot_mapping: fx.Node,
    block_table: fx.Node,
    query_start_loc: fx.Node,
    seq_lens: fx.Node,
) -> fx.Node:
    """Positions of the chosen keys, ``[1, T, topk]`` int32; ``written``: caches that hold the step's keys."""
    heads, dim = (int(size) for size in shape(query)[2:])
    if key_cache not in written:
        written.add(key_cache)
        index = cache_index(key_cache)
        assert index is not None
        site.traced.lay_out_cache(index, site.target.block_size, dim, 0)
        places = site.traced.call(_aten.stack.default, list(block_and_offset(site, slot_mapping)), -1)
        rows = site.traced.call(_aten.reshape.default, key, [-1, 1, dim])
        write_rows(site, key_cache, places, rows)
    factors = _without_factors(weights)
    if site.target.product is Product.A5:  # which takes no others
        factors = site.cast(factors, value(query).dtype)
    results = site.call(
        _npu.npu_lightning_indexer.default,
        site.dense(site.traced.call(_aten.reshape.default, query, [-1, heads, dim])),
        key_cache,
        site.dense(site.traced.call(_aten.reshape.default, factors, [-1, heads])),
        actual_seq_lengths_query=sequence_ends(site.traced, query_start_loc),
        actual_seq_lengths_key=seq_lens,
        block_table=block_table,
        layout_query="TND",
        layout_key="PA_BSND",
        sparse_count=topk,
        sparse_mode=CAUSAL,
    )
    if results is None:
        raise UnsupportedModel(
            f"no operator of {site.target.soc} chooses keys as {site.node.name} does: "
            f"{': '.join(site.refused[-1])}; use target='cpu'"
        )
    return site.traced.call(_aten.transpose.int, site.item(results, 0), 0, 1)


def _without_factors(weights: fx.Node) -> fx.Node:
    """Weights that rank keys as ``weights`` do: without positive factors, and before they were widened."""
    while True:
        name, source = callee(weights), weights.args[0] if weights.args else None
        if not isinstance(source, fx.Node) or shape(source) != shape(weights):
            return weights
        before, after = value(source).dtype, value(weights).dtype
        if name == "_to_copy":
            kept = before.is_floating_point and before.itemsize < after.itemsize
        else:
            factor = weights.args[1] if name == "mul.Tensor" else None
            kept = before is after and isinstance(factor, int | float) and factor > 0
        if not kept:
            return weights
        weights = source
