"""The pass pipeline: all passes over a captured graph, a proof and comparisons; one by one if those fail."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch

from ..passes import Pass, PassRecord, TracedGraph, UnsupportedModel
from ..passes.graph.attention_node import paged_attention_nodes
from ..passes.graph.custom_notes import clear_custom_notes
from ..passes.graph.fx_nodes import value
from ..passes.graph.stages import choose_boundaries, parted
from ..passes.lower.npu.attention.decode_attention import ANNOTATION as DECODE_ATTENTION
from ..passes.lower.npu.experts.rows_in_place import check_rows_read_once
from ..runtime.ops.linear.stored_weight import StoredWeight
from ..runtime.phases import phase
from .capture.aten import to_aten
from .capture.layer_repeat import CannotRepeat, LayerRepeat
from .capture.trace import Captured
from .link.linker import link
from .options import CompileOptions
from .pass_runs import PassError, apply_one_by_one, run_passes
from .pass_stages import Stages
from .report import CompileReport, PassCheck, Verdict, first_line, rejection_line
from .targets.npu.dtype_advice import dtype_advice
from .tolerance import HALF
from .verify import dump
from .verify.copied_layers import check_order
from .verify.graph_check import can_check, check_graph, check_own_weights, measure_rounding, on_cpu
from .verify.long_windows import check_decoded_windows, check_long_windows
from .verify.paging import check_paging
from .verify.self_check import Reference, check
from .weights.placed_weights import place_weights

log = logging.getLogger(__name__)

DECODE_ATTENTION_PASS = "decode_attention"
"""Stands among dropped passes for the notes of fused decode steps."""


@dataclass(frozen=True)
class Rewritten:
    """The graphs that the passes made of a captured one.

    Attributes:
        traced: the graph with all layers.
        captured: the same over the layers that were captured.
        paged: that one before its attention was lowered.
        unsharded: that one in front of the pass that cuts layers for several ranks; None for one rank.
    """

    traced: TracedGraph
    captured: TracedGraph
    paged: TracedGraph
    unsharded: TracedGraph | None = None


@dataclass(frozen=True)
class References:
    """The logits that a program is compared with; without any nothing is.

    Attributes:
        whole: those of the model with all its layers; None where ``shallow`` is enough.
        shallow: those of the model with the captured layers alone, on more sequences; None where ``whole`` is
            thorough.
        is_loaded: this process holds the weights of all layers. Else ``whole`` is for those who do.
    """

    whole: Reference | None
    shallow: Reference | None = None
    is_loaded: bool = True

    @property
    def thorough(self) -> Reference | None:
        """Those by which the captured layers are judged."""
        return self.shallow or self.whole

    def measure_rounding(self, captured: Captured) -> None:
        """Let both tolerate the rounding that the captured graph shows, and what more layers add to it."""
        if self.thorough is None:
            return
        measure_rounding(captured, self.thorough)
        if self.whole is not None:
            tolerated = tolerating_depth(self.thorough, captured.repeat)
            self.whole.tolerance, self.whole.share = tolerated.tolerance, tolerated.share


def tolerating_depth(reference: Reference, repeat: LayerRepeat | None) -> Reference:
    """The same of the model with all its layers: in half precision each adds to the rounding."""
    if repeat is None or reference.dtype not in HALF:
        return reference
    return replace(reference, tolerance=reference.tolerance * math.sqrt(repeat.total / repeat.kept))


def run_pipeline(
    captured: Captured, options: CompileOptions, reference: Reference | None, report: CompileReport
) -> TracedGraph:
    """The graph of :func:`rewrite` with all layers, compared with one reference."""
    return rewrite(captured, options, References(reference), report).traced


@phase("passes")
def rewrite(captured: Captured, options: CompileOptions, references: References, report: CompileReport) -> Rewritten:
    """The graph after the passes, proven correct and, with a reference, compared with the model.

    Args:
        captured: the model's graph; copies of it are modified.
        options: with a definite target, see ``CompileOptions.for_device``.
        references: the model's logits.
        report: filled in.

    Raises:
        CannotRepeat: the captured layers cannot represent the others.
        UnsupportedModel: a part of the model has no exact counterpart in a paged program.
    """
    if options.target == "npu" and captured.traced.npu is None:
        device = value(captured.traced.placeholder(captured.traced.input_ids)).device
        captured.traced.npu = options.npu_target(device.type)
    reference = references.thorough
    if options.cache_dtype is not None and reference is not None:
        options, dropped = _checked_without_rounding(captured, options, references, report)
    else:
        dropped = []
    captured.traced.taps_hidden = options.taps_hidden
    captured.traced.cache_dtype = options.cache_dtype
    captured.traced.quantization = options.weight_quantization
    captured.traced.input_bits = options.input_bits
    references.measure_rounding(captured)
    stages = Stages.of(options)
    found: Rewritten | None = None
    if options.verify != "every-pass":
        try:
            found = _all_at_once(captured, stages, report)
        except PassError as error:
            if captured.repeat is not None:
                raise CannotRepeat(str(error)) from error
            log.warning("%s; applying the passes one by one", error)
        else:
            if captured.repeat is not None:
                found = replace(found, traced=_with_all_layers(captured.repeat, found.captured, stages))
                report.attention_recognized = report.attention_total = len(list(paged_attention_nodes(found.traced)))
            if reference is not None:
                compared = found.traced if references.shallow is None else found.captured
                report.verdict = _difference(captured, compared, found.captured, reference)
                # Stored weights are unpacked for every product, and compared once they are packed.
                is_part = compared is found.captured and references.is_loaded and not _stored(compared)
                if report.verdict.ok and is_part and references.whole:
                    report.verdict = _over_own_weights(found.traced, references.whole)
    if captured.repeat is not None and report.verdict is not None and not report.verdict.ok:
        raise CannotRepeat(report.verdict.reason)
    if found is None or (report.verdict is not None and not report.verdict.ok):
        found = _one_by_one(captured, stages, reference, report)
        if reference is not None:
            report.verdict = _difference(captured, found.traced, found.captured, reference)
    if report.verdict is not None and not report.verdict.ok:
        raise UnsupportedModel(
            f"{report.model}: the paged program is not exact ({report.verdict.reason}), although each pass is "
            "exact for single sequences. Please report the model; verify='off' skips the self-check"
        )
    if reference is not None:
        _check_long_windows(captured, found, stages.aten[stages.lowering :], reference, report)
    report.dropped_passes = dropped + report.dropped_passes
    if options.world_size > 1:
        found = _of_ranks(captured, found, stages, options, references, report)
    if options.tensor_parallel_size > 1 and not found.traced.notes.parts:
        log.warning("nothing of %s can be cut: each of its ranks holds and computes all of it", report.model)
    hold_weights(found.traced, stages.weights, options.quantization, report)
    if captured.repeat is not None:
        check_order(captured.repeat, found.traced)
    if options.pipeline_parallel_size > 1:
        found.traced.notes.boundaries = choose_boundaries(found.traced, options.pipeline_parallel_size)
    if found.captured is not found.traced:  # it is to run over the same weights
        found.captured.notes.of_layers = found.traced.notes.of_layers
        run_passes(found.captured, [*stages.folds, *stages.weights])
    if found.traced.npu is not None:
        routes = [route for record in report.passes for route in record.routes]
        report.dtype_advice = dtype_advice(routes, _dtype_of(captured.traced), found.traced.npu.product)
    return found


def _check_long_windows(
    captured: Captured, found: Rewritten, lowering: Sequence[Pass], reference: Reference, report: CompileReport
) -> None:
    """Verify windows longer than the self-check's sequences. Decode steps over int8 caches that are wrong there fall
    back to the unfused attention path.

    Raises:
        UnsupportedModel: the graph is wrong there.
    """

    def lower(graph: TracedGraph) -> None:
        run_passes(graph, lowering)

    verdict = check_long_windows(captured.traced, found.paged, reference, lower)
    if verdict is not None and not verdict.ok:
        raise UnsupportedModel(f"{report.model}: attention with long windows is not exact ({verdict.reason})")
    decoded = check_decoded_windows(found.paged, reference, lower)
    if decoded is not None and not decoded.ok:
        log.warning("int8-KV decode falls back to the unfused attention path: %s", decoded.reason)
        report.dropped_passes.append((DECODE_ATTENTION_PASS, decoded.reason))
        clear_custom_notes(found.traced.graph, DECODE_ATTENTION)


def _dtype_of(traced: TracedGraph) -> torch.dtype:
    """The dtype of most of a model's parameters."""
    matrices = [t for t in traced.constants.values() if t.is_floating_point() and t.dim() > 1]
    return Counter(tensor.dtype for tensor in matrices).most_common(1)[0][0] if matrices else torch.float32


