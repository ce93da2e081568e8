"""From a model to a Program: capture, passes, proof, code, self-check."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..passes import Pass, Rejection, TracedGraph, UnsupportedModel
from ..passes.attention_node import attention_nodes, paged_attention_nodes
from ..passes.fx_nodes import callee, module_path, value
from ..passes.token_axis import mixers
from . import dump
from .aten import to_aten
from .cache_restart import restart_length
from .capture import Captured, capture, first_line
from .layer_repeat import CannotRepeat, LayerRepeat
from .linker import LinkedProgram, link
from .options import CompileOptions
from .pipeline import PassError, run_passes, selected_passes
from .report import CompileReport, PassCheck
from .shrink import check_long_windows
from .targets.cpu.inductor import generate_code, is_fusible
from .targets.cpu.kernels import call_kernels
from .targets.npu.routes import make_route
from .targets.npu.weights import prepare_weights
from .user_passes import registered_passes
from .verify import Reference, check, reference_of_model

log = logging.getLogger(__name__)


class _Clock:
    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds, self.start = seconds, time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.start
        self.start = now


@dataclass
class Built:
    """A program whose weights are not packed yet.

    Attributes:
        program: it, linked and compared with the model.
        traced: the graph that it runs.
        options: it was compiled with.
        reference: what the model says; None where nothing is compared.
    """

    program: LinkedProgram
    traced: TracedGraph
    options: CompileOptions
    reference: Reference | None


def build_program(
    model: nn.Module,
    options: CompileOptions,
    *,
    owns_weights: bool = False,
    report: CompileReport | None = None,
) -> LinkedProgram:
    """Compile ``model`` into a paged program.

    The program's ``report`` attribute is the ``CompileReport``.

    Args:
        model: a HuggingFace causal LM in eval mode. Its parameters may become views of merged tensors; names,
            values and shapes stay.
        options: see ``CompileOptions``.
        owns_weights: nobody else runs the model, so weights that get packed may be freed.
        report: filled in, so that it can be read when compiling fails; by default a new one.

    Raises:
        UnsupportedModel: the model cannot be served exactly; the message says which part and why.
        ValueError: ``codegen`` does not fit the target or the device.
    """
    built = build_unpacked(model, options, report=report, owns_weights=owns_weights)
    finish(built, owns_weights=owns_weights)
    return built.program


def build_unpacked(
    model: nn.Module, options: CompileOptions, *, owns_weights: bool = False, report: CompileReport | None = None
) -> Built:
    """The first part of ``build_program``: all but packing the weights of a CPU's program."""
    report = CompileReport(type(model).__name__) if report is None else report
    options = options.for_device(next(model.parameters()).device.type)
    dump.begin(report.model)
    clock = _Clock(report.seconds)
    # The reference comes first: some models settle into their final form at the first call.
    reference = reference_of_model(model) if options.verify != "off" else None
    clock.lap("reference")
    found = _with_few_layers(model, options, reference, report)
    if found is None:
        clock = _Clock(report.seconds)
        captured = capture(model)
        dump.write_graph(captured.traced, "captured")
        clock.lap("capture")
        found = captured, rewrite(captured, options, reference, report)
    captured, traced = found
    clock = _Clock(report.seconds)
    if traced.npu is None:
        # Until weights are rounded and packed, every product would round its own.
        program = _link(captured, traced, options, model, None if options.quantization else reference, report, clock)
    else:
        program = _link_for_npu(traced, options, reference, report, clock, owns_weights)
    program.rope_switch = switch = traced.notes.get("rope_switch")
    program.restart_length = None if switch is None else restart_length(model, switch)
    return Built(program, traced, options, reference)


def _with_few_layers(
    model: nn.Module, options: CompileOptions, reference: Reference | None, report: CompileReport
) -> tuple[Captured, TracedGraph] | None:
    """What capturing and rewriting yield when one layer is compiled for all that are like it; None where that cannot
    be, or cannot be checked.
    """
    looked_at = options.verify != "model" or dump.is_on() or options.patterns or registered_passes()
    if reference is None or options.target != "cpu" or looked_at:
        return None
    repeat = LayerRepeat.of(model)
    if repeat is None:
        return None
    clock = _Clock(report.seconds)
    try:
        with repeat.shortened():
            captured = replace(capture(model), repeat=repeat)
        clock.lap("capture")
        traced = rewrite(captured, options, reference, report)
    except (CannotRepeat, UnsupportedModel) as error:
        log.info("%s is compiled with all its layers: %s", report.model, error)
        fresh = CompileReport(report.model, seconds=report.seconds)
        vars(report).update(vars(fresh))
        return None
    report.layers_compiled = repeat.kept
    return captured, traced


