"""Attention in the caller's own graph, for Ascend: modes, masks, refusals and the numbers."""

from __future__ import annotations

import pytest
import torch
from aten_graphs import run_graph

from torch_pagoda.passes.lower.npu.attention.attention import lower_npu_attention
from torch_pagoda.runtime.npu_target import NpuTarget

from npu_graphs import assert_legal, graph_of, operators, refusals

FIA = "npu.npu_fused_infer_attention_score"
B, H, KV, T, D = 2, 4, 2, 9, 64


def tensors(queries=T, keys=T, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    sizes = ((B, H, queries, D), (B, KV, keys, D), (B, KV, keys, D))
    return [torch.randn(*size, generator=generator).to(dtype) for size in sizes]


def attention(*, causal=False, window=0, chunk=0, softcap=0.0, sinks=False, slopes=False):
    def without(m, q, k, v):
        return call(m, q, k, v, None)

    def call(m, q, k, v, mask):
        extra = m.sinks if sinks else None, m.slopes if slopes else None
        return torch.ops.pagoda.attention(q, k, v, mask, *extra, D**-0.5, causal, window, chunk, softcap)

    return without, call


def lowered(functions, *inputs, target=None, **parameters):
    graph = graph_of(functions[len(inputs) > 3], *inputs, target=target, dynamic=(), **parameters)
    expected = run_graph(graph.copy(), *inputs)
    record = lower_npu_attention(graph)
    assert record.matches == 1 and lower_npu_attention(graph).matches == 0
    torch.testing.assert_close(run_graph(graph, *inputs), expected, atol=2e-2, rtol=2e-2)
    assert_legal(graph)
    return graph, record


def kernel(graph):
    (node,) = [n for n in graph.graph.nodes if "attention" in str(n.target)]
    return node.kwargs


@pytest.mark.parametrize(
    ("function", "mode", "pre_tokens"),
    [
        (attention(causal=True), 2, 2147483647),
        (attention(causal=True, window=4), 4, 3),
        (attention(), 0, 2147483647),
    ],
    ids=["causal", "window", "all"],
)
def test_modes(function, mode, pre_tokens):
    graph, _ = lowered(function, *tensors())
    assert [n for n in operators(graph) if n.startswith("npu.")] == [FIA]
    found = kernel(graph)
    assert (found["sparse_mode"], found["pre_tokens"], found["input_layout"]) == (mode, pre_tokens, "BNSD")
    assert (found["num_heads"], found["num_key_value_heads"], found["scale"]) == (H, KV, D**-0.5)
    assert (found["atten_mask"] is None) == (mode == 0)


@pytest.mark.parametrize("batch", [1, B])
def test_a_mask_of_the_callers_is_turned_round(batch):
    mask = torch.rand(batch, 1, 3, T, generator=torch.Generator().manual_seed(1)) < 0.7
    mask[..., 0] = True
    graph, _ = lowered(attention(), *tensors(queries=3), mask)
    assert kernel(graph)["sparse_mode"] == 1
    assert kernel(graph)["atten_mask"].target is torch.ops.aten.logical_not.default


def test_rows_that_see_nothing_are_zero():
    mask = torch.ones(1, 1, T, T, dtype=torch.bool)
    mask[:, :, 2] = False
    graph, _ = lowered(attention(), *tensors(), mask)
    assert not run_graph(graph, *tensors(), mask)[:, :, 2].any()


@pytest.mark.parametrize(
    ("function", "extra", "reason"),
    [
        (attention(), [torch.zeros(1, 1, T, T).bfloat16()], "numbers that are added"),
        (attention(), [torch.ones(1, H, T, T, dtype=torch.bool)], "one for all heads"),
        (attention(), [torch.ones(1, 1, 1, T, dtype=torch.bool)], "would have to be repeated"),
        (attention(causal=True), [torch.ones(1, 1, T, T, dtype=torch.bool)], "a mask beside a causal one"),
        (attention(causal=True, softcap=5.0), [], "soft cap"),
        (attention(causal=True, chunk=4), [], "chunks"),
        (attention(causal=True, sinks=True), [], "sinks in this layout"),
        (attention(causal=True, slopes=True), [], "ALiBi"),
        (attention(window=4), [], "a window that looks ahead"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_the_kernel_does_not_know(function, extra, reason):
    parameters = {"sinks": torch.randn(H).bfloat16(), "slopes": torch.rand(H)}
    graph, record = lowered(function, *tensors(), *extra, **parameters)
    assert not [n for n in operators(graph) if n.startswith("npu.")]
    assert reason in refusals(record)


def test_a_window_over_more_keys_than_queries_counts_from_the_other_end():
    _, record = lowered(attention(causal=True, window=4), *tensors(queries=3))
    assert "counts from the top left" in refusals(record)


def test_the_inference_chip_has_another_kernel():
    """Of as many KV heads as heads, fp16, and not the causal mode."""
    given = [x.half() for x in tensors()]
    alike = [given[0], *(x.repeat_interleave(H // x.shape[1], 1) for x in given[1:])]
    graph, record = lowered(attention(), *alike, target=NpuTarget("Ascend310P3"))
    assert [n for n in operators(graph) if n.startswith("npu.")] == ["npu.npu_prompt_flash_attention"]
    assert "does not run it" in refusals(record)
    for function, inputs, reason in (
        (attention(), given, "no GQA on this chip"),
        (attention(causal=True), alike, "sparse_mode is 2; 0 on this chip"),
        (attention(), [x.bfloat16() for x in alike], "has no bfloat16"),
    ):
        graph, record = lowered(function, *inputs, target=NpuTarget("Ascend310P3"))
        assert not [n for n in operators(graph) if n.startswith("npu.")]
        assert reason in refusals(record)


def test_full_precision_is_spelled_out():
    graph, record = lowered(attention(causal=True), *tensors(dtype=torch.float32))
    assert "query is torch.float32" in refusals(record) and FIA not in operators(graph)