def _on_aten(
    traced: TracedGraph, stages: Stages, apply: Callable[[TracedGraph, list[Pass]], TracedGraph]
) -> Rewritten:
    """What the passes on the ATen graph make of it, and the graph in front of some of them."""
    copies = {}
    places = sorted({0, stages.lowering, stages.sharded, len(stages.aten)})
    for start, end in zip(places, [*places[1:], None], strict=True):
        if start in (stages.lowering, stages.sharded) and start < len(stages.aten):
            copies[start] = traced.copy()
        traced = apply(traced, stages.aten[start:end])
    unsharded = copies.get(stages.sharded, traced) if stages.sharding else None
    return Rewritten(traced, traced, copies.get(stages.lowering, traced), unsharded)


def _with_all_layers(repeat: LayerRepeat, captured: TracedGraph, stages: Stages) -> TracedGraph:
    """Unroll a graph of few layers, and fold constants of each layer's weights."""
    traced = repeat.unroll(captured)
    check_order(repeat, traced)
    traced.notes.of_layers = repeat.inputs_not_loaded(traced)
    run_passes(traced, stages.folds)
    return traced


def _checked_without_rounding(
    captured: Captured, options: CompileOptions, references: References, report: CompileReport
) -> tuple[CompileOptions, list[tuple[str, str]]]:
    """Verify the graph with full-precision caches: quantized ones would hide small errors.

    Returns:
        the options without the optional passes that change the logits, and these passes with the reasons.

    Raises:
        UnsupportedModel: the model cannot be served with any cache.
    """
    plain = CompileReport(report.model)
    rewrite(captured, replace(options, kv_cache_dtype="auto"), references, plain)
    dropped = [(name, why) for name, why in plain.dropped_passes if name != "to_aten"]
    names = [name for name, _ in dropped]
    if "only" in options.passes:
        passes = {"only": [name for name in options.passes["only"] if name not in names]}
    else:
        passes = {"skip": [*options.passes.get("skip", ()), *names]}
    return replace(options, passes=passes), dropped


