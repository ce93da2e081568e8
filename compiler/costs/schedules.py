"""Plans requested schedules of decode steps from shapes and a chip's published figures."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ...passes import TracedGraph
from ...passes.schedule.schedule_branches import Branch, schedule_branches
from ...passes.schedule.schedule_prefetch import L2Cache, schedule_prefetch
from ...passes.schedule.schedule_super_kernels import schedule_super_kernels
from ...passes.schedule.super_kernel_operators import SUPER_KERNEL_CHIPS, SUPER_KERNEL_PRODUCTS
from ...runtime.npu_target import NpuTarget
from ..report import CompileReport
from ..targets.npu.schedules.schedule_options import leave_out
from ..targets.npu.socs import Chip, chip
from .launch_costs import launch_costs, why_not_planned
from .traffic import Step

log = logging.getLogger(__name__)

PLANNED_STEP = Step(tokens=1, context=1024, rows=1)
"""The decode step that schedules are planned for."""


def annotate_schedules(traced: TracedGraph, asked: Sequence[str], report: CompileReport) -> None:
    """Annotate ``traced`` with the requested schedules; report those that cannot be planned and leave them out.

    Args:
        traced: a lowered graph.
        asked: names of schedules, see ``targets.npu.schedule_options``.
        report: gets the record of each, or why it is left out.
    """
    assert traced.npu is not None
    soc = traced.npu.soc
    known = chip(soc)
    branches: list[Branch] = []
    if planned := [name for name in asked if name != "super_kernels"]:
        reason = why_not_planned(known, soc)
        if reason or known is None:
            for name in planned:
                leave_out(name, reason, report.dropped_schedules)
        else:
            branches = _annotate_planned(traced, planned, known, report)
    if "super_kernels" in asked:
        reason = why_no_super_kernels(soc)
        if reason:
            leave_out("super_kernels", reason, report.dropped_schedules)
        else:
            record, kernels = schedule_super_kernels(traced, branches)
            report.passes.append(record)
            log.info("planned %d super kernels for decode steps", len(kernels))


def _annotate_planned(traced: TracedGraph, asked: Sequence[str], known: Chip, report: CompileReport) -> list[Branch]:
    """Annotate with the schedules that are planned by a chip's figures; the branches."""
    assert traced.npu is not None
    costs = launch_costs(traced, known, PLANNED_STEP)
    branches: list[Branch] = []
    if "streams" in asked:
        record, branches = schedule_branches(traced, costs)
        report.passes.append(record)
        log.info("planned %d branches of decode steps for a second stream", len(branches))
    if "prefetch" in asked:
        reason = why_not_fetched(known, traced.npu.soc)
        if reason:
            leave_out("prefetch", reason, report.dropped_schedules)
        else:
            record, fetches = schedule_prefetch(traced, costs, l2_cache(known), branches)
            report.passes.append(record)
            log.info("planned early fetches of %d weights in decode steps", len(fetches))
    return branches


def why_no_super_kernels(soc: str) -> str:
    """The reason why no super kernel is planned for a SoC, or ""."""
    if NpuTarget(soc).product in SUPER_KERNEL_PRODUCTS:
        return ""
    return f"super kernels are documented for {SUPER_KERNEL_CHIPS}, not for {soc}"


def why_not_fetched(chip: Chip | None, soc: str) -> str:
    """The reason why no fetch of a weight is planned for a chip, or ""."""
    reason = why_not_planned(chip, soc)
    if not reason and chip is not None and chip.l2 is None:
        reason = f"no source gives the L2 cache size of {soc}"
    return reason


def l2_cache(chip: Chip) -> L2Cache:
    """The L2 cache of a chip.

    Raises:
        ValueError: the chip's figures do not suffice; see ``why_not_fetched``.
    """
    reason = why_not_fetched(chip, chip.name)
    if reason or chip.l2 is None or chip.l2_bandwidth is None or chip.bandwidth is None:
        raise ValueError(f"chip: {reason}; omit schedule['prefetch']")
    return L2Cache(chip.l2, chip.l2_bandwidth, chip.bandwidth)
