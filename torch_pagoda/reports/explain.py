"""``explain``: run the compiler up to code generation, and report what it did."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from ..compiler.calibrate.recorded_grid import on_recorded_grid
from ..compiler.capture.aten import to_aten
from ..compiler.capture.model_facts import takes_positions
from ..compiler.capture.trace import Captured, capture
from ..compiler.costs.layer_caches import all_caches
from ..compiler.costs.rank_shares import rank_shares
from ..compiler.costs.skeleton import Skeleton, identity
from ..compiler.costs.stage_shares import stage_shares
from ..compiler.costs.traffic import Traffic, traffic
from ..compiler.options import CompileOptions, selected_passes
from ..compiler.pipeline import References, Rewritten, of_one_rank, rewrite
from ..compiler.report import CompileReport, first_line
from ..compiler.targets.npu.ge.static_graph import why_not_static
from ..compiler.targets.npu.socs import chip
from ..compiler.verify import dump
from ..compiler.verify.self_check import reference_of_model
from ..passes import PassRecord, TracedGraph, UnsupportedModel
from ..passes.graph.fx_nodes import callee, value
from ..passes.graph.provenance import DecoderLayers, decoder_layers, launches_work, operator_name
from ..passes.lower.npu.decode_graph import decode_graph_or_reason
from ..runtime.cache.cache_specs import bytes_per_block, bytes_per_slot
from ..runtime.phases import timed
from ..runtime.program import is_cache_input
from .drawing import LayerGraph, layer_graph
from .drop_in import CAPTURED_WHOLE, DropIn, observe
from .expected import KINDS, Expected, expected_matches, per_layer
from .explanation import Explanation
from .findings import LayerSummary, NearMiss, PassSummary, TargetGraph
from .npu import NpuReport, computed_in, estimates, npu_leftovers, route_summaries
from .npu_graph import GeReport, graph_engine_report
from .recognition import recognition
from .regions import Leftover, leftovers
from .schedule import schedule_plan

# What the recognizing passes look for, by a part of their names: kinds and spelling ("" for all).
_LOOKS_FOR: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("sdpa", ("attention",), "sdpa"),
    ("eager_attention", ("attention",), "eager"),
    ("rms_norm", ("norm",), "rms"),
    ("layer_norm", ("norm",), "layer"),
    ("rope", ("rope",), ""),
    ("gated_activation", ("gated_mlp",), ""),
    # A gated MLP has one too.
    ("activation", ("activation", "gated_mlp"), ""),
    ("moe", ("moe",), ""),
)
_NOT_RUN = DropIn(True, 0, 0, ("its weights have no values to run it with",), 0)
_COPIES = re.compile(r"copy_?|clone|index_put|scatter|.*_scatter|index_copy|cat|where|_to_copy|auto_functionalized.*")


def explain(
    model: nn.Module | Skeleton,
    example: Mapping[str, Any] | Sequence[Any] | torch.Tensor | None = None,
    target: str | None = None,
    *,
    context: int = 1024,
    torchair: bool = True,
    schedule: bool = False,
    **options: Any,
) -> Explanation:
    """Report what compiling ``model`` does to it: per pass, per decoder layer, and what is left.

    Generates no code and keeps the values and names of the weights. An unsupported model is explained as far as
    possible.

    Args:
        model: a transformers causal LM in eval mode, or a skeleton of one, whose outputs cannot be compared.
        example: inputs of a forward call, to count graph breaks and recompiles under ``torch.compile``: keyword
            arguments as a dict, positional ones as a tuple, or a tensor. Without it, recompiles are unknown, and a
            model captured as one graph has no breaks.
        target: "cpu" or "npu"; None: that of the model's device. "npu" needs no NPU.
        context: for an NPU, tokens of the sequence in the estimated decode step.
        torchair: for an NPU, convert the graph with the real torchair, if the offline toolchain is installed
            (``pagoda npu setup``); takes half a minute.
        schedule: for an NPU, also plan a second stream, early fetches and fused launches of a decode step.
        **options: as in ``CompileOptions``, for example ``soc``. ``verify="off"`` skips the self-check, which runs
            the model.

    Raises:
        TypeError: the model is not a module, or the example has another type.
        ValueError: the model is in train(), is on a device other than a CPU or an NPU, or fails on the example, or an
            option is invalid.
    """
    skeleton = model if isinstance(model, Skeleton) else None
    model = skeleton.model if skeleton is not None else getattr(model, "_orig_mod", model)
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is a {type(model).__name__}; pass a transformers causal LM, or use: pagoda inspect PATH"
        )
    if model.training:
        raise ValueError(f"model is a {type(model).__name__} in train() mode; call model.eval() first")
    if context < 1:
        raise ValueError(f"context={context} is below 1; it counts the decoded token")
    if skeleton is not None:
        options["verify"] = "off"
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type not in ("cpu", "npu"):
        raise ValueError(f"model is on {device}, but explain needs 'cpu' or 'npu'; call model.to('cpu') first")
    parsed = CompileOptions.from_dict({**options, "codegen": "none", "target": target or "auto"})
    parsed = parsed.for_device(device.type)
    parsed = on_recorded_grid(parsed, getattr(model, "config", None))
    report = CompileReport(type(model).__name__)
    refused, captured, reference = "", None, None
    dump.begin(report.model)
    with timed(report.seconds):
        try:
            if parsed.verify != "off":
                reference = reference_of_model(model)
        except UnsupportedModel as error:
            refused = str(error)
        try:
            captured = capture(model)
            dump.write_graph(captured.traced, "captured")
        except UnsupportedModel as error:
            refused = refused or str(error)
    drop_in = _NOT_RUN if skeleton is not None and captured is None else _drop_in(model, example, captured)
    start = time.perf_counter()
    before = _untouched(captured)
    report.seconds["untouched"] = time.perf_counter() - start
    found: Rewritten | None = None
    # A skeleton may have fewer layers than there are stages.
    rewriting = parsed if skeleton is None else replace(parsed, pipeline_parallel_size=1)
    if captured is not None and not refused:
        try:
            with timed(report.seconds):
                found = rewrite(captured, rewriting, References(reference), report)
        except UnsupportedModel as error:
            refused = str(error)
    after = None if found is None else found.traced
    explanation = _explained(before, after, report, parsed, drop_in, refused, skeleton)
    if found is not None and found.unsharded is not None:
        sharded, records = of_one_rank(found.unsharded, parsed)
        representatives = _representatives(skeleton, _layers(sharded, None))
        explanation.shares = rank_shares(found.unsharded, sharded, records, representatives, found.traced)
    if after is not None and parsed.pipeline_parallel_size > 1:
        try:
            representatives = _representatives(skeleton, _layers(after, None))
            explanation.stages = stage_shares(after, representatives, parsed.pipeline_parallel_size)
        except UnsupportedModel as error:
            explanation.refused = str(error)
    if after is not None and after.npu is not None:
        layers = _layers(after, _layers(before, None) if before is not None else None)
        representatives = _representatives(skeleton, layers)
        start = time.perf_counter()
        graph = graph_engine_report(model, representatives, parsed) if torchair else GeReport("not asked for")
        report.seconds["torchair"] = time.perf_counter() - start
        soc = after.npu.soc
        routes = route_summaries(report.passes)
        least = estimates(after, layers, representatives, chip(soc), context)
        dtype = computed_in(after)
        decode = decode_graph_or_reason(after)[0] or after
        if decode is not after:
            own = estimates(decode, _layers(decode, layers), representatives, chip(soc), context)
            least = (own[0], *least[1:])
        unfit = why_not_static(decode)
        plan = schedule_plan(decode, representatives, chip(soc), soc, context) if schedule else None
        size, advice = after.npu.block_size, report.dtype_advice
        cann = after.npu.cann
        explanation.npu = NpuReport(soc, chip(soc), size, dtype, routes, graph, least, unfit, plan, advice, cann)
    return explanation


def _representatives(skeleton: Skeleton | None, layers: DecoderLayers) -> tuple[int, ...]:
    """For each layer of the whole model, the equal layer of the graph."""
    if skeleton is not None and skeleton.depth == len(layers.paths):
        return skeleton.representatives
    return identity(len(layers.paths))


def _drop_in(model: nn.Module, example: Any, captured: Captured | None) -> DropIn:
    """Graph breaks on the example; without one, on any tokens if the model cannot be captured whole."""
    if example is not None:
        return observe(model, example)
    if captured is not None:
        return CAPTURED_WHOLE
    device = next(model.parameters()).device
    tokens = {"input_ids": torch.ones(1, 40, dtype=torch.int64, device=device)}
    if takes_positions(model):
        tokens["position_ids"] = torch.arange(40, device=device)[None]
    try:
        return observe(model, {**tokens, "use_cache": False})
    except (ValueError, TypeError) as error:
        return DropIn(True, 0, 0, (first_line(error),), 0)


def _untouched(captured: Captured | None) -> TracedGraph | None:
    """The ATen graph of the model before any pass; None where there is none."""
    if captured is None:
        return None
    try:
        return to_aten(captured.traced.copy(), captured.context)
    except Exception:  # masks made under vmap, for instance, which only passes take away
        return None


def _explained(
    before: TracedGraph | None,
    after: TracedGraph | None,
    report: CompileReport,
    options: CompileOptions,
    drop_in: DropIn,
    refused: str,
    skeleton: Skeleton | None,
) -> Explanation:
    start = time.perf_counter()
    layers = _layers(before, None) if before is not None else None
    layers_after = _layers(after, layers) if after is not None else None
    expected = expected_matches(before.graph, layers) if before is not None else []
    drawings: list[tuple[LayerGraph, LayerGraph]] = []
    if before is not None and layers is not None:
        for i in range(len(layers.paths)):
            drawn = layer_graph(before, layers, i)
            drawings.append(
                (drawn, layer_graph(after, layers_after, i) if after and layers_after else LayerGraph((), ()))
            )
    summaries = _layer_summaries(before, layers, after, layers_after, expected)
    representatives = _representatives(skeleton, layers) if layers is not None else ()
    explanation = Explanation(
        model=report.model,
        target=options.target,
        opt_level=options.opt_level,
        passes=_pass_summaries(report, options, expected, layers),
        layers=[_renumbered(summaries[like], number) for number, like in enumerate(representatives)],
        recognized=recognition(expected, after.graph, layers_after, report.passes) if after and layers_after else [],
        leftovers=_leftovers(after, layers_after, report),
        target_graph=_target_graph(after, layers_after, representatives),
        drop_in=drop_in,
        verdict=report.verdict,
        refused=refused,
        seconds=report.seconds,
        drawings=[drawings[like] for like in representatives],
        built_layers=None if skeleton is None else skeleton.depth,
    )
    report.seconds["report"] = time.perf_counter() - start
    return explanation


def _leftovers(after: TracedGraph | None, layers: DecoderLayers | None, report: CompileReport) -> list[Leftover]:
    if after is None or layers is None:
        return []
    if after.npu is not None:
        return npu_leftovers(after, layers, report.passes)
    return leftovers(after.graph, layers, report.passes)


def _renumbered(summary: LayerSummary, number: int) -> LayerSummary:
    """A layer that is like ``summary``."""
    if number == summary.index:
        return summary
    return replace(summary, index=number, path=f"{summary.path.rpartition('.')[0]}.{number}")


def _layers(traced: TracedGraph, like: DecoderLayers | None) -> DecoderLayers:
    return decoder_layers(traced.graph, like, traced.placeholder(traced.input_ids))


def _pass_summaries(
    report: CompileReport, options: CompileOptions, expected: Sequence[Expected], layers: DecoderLayers | None
) -> list[PassSummary]:
    levels = {entry.name: entry.level for entry in selected_passes(options)}
    dropped = dict(report.dropped_passes)
    summaries = [_pass_summary(record, levels.get(record.name, -1), expected, layers) for record in report.passes]
    known = {record.name for record in report.passes}
    for name, reason in dropped.items():
        if name not in known:
            summaries.append(PassSummary(name, levels.get(name, -1), 0, None, None, (), 0.0, reason))
    return summaries


def _pass_summary(
    record: PassRecord, level: int, expected: Sequence[Expected], layers: DecoderLayers | None
) -> PassSummary:
    total = each = None
    wanted = _looked_for(record.name, expected)
    if wanted is not None and layers is not None:
        total = len(wanted)
        each = max(Counter(e.layer for e in wanted if e.layer >= 0).values(), default=0)
    misses = tuple(NearMiss(r.module, r.reason, r.node) for r in record.rejections)
    return PassSummary(record.name, level, record.matches, total, each, misses, record.seconds, place=record.place)


def _looked_for(name: str, expected: Sequence[Expected]) -> list[Expected] | None:
    """The things that a recognizing pass should find; None for a pass that recognizes nothing that is counted."""
    if not name.startswith("recognize_"):
        return None
    for part, kinds, spelling in _LOOKS_FOR:
        if part in name:
            return [e for e in expected if e.kind in kinds and spelling in ("", e.spelling)]
    return None


def _layer_summaries(
    before: TracedGraph | None,
    layers: DecoderLayers | None,
    after: TracedGraph | None,
    layers_after: DecoderLayers | None,
    expected: Sequence[Expected],
) -> list[LayerSummary]:
    if before is None or layers is None:
        return []
    summaries = []
    counts = per_layer(expected, layers)
    for i, path in enumerate(layers.paths):
        nodes = layers.nodes(i)
        lowered = layers_after.nodes(i) if layers_after is not None else []
        moved = traffic(after, lowered) if after is not None else Traffic(0.0, 0)
        found = {kind: counts[i][kind] for kind in KINDS}
        summaries.append(
            LayerSummary(i, path, _operators(nodes), _operators(lowered), traffic(before, nodes), moved, found)
        )
    return summaries


def _operators(nodes: Sequence[fx.Node]) -> tuple[str, ...]:
    return tuple(operator_name(n) for n in nodes if launches_work(n))


def _target_graph(
    after: TracedGraph | None, layers: DecoderLayers | None, representatives: Sequence[int]
) -> TargetGraph:
    if after is None or layers is None:
        return TargetGraph({}, None, 0, 0, 0)
    counts = Counter(operator_name(n) for n in after.graph.nodes if launches_work(n))
    most = max((len(_operators(layers.nodes(i))) for i in range(len(layers.paths))), default=None)
    caches = all_caches(after, representatives)
    return TargetGraph(
        dict(counts.most_common()),
        most,
        cache_copies(after.graph),
        bytes_per_block(caches, 1),
        bytes_per_slot(caches),
    )


def cache_copies(graph: fx.Graph) -> int:
    """The number of operators of a graph that copy a whole key or value cache."""
    views: dict[fx.Node, fx.Node] = {}
    copies = 0
    for node in graph.nodes:
        if node.op == "placeholder" and is_cache_input(node.name):
            views[node] = node
        caches = [views[n] for n in node.all_input_nodes if n in views]
        if caches and not launches_work(node):
            views[node] = caches[0]
        elif caches and _COPIES.fullmatch(callee(node).partition(".")[0]):
            copies += _is_whole(node, caches[0])
    return copies


def _is_whole(node: fx.Node, cache: fx.Node) -> bool:
    """True if a copy is as large as the cache that it reads; what functionalises writes copies the cache always."""
    result = value(node)
    if isinstance(result, torch.Tensor):
        return str(result.numel()) == str(value(cache).numel())
    return callee(node).startswith("auto_functionalized")
