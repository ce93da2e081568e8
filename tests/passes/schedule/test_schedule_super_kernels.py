"""Runs of launches of lowered models that can be super kernels."""

from __future__ import annotations

from collections.abc import Collection
from itertools import groupby
from typing import Any

import pytest
import torch
from scheduled_models import KNOWN, fused, scheduled
from torch import fx

from torch_pagoda.compiler.costs.launch_costs import launch_costs
from torch_pagoda.compiler.costs.schedules import why_no_super_kernels
from torch_pagoda.compiler.costs.traffic import Step
from torch_pagoda.passes import TracedGraph
from torch_pagoda.passes.graph.provenance import launches_work, operator_name
from torch_pagoda.passes.schedule.schedule_branches import ANNOTATION, schedule_branches
from torch_pagoda.passes.schedule.schedule_prefetch import PREFETCH
from torch_pagoda.passes.schedule.schedule_super_kernels import SUPER_KERNEL, SuperKernel, schedule_super_kernels
from torch_pagoda.passes.schedule.super_kernel_operators import CUTS, FUSED, UNKNOWN, is_copied, why_not_fused


def _names(nodes: Any) -> list[str]:
    return [operator_name(node).rpartition(".")[2].removeprefix("npu_") for node in nodes]


def _code(traced: TracedGraph) -> list[str]:
    return [str(node.format_node()) for node in traced.graph.nodes]


def _noted(traced: TracedGraph) -> dict[fx.Node, str]:
    found = {node: (node.meta.get("custom") or {}).get(SUPER_KERNEL) for node in traced.graph.nodes}
    return {node: name for node, name in found.items() if name}


def _holds(traced: TracedGraph, found: list[SuperKernel], apart: Collection[fx.Node] = ()) -> None:
    """Each super kernel is all of a run of kernels that are fused: launches and views that are copied end one."""
    kernels = [node for node in traced.graph.nodes if launches_work(node) or is_copied(node)]
    runs = groupby(kernels, lambda node: operator_name(node) in FUSED and node not in apart)
    expected = [tuple(run) for fused, run in runs if fused]
    assert [kernel.launches for kernel in found] == [run for run in expected if len(run) > 1]
    assert [kernel.name for kernel in found] == [kernel.launches[0].name for kernel in found]


LLAMA = ["linear", "add_rms_norm", "linear", "swiglu", "linear", "add_rms_norm", "linear"]


def test_a_layer_is_one_super_kernel_between_its_attention_and_the_next():
    traced, _ = scheduled("llama", "ge", schedule=False)
    before = _code(traced)
    record, found = schedule_super_kernels(traced)
    assert record.matches == len(found) == 3 and _code(traced) == before
    _holds(traced, found)
    first, between, last = (_names(kernel.launches) for kernel in found)
    assert first == ["rms_norm", "linear"] and between == LLAMA
    assert last == LLAMA[1:], "rows are gathered in front of the last norms"
    assert _noted(traced) == {node: kernel.name for kernel in found for node in kernel.launches}
    reasons = [each.reason for each in record.rejections]
    assert sum("is looked up on the device" in reason for reason in reasons) == 2
    rotary = [reason for reason in reasons if "apply_rotary_pos_emb" in reason]
    assert len(rotary) == 2 and all(reason.endswith(UNKNOWN) for reason in rotary)
    launches = sum(map(launches_work, traced.graph.nodes))
    assert len(reasons) == launches - sum(len(kernel.launches) for kernel in found), "each is in one or has a reason"
    noted = _noted(traced)
    again, same = schedule_super_kernels(traced)
    assert same == found and again == record and _noted(traced) == noted


