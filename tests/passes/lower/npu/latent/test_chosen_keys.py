"""Latent attention over the keys that an indexer chooses, on Ascend: operators, numbers, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from latent_graphs import AS_BFLOAT16, LatentGraph
from torch import fx

from torch_pagoda.compiler.weights.merged_weights import link_merged_weights
from torch_pagoda.passes import PassRecord, UnsupportedModel
from torch_pagoda.passes.graph.fx_nodes import shape, value
from torch_pagoda.passes.lower.npu.attention.indexers import lower_npu_indexers
from torch_pagoda.passes.lower.npu.attention.paged_attention import lower_npu_paged_attention
from torch_pagoda.passes.lower.npu.latent.attention import absorb_latent_attention
from torch_pagoda.runtime.npu_target import NpuTarget

from npu_graphs import assert_legal, operators, refusals

PROLOG, KV_NORM = "npu.npu_mla_prolog_v3", "npu.npu_kv_rmsnorm_rope_cache_v2"
INDEXER, SPARSE = "npu.npu_lightning_indexer", "npu.npu_sparse_flash_attention"
PRODUCT, ROW, WRITE = "npu.npu_transpose_batchmatmul", "npu.npu_scatter_nd_update_", "npu.npu_scatter_pa_kv_cache"
# Prompts longer than what is chosen, a chunk over a block's end, decoded tokens.
STEPS = [[30, 1, 17], [1, 9, 0], [1, 1, 3]]
TOPK = 6


def lowered(**kwargs: Any) -> tuple[LatentGraph, PassRecord]:
    graph = LatentGraph(topk=TOPK, **kwargs)
    indexers, record = lower_npu_indexers(graph.traced), absorb_latent_attention(graph.traced)
    assert indexers.matches == 1 and record.matches == kwargs.get("calls", 1), record.rejections
    assert not lower_npu_indexers(graph.traced).matches and not absorb_latent_attention(graph.traced).matches
    graph.traced.graph.lint()
    link_merged_weights(graph.traced)
    assert_legal(graph.traced)
    return graph, record


def fused(graph: LatentGraph) -> list[str]:
    return [name for name in operators(graph.traced) if name.startswith("npu.")]


def node_of(graph: LatentGraph, name: str) -> fx.Node:
    (node,) = [n for n in graph.traced.graph.nodes if name.removeprefix("npu.") in str(n.target)]
    return node


def assert_same_numbers(graph: LatentGraph, **kwargs: Any) -> None:
    expected = LatentGraph(topk=TOPK, **kwargs)
    link_merged_weights(expected.traced)
    for found, right in zip(graph.run(STEPS), expected.run(STEPS), strict=True):
        assert (found - right).abs().max() < 2e-5 * right.abs().max()


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("mode", ["interleaved_to_half", "interleaved"])
def test_the_prolog_makes_what_the_indexer_reads_too(mode: str, merged: bool) -> None:
    graph, record = lowered(mode=mode, merged=merged)
    assert fused(graph) == [PROLOG, ROW, INDEXER, SPARSE, PRODUCT] and not refusals(record)
    prolog = node_of(graph, PROLOG)
    assert prolog.kwargs["query_norm_flag"] is True
    linears = [n for n in graph.traced.graph.nodes if n.target is torch.ops.aten.linear.default]
    assert len(linears) == (2 if merged else 3), "queries, keys and weights of the indexer: nothing is made twice"
    assert not [n for n in graph.traced.graph.nodes if n.target is torch.ops.pagoda.rms_norm.default]
    assert_same_numbers(graph, mode=mode, merged=merged)


def test_the_kernel_gets_latents_in_blocks_and_lengths_on_the_device() -> None:
    graph, _ = lowered()
    call, indexer = node_of(graph, SPARSE), node_of(graph, INDEXER)
    assert call.args[1] is call.args[2] is graph.traced.placeholder("key_cache_0")
    assert call.args[3].args == (indexer, 0) and call.args[4] == 0.1
    assert [tuple(shape(n))[1:] for n in call.args[:2]] == [(2, 512), (16, 1, 512)]
    assert call.kwargs["key_rope"] is graph.traced.placeholder("value_cache_0")
    plain = {k: v for k, v in call.kwargs.items() if isinstance(v, int | str)}
    assert plain == {
        "sparse_block_size": 1,
        "layout_query": "TND",
        "layout_kv": "PA_BSND",
        "sparse_mode": 3,
        "attention_mode": 2,
    }
    for node, lens in ((call, "actual_seq_lengths_kv"), (indexer, "actual_seq_lengths_key")):
        ends = node.kwargs["actual_seq_lengths_query"]
        assert ends.args[0].name == "query_start_loc" and ends.args[1:3] == (0, 1)
        assert node.kwargs[lens].name == "seq_lens" and node.kwargs["block_table"].name == "block_table"
        assert value(ends).dtype is value(node.kwargs[lens]).dtype is torch.int32
    specs = graph.traced.caches
    assert [(s.num_kv_heads, s.key_dim, s.value_dim, s.by_token) for s in specs] == [
        (1, 512, 64, True),
        (1, 128, 0, True),
    ]
    nodes = list(graph.traced.graph.nodes)
    for name in ("key_cache_0", "value_cache_0", "key_cache_1"):  # whole, and written once before they are read
        users = sorted(graph.traced.placeholder(name).users, key=nodes.index)
        written = [n for n in users if any(a.is_write for a in n.target._schema.arguments)]
        assert written == users[:1] and value(graph.traced.placeholder(name)).is_contiguous()


def test_two_attentions_over_one_cache_are_refused() -> None:
    graph = LatentGraph(topk=TOPK, calls=2)
    lower_npu_indexers(graph.traced)
    assert not absorb_latent_attention(graph.traced).matches
    with pytest.raises(UnsupportedModel, match=r"its cache is read by another attention too; use target='cpu'"):
        lower_npu_paged_attention(graph.traced)


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({"query": "plain whole"}, [ROW, INDEXER, KV_NORM, PRODUCT, SPARSE, PRODUCT]),
        ({"mode": "half"}, [ROW, INDEXER, WRITE, PRODUCT, SPARSE, PRODUCT]),
    ],
    ids=str,
)
def test_other_spellings(kwargs: dict[str, Any], expected: list[str]) -> None:
    graph, _ = lowered(**kwargs)
    assert fused(graph) == expected
    assert_same_numbers(graph, **kwargs)


def test_sequences_of_many_heads_are_turned_before_the_product() -> None:
    graph, record = lowered(heads=128, content=16, hidden=64, query="plain whole")
    assert fused(graph)[-1] == PRODUCT and node_of_last(graph).kwargs["perm_x1"] == [0, 1, 2]
    assert "a row of the input has 128 * 512 entries" in refusals(record)
    assert_same_numbers(graph, heads=128, content=16, hidden=64, query="plain whole")


def node_of_last(graph: LatentGraph) -> fx.Node:
    return [n for n in graph.traced.graph.nodes if "transpose_batchmatmul" in str(n.target)][-1]


def test_sinks_on_the_chip_that_knows_them() -> None:
    sinks = {"sinks": torch.tensor([0.5, -1.0])}
    target = replace(AS_BFLOAT16, soc="Ascend950PR")
    graph, _ = lowered(target=target, **sinks)
    assert node_of(graph, SPARSE).kwargs["sinks"].name == "sinks"
    assert_same_numbers(graph, target=target, **sinks)


REFUSED = [
    ({"sinks": torch.zeros(2)}, "it knows no sinks on Ascend910B3, only on Ascend950"),
    ({"softcap": 3.0}, "it knows no soft cap"),
    ({"sliding_window": 8}, "it knows no window beside chosen keys"),
    ({"heads": 3}, "3 heads; Ascend910B3 takes 1 or 2 or 4 or 8 or 16 or 32 or 64 or 128"),
    ({"latent": 256}, "a latent of 256 dims with 64 rotated ones; it takes 512 and 64 alone"),
    ({"rotary": 32}, "a latent of 512 dims with 32 rotated ones; it takes 512 and 64 alone"),
    ({"target": NpuTarget(block_size=16)}, "query is torch.float32"),
]


@pytest.mark.parametrize(("kwargs", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_what_no_operator_does_is_refused_by_name(kwargs: dict[str, Any], reason: str) -> None:
    graph = LatentGraph(topk=TOPK, **kwargs)
    assert not absorb_latent_attention(graph.traced).matches
    with pytest.raises(UnsupportedModel, match="keys that an indexer chooses") as raised:
        lower_npu_paged_attention(graph.traced)
    assert f"{SPARSE}: {reason}" in str(raised.value) and str(raised.value).endswith("use target='cpu'")


def test_int8_latents_are_refused_with_their_own_remedy() -> None:
    graph = LatentGraph(topk=TOPK, cache_dtype=torch.int8)
    assert not absorb_latent_attention(graph.traced).matches
    with pytest.raises(UnsupportedModel, match=r"an int8 latent only with int8 queries; give kv_cache_dtype='auto'"):
        lower_npu_paged_attention(graph.traced)
