"""Run the passes over a traced graph, check the graph after each, and keep the records."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from ..passes import Pass, PassRecord, TracedGraph, UnsupportedModel
from ..passes.graph.fx_nodes import VMAP_BOUNDS, callee, is_tensor, value
from ..runtime.phases import phase
from .report import first_line
from .verify import dump


class PassError(UnsupportedModel):
    """A pass failed or left a graph that is not well-formed. The message names the pass."""


@phase("passes")
def run_passes(traced: TracedGraph, passes: Sequence[Pass]) -> list[PassRecord]:
    """Apply ``passes`` in order.

    After each pass that changed something the graph is linted; at the end its fake tensors are computed anew.

    Raises:
        PassError: a pass failed, left a malformed graph, or left a node whose dtype or rank is not as recorded.
    """
    records = []
    for entry in passes:
        start = time.perf_counter()
        try:
            record = entry.apply(traced)
        except UnsupportedModel:
            raise
        except Exception as error:
            raise PassError(f"pass {entry.name} failed: {first_line(error)}") from error
        if record.matches:
            try:
                traced.graph.lint()
            except Exception as error:
                raise PassError(f"pass {entry.name} left a broken graph: {first_line(error)}") from error
            dump.write_graph(traced, entry.name)
        record.seconds, record.place = time.perf_counter() - start, entry.place
        records.append(record)
    changed = [record.name for record in records if record.matches]
    if changed:
        try:
            propagate(traced)
        except Exception as error:
            named = f"pass {changed[0]}" if len(changed) == 1 else f"one of the passes {', '.join(changed)}"
            raise PassError(f"{named} left a broken graph: {first_line(error)}") from error
    traced.recompile()
    return records


def propagate(traced: TracedGraph) -> None:
    """Recompute every fake value from the placeholders and compare it with what the passes recorded.

    A view that new strides do not allow becomes a reshape, which copies.
    Nodes between the begin and the end of a vmap keep their values: they cannot be run one at a time.
    """
    vmaps = 0
    for node in traced.graph.nodes:
        vmaps += VMAP_BOUNDS.get(callee(node), 0)
        if vmaps or node.op not in ("call_function", "call_method") or not is_tensor(node):
            continue
        recorded = value(node)
        try:
            traced.propagate(node)
        except (RuntimeError, ValueError):
            if node.target not in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
                raise
            node.target = torch.ops.aten.reshape.default  # what it views has other strides now
            traced.propagate(node)
        found = value(node)
        if found.dtype != recorded.dtype or found.dim() != recorded.dim():
            raise ValueError(
                f"{node.name} is {found.dtype} of rank {found.dim()}, "
                f"recorded as {recorded.dtype} of rank {recorded.dim()}"
            )
