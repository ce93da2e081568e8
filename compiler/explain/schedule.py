"""Account of what a decode step for an NPU could run on a second stream: by shapes only, nothing is measured."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from ...passes import TracedGraph
from ...passes.graph.provenance import decoder_layers, operator_name
from ...passes.schedule.launches import Launches
from ...passes.schedule.schedule_branches import schedule_branches
from ..estimates.launch_costs import launch_costs, why_not_planned
from ..estimates.traffic import Step
from ..targets.npu.socs import Chip
from .wording import alike, counted

_OVERLOAD = re.compile(r"_(default|tensor|scalar|self|int)(_\d+)?\b|_\d+\b")
"""What tells nodes of one operator from each other."""


@dataclass(frozen=True)
class PlannedBranch:
    """Launches of some layers, alike in all of them, for a second stream.

    Attributes:
        layers: their numbers; none of what is outside the layers.
        side: operators of the second stream, in order.
        main: those that run meanwhile.
        seconds: that ``side`` takes by itself in one layer.
        gain: seconds that one layer is shorter by.
    """

    layers: tuple[int, ...]
    side: tuple[str, ...]
    main: tuple[str, ...]
    seconds: float
    gain: float


@dataclass(frozen=True)
class SchedulePlan:
    """What a decode step of one sequence could run beside what.

    Attributes:
        branches: for the second stream.
        refused: places where two sides meet that stay on the main stream, layers not told apart, with the reasons.
        step_seconds: of all launches one after the other, as far as the layers were built.
        unplanned: why nothing is planned; else "".
    """

    branches: tuple[PlannedBranch, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    step_seconds: float = 0.0
    unplanned: str = ""


def schedule_plan(
    traced: TracedGraph, representatives: Sequence[int], chip: Chip | None, soc: str, context: int
) -> SchedulePlan:
    """Plan a decode step; the graph stays as it is.

    Args:
        traced: the lowered graph.
        representatives: for each layer of the whole model the layer of the graph that is like it.
        chip: where it runs; None when nothing is known of it.
        soc: the chip's name.
        context: tokens in the cache, the decoded one included.
    """
    reason = why_not_planned(chip, soc)
    if reason or chip is None:
        return SchedulePlan(unplanned=reason)
    traced = traced.copy()
    costs = launch_costs(traced, chip, Step(1, context, 1))
    record, found = schedule_branches(traced, costs)
    launches = Launches(traced.graph, costs)
    layers = decoder_layers(traced.graph, tokens=traced.placeholder(traced.input_ids))
    kinds: dict[tuple[tuple[str, ...], tuple[str, ...], float, float], list[int]] = {}
    for branch in found:
        like = layers.of.get(branch.join, -1)
        numbers = [number for number, layer in enumerate(representatives) if layer == like]
        key = _names(branch.side), _names(branch.main), branch.seconds, branch.gain
        kinds.setdefault(key, []).extend(numbers)
    branches = [PlannedBranch(tuple(sorted(numbers)), *key) for key, numbers in kinds.items()]
    refused = counted((alike(each.module), _OVERLOAD.sub("", each.reason)) for each in record.rejections)
    return SchedulePlan(tuple(branches), tuple(pair for pair, _ in refused), launches.seconds(launches.nodes))


def _names(nodes: Sequence[fx.Node]) -> tuple[str, ...]:
    return tuple(operator_name(node).rpartition(".")[2] for node in nodes)
