"""Experts in groups of ranks, cut within a group: all ranks together compute what the model does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quantized_checkpoints import quantize_folder

from torch_pagoda.checkpoint.loading import load_model
from torch_pagoda.compiler.capture.trace import Captured, capture
from torch_pagoda.compiler.costs.rank_shares import rank_shares
from torch_pagoda.compiler.options import CompileOptions
from torch_pagoda.compiler.pipeline import References, Rewritten, rewrite
from torch_pagoda.compiler.report import CompileReport
from torch_pagoda.compiler.verify.self_check import Reference, reference_of_model
from torch_pagoda.passes import SHARDING, UnsupportedModel
from torch_pagoda.passes.graph.cut import Indices
from torch_pagoda.passes.sharding import experts
from torch_pagoda.runtime.ops.linear.stored_weight import StoredWeight

from tiny_models import build_tiny_model

Made = tuple[Captured, Reference]
Held = tuple[int, int]
SIZES = {"qwen3_moe": 32, "mixtral": 96, "gpt_oss": 96, "deepseek_v3": 32}
"""Features of an expert; each layer has eight."""


def cut(made: Made, ranks: int, groups: int | None) -> tuple[Rewritten, CompileReport]:
    """The graph of rank 0, once all ranks have been compared with the model."""
    found, reference = made
    report = CompileReport("tiny")
    options = CompileOptions(
        codegen="none", target="cpu", tensor_parallel_size=ranks, expert_parallel_size=groups, passes=WITHOUT
    )
    rewritten = rewrite(found, options, References(reference), report)
    assert report.verdict is not None
    assert report.verdict.ok
    assert not next(record for record in report.passes if record.name == SHARDING).rejections
    return rewritten, report


WITHOUT = {"skip": ["quantize_experts"]}
"""So that experts can be looked at."""


def held(found: Rewritten) -> set[Held]:
    """Experts and features on each rank."""
    calls = [node for node in found.traced.graph.nodes if node.target is torch.ops.pagoda.moe.default]
    weights = [(found.traced.constants[node.args[4].name], node.args[11]) for node in calls]  # type: ignore[union-attr]
    return {(down.shape[0], down.shape[1 if transposed else 2]) for down, transposed in weights}


@pytest.mark.parametrize(("ranks", "groups"), [(4, 2), (2, 1)])
@pytest.mark.parametrize("kind", SIZES)
def test_groups_of_ranks_are_exact(kind: str, ranks: int, groups: int, captured: Callable[..., Made]) -> None:
    found, _ = cut(captured(kind), ranks, groups)
    assert held(found) == {(8 // groups, SIZES[kind] * groups // ranks)}


@pytest.mark.parametrize(("count", "expected"), [(2, (1, 48)), (3, (2, 48)), (8, (2, 96))])
def test_experts_are_cut_only_where_there_are_too_few(
    count: int, expected: Held, captured: Callable[..., Made]
) -> None:
    found, _ = cut(captured("mixtral", num_local_experts=count), 4, None)
    assert held(found) == {expected}


@pytest.mark.parametrize(
    ("kind", "name"), [("gpt_oss", "mxfp4-experts"), ("qwen3_moe", "fp8-blocks"), ("qwen3_moe", "ct-w4a16-asym")]
)
def test_stored_experts_are_cut_at_their_groups(kind: str, name: str, tmp_path: Path) -> None:
    overrides = {} if kind == "gpt_oss" else {"moe_intermediate_size": 96}
    build_tiny_model(kind, **overrides).save_pretrained(tmp_path)
    quantize_folder(tmp_path, name)
    model: Any = load_model(tmp_path, "auto", False, torch.device("cpu"))
    found, _ = cut((capture(model), reference_of_model(model)), 4, 2)
    assert held(found) == {(4, 64)}, "two groups of 32 and one with zeros beside it"
    parts = found.traced.notes.parts.values()
    assert any(isinstance(part.whole, StoredWeight) and part.cut.further for part in parts)


def test_stored_experts_in_an_order_of_their_own_stay_whole_and_are_named(tmp_path: Path) -> None:
    """Fewer experts than ranks would be cut along their inputs, which GPTQ's act-order mixes."""
    build_tiny_model("mixtral", num_local_experts=2).save_pretrained(tmp_path)
    quantize_folder(tmp_path, "gptq-4-order")
    model: Any = load_model(tmp_path, "auto", False, torch.device("cpu"))
    report = CompileReport("tiny")
    options = CompileOptions(codegen="none", target="cpu", tensor_parallel_size=4, passes=WITHOUT)
    rewrite(capture(model), options, References(reference_of_model(model)), report)
    assert report.verdict is not None and report.verdict.ok
    rejections = next(record for record in report.passes if record.name == SHARDING).rejections
    assert {(each.module, each.reason) for each in rejections} == {
        (f"model.layers.{layer}.mlp.experts", "its quantized inputs are in another order (act-order)")
        for layer in range(2)
    }