def _all_at_once(captured: Captured, stages: Stages, report: CompileReport) -> Rewritten:
    """Apply all passes and prove the paged graph between the two stages.

    Raises:
        PassError: a pass or the conversion to ATen failed.
    """
    traced = captured.traced.copy()
    report.passes = run_passes(traced, stages.dynamo)
    check_paging(traced, report)
    try:
        traced = to_aten(traced, captured.context)
    except Exception as error:
        raise PassError(f"AOTAutograd cannot trace the rewritten graph: {first_line(error)}") from error
    dump.write_graph(traced, "aten")

    def apply(graph: TracedGraph, passes: list[Pass]) -> TracedGraph:
        report.passes += run_passes(graph, passes)
        return graph

    return _on_aten(traced, stages, apply)


def _one_by_one(captured: Captured, stages: Stages, reference: Reference | None, report: CompileReport) -> Rewritten:
    """Apply the passes one at a time, comparing after each; drop optional ones that fail or change the logits.

    Raises:
        UnsupportedModel: a required pass fails (PassError) or changes the logits; the message names it.
    """
    report.passes, report.dropped_passes = [], []
    traced = _each(captured, captured.traced.copy(), stages.dynamo, reference, report)
    check_paging(traced, report)
    try:
        aten = to_aten(traced, captured.context)
        dump.write_graph(aten, "aten")
        reason = _difference(captured, aten, aten, reference).reason if reference is not None else ""
    except Exception as error:
        reason = first_line(error)
    if reason:
        report.dropped_passes.append(("to_aten", reason))
        log.warning("applying no pass on the ATen graph: %s", reason)
        return Rewritten(traced, traced, traced)
    return _on_aten(aten, stages, lambda graph, passes: _each(captured, graph, passes, reference, report))


def _of_ranks(
    captured: Captured,
    found: Rewritten,
    stages: Stages,
    options: CompileOptions,
    references: References,
    report: CompileReport,
) -> Rewritten:
    """The graph of the first of several ranks, all of which together were compared with the model, if there is a
    reference.

    Raises:
        UnsupportedModel: together they do not compute what the model does.
    """
    graphs = [found.captured]
    if found.unsharded is not None:
        dropped = {name for name, _ in report.dropped_passes}
        count = options.tensor_parallel_size if references.thorough is not None else 1
        ranks = [lowered_rank(found.unsharded, options, rank, dropped) for rank in range(count)]
        graphs = [traced for traced, _ in ranks]
        again = {entry.name for entry in stages.aten[stages.sharded :]}
        report.passes = [record for record in report.passes if record.name not in again] + ranks[0][1]
    if references.thorough is not None:
        report.verdict = _together(captured, parted(graphs, options.pipeline_parallel_size), references.thorough)
        if not report.verdict.ok:
            asked = f"tensor_parallel_size={options.tensor_parallel_size}"
            if options.pipeline_parallel_size > 1:
                asked += f", pipeline_parallel_size={options.pipeline_parallel_size}"
            raise UnsupportedModel(
                f"{report.model}: {asked}: the ranks together are not exact ({report.verdict.reason}). Please report "
                "the model; one process runs it whole"
            )
    if found.unsharded is None:
        return found
    traced = graphs[0]
    if captured.repeat is not None:
        traced = _with_all_layers(captured.repeat, traced, stages)
    return Rewritten(traced, graphs[0], found.unsharded, found.unsharded)


