"""Paged attention for Ascend: the route of each head shape, its reasons, and the numbers of every route."""

from __future__ import annotations

import pytest
import torch

from torch_pagoda.passes.graph.fx_nodes import value
from torch_pagoda.passes.lower.npu.attention.attention_routes import Heads, bytes_per_decoded_token, routes_by_traffic
from torch_pagoda.passes.lower.npu.attention.paged_attention import lower_npu_paged_attention
from torch_pagoda.runtime.npu_target import NpuTarget
from torch_pagoda.runtime.step_metadata import StepMetadata

from npu_graphs import AttentionGraph, assert_legal, operators, refusals

FIA = "npu.npu_fused_infer_attention_score"
STEPS = [[30, 1, 17], [1, 9, 0], [4, 20, 3], [1, 1, 1], [0, 1, 0]]
SMALL, OLD = NpuTarget(block_size=16), NpuTarget(cann="8.5.0")


def lowered(*shape, **kwargs):
    graph = AttentionGraph(*shape, **kwargs)
    record = lower_npu_paged_attention(graph.traced)
    assert record.matches == kwargs.get("calls", 1)
    assert_legal(graph.traced)
    assert lower_npu_paged_attention(graph.traced).matches == 0
    return graph, record


def kernel(graph):
    (node,) = [n for n in graph.traced.graph.nodes if "infer_attention" in str(n.target)]
    return node.kwargs


def assert_same_numbers(graph, *shape, **kwargs):
    kwargs["target"] = SMALL
    expected = AttentionGraph(*shape, **kwargs).run(STEPS)
    for found, right in zip(graph.run(STEPS), expected, strict=True):
        assert found.shape == right.shape
        torch.testing.assert_close(found, right, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("shape", "kwargs", "layout"),
    [
        ((4, 2, 128), {}, "TND"),
        ((4, 4, 128), {}, "TND"),
        ((8, 1, 128), {"dtype": torch.float16}, "TND"),
        ((4, 4, 64), {}, "TND"),
        ((4, 4, 192, 128), {}, "TND"),
        ((4, 2, 128), {"sliding_window": 8}, "TND"),
        ((4, 2, 128), {"sinks": True}, "TND"),
        ((4, 2, 64), {"sinks": True, "sliding_window": 5}, "TND"),
        ((4, 1, 256), {"sliding_window": 9}, "TND"),
        ((4, 4, 96), {"sliding_window": 9}, "TND"),
        ((4, 2, 80), {}, "TND"),
        ((4, 2, 48, 16), {}, "TND"),  # heads padded to 128: keys and values differ
    ],
    ids=str,
)
def test_one_kernel_with_the_numbers_of_ours(shape, kwargs, layout):
    graph, _ = lowered(*shape, target=SMALL, **kwargs)
    names = [n for n in operators(graph.traced) if n.startswith("npu.")]
    assert names == ["npu.npu_scatter_pa_kv_cache", FIA + ("_v2" if kwargs.get("sinks") else "")]
    assert kernel(graph)["input_layout"] == layout
    assert_same_numbers(graph, *shape, **kwargs)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (8, 2, 80), (4, 4, 96), (4, 1, 256), (4, 2, 512)])
@pytest.mark.parametrize("window", [0, 9])
def test_heads_that_token_layouts_do_not_take_go_in_padded_sequences(heads, kv_heads, dim, window):
    target = NpuTarget() if dim == 512 else OLD
    graph, record = lowered(heads, kv_heads, dim, target=target, sliding_window=window)
    assert (kernel(graph)["input_layout"], kernel(graph)["block_size"]) == ("BSH", 128)
    assert graph.traced.caches[0].key_dim == dim
    assert f"heads of {512 if dim == 512 else (dim,) * 3} dims" in refusals(record)
    assert_same_numbers(graph, heads, kv_heads, dim, sliding_window=window)


def test_heads_of_512_dims_are_gathered_before_cann_9():
    graph, record = lowered(4, 2, 512, target=OLD)
    assert not any("infer_attention" in name for name in operators(graph.traced))
    assert "from CANN 9.0 on" in refusals(record)


def test_decode_steps_in_padded_sequences_have_two_rows_each(monkeypatch):
    """For one row of queries the kernel reads neither a compressed mask nor a window: with it they are refused."""
    graph, _ = lowered(4, 2, 64, target=OLD, sliding_window=9)
    (padded,) = [node for node in graph.traced.placeholders if node.name.startswith("padded_tokens")]
    assert padded.name == "padded_tokens_2"
    monkeypatch.setattr(StepMetadata, "_padded_to", lambda step, least, made=StepMetadata._padded_to: made(step, 1))
    with pytest.raises(ValueError, match="sparse_mode is 4, which is invalid for one query per sequence in BSH"):
        graph.run(STEPS)


