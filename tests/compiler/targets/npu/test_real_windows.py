"""Windows of the sizes that models have: lowered for an NPU, and checked on copies with shorter ones."""

from __future__ import annotations

import pytest
import torch

from torch_pagoda.compiler import CompileOptions, UnsupportedModel, options
from torch_pagoda.compiler.pipeline import run_pipeline
from torch_pagoda.compiler.report import CompileReport
from torch_pagoda.compiler.verify.self_check import reference_of_model
from torch_pagoda.passes import PASSES, Pass, PassRecord
from torch_pagoda.passes.graph.npu_target import NpuTarget

from legal_models import build_legal_model
from shared_graphs import capture

NPU = CompileOptions(codegen="none", target="npu")


def lowered(model_type, window):
    model = build_legal_model(model_type, window=window)
    reference, captured = reference_of_model(model), capture(model)
    captured.traced.npu = NpuTarget(float32_as=torch.bfloat16)
    return run_pipeline(captured, NPU, reference, CompileReport(model_type))


def windows(graph):
    return [n.kwargs["pre_tokens"] + 1 for n in graph.graph.nodes if "pre_tokens" in n.kwargs]


@pytest.mark.parametrize(
    ("model_type", "window"), [("mistral", 128), ("gemma3_text", 512), ("mistral", 4096)], ids=str
)
def test_windows_of_real_models_are_lowered(model_type, window):
    assert window in windows(lowered(model_type, window))


def test_a_window_that_is_lowered_wrongly_refuses_the_model(monkeypatch):
    """One token more in 4096: no sequence of the check is that long."""

    def widen(graph):
        found = [n for n in graph.graph.nodes if n.kwargs.get("pre_tokens", 1 << 30) < 1 << 30]
        for node in found:
            node.kwargs = {**node.kwargs, "pre_tokens": node.kwargs["pre_tokens"] + 1}
        return PassRecord("widen", matches=len(found))

    monkeypatch.setattr(options, "PASSES", (*PASSES, Pass("widen", widen, "aten", required=False, target="npu")))
    with pytest.raises(UnsupportedModel, match=r"a long window is not exact .*in float32"):
        lowered("mistral", 4096)
