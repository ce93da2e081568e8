"""Windows of the sizes that models have: lowered for an NPU, and checked on copies with shorter ones."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from torch_pagoda.compiler import CompileOptions, UnsupportedModel, options, pipeline
from torch_pagoda.compiler.pipeline import run_pipeline
from torch_pagoda.compiler.report import CompileReport
from torch_pagoda.compiler.tolerance import TOLERANCE
from torch_pagoda.compiler.verify import long_windows
from torch_pagoda.compiler.verify.self_check import reference_of_model
from torch_pagoda.passes import PASSES, Pass, PassRecord
from torch_pagoda.passes.lower.npu.attention import decode_attention
from torch_pagoda.passes.lower.npu.decode_graph import decode_graph
from torch_pagoda.runtime.npu_target import NpuTarget

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


def test_choices_of_real_models_are_lowered():
    """More keys than any sequence of the check has."""
    graph = lowered("deepseek_v32", 2048)
    chosen = [n.kwargs["sparse_count"] for n in graph.graph.nodes if "npu_lightning_indexer" in str(n.target)]
    assert chosen and set(chosen) == {2048}


def test_a_window_that_is_lowered_wrongly_refuses_the_model(monkeypatch):
    """One token more in 4096: no sequence of the check is that long."""

    def widen(graph):
        found = [n for n in graph.graph.nodes if n.kwargs.get("pre_tokens", 1 << 30) < 1 << 30]
        for node in found:
            node.kwargs = {**node.kwargs, "pre_tokens": node.kwargs["pre_tokens"] + 1}
        return PassRecord("widen", matches=len(found))

    monkeypatch.setattr(options, "PASSES", (*PASSES, Pass("widen", widen, "aten", required=False, target="npu")))
    with pytest.raises(UnsupportedModel, match=r"attention with long windows is not exact .*in float32"):
        lowered("mistral", 4096)


def lowered_copy(paged, lower):
    copy = paged.copy()
    lower(copy)
    return copy


def others(by):
    """A change of the windows of lowered attention."""

    def change(graph):
        found = [n for n in graph.graph.nodes if n.kwargs.get("pre_tokens", 1 << 30) < 1 << 30]
        for node in found:
            node.kwargs = {**node.kwargs, "pre_tokens": node.kwargs["pre_tokens"] + by}
        assert found

    return change


@pytest.mark.parametrize(("model_type", "window"), [("gemma3_text", 512), ("gpt_oss", 128)], ids=str)
def test_a_device_compares_windows_in_the_dtype_of_the_model(model_type, window, monkeypatch):
    """Its self-check has sequences of 48 tokens, and float32 does not run there."""
    given = []
    monkeypatch.setattr(pipeline, "check_long_windows", lambda *arguments: given.append(arguments))
    model = build_legal_model(model_type, window=window, dtype=torch.bfloat16)
    report = CompileReport(model_type)
    run_pipeline(capture(model), NPU, reference_of_model(model), report)
    assert report.verdict.ok
    monkeypatch.setattr(long_windows, "can_check", lambda graph: False)
    ((original, paged, reference, lower),) = given

    def verdict(by, tolerance):
        def changed(graph):
            lower(graph)
            if by:
                others(by)(graph)

        return long_windows.check_long_windows(original, paged, replace(reference, tolerance=tolerance), changed)

    assert verdict(0, TOLERANCE[torch.bfloat16]).ok  # of which nobody has measured the rounding
    for by, said in ((1, "a token longer"), (-1, "a token shorter"), (1 << 20, "without end")):
        assert not verdict(by, TOLERANCE[torch.bfloat16]).ok
        # However much a model rounds.
        assert verdict(by, math.inf).reason.endswith(f"rows are those of a window {said}")
    # Where neither side follows the window, nothing is shown.
    monkeypatch.setattr(long_windows, "_shortened_masks", lambda original, *_: original.copy())
    monkeypatch.setattr(long_windows, "_shortened", lambda paged, *_: lowered_copy(paged, lower))
    assert verdict(0, TOLERANCE[torch.bfloat16]).reason == "no row distinguishes the window from one a token shorter"


@pytest.mark.parametrize("wrong", [False, True])
def test_decode_steps_over_int8_caches_are_compared_beyond_a_window(wrong, monkeypatch):
    if wrong:
        blocks = decode_attention.window_blocks
        monkeypatch.setattr(
            decode_attention, "window_blocks", lambda table, lens, window, size: blocks(table, lens, window + 1, size)
        )
    model = build_legal_model("gemma3_text", window=512)
    reference, captured = reference_of_model(model), capture(model)
    captured.traced.npu = NpuTarget(float32_as=torch.bfloat16)
    report = CompileReport("gemma3_text")
    traced = run_pipeline(captured, replace(NPU, kv_cache_dtype="int8"), reference, report)
    assert report.verdict.ok
    assert (decode_graph(traced) is None) == wrong
    assert [name for name, _ in report.dropped_passes] == ["decode_attention"] * wrong
