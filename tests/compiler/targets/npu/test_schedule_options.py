"""Schedules that users ask for: names, values, and where they run."""

from __future__ import annotations

import logging
import re
from dataclasses import replace

import pytest
import torch
from lowered_models import lowered

from torch_pagoda.compiler.costs import schedules
from torch_pagoda.compiler.costs.schedules import annotate_schedules, l2_cache
from torch_pagoda.compiler.options import CompileOptions
from torch_pagoda.compiler.report import CompileReport
from torch_pagoda.compiler.targets.npu.schedules import schedule_options
from torch_pagoda.compiler.targets.npu.socs import chip
from torch_pagoda.passes import TracedGraph
from torch_pagoda.passes.schedule.schedule_branches import ANNOTATION
from torch_pagoda.passes.schedule.schedule_prefetch import PREFETCH
from torch_pagoda.passes.schedule.schedule_super_kernels import SUPER_KERNEL
from torch_pagoda.runtime.npu_target import NpuTarget

ON = {"streams": True}


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ({"stream": True}, r"schedule\['stream'\] is not known; did you mean 'streams'"),
        ({"overlap": True}, r"schedule\['overlap'\] is not known; use one of 'streams', 'prefetch', 'super_kernels'"),
        ({"streams": 1}, r"schedule\['streams'\]=1 is not a bool"),
        (["streams"], r"schedule=\['streams'\] is invalid; use a dictionary"),
    ],
)
def test_names_and_values(schedule, words):
    with pytest.raises(ValueError, match=words):
        CompileOptions(schedule=schedule)


@pytest.mark.parametrize(
    ("options", "device", "words"),
    [
        ({}, "cpu", "cannot be used with target='cpu': a CPU runs one operator after the other; omit it"),
        (
            {"target": "npu"},
            "cpu",
            "cannot be used with target='npu' with codegen='none': it calls operators one by one",
        ),
        (
            {},
            "npu",
            "cannot be used with codegen='ge' with static_decode=False: dynamic graphs ignore schedules; set",
        ),
        (
            {"static_decode": True, "npu_options": {"ge_config.enable_single_stream": True}},
            "npu",
            r"cannot be used with npu_options\['ge_config.enable_single_stream'\]=True: omit one of them",
        ),
        ({"codegen": "none"}, "npu", "cannot be used with target='npu' with codegen='none'"),
    ],
)
def test_where_schedules_do_not_run(options, device, words):
    with pytest.raises(ValueError, match=rf"schedule(=\{{'streams': True\}}|\['streams'\]=True) {words}"):
        CompileOptions(schedule=ON, **options).for_device(device)
    CompileOptions(schedule={"streams": False}, **options).for_device(device)
    assert CompileOptions.from_dict({"schedule": None}).schedule == {}


def test_static_decode_graphs_run_schedules():
    options = CompileOptions(schedule=ON, static_decode=True).for_device("npu")
    assert options.schedule == ON and options.codegen == "ge"
    with pytest.raises(ValueError, match="static_decode=True cannot be used with"):
        CompileOptions(schedule=ON, static_decode=True).for_device("cpu")


@pytest.mark.parametrize("schedule", [ON, {"prefetch": True}, {"streams": True, "prefetch": True}])
def test_captured_graphs_run_schedules(schedule):
    options = CompileOptions(schedule=schedule, codegen="aclgraph").for_device("npu")
    assert options.schedule == schedule and options.codegen == "aclgraph"


def test_what_torch_compile_says():
    with pytest.raises(Exception, match="cannot be used with backend='pagoda': the caller may run any step"):
        torch.compile(torch.nn.Linear(2, 2), backend="pagoda", options={"schedule": ON})(torch.ones(1, 2))


def _on(soc: str) -> TracedGraph:
    traced = lowered("gpt_neox", "aclgraph")[1].copy()
    assert traced.npu is not None
    traced.npu = NpuTarget(soc, traced.npu.block_size, "aclgraph", float32_as=traced.npu.float32_as)
    return traced


@pytest.mark.parametrize(("soc", "branches"), [("Ascend910B2", 2), ("Ascend310P3", 0)])
def test_branches_are_annotated_for_chips_with_published_figures(soc, branches, caplog):
    traced, report = _on(soc), CompileReport("gpt_neox")
    with caplog.at_level(logging.WARNING, schedule_options.__name__):
        annotate_schedules(traced, ["streams"], report)
    named = {
        n.meta["custom"][ANNOTATION]["branch"] for n in traced.graph.nodes if ANNOTATION in n.meta.get("custom", {})
    }
    assert len(named) == branches
    if branches:
        (record,) = report.passes
        assert (record.name, record.matches) == ("schedule_branches", 2) and record.rejections
    else:
        assert (
            not report.passes
            and "no branch runs on a second stream: no source gives vector cores of Ascend310P3" in caplog.text
        )


