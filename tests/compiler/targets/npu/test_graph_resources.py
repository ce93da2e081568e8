"""How many sizes the streams and events of a chip let us capture, and what of it the report says."""

from __future__ import annotations

import pytest
from lowered_models import LIMITS, lowered

from torch_pagoda.compiler.link.linker import link
from torch_pagoda.compiler.targets.npu.aclgraph.aclgraph_route import AclGraphs
from torch_pagoda.compiler.targets.npu.sizes.graph_resources import (
    CAPTURES_PER_GRAPH,
    RESOURCES,
    GraphNeeds,
    capture_budget,
)
from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.npu_target import NpuTarget, Product

A2, A3, A5, INFERENCE = "Ascend910B3", "Ascend910_9391", "Ascend950PR_9599", "Ascend310P3"


def test_every_family_has_its_figures():
    assert set(RESOURCES) == set(Product)
    assert RESOURCES[Product.INFERENCE].events == 1023 and RESOURCES[Product.INFERENCE].streams == 1024


@pytest.mark.parametrize("soc", [A2, A3])
@pytest.mark.parametrize("calls", [1, 32, 126])
def test_a_whole_graph_is_limited_by_npugraph_ex_alone(soc, calls):
    budget, reason = capture_budget(soc, GraphNeeds(calls))
    assert budget == CAPTURES_PER_GRAPH and "npugraph_ex captures 64" in reason


@pytest.mark.parametrize(("calls", "sizes"), [(12, 64), (32, 27), (64, 13), (898, 1), (899, 0)])
def test_events_of_310p(calls, sizes):
    """1023, of which 124 are left to others: (1023 - 124) // (calls + 1)."""
    budget, reason = capture_budget(INFERENCE, GraphNeeds(calls))
    assert budget == sizes
    assert sizes == 64 or f"Ascend310P3 has 1023 events, and each capture takes {calls + 1}" == reason


def test_side_streams_take_streams_and_events():
    plain, sided = GraphNeeds(32), GraphNeeds(32, side_streams=2, side_events=96)
    assert (plain.streams, plain.events) == (1, 33) and (sided.streams, sided.events) == (3, 32 + 1 + 4 + 96)
    assert capture_budget(INFERENCE, sided)[0] == (1023 - 124) // 133 == 6
    assert capture_budget(A2, GraphNeeds(32, side_streams=60))[0] == (1984 - 240) // 61 == 28
    assert "1984 streams, and each capture takes 61" in capture_budget(A2, GraphNeeds(32, side_streams=60))[1]


def test_graphs_cut_at_every_attention_and_groups_follow_vllm_ascends_formula():
    assert capture_budget(A2, GraphNeeds(graphs=49))[0] == (1984 - 240) // 49
    assert capture_budget(A2, GraphNeeds(graphs=49, groups=1))[0] == (1984 - 240 - 40) // (49 * 3)
    assert capture_budget(A2, GraphNeeds(graphs=2000))[0] == 0


def test_drivers_of_950():
    assert capture_budget(A5, GraphNeeds(32)) == (4, f"the driver of {A5} is not known to support more")


def at(soc: str, calls: int, monkeypatch: pytest.MonkeyPatch) -> AclGraphs:
    """A route on a chip, for a graph with so many attention calls."""
    from torch_pagoda.compiler.targets.npu.aclgraph import aclgraph_route

    traced = lowered("llama", "aclgraph")[1].copy()
    assert traced.npu is not None
    traced.npu = NpuTarget(soc, traced.npu.block_size, "aclgraph", traced.npu.float32_as)
    monkeypatch.setattr(aclgraph_route, "_attention_calls", lambda traced: calls)
    monkeypatch.setattr(AclGraphs, "_compile", lambda self, scheduled: self.traced.module)
    return AclGraphs(traced, traced.module)


def test_what_does_not_fit_is_left_out_with_a_reason_and_the_largest_kept(monkeypatch):
    route = at(INFERENCE, 64, monkeypatch)
    route.reserve(64, 2048, 4096)
    assert len(route.planned) == 13 and route.planned[-1] == 2048 and 64 in route.planned
    (reason,) = route.limits
    assert reason == ("13 sizes of 188 steps are planned: Ascend310P3 has 1023 events, and each capture takes 65")
    few = at(INFERENCE, 450, monkeypatch)
    engine = Engine(link(few.traced, few), block_size=16, **LIMITS)
    assert few.planned == (LIMITS["max_num_batched_tokens"],)
    assert engine.runner.program.report.size_limits == [
        "1 sizes of 5 steps are planned: Ascend310P3 has 1023 events, and each capture takes 451"
    ]


def test_attention_calls_are_counted():
    traced = lowered("llama", "aclgraph")[1]
    assert AclGraphs(traced, traced.module).needs == GraphNeeds(len(traced.caches))
