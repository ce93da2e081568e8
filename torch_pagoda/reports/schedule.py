"""Plans a second stream, early fetches and fused launches of a decode step on an NPU, from shapes; nothing is
measured."""

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
"""Suffixes that distinguish nodes of one operator."""


@dataclass(frozen=True)
class PlannedBranch:
    """Launches for a second stream, equal in some layers.

    Attributes:
        layers: indices of the layers; empty: outside the layers.
        side: operators of the second stream, in order.
        main: operators of the main stream meanwhile.
        seconds: time of ``side`` by itself in one layer.
        gain: seconds saved in one layer.
    """

    layers: tuple[int, ...]
    side: tuple[str, ...]
    main: tuple[str, ...]
    seconds: float
    gain: float


@dataclass(frozen=True)
class PlannedFetch:
    """A weight to fetch into the L2 cache before it is read, equal in some layers.

    Attributes:
        layers: as in ``PlannedBranch``.
        weight: its argument name and the module that reads it, from its layer on.
        bytes: bytes to fetch.
        of_bytes: bytes of the weight.
        behind: operator after which the fetch begins.
        window: operators that leave the memory idle meanwhile, in order.
        idle: seconds for which they do.
        gain: seconds saved in one layer.
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
    """Launches to fuse, equal in some layers.

    Attributes:
        layers: as in ``PlannedBranch``, of the first launch.
        launches: operators, in order.
        seconds: their time by themselves; None if the chip's figures are unknown.
        beyond: their time beyond moving their bytes and doing their operations, the maximum that fusing can save.
    """

    layers: tuple[int, ...]
    launches: tuple[str, ...]
    seconds: float | None
    beyond: float | None


@dataclass(frozen=True)
class SchedulePlan:
    """A plan of second stream, early fetches and fused launches for a decode step of one sequence.

    Attributes:
        branches: branches for the second stream.
        refused: joins that stay on the main stream, layers not distinguished, with the reasons.
        step_seconds: time of all launches in sequence, for the built layers.
        unplanned: why nothing is planned; else "".
        fetches: weights to fetch early.
        not_fetched: weights not fetched, likewise, with the reasons.
        unfetched: why no fetch is planned; else "".
        super_kernels: launches to fuse.
        not_fused: launches not fused, likewise, with the reasons.
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
        representatives: for each layer of the whole model, the equal layer of the graph.
        chip: the chip; None if unknown.
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
    """The layers of the whole model equal to that of a node."""
    like = layers.get(node, -1)
    return [number for number, layer in enumerate(representatives) if layer == like]


def _reasons(record: PassRecord) -> tuple[tuple[str, str], ...]:
    """(where, why) of each kind of near miss."""
    refused = counted((alike(each.module), _OVERLOAD.sub("", each.reason)) for each in record.rejections)
    return tuple(pair for pair, _ in refused)


def _names(nodes: Sequence[fx.Node]) -> tuple[str, ...]:
    return tuple(operator_name(node).rpartition(".")[2] for node in nodes)
