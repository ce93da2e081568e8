"""Weights as quantized checkpoints store them, held in parts by several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoints import FORMATS, quantize_folder

from torch_pagoda.checkpoint.loading import load_model
from torch_pagoda.compiler import pipeline
from torch_pagoda.compiler.capture.trace import capture
from torch_pagoda.compiler.options import CompileOptions
from torch_pagoda.compiler.pipeline import References, rewrite
from torch_pagoda.compiler.report import CompileReport, Verdict
from torch_pagoda.compiler.verify import graph_check
from torch_pagoda.compiler.verify.self_check import reference_of_model
from torch_pagoda.passes import TracedGraph, UnsupportedModel
from torch_pagoda.passes.graph.attention_node import paged_attention_nodes
from torch_pagoda.passes.graph.cut import Cut
from torch_pagoda.passes.rewrite import shard_layers
from torch_pagoda.passes.sharding.walk import SHARDED
from torch_pagoda.runtime.ops.linear.stored_weight import StoredWeight

from tiny_models import build_tiny_model

pagoda = torch.ops.pagoda
SCALE = 11
"""The place of the scale among the arguments of paged attention."""


def cut(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> TracedGraph:
    """The graph of the first of two ranks, which have been compared with the model."""
    build_tiny_model("gpt_oss" if name and FORMATS[name].of_experts else "llama").to(dtype).save_pretrained(folder)
    if name:
        quantize_folder(folder, name)
    model: Any = load_model(folder, "auto", False, torch.device("cpu"))
    options = CompileOptions(codegen="none", target="cpu", tensor_parallel_size=2)
    report = CompileReport(name)
    reference = reference_of_model(model)
    traced = rewrite(capture(model), options, References(reference), report).traced
    assert report.verdict is not None
    assert report.verdict.ok
    return traced


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_cut_throughout(name: str, tmp_path: Path) -> None:
    traced = cut(tmp_path, name)
    attention = [node for node in traced.graph.nodes if node.target is pagoda.paged_attention.default]
    assert len(attention) == 2
    assert all(node.meta.get(SHARDED) for node in attention)
    assert any(isinstance(part.whole, StoredWeight) for part in traced.notes.parts.values())


@pytest.mark.parametrize("name", ["ct-w4a16", "gptq-4-g32", "awq", "fp8-blocks"])
def test_weights_that_are_shown_in_half_precision_are_cut(name: str, tmp_path: Path) -> None:
    """As those of nearly all checkpoints are: no rank's codes are rounded in the comparison in float32."""
    assert cut(tmp_path, name, torch.bfloat16).notes.parts


@pytest.mark.parametrize(
    ("name", "wrong", "error", "reason"),
    [
        ("", (0, 1), UnsupportedModel, "over large weights in float32"),
        ("ct-w4a16", (0, 1), UnsupportedModel, "over large weights in float32"),
        ("", (1,), ValueError, "the ranks' graphs differ"),
    ],
)
def test_slightly_wrong_scales_are_refused(
    name: str,
    wrong: tuple[int, ...],
    error: type[Exception],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of all ranks, and of one whose graph otherwise makes the same calls."""
    compared = graph_check.check_graph

    def of_wrong_ranks(original: TracedGraph, *ranks: TracedGraph, **given: Any) -> Verdict:
        for rank in wrong if len(ranks) > 1 else ():
            for node in paged_attention_nodes(ranks[rank]):
                node.args = (*node.args[:SCALE], node.args[SCALE] * 1.02, *node.args[SCALE + 1 :])  # type: ignore[operator]
        return compared(original, *ranks, **given)

    monkeypatch.setattr(pipeline, "check_graph", of_wrong_ranks)
    with pytest.raises(error, match=reason):
        cut(tmp_path, name)


def test_scales_of_the_next_group_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold = shard_layers.part_of

    def shifted(tensor: torch.Tensor, held: Cut, rank: int) -> torch.Tensor:
        part = hold(tensor, held, rank)
        return part.replaced(scales=part.scales.roll(1, -1)) if isinstance(part, StoredWeight) else part

    monkeypatch.setattr(shard_layers, "part_of", shifted)
    with pytest.raises(UnsupportedModel, match="the ranks together are not exact"):
        cut(tmp_path, "ct-w4a16")