@pytest.mark.parametrize("model_type", ["gpt_neox", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_launches_beside_a_branch_are_left_alone(model_type):
    traced, _ = scheduled(model_type, "ge", schedule=False)
    _, alone = schedule_super_kernels(traced)
    _, branches = schedule_branches(traced, launch_costs(traced, KNOWN, Step(1, 1024, 1)))
    record, found = schedule_super_kernels(traced, branches)
    apart = {node for branch in branches for node in (*branch.side, *branch.main, branch.join)}
    assert branches and found != alone
    _holds(traced, found, apart)
    assert any("beside a branch on the second stream" in each.reason for each in record.rejections)
    sided = {node for node in traced.graph.nodes if ANNOTATION in (node.meta.get("custom") or {})}
    assert sided == {node for branch in branches for node in branch.side}, "notes of other schedules stay"
    assert sided.isdisjoint(_noted(traced))


def test_routing_that_is_not_adapted_cuts_a_run():
    traced, found, record = fused("qwen2_moe")
    _holds(traced, found)
    reasons = {each.reason.partition(": ")[2] for each in record.rejections if "init_routing" in each.node}
    assert reasons == {CUTS["npu.npu_moe_init_routing_v2"]}
    assert any("grouped_matmul" in _names(kernel.launches) for kernel in found)


def test_parts_that_are_copied_cut_a_run():
    """Torchair makes a kernel of a split, and none of a view."""
    _, found, record = fused("qwen2_moe")
    cuts = [each.reason for each in record.rejections if each.reason.startswith("split")]
    assert cuts and all(
        reason.endswith("ends a super kernel: the graph engine copies what it shows") for reason in cuts
    )
    gating = [kernel for kernel in found if "moe_gating_top_k_softmax" in _names(kernel.launches)]
    assert not gating, "the router's product and the shared gate are one, which is split in between"


def test_a_run_of_one_is_none():
    traced, _ = scheduled("llama", "ge", schedule=False)
    graph, npu = fx.Graph(), torch.ops.npu
    x = node = graph.placeholder("x")
    x.meta["example_value"] = torch.empty(4, 8, device="meta")
    for target in (npu.npu_swiglu, torch.ops.aten.neg, npu.npu_rms_norm, npu.npu_swiglu, torch.ops.aten.view):
        node = graph.call_function(target.default, (node,))
        node.meta["example_value"] = torch.empty(4, 8, device="meta")
        node.meta["custom"] = {PREFETCH: "kept", SUPER_KERNEL: "old"}
    graph.output((node,))
    traced.module = fx.GraphModule({}, graph)
    record, (kernel,) = schedule_super_kernels(traced)
    assert _names(kernel.launches) == ["rms_norm", "swiglu"] and kernel.name == kernel.launches[0].name
    assert [each.reason for each in record.rejections] == [
        f"neg_default is in no super kernel: {UNKNOWN}",
        "npu_swiglu_default by itself is not a super kernel",
    ]
    kept = [node.meta["custom"] for node in graph.nodes if node.op == "call_function"]
    assert [each.get(SUPER_KERNEL) for each in kept] == [None, None, kernel.name, kernel.name, None]
    assert all(each[PREFETCH] == "kept" for each in kept)


def test_what_the_table_names_is_there():
    for name in (*FUSED, *CUTS):
        space, _, operator = name.partition(".")
        if space != "air":  # torchair's own
            assert hasattr(getattr(torch.ops, space), operator), name
    assert not set(FUSED) & set(CUTS)
    assert why_not_fused("npu.npu_linear") == "" and why_not_fused("aten.add") == UNKNOWN
    for cut in ("aten._to_copy", "aten.slice", "aten.add", "npu.npu_fused_infer_attention_score"):
        assert why_not_fused(cut)


@pytest.mark.parametrize("soc", ["Ascend910B3", "Ascend910_9391", "Ascend910B9"])
def test_super_kernels_need_no_figures(soc):
    assert why_no_super_kernels(soc) == ""


@pytest.mark.parametrize("soc", ["Ascend310P3", "Ascend950PR_9589"])
def test_other_chips_have_none(soc):
    reason = f"super kernels are documented for Ascend910B* and Ascend910_93*, not for {soc}"
    assert why_no_super_kernels(soc) == reason
