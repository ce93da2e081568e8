"""What a report says of operators that a model's dtype keeps away."""

from __future__ import annotations

import logging

import pytest
import torch
from lowered_models import assert_same, served

from torch_pagoda.compiler import CompileOptions
from torch_pagoda.compiler.build import build_program
from torch_pagoda.compiler.pipeline import run_pipeline
from torch_pagoda.compiler.report import CompileReport
from torch_pagoda.compiler.targets.cpu.kernels import call_kernels
from torch_pagoda.compiler.targets.npu.dtype_advice import dtype_advice
from torch_pagoda.compiler.verify.self_check import reference_of_model
from torch_pagoda.passes.graph.record import Route
from torch_pagoda.reports import explain
from torch_pagoda.reports.model_sections import heading
from torch_pagoda.runtime.npu_target import NpuTarget, Product

from legal_models import build_legal_model
from shared_graphs import capture

GROUPED = "rows of torch.float32 and matrices of torch.float32; both float16 or both bfloat16"
NPU = CompileOptions(codegen="none", target="npu", verify="off")


def route(operator, chosen, *refused):
    return Route("node", "module", operator, chosen, refused)


def test_operators_are_named_once_with_what_stands_in_for_them():
    halves = "it must be torch.bfloat16 or torch.float16"
    mask = "its mask is torch.float16: numbers that are added, not a choice"  # which another dtype does not cure
    refused = (
        ("npu.fia TND", f"query is torch.float32; {halves}"),
        ("npu.fia BSH", f"query is torch.float32; {halves}"),
    )
    routes = [
        route("pagoda.moe", ("npu.routing", "aten.bmm"), ("npu.gmm", GROUPED)),
        *[route("pagoda.paged_attention", ("aten",), *refused)] * 2,
        route("pagoda.rope", ("aten",), ("npu.rope", "heads of 48 dims")),
        route("aten.linear", ("npu.linear",)),
        route(
            "pagoda.attention",
            ("aten",),
            ("npu.flash", mask),
            ("npu.delta", "g is torch.float16; it must be float32"),
        ),
    ]
    assert dtype_advice(routes, torch.float32, Product.A2) == (
        "float32 prevents the use of operators: moe is routing and its reference implementation, not gmm; "
        "paged_attention is its reference implementation, not fia. dtype='bfloat16' would allow them"
    )
    assert dtype_advice(routes, torch.float32, Product.INFERENCE).endswith("dtype='float16' would allow them")
    # Neither a dtype that an operator would take nor one that the model does not compute in.
    assert dtype_advice(routes, torch.float16, Product.A2) == ""
    assert dtype_advice(routes, torch.bfloat16, Product.A2) == ""


@pytest.mark.parametrize(
    ("model_type", "dtype", "said"),
    [
        ("llama", torch.float32, "not npu_fused_infer_attention_score. dtype='bfloat16' would allow them"),
        (
            "deepseek_v3",
            torch.float16,
            "npu_fused_infer_attention_score, not npu_mla_prolog_v3. dtype='bfloat16' would allow them",
        ),
        ("deepseek_v3", torch.bfloat16, ""),
    ],
    ids=str,
)
def test_reports_of_models_say_so(model_type, dtype, said):
    report = CompileReport(model_type)
    captured = capture(build_legal_model(model_type, dtype=dtype))
    run_pipeline(captured, NPU, None, report)
    assert said in report.dtype_advice and bool(report.dtype_advice) == bool(said)


def test_compiling_warns_and_inspecting_shows_it(caplog):
    model = build_legal_model("llama")
    with caplog.at_level(logging.WARNING, "torch_pagoda"):
        report = build_program(model, NPU).report
    assert [r.getMessage() for r in caplog.records] == [f"{report.model}: {report.dtype_advice}"]
    explanation = explain(model, target="npu", verify="off", torchair=False)
    (line,) = [shown.text for name, shown in heading(explanation) if name == "dtype"]
    assert line == report.dtype_advice == explanation.npu.to_dict()["dtype_advice"]


@pytest.mark.torchair
def test_latent_attention_is_absorbed_though_torch_npu_knows_its_prolog_in_bfloat16_alone():
    """Of float32 that counts as bfloat16: torch_npu's meta function yields bfloat16 whatever it is given."""
    model = build_legal_model("deepseek_v3")
    reference, captured = reference_of_model(model), capture(model)
    captured.traced.npu = NpuTarget(block_size=16, float32_as=torch.bfloat16)
    report = CompileReport("deepseek_v3")
    traced = run_pipeline(captured, CompileOptions(codegen="none", target="npu"), reference, report)
    assert report.verdict.ok and not report.dropped_passes
    names = [str(node.target) for node in traced.graph.nodes]
    assert "npu.npu_kv_rmsnorm_rope_cache_v2.default" in names and "npu.npu_mla_prolog_v3.default" not in names
    assert "not npu_mla_prolog_v3" in report.dtype_advice
    canonical = capture(model)
    options = CompileOptions(codegen="none", target="cpu", verify="off")
    right = run_pipeline(canonical, options, None, CompileReport("deepseek_v3"))
    right.npu = traced.npu  # for the size of its blocks
    assert_same(served(traced, traced.module), served(right, call_kernels(right)))
