"""Runs of passes over one graph: in order, or one at a time with a verdict on each."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from ..passes import Pass, PassRecord, TracedGraph, UnsupportedModel
from ..runtime.phases import phase
from .report import first_line
from .verify import dump
from .verify.fake_values import propagate

log = logging.getLogger(__name__)

Refusal: TypeAlias = Callable[[int, TracedGraph, "TracedGraph | UnsupportedModel"], str]
"""Of the index of a pass, the graph before it, and the graph after it or the error that it ended in: why the pass is
to be left out, or ""."""


@phase("passes")
def apply_one_by_one(
    traced: TracedGraph, passes: Sequence[Pass], refusal: Refusal, records: list[PassRecord]
) -> TracedGraph:
    """Apply passes one at a time and revert rejected ones.

    Args:
        traced: the graph; modified in place.
        passes: in order.
        refusal: called for each pass that changed something or failed. An exception ends everything.
        records: extended with those of the kept passes.

    Returns:
        the graph after the kept passes.
    """
    for index, entry in enumerate(passes):
        before = traced.copy()
        try:
            applied = run_passes(traced, [entry])
        except UnsupportedModel as error:
            reason = refusal(index, before, error) or str(error)
        else:
            reason = refusal(index, before, traced) if applied[0].matches else ""
        if reason:
            log.warning("dropping pass %s: %s", entry.name, reason)
            traced = before
        else:
            records += applied
    traced.recompile()
    return traced


class PassError(UnsupportedModel):
    """A pass failed or left a malformed graph. The message names the pass."""


def run_passes(traced: TracedGraph, passes: Sequence[Pass]) -> list[PassRecord]:
    """Apply ``passes`` in order.

    After each pass with changes, the graph is linted; at the end its fake tensors are recomputed.

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