def test_small_blocks_are_for_token_layouts_alone():
    graph, record = lowered(4, 2, 64, target=NpuTarget(block_size=16, cann="8.3"))
    assert kernel(graph)["input_layout"] == "TND"
    assert graph.traced.caches[0].key_dim == 128
    assert "blocks of 16" in refusals(record)
    assert_same_numbers(graph, 4, 2, 64)


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [({"softcap": 5.0}, "soft cap"), ({"alibi": True}, "ALiBi"), ({"chunk": 8}, "chunks")],
)
def test_what_the_kernel_does_not_know_is_gathered(kwargs, reason):
    graph, record = lowered(4, 2, 128, target=SMALL, **kwargs)
    assert [n for n in operators(graph.traced) if n.startswith("npu.")] == ["npu.npu_scatter_pa_kv_cache"]
    assert f"it knows no {reason}" in refusals(record)
    assert_same_numbers(graph, 4, 2, 128, **kwargs)


@pytest.mark.parametrize(
    "kwargs", [{"sinks": True, "softcap": 3.0}, {"sliding_window": 7, "softcap": 3.0}, {"alibi": True}], ids=str
)
def test_gathered_attention_with_unequal_heads(kwargs):
    graph, _ = lowered(6, 2, 40, 24, target=SMALL, **kwargs)
    assert_same_numbers(graph, 6, 2, 40, 24, **kwargs)


def test_full_precision_is_gathered_unless_it_counts_as_half():
    graph, record = lowered(4, 2, 128, dtype=torch.float32, target=SMALL)
    assert "query is torch.float32" in refusals(record)
    assert_same_numbers(graph, 4, 2, 128, dtype=torch.float32)
    counted = NpuTarget(block_size=16, float32_as=torch.bfloat16)
    graph, record = lowered(4, 2, 128, dtype=torch.float32, target=counted)
    assert not refusals(record)
    assert_same_numbers(graph, 4, 2, 128, dtype=torch.float32)


def test_causal_calls_say_so_in_full():
    graph, _ = lowered(4, 2, 128)
    found = kernel(graph)
    assert (found["sparse_mode"], found["pre_tokens"], found["next_tokens"]) == (3, 2147483647, 2147483647)
    assert (found["num_heads"], found["num_key_value_heads"], found["block_size"]) == (4, 2, 128)
    assert found["scale"] == 128**-0.5 and found["inner_precise"] == 0
    mask = graph.traced.constants[found["atten_mask"].name]
    assert mask.dtype is torch.int8 and torch.equal(mask, torch.ones(2048, 2048, dtype=torch.int8).triu(1))
    assert found["actual_seq_lengths"].name == "query_ends"  # cumulative
    assert found["actual_seq_lengths_kv"].name == "kv_lens"  # of each sequence


def test_a_window_is_a_band_that_starts_at_its_last_key():
    graph, _ = lowered(4, 2, 128, sliding_window=8)
    found = kernel(graph)
    assert (found["sparse_mode"], found["pre_tokens"], found["next_tokens"]) == (4, 7, 0)


def test_caches_are_whole_inputs_written_once_and_read_afterwards():
    graph, _ = lowered(4, 2, 128, calls=2)
    nodes = list(graph.traced.graph.nodes)
    writes = [n for n in nodes if "scatter" in str(n.target)]
    assert len(writes) == 1
    for name in ("key_cache_0", "value_cache_0"):
        cache = graph.traced.placeholder(name)
        assert cache in writes[0].args
        assert all(nodes.index(user) >= nodes.index(writes[0]) for user in cache.users)
        assert value(cache).is_contiguous() and value(cache).shape[1] == 128
    assert graph.traced.caches[0].by_token
    assert len(graph.run([[5, 3]])) == 1


def test_a_chip_without_the_operators_writes_rows_and_gathers():
    target = NpuTarget("Ascend310P3", block_size=16)
    graph, record = lowered(4, 2, 128, target=target, dtype=torch.float16)
    assert [n for n in operators(graph.traced) if n.startswith("npu.")] == ["npu.npu_scatter_nd_update_"] * 2
    assert "Ascend310P3 does not run it" in refusals(record)
    assert_same_numbers(graph, 4, 2, 128, dtype=torch.float16)


def test_captured_calls_get_dense_tensors():
    graph, _ = lowered(4, 2, 128, target=NpuTarget(graph_mode="aclgraph"))
    for node in graph.traced.graph.nodes:
        if str(node.target).startswith("npu."):
            assert all(value(n).is_contiguous() for n in node.args if isinstance(value(n), torch.Tensor))


def test_routes_are_ordered_by_the_bytes_that_a_decoded_token_moves():
    llama = Heads(32, 8, 64, 64)
    moved = {route: bytes_per_decoded_token(llama, route, context=1000) for route in ("TND", "TND padded", "BSH")}
    assert moved["TND"] == 2 * (1000 * 8 * 128 + 32 * 128)
    assert moved["BSH"] == moved["TND"] + 2 * 3 * 32 * 128
    assert moved["TND padded"] > 1.9 * moved["TND"]
    assert routes_by_traffic(llama, sinks=False) == ["TND", "BSH", "TND padded"]
    assert routes_by_traffic(llama, sinks=True) == ["TND", "TND padded"]
    assert routes_by_traffic(Heads(8, 8, 256, 256), sinks=False) == ["TND", "BSH"]
    with pytest.raises(ValueError, match="route='TNX' is not one of"):
        bytes_per_decoded_token(llama, "TNX")