def test_reports_say_what_each_rank_holds(captured: Callable[..., Made]) -> None:
    found, report = cut(captured("mixtral"), 4, 2)
    assert found.unsharded is not None
    shares = rank_shares(found.unsharded, found.traced, report.passes, [0, 1], found.traced)
    assert shares.experts == {8: (4, 2)}


# What must not pass


def refused(made: Made) -> None:
    with pytest.raises(UnsupportedModel, match="the ranks together are not exact"):
        cut(made, 4, 2)


def test_a_bias_that_all_ranks_of_a_group_add_is_refused(
    captured: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "first_only", lambda size, ranks: tuple(np.arange(size) for _ in range(ranks)))
    refused(captured("gpt_oss"))


def test_gates_with_the_ups_of_other_features_are_refused(
    captured: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = experts._ROWS["interleaved"]
    monkeypatch.setitem(experts._ROWS, "interleaved", lambda part, size: np.roll(rows(part, size), 1))
    refused(captured("gpt_oss"))


def test_features_of_another_rank_are_refused(captured: Callable[..., Made], monkeypatch: pytest.MonkeyPatch) -> None:
    deal = experts.deal

    def turned(size: int, unit: int, ranks: int) -> Indices:
        parts = deal(size, unit, ranks)
        return parts if size == 8 else (parts[0], parts[0])

    monkeypatch.setattr(experts, "deal", turned)
    refused(captured("gpt_oss"))


# What is refused by name


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"tensor_parallel_size": 4, "expert_parallel_size": 3},
            "expert_parallel_size=3 does not divide tensor_parallel_size=4; use 1 or 2 or 4",
        ),
        ({"expert_parallel_size": 2}, "expert_parallel_size=2 does not divide tensor_parallel_size=1; use 1"),
        ({"tensor_parallel_size": 2, "expert_parallel_size": True}, "expert_parallel_size=True does not divide"),
        (
            {"tensor_parallel_size": 2, "expert_parallel_size": 1, "enable_expert_parallel": True},
            "expert_parallel_size=1 and enable_expert_parallel=True, which is expert_parallel_size=2, differ",
        ),
        ({"enable_expert_parallel": "yes"}, "enable_expert_parallel='yes' is not one of True, False, None"),
    ],
)
def test_sizes_that_do_not_fit(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as raised:
        CompileOptions(**given)
    assert words in str(raised.value)


@pytest.mark.parametrize(("given", "groups"), [(True, 4), (False, 1), (None, None)])
def test_the_name_of_vllm(given: bool | None, groups: int | None) -> None:
    assert CompileOptions(tensor_parallel_size=4, enable_expert_parallel=given).expert_parallel_size == groups


@pytest.mark.parametrize(
    ("kind", "overrides", "words"),
    [
        ("mixtral", {"num_local_experts": 2}, "is more than the 2 experts of a layer; use 2 or less"),
        ("llama", {}, "no routed experts were found in the model; omit it"),
    ],
)
def test_more_groups_than_experts(
    kind: str, overrides: dict[str, Any], words: str, captured: Callable[..., Made]
) -> None:
    with pytest.raises(UnsupportedModel, match=f"expert_parallel_size=4:? {words}"):
        cut(captured(kind, **overrides), 4, 4)