@pytest.mark.parametrize("soc", ["Ascend910B2", "Ascend910B3"])
def test_fetches_are_planned_for_chips_whose_cache_is_known(soc, caplog, monkeypatch):
    """Of weights of so few bytes none is waited for on these chips, so on ones with a twentieth of the bandwidth."""
    known = chip(soc)
    assert known is not None and known.bandwidth is not None
    monkeypatch.setattr(schedules, "chip", lambda name: replace(known, bandwidth=known.bandwidth / 20))
    traced, report = _on(soc), CompileReport("gpt_neox")
    with caplog.at_level(logging.WARNING, schedule_options.__name__):
        annotate_schedules(traced, ["prefetch"], report)
    noted = [node for node in traced.graph.nodes if PREFETCH in node.meta.get("custom", {})]
    if known.l2:
        (record,) = report.passes
        assert (record.name, record.matches, len(noted)) == ("schedule_prefetch", 2, 4)
    else:
        assert not report.passes and not noted
        assert (
            "no weight is fetched before it is read: no source gives the L2 cache size of Ascend910B3" in caplog.text
        )
        with pytest.raises(ValueError, match=r"no source gives the L2 cache size of .*; omit schedule"):
            l2_cache(known)


def test_schedules_are_planned_together(monkeypatch):
    known = chip("Ascend910B2")
    assert known is not None and known.bandwidth is not None
    monkeypatch.setattr(schedules, "chip", lambda name: replace(known, bandwidth=known.bandwidth / 20))
    traced, report = _on("Ascend910B2"), CompileReport("gpt_neox")
    annotate_schedules(traced, ["streams", "prefetch"], report)
    # Beside the MLP of a layer its attention leaves no memory idle.
    assert [(record.name, record.matches) for record in report.passes] == [
        ("schedule_branches", 2),
        ("schedule_prefetch", 0),
    ]


@pytest.mark.parametrize("soc", ["Ascend910B3", "Ascend910_9391", "Ascend310P3", "Ascend950PR_9589"])
def test_super_kernels_are_for_chips_that_they_are_documented_for(soc, caplog):
    traced, report = _on(soc), CompileReport("gpt_neox")
    with caplog.at_level(logging.WARNING, schedule_options.__name__):
        annotate_schedules(traced, ["super_kernels"], report)
    noted = [node for node in traced.graph.nodes if SUPER_KERNEL in (node.meta.get("custom") or {})]
    if "910" in soc:
        (record,) = report.passes
        assert record.name == "schedule_super_kernels" and record.matches and noted
        assert not report.dropped_schedules and not caplog.text
    else:
        assert not report.passes and not noted
        reason = f"super kernels are documented for Ascend910B* and Ascend910_93*, not for {soc}"
        assert report.dropped_schedules == {"super_kernels": reason}
        assert f"no launches are fused into super kernels: {reason}" in caplog.text


def test_where_super_kernels_do_not_run():
    on = {"super_kernels": True}
    options = CompileOptions(schedule=on, static_decode=True).for_device("npu")
    assert options.schedule == on and options.codegen == "ge"
    both = {"static_decode": True, "npu_options": {"ge_config.enable_single_stream": True}}
    assert CompileOptions(schedule=on, **both).for_device("npu").schedule == on, "all of one is on one stream"
    for given, words in (
        ({"codegen": "aclgraph"}, "give npu_options={'static_kernel_compile': True, 'super_kernel_optimize': True}"),
        ({}, "cannot be used with codegen='ge' with static_decode=False"),
        (
            {"static_decode": True, "npu_options": {"dump_config.enable_dump": True}},
            "cannot be used with npu_options['dump_config.enable_dump']=True: fused operators are not dumped",
        ),
        (
            {"static_decode": True, "npu_options": both["npu_options"], "schedule": {**on, **ON}},
            "enable_single_stream",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            CompileOptions(**{"schedule": on, **given}).for_device("npu")


def test_the_first_reason_is_kept_and_said_once(caplog):
    dropped: dict[str, str] = {}
    with caplog.at_level(logging.WARNING, schedule_options.__name__):
        for reason in ("a", "b"):
            schedule_options.leave_out("streams", reason, dropped)
    assert dropped == {"streams": "a"}
    assert [record.message for record in caplog.records] == ["no branch runs on a second stream: a"]
    assert set(schedule_options.LEFT_OUT) == set(schedule_options.PASSES)