def finish(built: Built, *, owns_weights: bool) -> None:
    """The second part: pack the weights, where the options ask for it."""
    if (built.options.pack_weights or built.options.quantization) and built.traced.npu is None:
        clock = _Clock(built.program.report.seconds)
        _pack(built.program, built.reference, built.program.report, owns_weights)
        clock.lap("pack")


def _pack(program: LinkedProgram, reference: Reference | None, report: CompileReport, release: bool) -> None:
    """Pack the weights of a verified program and compare it once more.

    Raises:
        UnsupportedModel: the packed program, or a rounded weight, is not what it should be.
    """
    size = program.pack_weights(release=release, check=reference is not None)
    kept = "in place of" if release else "beside"
    log.info("%.2f GiB of weights are packed %s the model's own", size / 2**30, kept)
    if reference is not None and size:
        verdict = check(program, reference, weight_bits=program.weight_bits)
        if not verdict.ok:
            raise UnsupportedModel(f"{report.model}: with packed weights {verdict.reason}; give pack_weights=False")
        report.verdict = verdict


def rewrite(
    captured: Captured, options: CompileOptions, reference: Reference | None, report: CompileReport
) -> TracedGraph:
    """The graph after the passes, proven and, with a reference, compared with the model.

    Raises:
        CannotRepeat: the layers that were captured cannot stand for the others.
        UnsupportedModel: something of the model has no exact counterpart in a paged program.
    """
    clock = _Clock(report.seconds)
    device = value(captured.traced.placeholder(captured.traced.input_ids)).device.type
    options = options.for_device(device)
    if options.target == "npu" and captured.traced.npu is None:
        captured.traced.npu = options.npu_target(device)
    if options.cache_dtype is not None and reference is not None:
        options, dropped = _checked_without_rounding(captured, options, reference, report)
        clock.lap("verify")
    else:
        dropped = []
    captured.traced.cache_dtype = options.cache_dtype
    captured.traced.quantization = options.weight_quantization
    traced: TracedGraph | None = None
    few: TracedGraph  # the graph over the layers that were captured
    if options.verify != "every-pass":
        try:
            traced = _all_at_once(captured, options, report, clock)
        except PassError as error:
            if captured.repeat is not None:
                raise CannotRepeat(str(error)) from error
            log.warning("%s; applying the passes one by one", error)
        else:
            few = traced
            if captured.repeat is not None:
                traced = captured.repeat.deepen(few)
                report.attention_recognised = report.attention_total = len(list(paged_attention_nodes(traced)))
                clock.lap("passes")
            if reference is not None:
                report.verdict = check(link(traced, traced.module), reference)
                clock.lap("verify")
    if captured.repeat is not None and report.verdict is not None and not report.verdict.ok:
        raise CannotRepeat(report.verdict.reason)
    if traced is None or (report.verdict is not None and not report.verdict.ok):
        traced = few = _one_by_one(captured, options, reference, report, clock)
        if reference is not None:
            report.verdict = check(link(traced, traced.module), reference)
            clock.lap("verify")
    if report.verdict is not None and not report.verdict.ok:
        raise UnsupportedModel(
            f"{report.model}: the paged program is not exact ({report.verdict.reason}), though each pass is for "
            "sequences that run alone; the self-check refuses it. Please report the model; verify='off' serves it "
            "regardless"
        )
    if reference is not None:
        long_windows = check_long_windows(captured.traced, few, reference)
        if long_windows is not None and not long_windows.ok:
            raise UnsupportedModel(f"{report.model}: a long window is not exact ({long_windows.reason})")
        clock.lap("verify")
    report.dropped_passes = dropped + report.dropped_passes
    _hold_weights(traced, options, report)
    clock.lap("passes")
    return traced


