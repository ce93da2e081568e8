"""Lowered models whose nodes have the notes of schedules."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from lowered_models import assert_same, lowered, served

import torch_pagoda as pagoda
from torch_pagoda.compiler.costs.launch_costs import launch_costs
from torch_pagoda.compiler.costs.schedules import l2_cache
from torch_pagoda.compiler.costs.traffic import Step
from torch_pagoda.compiler.targets.npu.ge import scheduled as ge_scheduled
from torch_pagoda.compiler.targets.npu.ge.ge_route import GeGraphs
from torch_pagoda.compiler.targets.npu.schedules import schedule_options
from torch_pagoda.compiler.targets.npu.socs import Chip, chip
from torch_pagoda.compiler.targets.npu.weights.weights import prepare_weights
from torch_pagoda.passes import TracedGraph
from torch_pagoda.passes.graph.record import PassRecord
from torch_pagoda.passes.schedule.schedule_branches import Branch, schedule_branches
from torch_pagoda.passes.schedule.schedule_prefetch import Fetch, schedule_prefetch
from torch_pagoda.passes.schedule.schedule_super_kernels import SuperKernel, schedule_super_kernels

from legal_models import build_legal_model

KNOWN = chip("Ascend910B2")
assert KNOWN is not None
SLOW = replace(KNOWN, bandwidth=KNOWN.bandwidth / 20, l2=2**24)  # type: ignore[operator]
"""A chip whose memory is as slow and whose cache as small as the models are: their products wait for weights."""


def scheduled(
    model_type: str, graph_mode: str = "aclgraph", schedule: bool = True, on: Chip = KNOWN
) -> tuple[TracedGraph, list[Branch]]:
    """A lowered graph with linked weights, and the branches on chip ``on`` that its nodes are annotated with."""
    traced = lowered(model_type, graph_mode)[1].copy()
    prepare_weights(traced, fractal_nz=True, release=False)
    return traced, schedule_branches(traced, launch_costs(traced, on, Step(1, 1024, 1)))[1] if schedule else []


def prefetched(
    model_type: str, graph_mode: str = "aclgraph", *, streams: bool = False
) -> tuple[TracedGraph, list[Fetch], PassRecord]:
    """A lowered graph with linked weights, the fetches that its nodes are annotated with for ``SLOW``, and the
    record."""
    traced, _ = scheduled(model_type, graph_mode, schedule=False)
    costs = launch_costs(traced, SLOW, Step(1, 1024, 1))
    branches = schedule_branches(traced, costs)[1] if streams else []
    record, found = schedule_prefetch(traced, costs, l2_cache(SLOW), branches)
    return traced, found, record


def fused(
    model_type: str, *, streams: bool = False, prefetch: bool = False
) -> tuple[TracedGraph, list[SuperKernel], PassRecord]:
    """A graph lowered for the graph engine with linked weights, the super kernels that its nodes are annotated with
    beside the other schedules, and the record."""
    if prefetch:
        traced = prefetched(model_type, "ge", streams=streams)[0]
    else:
        traced, _ = scheduled(model_type, "ge", schedule=False)
    branches = schedule_branches(traced, launch_costs(traced, SLOW, Step(1, 1024, 1)))[1] if streams else []
    record, found = schedule_super_kernels(traced, branches)
    return traced, found, record


def assert_static_graphs_serve(traced: TracedGraph, placing: str) -> None:
    """Static decode graphs serve what the calls do; ``placing``, of ``ge.scheduled``, placed its schedule in one."""
    place, said = getattr(ge_scheduled, placing), []

    def noted(gm: Any) -> str:
        said.append(place(gm))
        return str(said[-1])

    route = GeGraphs(traced, sequences_per_graph=4, static_decode=True)
    with mock.patch.object(ge_scheduled, placing, noted):
        found = served(traced, route)
    assert_same(found, served(traced, traced.module))
    assert route.static is not None
    assert said == [""] and set(route.static.graphs) == {4} and not route.static.dropped


def assert_an_engine_places(
    schedule: str,
    placing: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    model_type: str = "llama",
) -> PassRecord:
    """An engine over the graph engine gives the tokens of the calls, with a schedule, and without where ``placing``
    fails, which it says; the record of the pass."""
    model = build_legal_model(model_type, dtype=torch.bfloat16)
    limits = {"block_size": 16, "num_blocks": 24, "max_num_seqs": 2, "max_num_batched_tokens": 16}
    params = pagoda.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    on: dict[str, Any] = {"codegen": "ge", "static_decode": True, "schedule": {schedule: True}}
    plain = pagoda.LLM(model, target="npu", codegen="none", verify="off", **limits)
    expected = [output.outputs[0].token_ids for output in plain.generate([[4, 5, 6], [7]], params)]
    for fails in (False, True):
        if fails:
            monkeypatch.setattr(ge_scheduled, placing, lambda gm: "x is wrong")
        with caplog.at_level(logging.WARNING, schedule_options.__name__):
            llm = pagoda.LLM(model, target="npu", verify="off", **on, **limits)
            assert [output.outputs[0].token_ids for output in llm.generate([[4, 5, 6], [7]], params)] == expected
        record = llm.compile_report.passes[-1]
        assert record.name == schedule_options.PASSES[schedule]
        assert [size.reason for size in llm.compile_report.sizes] == ["", ""]
        assert (f"{schedule_options.LEFT_OUT[schedule]}: x is wrong" in caplog.text) == fails
        assert llm.compile_report.dropped_schedules == ({schedule: "x is wrong"} if fails else {})
    return record
