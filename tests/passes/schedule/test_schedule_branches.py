"""Branches of lowered models that can run on a second stream."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from lowered_models import lowered
from torch import fx

from torch_pagoda.compiler.costs.launch_costs import launch_costs, why_not_planned
from torch_pagoda.compiler.costs.traffic import Step
from torch_pagoda.compiler.targets.npu.socs import chip
from torch_pagoda.passes import TracedGraph
from torch_pagoda.passes.graph.provenance import operator_name
from torch_pagoda.passes.schedule import launches as launches_module
from torch_pagoda.passes.schedule import schedule_branches as branches_module
from torch_pagoda.passes.schedule.launches import Launches
from torch_pagoda.passes.schedule.schedule_branches import ANNOTATION, SIDE, Branch, schedule_branches

DECODE = Step(1, 1024, 1)


def _scheduled(model_type: str) -> tuple[TracedGraph, list[str], list[Branch], Launches]:
    """A copy of the model's graph with annotations, its code before them, and the branches."""
    traced = lowered(model_type, "aclgraph")[1].copy()
    before = [str(node.format_node()) for node in traced.graph.nodes]
    known = chip("Ascend910B2")
    assert known is not None
    costs = launch_costs(traced, known, DECODE)
    record, found = schedule_branches(traced, costs)
    assert record.matches == len(found)
    return traced, before, found, Launches(traced.graph, costs)


def _names(nodes: Sequence[fx.Node]) -> set[str]:
    return {operator_name(node).rpartition(".")[2] for node in nodes}


def _holds(traced: TracedGraph, before: list[str], found: list[Branch], launches: Launches) -> None:
    """Annotations are all that changed, and no launch of one side waits for one of the other."""
    assert [str(node.format_node()) for node in traced.graph.nodes] == before
    marked = {n: n.meta["custom"][ANNOTATION] for n in traced.graph.nodes if ANNOTATION in n.meta.get("custom", {})}
    assert marked == {n: {"stream": SIDE, "branch": b.join.name} for b in found for n in b.side}
    for branch in found:
        for side in branch.side:
            assert launches.needs(branch.join, side)
            assert not any(launches.needs(side, main) or launches.needs(main, side) for main in branch.main)
        assert 0 < branch.gain <= branch.seconds


def test_the_mlp_of_gpt_neox_runs_beside_its_attention():
    traced, before, found, launches = _scheduled("gpt_neox")
    assert len(found) == 2  # one for each layer
    _holds(traced, before, found, launches)
    for branch in found:
        assert {"npu_linear", "npu_gelu", "native_layer_norm"} <= _names(branch.side)
        assert {"npu_scatter_pa_kv_cache", "npu_fused_infer_attention_score"} <= _names(branch.main)
        assert not {"cos", "sin"} & _names(branch.main)  # made once a step
    again, _ = schedule_branches(traced, launches.costs)
    assert again.matches == 2
    _holds(traced, before, found, launches)


def test_what_writes_a_cache_stays_on_the_main_stream(monkeypatch):
    _, _, found, launches = _scheduled("gpt_neox")
    for branch in found:
        reason = branches_module._one_way(launches, branch.join, branch.main, branch.side)
        assert isinstance(reason, str) and "npu_scatter_pa_kv_cache" in reason and "writes memory" in reason
    monkeypatch.setattr(branches_module, "written_arguments", lambda node: [])
    assert isinstance(branches_module._one_way(launches, found[0].join, found[0].main, found[0].side), Branch)


def test_llama_has_no_branches_and_its_attention_waits_for_the_cache_write(monkeypatch):
    traced, before, found, launches = _scheduled("llama")
    assert not found
    _holds(traced, before, found, launches)
    writes = [node for node in launches.nodes if "scatter" in operator_name(node)]
    reads = [node for node in launches.nodes if "attention_score" in operator_name(node)]
    assert [launches.needs(r, w) for r, w in zip(reads, writes, strict=True)] == [True, True]
    monkeypatch.setattr(launches_module, "written_arguments", lambda node: [])
    wrong = Launches(traced.graph, launches.costs)
    assert [wrong.needs(r, w) for r, w in zip(reads, writes, strict=True)] == [False, False]


@pytest.mark.slow
@pytest.mark.parametrize("model_type, count", [("qwen2_moe", 2), ("deepseek_v3", 1), ("cohere", 2), ("qwen3", 0)])
def test_branches_of_other_models(model_type, count):
    traced, before, found, launches = _scheduled(model_type)
    assert len(found) == count
    _holds(traced, before, found, launches)
    for branch in found:
        assert "npu_linear" in _names(branch.side)
        assert {"npu_grouped_matmul", "npu_fused_infer_attention_score"} & _names(branch.main)


@pytest.mark.parametrize(
    "soc, reason",
    [
        ("Ascend910B1", ""),
        ("Ascend910B3", ""),
        ("Ascend310P3", "no source gives vector cores of Ascend310P3"),
        ("Ascend950PR_9589", "no source gives vector cores of Ascend950PR_9589"),
        ("Ascend910Z", "no published figures for Ascend910Z"),
    ],
)
def test_nothing_is_planned_for_a_chip_whose_figures_are_unknown(soc, reason):
    assert why_not_planned(chip(soc), soc) == reason
