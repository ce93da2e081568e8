"""The cost of each launch of a lowered graph, from its shapes and a chip's published figures."""

from __future__ import annotations

from torch import fx

from ...passes import TracedGraph
from ...passes.graph.provenance import launches_work, operator_name
from ...passes.schedule.launches import Cost
from ..targets.npu.socs import Chip
from .flops import flops
from .traffic import Step, moved

FLOOR = 2e-6
"""Seconds that the smallest launch of a captured graph is taken to need; an assumption, no source gives one."""
_MIXED = ("attention", "mla_prolog", "indexer")


def launch_costs(traced: TracedGraph, chip: Chip, step: Step) -> dict[fx.Node, Cost]:
    """The cost of every launch in ``step``.

    Raises:
        ValueError: the chip's figures do not suffice; see ``why_not_planned``.
    """
    reason = why_not_planned(chip, chip.name)
    if reason or chip.bandwidth is None or chip.peak is None:
        raise ValueError(f"chip: {reason}; omit schedule")
    costs = {}
    for node in traced.graph.nodes:
        if launches_work(node):
            operations = flops(traced, [node], step)
            name = operator_name(node)
            mixed = any(part in name for part in _MIXED)
            costs[node] = Cost(
                memory=moved(traced, [node], step).total / chip.bandwidth,
                compute=operations / chip.peak,
                floor=FLOOR,
                resource="mixed" if mixed else "cube" if operations else "vector",
            )
    return costs


def why_not_planned(chip: Chip | None, soc: str) -> str:
    """The reason why no schedule is planned for a chip, or ""."""
    if chip is None:
        return f"no published figures for {soc}"
    missing = [
        name
        for name, known in (
            ("bandwidth", chip.bandwidth),
            ("cube cores", chip.cube_cores),
            ("vector cores", chip.vector_cores),
        )
        if known is None
    ]
    return f"no source gives {', '.join(missing)} of {soc}" if missing else ""
