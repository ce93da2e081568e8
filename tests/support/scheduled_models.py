"""Lowered models whose nodes say which of them are for a second stream."""

from __future__ import annotations

from lowered_models import lowered

from torch_pagoda.compiler.estimates.launch_costs import launch_costs
from torch_pagoda.compiler.estimates.traffic import Step
from torch_pagoda.compiler.targets.npu.socs import chip
from torch_pagoda.compiler.targets.npu.weights import prepare_weights
from torch_pagoda.passes import TracedGraph
from torch_pagoda.passes.schedule.schedule_branches import Branch, schedule_branches


def scheduled(
    model_type: str, graph_mode: str = "aclgraph", schedule: bool = True
) -> tuple[TracedGraph, list[Branch]]:
    """A lowered graph with linked weights, and the branches that its nodes are annotated with."""
    traced = lowered(model_type, graph_mode)[1].copy()
    prepare_weights(traced, fractal_nz=True, release=False)
    known = chip("Ascend910B2")
    assert known is not None
    return traced, schedule_branches(traced, launch_costs(traced, known, Step(1, 1024, 1)))[1] if schedule else []