def of_one_rank(
    unsharded: TracedGraph, options: CompileOptions, rank: int = 0, rest: Sequence[Pass] = ()
) -> tuple[TracedGraph, list[PassRecord]]:
    """One rank's graph, and what the passes did that cut it.

    Args:
        unsharded: that of the whole model.
        options: say how many ranks there are.
        rank: number of this one.
        rest: passes that follow.
    """
    traced = unsharded.copy()
    traced.ranks, traced.rank = options.tensor_parallel_size, rank
    traced.expert_groups = options.expert_parallel_size
    records = run_passes(traced, Stages.of(options).sharding)
    place_weights(traced)
    return traced, [*records, *run_passes(traced, rest)]


def lowered_rank(
    unsharded: TracedGraph, options: CompileOptions, rank: int, dropped: Collection[str]
) -> tuple[TracedGraph, list[PassRecord]]:
    """One rank's graph behind all passes but those that are dropped, and what these did."""
    stages = Stages.of(options)
    rest = [entry for entry in stages.aten[stages.sharded :] if entry.name not in dropped]
    traced, records = of_one_rank(unsharded, options, rank, rest)
    if DECODE_ATTENTION_PASS in dropped:
        clear_custom_notes(traced.graph, DECODE_ATTENTION)
    return traced, records


def hold_weights(
    traced: TracedGraph, passes: Sequence[Pass], quantization: str | None, report: CompileReport
) -> None:
    """Apply the passes that select the format of weights.

    Raises:
        UnsupportedModel: quantization was requested, and no weight can be quantized.
    """
    records = run_passes(traced, passes)
    report.passes += records
    for record in records:
        rounds = quantization and record.name in ("quantize_linears", "quantize_npu_linears")
        if rounds and not record.matches:
            why = f": {rejection_line(record.rejections[0])}" if record.rejections else ""
            raise UnsupportedModel(
                f"{report.model}: quantization={quantization!r} finds no linear layer that it can quantize{why}"
            )
    if traced.npu is not None:
        check_rows_read_once(traced)


@phase("verify")
def _together(captured: Captured, graphs: Sequence[TracedGraph], reference: Reference) -> Verdict:
    """Compare all ranks with the model, and in float32 with the captured graph."""
    verdict = check_own_weights(graphs, reference)
    if verdict.ok and can_check(graphs[0]):
        in_float32 = check_graph(captured.traced, *graphs)
        return verdict if in_float32.ok else in_float32
    return verdict


@phase("verify")
def _difference(
    captured: Captured, traced: TracedGraph, shallow: TracedGraph, reference: Reference, *, alone: bool = False
) -> Verdict:
    """Compare a graph with the model, and what it is made of (the same over the layers that were captured) in float32
    with the captured graph."""
    verdict = _over_own_weights(traced, reference, alone=alone)
    if verdict.ok and can_check(shallow):
        in_float32 = check_graph(captured.traced, shallow, alone=alone)
        return verdict if in_float32.ok else in_float32
    return verdict


def _stored(traced: TracedGraph) -> bool:
    """True if weights are as a quantized checkpoint stores them."""
    return any(isinstance(tensor, StoredWeight) for tensor in traced.constants.values())


@phase("verify")
def _over_own_weights(traced: TracedGraph, reference: Reference, *, alone: bool = False) -> Verdict:
    """Compare a graph with the model."""
    if _stored(traced) or (traced.npu is None and on_cpu(traced)):
        return check_own_weights(traced, reference, alone=alone)
    return check(link(traced, traced.module), reference, alone=alone)


def _each(
    captured: Captured,
    traced: TracedGraph,
    passes: Sequence[Pass],
    reference: Reference | None,
    report: CompileReport,
) -> TracedGraph:
    """Apply passes of one stage one at a time. Until all required ones have run, the graph is compared on single
    sequences.
    """

    def refusal(index: int, before: TracedGraph, after: TracedGraph | UnsupportedModel) -> str:
        entry = passes[index]
        if isinstance(after, UnsupportedModel):
            if not isinstance(after, PassError):
                raise after
            report.checks.append(PassCheck(entry.name, float("inf"), str(after)))
            if entry.required:
                raise after
            report.dropped_passes.append((entry.name, str(after)))
            return str(after)
        if reference is None:
            return ""
        alone = any(p.required for p in passes[index + 1 :])
        verdict = _difference(captured, after, after, reference, alone=alone)
        report.checks.append(PassCheck(entry.name, verdict.error, verdict.reason))
        if verdict.reason:
            dump.write_reproducer(entry.name, before, after, reference, alone=alone, reason=verdict.reason)
            if entry.required:
                raise UnsupportedModel(
                    f"{report.model}: pass {entry.name} is not exact on it ({verdict.reason}). Please report the "
                    "model; verify='off' skips the self-check"
                )
            report.dropped_passes.append((entry.name, verdict.reason))
        return verdict.reason

    return apply_one_by_one(traced, passes, refusal, report.passes)
