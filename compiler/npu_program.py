"""Links a graph that was lowered for an NPU by the route that the options select, compared with the model."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from ..passes import TracedGraph, UnsupportedModel
from ..passes.graph.notes import fewest_bits
from ..passes.lower.npu.decode_graph import decode_graph_or_reason
from ..runtime.npu_errors.device_lost import raise_if_lost
from ..runtime.ops.linear.stored_weight import StoredWeight
from ..runtime.phases import phase
from .costs.schedules import annotate_schedules
from .link.linker import LinkedProgram
from .options import CompileOptions
from .report import CompileReport, Verdict, first_line
from .targets.cpu.kernels import call_kernels
from .targets.npu.decode_steps import DecodeCalls
from .targets.npu.route import Run
from .targets.npu.routes import make_route
from .targets.npu.schedules.schedule_options import asked_for, leave_out
from .targets.npu.weights.weights import prepare_weights
from .tolerance import Tolerance, routes_tokens
from .verify.self_check import Reference, check, compared_steps, judge, tolerating_rounding

log = logging.getLogger(__name__)

Linked: TypeAlias = Callable[[Callable[..., Sequence[Any]]], LinkedProgram]
"""The program of a function of the graph's inputs."""


def link_for_npu(
    linked: Linked,
    traced: TracedGraph,
    options: CompileOptions,
    reference: Reference | None,
    report: CompileReport,
    release: bool,
) -> LinkedProgram:
    """The program of a lowered graph, its weights prepared, by the route that the options select.

    Args:
        linked: links it.
        traced: the graph.
        options: with a definite codegen.
        reference: what it is compared with; None compares nothing.
        report: filled in.
        release: see ``prepare_weights``.

    Raises:
        UnsupportedModel: it is wrong with quantized weights.
    """
    if report.dtype_advice:
        log.warning("%s: %s", report.model, report.dtype_advice)
    # Until now a part of the reference was compared, or weights that were not rounded yet.
    changed = bool(traced.notes.quantized) or any(isinstance(t, StoredWeight) for t in traced.constants.values())
    bits = fewest_bits(traced.notes.quantized)
    prepare_weights(traced, fractal_nz=options.pack_weights, release=release, check=reference is not None)
    eager = call_kernels(traced)
    if reference is not None and changed:
        verdict = check(linked(eager), reference, weight_bits=bits)
        if not verdict.ok:
            remedy = "omit quantization" if options.quantization else "use target='cpu'"
            raise UnsupportedModel(f"{report.model}: with quantized weights {verdict.reason}; {remedy}")
        report.verdict = verdict
    decode = _decode_calls(linked, traced, eager, reference, report)
    if asked := asked_for(options.schedule):
        annotate_schedules(traced if decode is None else decode.graph, asked, report)
    route = make_route(
        options.codegen, traced, eager, options.npu_options, static_decode=options.static_decode, decode=decode
    )
    if route is None:
        return linked(decode or eager)
    route.dropped_schedules.update(report.dropped_schedules)
    report.dropped_schedules = route.dropped_schedules  # graphs are compiled later, too
    program, reason = linked(route), ""
    report.codegen = route.name
    if reference is not None:
        share = reference.share if routes_tokens(traced.graph) else 1.0
        program.tolerance = Tolerance(reference.tolerance, share)
    if reference is not None:
        try:
            with phase("codegen"):  # the first steps compile the graphs
                judged = tolerating_rounding(reference, program.caches, bits)
                verdict = judge(compared_steps(program, reference), judged)
        except Exception as error:  # an operator without converter, a device without room
            raise_if_lost(error)
            reason = f"it fails: {first_line(error)}"
        else:
            reason = verdict.reason or route.failure
    if reason:
        log.warning(
            "not using codegen=%r: %s; running the lowered graph operator by operator, which is slower",
            route.name,
            reason,
        )
        report.dropped_passes.append((route.name, reason))
        report.codegen = "none"
        for name in asked:
            leave_out(name, f"codegen={route.name!r} is not used", report.dropped_schedules)
        return linked(decode or eager)
    if reference is not None:
        report.verdict = verdict
    return program


@phase("verify")
def _decode_calls(
    linked: Linked, traced: TracedGraph, eager: Run, reference: Reference | None, report: CompileReport
) -> DecodeCalls | None:
    """The calls of the graph for decode steps, compared with those of ``traced``; None if there is none, or it is
    wrong."""
    graph, reason = decode_graph_or_reason(traced)
    if graph is not None:
        calls = DecodeCalls(traced, graph, call_kernels(graph), eager)
        if reference is None:
            return calls
        verdict = _beside_each_other(linked(eager), linked(calls), reference)
        if verdict.ok:
            return calls
        reason = f"its logits differ from the unfused path's by up to {verdict.error:.3g} standard deviations"
        if math.isinf(verdict.error):
            reason = verdict.reason
    if not reason:
        return None
    log.warning("decode steps fall back to the graph of all other steps: %s", reason)
    report.dropped_passes.append(("decode_graph", reason))
    return None


def _beside_each_other(one: LinkedProgram, other: LinkedProgram, reference: Reference) -> Verdict:
    """Compare the steps of a program with those of another one whose cache is rounded in the same way."""
    steps = zip(*(compared_steps(program, reference) for program in (one, other)), strict=True)
    return judge(((group, found, expected) for (group, expected, _), (_, found, _) in steps), reference)
