"""Graphs for several stages, lowered for an NPU and run one after the other by the reference kernels."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from npu_calls import illegal_calls

from torch_pagoda.compiler.link.linkage import Linkage
from torch_pagoda.compiler.link.stages import stage_of
from torch_pagoda.compiler.options import CompileOptions
from torch_pagoda.compiler.pipeline import References, rewrite
from torch_pagoda.compiler.report import CompileReport
from torch_pagoda.compiler.verify.self_check import reference_of_model
from torch_pagoda.passes import TracedGraph
from torch_pagoda.passes.graph.provenance import launches_work, operator_name
from torch_pagoda.reports.explain import cache_copies
from torch_pagoda.runtime.npu_target import NpuTarget

from legal_models import build_legal_model
from shared_graphs import capture

TARGET = NpuTarget(block_size=16, float32_as=torch.bfloat16)


def lowered(model_type: str, ranks: int = 1) -> TracedGraph:
    """The finished graph with its boundary, once its stages have been compared with the model in lockstep."""
    model = build_legal_model(model_type)
    captured = capture(model)
    captured.traced.npu = TARGET
    options = CompileOptions(codegen="none", target="npu", pipeline_parallel_size=2, tensor_parallel_size=ranks)
    report = CompileReport("a model")
    traced = rewrite(captured, options, References(reference_of_model(model)), report).traced
    assert report.verdict is not None and report.verdict.ok
    assert not report.dropped_passes
    return traced


@pytest.mark.parametrize(
    ("model_type", "ranks", "crossing"),
    [("llama", 1, 2), ("llama", 2, 2), ("qwen3_moe", 2, 2), ("deepseek_v3", 1, 2), ("qwen3_5_text", 1, 1)],
)
def test_stages_together_are_exact(model_type: str, ranks: int, crossing: int) -> None:
    traced = lowered(model_type, ranks)
    (boundary,) = traced.notes.boundaries
    assert len(boundary.values) == crossing
    linkage = Linkage.of(traced)
    found = [stage_of(traced.graph, linkage, stage) for stage in range(2)]
    first, second = (own.held for _, own in found)
    assert first and second and sorted([*first, *second]) == list(range(len(linkage.caches)))
    launched = [Counter(operator_name(n) for n in module.graph.nodes if launches_work(n)) for module, _ in found]
    whole = Counter(operator_name(node) for node in traced.graph.nodes if launches_work(node))
    assert whole - launched[0] - launched[1] == Counter(), "both may compute tables of the step"
    assert illegal_calls(traced, TARGET) == []
    assert sum(cache_copies(module.graph) for module, _ in found) == 0