def _hold_weights(traced: TracedGraph, options: CompileOptions, report: CompileReport) -> None:
    """Apply the passes that say how weights are held.

    Raises:
        UnsupportedModel: weights are to be rounded, and there is none that can be.
    """
    records = run_passes(traced, selected_passes(options, "weights"))
    report.passes += records
    for record in records:
        if record.name == "quantise_linears" and not record.matches:
            why = f": {_say(record.rejections[0])}" if record.rejections else ""
            raise UnsupportedModel(
                f"{report.model}: quantization={options.quantization!r} finds no linear layer that it can round{why}"
            )


def _checked_without_rounding(
    captured: Captured, options: CompileOptions, reference: Reference, report: CompileReport
) -> tuple[CompileOptions, list[tuple[str, str]]]:
    """Compare the graph with caches of full precision: rounded ones would hide what is slightly wrong.

    Returns:
        the options without the optional passes that break the numbers, and these with the reasons.

    Raises:
        UnsupportedModel: the model cannot be served, whatever its caches are.
    """
    plain = CompileReport(report.model)
    rewrite(captured, replace(options, kv_cache_dtype="auto"), reference, plain)
    dropped = [(name, why) for name, why in plain.dropped_passes if name != "to_aten"]
    names = [name for name, _ in dropped]
    if "only" in options.passes:
        passes = {"only": [name for name in options.passes["only"] if name not in names]}
    else:
        passes = {"skip": [*options.passes.get("skip", ()), *names]}
    return replace(options, passes=passes), dropped


def _all_at_once(captured: Captured, options: CompileOptions, report: CompileReport, clock: _Clock) -> TracedGraph:
    """Apply all passes and prove the paged graph between the two stages.

    Raises:
        PassError: a pass or the conversion to ATen failed.
    """
    traced = captured.traced.copy()
    report.passes = run_passes(traced, selected_passes(options, "dynamo"))
    _prove(traced, report)
    clock.lap("passes")
    try:
        traced = to_aten(traced, captured.context)
    except Exception as error:
        raise PassError(f"AOTAutograd cannot trace the rewritten graph: {first_line(error)}") from error
    dump.write_graph(traced, "aten")
    clock.lap("aten")
    report.passes += run_passes(traced, selected_passes(options, "aten"))
    clock.lap("passes")
    return traced


def _one_by_one(
    captured: Captured, options: CompileOptions, reference: Reference | None, report: CompileReport, clock: _Clock
) -> TracedGraph:
    """Apply the passes one at a time, comparing after each; leave out optional ones that fail or break the numbers.

    Raises:
        UnsupportedModel: a required pass fails (PassError) or breaks the numbers; the message names it.
    """
    report.passes, report.dropped_passes = [], []
    traced = _each(captured.traced.copy(), selected_passes(options, "dynamo"), reference, report)
    _prove(traced, report)
    clock.lap("passes")
    try:
        aten = to_aten(traced, captured.context)
        dump.write_graph(aten, "aten")
        reason = check(link(aten, aten.module), reference).reason if reference is not None else ""
    except Exception as error:
        reason = first_line(error)
    clock.lap("aten")
    if reason:
        report.dropped_passes.append(("to_aten", reason))
        log.warning("no pass on the ATen graph is applied: %s", reason)
        return traced
    traced = _each(aten, selected_passes(options, "aten"), reference, report)
    clock.lap("passes")
    return traced


def _each(
    traced: TracedGraph, passes: Sequence[Pass], reference: Reference | None, report: CompileReport
) -> TracedGraph:
    """Apply passes of one stage one at a time. Until all required ones have run, the graph is compared on sequences
    that run alone.
    """
    for i, entry in enumerate(passes):
        before = traced.copy()
        alone = any(p.required for p in passes[i + 1 :])
        reason = ""
        try:
            records = run_passes(traced, [entry])
            if reference is not None and records[0].matches:
                verdict = check(link(traced, traced.module), reference, alone=alone)
                reason = verdict.reason
                report.checks.append(PassCheck(entry.name, verdict.error, reason))
                if reason:
                    dump.write_reproducer(entry.name, before, traced, reference, alone=alone, reason=reason)
        except PassError as error:
            report.checks.append(PassCheck(entry.name, float("inf"), str(error)))
            if entry.required:
                raise
            reason = str(error)
        if not reason:
            report.passes += records
        elif entry.required:
            raise UnsupportedModel(
                f"{report.model}: pass {entry.name} is not exact on it ({reason}); the self-check refuses it. "
                "Please report the model; verify='off' serves it regardless"
            )
        else:
            report.dropped_passes.append((entry.name, reason))
            log.warning("pass %s is left out: with it, %s", entry.name, reason)
            traced = before
    return traced


