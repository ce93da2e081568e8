"""Graphs for several ranks, lowered for an NPU and run in lockstep by the reference kernels.

All ranks call the same operators. Their logits are the model's, each reduction is one launch more than on one device,
and nothing copies a cache.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from npu_calls import illegal_calls
from quantized_checkpoints import quantize_folder
from transformers import PreTrainedModel

from torch_pagoda.checkpoint.loading import load_model
from torch_pagoda.compiler.options import CompileOptions
from torch_pagoda.compiler.pipeline import References, rewrite
from torch_pagoda.compiler.report import CompileReport
from torch_pagoda.compiler.verify import lockstep
from torch_pagoda.compiler.verify.self_check import Reference, reference_of_model
from torch_pagoda.passes import TracedGraph, UnsupportedModel
from torch_pagoda.passes.graph.cut import Cut
from torch_pagoda.passes.graph.provenance import launches_work, operator_name
from torch_pagoda.passes.lower.npu.decode_graph import decode_graph_or_reason
from torch_pagoda.passes.lower.npu.experts import moe
from torch_pagoda.passes.rewrite import shard_layers, shard_vocabulary
from torch_pagoda.reports.explain import cache_copies
from torch_pagoda.runtime.npu_target import NpuTarget
from torch_pagoda.runtime.ops.linear.stored_weight import StoredWeight

from legal_models import build_legal_model
from shared_graphs import capture

TARGET = NpuTarget(block_size=16, float32_as=torch.bfloat16)
REDUCE, GATHER = "_c10d_functional.all_reduce", "_c10d_functional.all_gather_into_tensor"


def lowered(
    model: str | PreTrainedModel,
    ranks: int,
    reference: Reference | None = None,
    target: NpuTarget = TARGET,
    **chosen: Any,
) -> TracedGraph:
    captured = capture(build_legal_model(model) if isinstance(model, str) else model)
    captured.traced.npu = target
    options = CompileOptions(codegen="none", target="npu", tensor_parallel_size=ranks, **chosen)
    report = CompileReport("a model")
    traced = rewrite(captured, options, References(reference), report).traced
    assert (report.verdict is None) == (reference is None or ranks == 1)
    assert not report.dropped_passes
    return traced


def launches(traced: TracedGraph) -> Counter[str]:
    return Counter(operator_name(node) for node in traced.graph.nodes if launches_work(node))


@pytest.mark.parametrize(
    ("model_type", "alike"),
    [("llama", True), ("qwen3_moe", True), ("deepseek_v3", True), ("qwen3_5_text", True), ("qwen3_next", False)],
)
def test_ranks_together_are_exact(model_type: str, alike: bool) -> None:
    """Attention, linear or not, and the MLP of every layer are cut: two reductions a layer, and nothing else more.
    The last one's ranks have a single key head, which is repeated otherwise."""
    kinds = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
    model = build_legal_model(model_type, **(kinds if model_type in ("qwen3_5_text", "qwen3_next") else {}))
    traced = lowered(model, 2, reference_of_model(model))
    assert illegal_calls(traced, TARGET) == []
    assert not [node for node in traced.graph.nodes if str(node.target).startswith("pagoda.")]
    assert cache_copies(traced.graph) == 0
    assert launches(traced)[REDUCE] == 4
    if alike:
        assert launches(traced) - launches(lowered(model, 1)) == Counter({REDUCE: 4})


@pytest.mark.parametrize("chosen", [{}, {"quantization": "int8"}, {"kv_cache_dtype": "int8"}], ids=str)
@pytest.mark.parametrize("mode", ["ge", "aclgraph"])
@pytest.mark.parametrize("soc", ["Ascend910B3", "Ascend950PR"])
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_a_reduction_is_one_launch_more(
    model_type: str, ranks: int, soc: str, mode: Literal["ge", "aclgraph"], chosen: dict[str, Any]
) -> None:
    target = replace(TARGET, soc=soc, graph_mode=mode)
    traced = lowered(model_type, ranks, target=target, **chosen)
    found, alone = launches(traced), launches(lowered(model_type, 1, target=target, **chosen))
    more = found - alone
    # What drops places of other ranks stands for what takes none.
    assert more.pop("npu.npu_moe_finalize_routing", 0) == (alone - found)["npu.npu_moe_token_unpermute"]
    assert more == Counter({REDUCE: 4})
    assert illegal_calls(traced, target) == []
    assert cache_copies(traced.graph) == 0
    decode, reason = decode_graph_or_reason(traced)
    assert not reason
    if decode is not None:  # of int8 caches
        assert launches(decode)[REDUCE] == 4
        assert illegal_calls(decode, target) == []
        assert cache_copies(decode.graph) == 0


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("name", ["ct-w8a8-dynamic", "ct-w8a8-static"])
def test_stored_w8a8_is_exact(name: str, ranks: int, tmp_path: Path) -> None:
    build_legal_model("llama").save_pretrained(tmp_path)
    quantize_folder(tmp_path, name)
    model: Any = load_model(tmp_path, "auto", False, torch.device("cpu"))
    traced = lowered(model, ranks, reference_of_model(model))
    found = launches(traced)
    assert (found[REDUCE], found["npu.npu_quant_matmul"]) == (4, 8), (
        "those of q, k and v, and of gate and up, are one"
    )
    assert illegal_calls(traced, TARGET) == []


def test_scales_of_another_ranks_rows_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold = shard_layers.part_of

    def of_the_next(tensor: torch.Tensor, held: Cut, rank: int) -> torch.Tensor:
        part = hold(tensor, held, rank)
        return part.replaced(scales=part.scales.roll(1, 0)) if isinstance(part, StoredWeight) else part

    monkeypatch.setattr(shard_layers, "part_of", of_the_next)
    with pytest.raises(UnsupportedModel, match="the ranks together are not exact"):
        test_stored_w8a8_is_exact("ct-w8a8-dynamic", 2, tmp_path)


def test_a_vocabulary_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_vocabulary, "LEAST_PARAMETERS", 2**13)
    traced = lowered("llama", 2, reference_of_model(build_legal_model("llama")))
    found = launches(traced)
    assert (found[REDUCE], found[GATHER]) == (5, 1)
    assert illegal_calls(traced, TARGET) == []


def test_the_range_of_another_ranks_experts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep, "_NUMBERED", frozenset())  # so that all ranks run rank 0's numbers
    with pytest.raises(UnsupportedModel, match="the ranks together are not exact"):
        lowered("qwen3_moe", 2, reference_of_model(build_legal_model("qwen3_moe")))


def test_places_of_other_ranks_experts_that_are_not_dropped_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "_ROW_MAJOR_DROPPED", moe._ROW_MAJOR)
    with pytest.raises(UnsupportedModel):
        lowered("qwen3_moe", 2, reference_of_model(build_legal_model("qwen3_moe")))
