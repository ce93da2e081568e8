"""Lowered models whose nodes have the notes of schedules."""

from __future__ import annotations

from dataclasses import replace

from lowered_models import lowered

from torch_pagoda.compiler.estimates.launch_costs import launch_costs
from torch_pagoda.compiler.estimates.schedules import l2_cache
from torch_pagoda.compiler.estimates.traffic import Step
from torch_pagoda.compiler.targets.npu.socs import chip
from torch_pagoda.compiler.targets.npu.weights import prepare_weights
from torch_pagoda.passes import TracedGraph
from torch_pagoda.passes.graph.record import PassRecord
from torch_pagoda.passes.schedule.schedule_branches import Branch, schedule_branches
from torch_pagoda.passes.schedule.schedule_prefetch import Fetch, schedule_prefetch
from torch_pagoda.passes.schedule.schedule_super_kernels import SuperKernel, schedule_super_kernels

KNOWN = chip("Ascend910B2")
assert KNOWN is not None
SLOW = replace(KNOWN, bandwidth=KNOWN.bandwidth / 20, l2=2**24)  # type: ignore[operator]
"""A chip whose memory is as slow and whose cache as small as the models are: their products wait for weights."""


def scheduled(
    model_type: str, graph_mode: str = "aclgraph", schedule: bool = True
) -> tuple[TracedGraph, list[Branch]]:
    """A lowered graph with linked weights, and the branches that its nodes are annotated with."""
    traced = lowered(model_type, graph_mode)[1].copy()
    prepare_weights(traced, fractal_nz=True, release=False)
    return traced, schedule_branches(traced, launch_costs(traced, KNOWN, Step(1, 1024, 1)))[1] if schedule else []


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
