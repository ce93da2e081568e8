"""Mark runs of launches of a decode step that can be one super kernel.

Matches:
    x; a; b; c; y                    # a, b and c are fused, and x and y, launches or copied views, are not
Becomes:
    the same nodes; those of a run have meta["custom"]["pagoda_super_kernel"] == the name of its first launch
Why it is faster:
    the kernels of a run are launched as one, which calls them one after the other: the device neither waits for each
    launch nor drains between them. Only graphs of fixed sizes have it. By the vendor's word, not measured.

The graph engine itself cuts a scope at what it cannot fuse; a scope that ends there says what is fused, in the report
and in the profile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from ..graph.custom_notes import clear_custom_notes, put_custom_note
from ..graph.provenance import launches_work, operator_name
from ..graph.record import PassRecord
from ..graph.traced import TracedGraph
from .schedule_branches import Branch
from .super_kernel_operators import is_copied, why_not_fused

SUPER_KERNEL = "pagoda_super_kernel"
"""Key, in ``node.meta["custom"]``, of the name of the super kernel that a node is part of."""


@dataclass(frozen=True)
class SuperKernel:
    """Launches that follow each other and are fused.

    Attributes:
        name: that no other of the graph has.
        launches: in order.
    """

    name: str
    launches: tuple[fx.Node, ...]


def schedule_super_kernels(
    traced: TracedGraph, branches: Sequence[Branch] = ()
) -> tuple[PassRecord, list[SuperKernel]]:
    """Annotate the super kernels of ``traced``; its nodes, their order and their arguments stay.

    Launches of a branch, on either stream, and the one that waits for both are left alone: a super kernel takes the
    cores that they share.

    Args:
        traced: a lowered graph.
        branches: that run on a second stream, from ``schedule_branches``.

    Returns:
        the record and the super kernels, in launch order.
    """
    record = PassRecord("schedule_super_kernels")
    apart = {node for branch in branches for node in (*branch.side, *branch.main, branch.join)}
    runs: list[list[fx.Node]] = [[]]
    view: fx.Node | None = None
    for node in traced.graph.nodes:
        if not launches_work(node):
            view = node if runs[-1] and is_copied(node) else view
            continue
        if reason := _why_apart(node, apart):
            record.reject(node, f"{node.name} is in no super kernel: {reason}")
            runs.append([])
        elif view is not None:
            record.reject(view, f"{view.name} ends a super kernel: the graph engine copies what it shows")
            runs.append([node])
        else:
            runs[-1].append(node)
        view = None
    for run in runs:
        if len(run) == 1:
            record.reject(run[0], f"{run[0].name} by itself is not a super kernel")
    found = [SuperKernel(run[0].name, tuple(run)) for run in runs if len(run) > 1]
    clear_custom_notes(traced.graph, SUPER_KERNEL)
    for kernel in found:
        for node in kernel.launches:
            put_custom_note(node, SUPER_KERNEL, kernel.name)
    record.matches = len(found)
    return record, found


def _why_apart(node: fx.Node, apart: set[fx.Node]) -> str:
    if node in apart:
        return "it runs beside a branch on the second stream"
    return why_not_fused(operator_name(node))
