"""Account of what a decode step for an NPU could run on a second stream, fetch early or launch as one: by shapes
only, nothing is measured."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from ..compiler.costs.launch_costs import launch_costs, why_not_planned
from ..compiler.costs.schedules import l2_cache, why_no_super_kernels, why_not_fetched
from ..compiler.costs.traffic import Step
from ..compiler.targets.npu.socs import Chip
from ..passes import TracedGraph
from ..passes.graph.fx_nodes import module_path
from ..passes.graph.provenance import decoder_layers, operator_name
from ..passes.graph.record import PassRecord
from ..passes.schedule.launches import Cost, Launches
from ..passes.schedule.schedule_branches import schedule_branches
from ..passes.schedule.schedule_prefetch import schedule_prefetch, stored_bytes
from ..passes.schedule.schedule_super_kernels import schedule_super_kernels
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
class PlannedFetch:
    """A weight of some layers, alike in all of them, that is fetched into the L2 cache before it is read.

    Attributes:
        layers: as in ``PlannedBranch``.
        weight: the argument that it is, and the module that reads it, from its layer on.
        bytes: that are fetched.
        of_bytes: that the weight has.
        behind: operator after which that begins.
        window: operators that leave the memory idle meanwhile, in order.
        idle: seconds for which they do.
        gain: seconds that one layer is shorter by.
    """

    layers: tuple[int, ...]
    weight: str
    bytes: int
    of_bytes: int
    behind: str
    window: tuple[str, ...]
    idle: float
    gain: float


@dataclass(frozen=True)
class PlannedSuperKernel:
    """Launches of some layers, alike in all of them, that are fused.

    Attributes:
        layers: as in ``PlannedBranch``, of the first launch.
        launches: operators, in order.
        seconds: that they take by themselves; None where the chip's figures do not say.
        beyond: of these, seconds that they take beyond moving their bytes and doing their operations, which is the
            most that fusing can save.
    """

    layers: tuple[int, ...]
    launches: tuple[str, ...]
    seconds: float | None
    beyond: float | None


@dataclass(frozen=True)
class SchedulePlan:
    """What a decode step of one sequence could run beside what, and without that fetch early and launch as one.

    Attributes:
        branches: for the second stream.
        refused: places where two sides meet that stay on the main stream, layers not told apart, with the reasons.
        step_seconds: of all launches one after the other, as far as the layers were built.
        unplanned: why nothing is planned; else "".
        fetches: weights that are fetched early.
        not_fetched: places where none is, likewise, with the reasons.
        unfetched: why no fetch is planned; else "".
        super_kernels: launches that are fused.
        not_fused: launches that are in none, likewise, with the reasons.
        unfused: why nothing is fused; else "".
    """

    branches: tuple[PlannedBranch, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    step_seconds: float = 0.0
    unplanned: str = ""
    fetches: tuple[PlannedFetch, ...] = ()
    not_fetched: tuple[tuple[str, str], ...] = ()
    unfetched: str = ""
    super_kernels: tuple[PlannedSuperKernel, ...] = ()
    not_fused: tuple[tuple[str, str], ...] = ()
    unfused: str = ""


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
    traced = traced.copy()
    layers = decoder_layers(traced.graph, tokens=traced.placeholder(traced.input_ids)).of
    reason = why_not_planned(chip, soc)
    if reason or chip is None:
        plan, costs = SchedulePlan(unplanned=reason), None
    else:
        costs = launch_costs(traced, chip, Step(1, context, 1))
        launches = Launches(traced.graph, costs)
        branches, refused = _branches(traced, costs, layers, representatives)
        seconds = launches.seconds(launches.nodes)
        plan = SchedulePlan(branches, refused, seconds, unfetched=why_not_fetched(chip, soc))
        if not plan.unfetched:
            fetches, not_fetched = _fetches(traced, costs, layers, representatives, chip)
            plan = replace(plan, fetches=fetches, not_fetched=not_fetched)
    if unfused := why_no_super_kernels(soc):
        return replace(plan, unfused=unfused)
    kernels, not_fused = _super_kernels(traced, costs, layers, representatives)
    return replace(plan, super_kernels=kernels, not_fused=not_fused)


def _branches(
    traced: TracedGraph, costs: Mapping[fx.Node, Cost], layers: Mapping[fx.Node, int], representatives: Sequence[int]
) -> tuple[tuple[PlannedBranch, ...], tuple[tuple[str, str], ...]]:
    record, found = schedule_branches(traced, costs)
    kinds: dict[tuple[tuple[str, ...], tuple[str, ...], float, float], list[int]] = {}
    for branch in found:
        key = _names(branch.side), _names(branch.main), branch.seconds, branch.gain
        kinds.setdefault(key, []).extend(_like(branch.join, layers, representatives))
    return tuple(PlannedBranch(tuple(sorted(numbers)), *key) for key, numbers in kinds.items()), _reasons(record)


def _fetches(
    traced: TracedGraph,
    costs: Mapping[fx.Node, Cost],
    layers: Mapping[fx.Node, int],
    representatives: Sequence[int],
    chip: Chip,
) -> tuple[tuple[PlannedFetch, ...], tuple[tuple[str, str], ...]]:
    record, found = schedule_prefetch(traced, costs, l2_cache(chip))
    kinds: dict[tuple[str, int, int, str, tuple[str, ...], float, float], list[int]] = {}
    for fetch in found:
        where = f"{fetch.name} of {alike(module_path(fetch.reader)).rpartition('.*.')[2]}"
        sizes, behind = (fetch.bytes, stored_bytes(fetch.weight)), _names([fetch.behind])[0]
        key = where, *sizes, behind, _names(fetch.window), fetch.idle, fetch.gain
        kinds.setdefault(key, []).extend(_like(fetch.reader, layers, representatives))
    return tuple(PlannedFetch(tuple(sorted(numbers)), *key) for key, numbers in kinds.items()), _reasons(record)


def _super_kernels(
    traced: TracedGraph,
    costs: Mapping[fx.Node, Cost] | None,
    layers: Mapping[fx.Node, int],
    representatives: Sequence[int],
) -> tuple[tuple[PlannedSuperKernel, ...], tuple[tuple[str, str], ...]]:
    record, found = schedule_super_kernels(traced)
    kinds: dict[tuple[tuple[str, ...], float | None, float | None], list[int]] = {}
    for kernel in found:
        seconds, beyond = None, None
        if costs is not None:
            each = [costs[node] for node in kernel.launches]
            seconds = sum(cost.seconds for cost in each)
            beyond = sum(cost.seconds - max(cost.memory, cost.compute) for cost in each)
        like = _like(kernel.launches[0], layers, representatives)
        kinds.setdefault((_names(kernel.launches), seconds, beyond), []).extend(like)
    kernels = tuple(PlannedSuperKernel(tuple(sorted(numbers)), *key) for key, numbers in kinds.items())
    return kernels, _reasons(record)


def _like(node: fx.Node, layers: Mapping[fx.Node, int], representatives: Sequence[int]) -> list[int]:
    """The layers of the whole model that are like that of a node."""
    like = layers.get(node, -1)
    return [number for number, layer in enumerate(representatives) if layer == like]


def _reasons(record: PassRecord) -> tuple[tuple[str, str], ...]:
    """(where, why) of each kind of near miss."""
    refused = counted((alike(each.module), _OVERLOAD.sub("", each.reason)) for each in record.rejections)
    return tuple(pair for pair, _ in refused)


def _names(nodes: Sequence[fx.Node]) -> tuple[str, ...]:
    return tuple(operator_name(node).rpartition(".")[2] for node in nodes)
