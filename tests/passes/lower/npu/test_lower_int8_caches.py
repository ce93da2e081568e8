"""Paged attention over int8 caches for Ascend: rounded by an operator, gathered by ATen ones, the operator's
numbers."""

from __future__ import annotations

import pytest
import torch

from torch_pagoda.passes import UnsupportedModel
from torch_pagoda.passes.lower.npu.attention.paged_attention import lower_npu_paged_attention
from torch_pagoda.runtime.npu_target import NpuTarget

from npu_graphs import AttentionGraph, assert_legal, operators, refusals

SMALL = NpuTarget(block_size=16)
STEPS = [[30, 1, 17], [1, 9, 0], [4, 20, 3], [1, 1, 1], [0, 1, 0]]
ROUNDS = ["npu.npu_dynamic_quant", "npu.npu_dynamic_quant"]
WRITES = ["npu.npu_scatter_nd_update_", "npu.npu_scatter_nd_update_", "npu.npu_scatter_pa_kv_cache"]


def lowered(*shape, **kwargs):
    graph = AttentionGraph(*shape, cache_dtype=torch.int8, **kwargs)
    record = lower_npu_paged_attention(graph.traced)
    assert record.matches == kwargs.get("calls", 1)
    assert_legal(graph.traced)
    assert lower_npu_paged_attention(graph.traced).matches == 0
    return graph, record


@pytest.mark.parametrize(
    ("shape", "kwargs"),
    [
        ((4, 2, 128), {}),
        ((8, 1, 64), {"dtype": torch.float16}),
        ((4, 4, 24, 16), {"sinks": True}),
        ((4, 2, 128), {"sliding_window": 8, "softcap": 20.0}),
        ((4, 2, 40), {"alibi": True}),
        ((4, 2, 128), {"chunk": 16, "calls": 2}),
        ((4, 2, 128), {"dtype": torch.float32}),
    ],
    ids=str,
)
def test_numbers_are_those_of_the_operator(shape, kwargs):
    graph, record = lowered(*shape, target=SMALL, **kwargs)
    rounds = ROUNDS if kwargs.get("dtype") is not torch.float32 else []  # whose inputs the operator does not take
    # Once, however many read them.
    assert [n for n in operators(graph.traced) if n.startswith("npu.")] == [*rounds, *WRITES]
    assert bool(rounds) != ("npu.npu_dynamic_quant: input is torch.float32" in refusals(record))
    assert "per sequence alone" in refusals(record) or "it knows no" in refusals(record)
    expected = AttentionGraph(*shape, cache_dtype=torch.int8, target=SMALL, **kwargs).run(STEPS)
    exact = kwargs.get("dtype") is torch.float32
    for found, right in zip(graph.run(STEPS), expected, strict=True):
        torch.testing.assert_close(found, right, atol=1e-5 if exact else 2e-2, rtol=1e-5 if exact else 2e-2)


def test_caches_are_whole_inputs_laid_out_by_token():
    graph, _ = lowered(4, 2, 128)
    for part in graph.traced.caches[0].parts():
        node = graph.traced.placeholder(f"{part.name}_0")
        example = node.meta["example_value"]
        assert example.is_contiguous() and tuple(example.shape[1:]) == part.block_shape(128)
        writers = [user for user in node.users if user.target._schema.is_mutable]
        assert len(writers) == 1 and min(node.users) is writers[0]


def test_chips_without_the_operators():
    """Where nothing writes int8 rows or their scales the model is refused."""
    target = NpuTarget("Ascend310P3")
    graph = AttentionGraph(4, 2, 128, target=target, dtype=torch.float16, cache_dtype=torch.int8)
    with pytest.raises(UnsupportedModel, match=r"Ascend310P3.*kv_cache_dtype='auto'"):
        lower_npu_paged_attention(graph.traced)


def test_a_chip_that_writes_rows_and_reads_by_the_formula():
    graph = AttentionGraph(4, 2, 128, target=NpuTarget("Ascend950PR"), dtype=torch.bfloat16, cache_dtype=torch.int8)
    record = lower_npu_paged_attention(graph.traced)
    assert "no document says that Ascend950PR reads int8 keys and values" in refusals(record)
    assert [name for name in operators(graph.traced) if "scatter" in name].count("npu.npu_scatter_nd_update_") == 2
    assert_legal(graph.traced)
