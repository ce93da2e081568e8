"""Whole models lowered for an NPU over int8 KV caches: the answers of the same model served for a CPU."""

from __future__ import annotations

import pytest
import torch
from lowered_models import assert_same, served
from npu_calls import illegal_calls

from torch_pagoda.compiler import CompileOptions
from torch_pagoda.compiler.build import build_program
from torch_pagoda.compiler.costs.traffic import Step, moved
from torch_pagoda.compiler.pipeline import run_pipeline
from torch_pagoda.compiler.report import CompileReport
from torch_pagoda.compiler.targets.cpu.kernels import call_kernels
from torch_pagoda.npu_tools.offline.conversion import convert
from torch_pagoda.passes.graph.fx_nodes import value
from torch_pagoda.reports.npu import computed_in
from torch_pagoda.runtime.npu_target import NpuTarget
from torch_pagoda.runtime.program import is_cache_input

from legal_models import build_legal_model
from shared_graphs import capture


def rewritten(model, target, kind):
    captured = capture(model)
    captured.traced.npu = NpuTarget(block_size=16, float32_as=torch.bfloat16)
    options = CompileOptions(codegen="none", target=target, verify="off", kv_cache_dtype=kind)
    report = CompileReport("")
    return run_pipeline(captured, options, None, report), report


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3"])
def test_served_tokens_are_those_of_the_cpu(model_type):
    model = build_legal_model(model_type)
    lowered, report = rewritten(model, "npu", "int8")
    assert illegal_calls(lowered, lowered.npu) == []
    assert not [n for n in lowered.graph.nodes if str(n.target).startswith("pagoda.")]
    routes = [r for record in report.passes for r in record.routes if r.operator == "pagoda.paged_attention"]
    reasons = [reason for route in routes for _, reason in route.refused]
    assert routes and any("one query token per sequence alone" in reason for reason in reasons)
    assert any("int8 latent" in reason for reason in reasons) == (model_type == "deepseek_v3")
    canonical, _ = rewritten(model, "cpu", "int8")
    found, expected = (served(graph, call_kernels(graph)) for graph in (lowered, canonical))
    assert_same(found, expected, tolerance=0.05)  # what is near the middle may be rounded the other way


class _Gated(torch.nn.Module):
    """A gated activation of one product."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.both = torch.nn.Linear(inputs, 2 * outputs, bias=False)

    def forward(self, x):
        gate, up = self.both(x).chunk(2, -1)
        return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_an_activation_does_not_round_what_is_rounded_head_by_head(kv_heads):
    model = build_legal_model("llama", num_key_value_heads=kv_heads)
    for layer in model.model.layers:
        projection = layer.self_attn.v_proj
        layer.self_attn.v_proj = _Gated(projection.in_features, projection.out_features)
    options = CompileOptions(codegen="none", target="npu", kv_cache_dtype="int8")
    report = build_program(model.bfloat16(), options).report
    assert report.verdict.ok and not report.dropped_passes
    (record,) = [record for record in report.passes if record.name == "fuse_npu_quantization"]
    assert record.matches == 0
    assert {rejection.reason for rejection in record.rejections} == {"its rows are rounded in parts"}


def test_bytes_of_the_cache_are_counted_with_scales():
    model = build_legal_model("llama")
    step = Step(tokens=1, context=512, rows=1)
    graphs = {kind: rewritten(model, "cpu", kind)[0] for kind in ("auto", "int8")}
    cache = {kind: moved(graph, graph.graph.nodes, step).cache for kind, graph in graphs.items()}
    spec = graphs["auto"].caches[0]
    layers = len(graphs["auto"].caches)
    assert cache["auto"] == layers * 513 * spec.num_kv_heads * (spec.key_dim + spec.value_dim) * 4
    assert cache["int8"] == layers * 513 * spec.num_kv_heads * (spec.key_dim + spec.value_dim + 8)
    assert computed_in(graphs["int8"]) == computed_in(graphs["auto"]) == "float32"


@pytest.mark.torchair
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "deepseek_v3"])
def test_converts_without_copies_of_a_cache(model_type):
    """Torchair converts every node; caches and scales are whole inputs that are written once."""
    model = build_legal_model(model_type, dtype=torch.bfloat16)
    options = CompileOptions(codegen="none", target="npu", verify="off", kv_cache_dtype="int8")
    traced = run_pipeline(capture(model), options, None, CompileReport(model_type))
    graph = convert(traced.module, [value(n) for n in traced.placeholders], soc="Ascend910B3")
    caches = [n.name for n in traced.placeholders if is_cache_input(n.name)]
    assert len(caches) == 4 * len(traced.caches) and set(caches) <= set(graph.inputs)
    assert graph.cache_copies(*caches) == []
    for name in caches:
        writers = [n for n in graph if name + ":0" in n.inputs.values() and n.in_place]
        assert len(writers) == 1 and not writers[0].is_view
