"""explain for an NPU with int8 caches: decode steps are shown by the graph that they run by."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from torch_pagoda.compiler.options import CompileOptions
from torch_pagoda.reports import explain, npu_graph
from torch_pagoda.reports.npu import NpuReport
from torch_pagoda.reports.npu_graph import GeReport
from torch_pagoda.reports.npu_sections import npu_sections

from legal_models import build_legal_model

LAYERS, CONTEXT = 2, 300


def test_decode_steps_over_int8_caches_are_estimated_by_the_kernel() -> None:
    llama = build_legal_model("llama", dtype=torch.bfloat16, num_hidden_layers=LAYERS)
    explained, rounded = (
        explain(llama, target="npu", kv_cache_dtype=kind, context=CONTEXT, torchair=False, verify="off")
        for kind in ("auto", "int8")
    )
    assert rounded.npu is not None and explained.npu is not None
    decode, prefill = rounded.npu.estimates
    kv_heads, dim = llama.config.num_key_value_heads, llama.config.head_dim
    assert decode.moved.cache == LAYERS * 2 * kv_heads * (dim + 4) * (CONTEXT + 1)
    plain = explained.npu.estimates[0]
    assert decode.flops == plain.flops and decode.moved.weights == plain.moved.weights
    assert prefill.moved.activations > explained.npu.estimates[1].moved.activations, "gathered"
    assert rounded.npu.no_static_decode == ""
    attention = next(r for r in rounded.npu.routes if r.operator == "pagoda.paged_attention")
    assert any(
        "decode steps can run by it, all others run by the formula" in reason for _, reason in attention.refused
    )
    report = NpuReport("Ascend910B3", None, 128, "bfloat16", (), GeReport(other_steps=61), ())
    kernels = next(s for s in npu_sections(SimpleNamespace(npu=report, layers=[])) if "Kernels" in s.title)
    assert "the kernels of decode steps" in kernels.note and "launch up to 61" in kernels.note


@pytest.mark.torchair
def test_torchair_s_graphs_of_a_llama_over_int8_caches() -> None:
    model = build_legal_model("llama", dtype=torch.bfloat16, num_hidden_layers=2)
    options = CompileOptions(target="npu", kv_cache_dtype="int8")
    report = npu_graph.graph_engine_report(model, (0, 1), options)
    assert report.unavailable == "" and report.cache_copies == ()
    for kind in report.layers:
        assert kind.types["FusedInferAttentionScore"] == kind.types["ScatterPaKvCache"] == 1
        assert not {"GatherV2", "BatchMatMulV2", "SoftmaxV2"} & set(kind.types)
    assert report.other_steps is not None and report.launches_per_layer < report.other_steps
    varying, fixed = report.decode
    assert fixed["host_nodes"] == fixed["unknown_sizes"] == fixed["cache_copies"] == varying["cache_copies"] == 0