def _prove(traced: TracedGraph, report: CompileReport) -> None:
    """Count the attention, and refuse what does not read the paged cache or lets tokens see each other.

    Raises:
        UnsupportedModel: the message says which node and why.
    """
    report.attention_recognised = len(list(paged_attention_nodes(traced)))
    left = _left_over(traced, report)
    report.attention_total = report.attention_recognised + len(left)
    if left:
        raise UnsupportedModel(f"{report.model}: {len(left)} attention calls cannot be paged: {left[0]}")
    if not report.attention_recognised:
        recognisers = [record for record in report.passes if record.name.startswith("recognise_")]
        near_misses = [r for record in recognisers for r in record.rejections] + mixers(traced)
        why = f"; {_say(near_misses[0])}" if near_misses else ""
        raise UnsupportedModel(f"{report.model} has no attention that a pass recognises{why}")
    found = mixers(traced)
    if found:
        raise UnsupportedModel(f"{report.model} cannot run many sequences in one step: {_say(found[0])}")


def _say(rejection: Rejection) -> str:
    where = f" in {rejection.module}" if rejection.module else ""
    return f"{rejection.reason} ({rejection.node}{where})"


def _left_over(traced: TracedGraph, report: CompileReport) -> list[str]:
    """Attention that does not read the paged cache, with the reason that a pass gave for it."""
    reasons: dict[str, Rejection] = {}
    for record in report.passes:
        for rejection in record.rejections:
            reasons.setdefault(rejection.node, rejection)
    attention = set(attention_nodes(traced))
    left = []
    for node in traced.graph.nodes:
        if callee(node) == "scaled_dot_product_attention" or node in attention:
            why = reasons.get(node.name)
            left.append(_say(why) if why else f"{node.name} in {module_path(node)} was not rewritten")
    return left


def _link(
    captured: Captured,
    traced: TracedGraph,
    options: CompileOptions,
    model: nn.Module,
    reference: Reference | None,
    report: CompileReport,
    clock: _Clock,
) -> LinkedProgram:
    if not options.uses_inductor(sum(p.numel() for p in model.parameters()), is_fusible(traced)):
        return link(traced, call_kernels(traced), report)
    try:
        run: Callable[..., Sequence[Any]] = generate_code(traced, captured.context)
    except Exception as error:  # no C++ compiler, no room on the disk, a bug of inductor
        log.warning("inductor fails, the rewritten graph runs as it is, slower: %s", first_line(error))
        report.dropped_passes.append(("inductor", first_line(error)))
        return link(traced, call_kernels(traced), report)
    program = link(traced, run, report)
    clock.lap("codegen")
    report.codegen = "inductor"
    if reference is not None:
        verdict = check(program, reference)
        clock.lap("verify")
        if not verdict.ok:
            log.warning("inductor's code is not used: %s; the rewritten graph runs as it is", verdict.reason)
            report.dropped_passes.append(("inductor", verdict.reason))
            report.codegen = "none"
            return link(traced, call_kernels(traced), report)
        report.verdict = verdict
    return program


def _link_for_npu(
    traced: TracedGraph,
    options: CompileOptions,
    reference: Reference | None,
    report: CompileReport,
    clock: _Clock,
    release: bool,
) -> LinkedProgram:
    prepare_weights(traced, fractal_nz=options.pack_weights, release=release)
    clock.lap("pack")
    eager = call_kernels(traced)
    route = make_route(options.codegen, traced, eager)
    if route is None:
        return link(traced, eager, report)
    program, reason = link(traced, route, report), ""
    report.codegen = route.name
    if reference is not None:
        try:
            verdict = check(program, reference)
        except Exception as error:  # an operator without converter, a device without room
            reason = f"it fails: {first_line(error)}"
        else:
            reason = verdict.reason
        clock.lap("codegen")
    if reason:
        log.warning("codegen=%r is not used: %s; the lowered graph runs call by call, slower", route.name, reason)
        report.dropped_passes.append((route.name, reason))
        report.codegen = "none"
        return link(traced, eager, report)
    if reference is not None:
        report.verdict = verdict
    return program
