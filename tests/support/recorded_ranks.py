"""Scenarios of ranks (see ``rank_processes``) that record steps with collectives and replay them."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import fx, nn

from torch_pagoda.compiler.targets.cpu.kernels import GraphCalls, kernel_calls
from torch_pagoda.compiler.targets.cpu.recorded_step import RecordedSteps, _Step
from torch_pagoda.runtime.ops.collectives import GROUP, ParallelGroup, drop_group, set_group

pagoda = torch.ops.pagoda
counts: Counter[str] = Counter()
"""Of steps: "graph" for runs of the graph, "replay" for those of a record."""


class CountedCalls(GraphCalls):
    """Counts its runs."""

    def __call__(self, *args: object) -> Sequence[object]:
        counts["graph"] += 1
        return super().__call__(*args)


def counted_steps(build: Callable[[fx.Graph], None], varying: Sequence[int] = (0,)) -> RecordedSteps:
    """Recorded steps of a graph that a function builds; ``counts`` begin anew."""
    graph = fx.Graph()
    build(graph)
    counts.clear()
    return RecordedSteps(CountedCalls(kernel_calls(fx.GraphModule(nn.Module(), graph)).module), varying, ())


def layers(size: int, count: int) -> Callable[[fx.Graph], None]:
    """Layers that each end with a sum of the ranks, and rows of all at the end."""

    def build(graph: fx.Graph) -> None:
        x, weight = graph.placeholder("x"), graph.placeholder("weight")
        for _ in range(count):
            part = graph.call_function(pagoda.rms_norm.default, (x, weight, 1e-5, 0.0, False))
            part = graph.call_function(pagoda.activation.default, (part, "silu"))
            x = graph.call_function(pagoda.all_reduce.default, (part, GROUP))
        graph.output((graph.call_function(pagoda.all_gather.default, (x, size, GROUP)),))

    return build


def replay_steps(group: ParallelGroup, count: int, dies_at: int) -> tuple[list[list[list[float]]], dict[str, int]]:
    """Run steps by records and by the graph, which must give the same; rank 1 is killed in one of them."""
    set_group(group)
    steps, weight = counted_steps(layers(group.size, 3)), torch.full((64,), 1.0 + group.rank)
    original, found = _Step.replay, []

    def replay(self: _Step, args: Sequence[torch.Tensor]) -> Sequence[torch.Tensor] | None:
        counts["replay"] += 1
        return original(self, args)

    _Step.replay = replay  # type: ignore[method-assign]
    for number in range(count):
        if group.rank == 1 and number == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.randn(1, 64, generator=torch.Generator().manual_seed(number))
        (by_record,) = steps([x, weight])
        by_record = by_record.clone()
        with torch.no_grad():
            (by_graph,) = steps._calls.module(x, weight)
        assert torch.equal(by_record, by_graph)
        found.append(by_record.tolist())
    drop_group(GROUP)
    return found, dict(counts)
