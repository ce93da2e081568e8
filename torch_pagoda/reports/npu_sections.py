"""Sections of a report about an NPU, for a terminal and a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..rendering.section import Section
from .findings import Findings, LayerSummary
from .npu import HALF, Estimate, NpuReport
from .schedule import SchedulePlan
from .wording import counted_names, duration, in_runs, quantity, size

_UNKNOWN = "unknown"


def npu_sections(found: Findings) -> list[Section]:
    """Routes, the graph engine's operators and the estimate; [] for another target."""
    report = found.npu
    if report is None:
        return []
    graph = _graph(report, found.layers)
    more = *_decode_graphs(report), *_schedules(report), *_plan(report)
    return [_routes(report), *_refused(report), graph, *more, _estimates(report)]


def _routes(report: NpuReport) -> Section:
    rows = tuple(
        (_short(route.operator), str(route.count), " +\n".join(_short(name) for name in route.chosen))
        for route in report.routes
    )
    reason = report.no_static_decode
    note = f"Decode steps have no static graphs: {reason}." if reason else "Decode steps can have static graphs."
    return Section(f"Routes on {report.soc}", ("operator!", "sites#", "becomes"), rows, note)


def _refused(report: NpuReport) -> list[Section]:
    """Better operators that could not be used; [] if there are none."""
    rows = []
    for route in report.routes:
        if route.refused:
            reasons = [f"{_short(name)}: {reason}" for name, reason in route.refused]
            rows.append(
                (_short(route.operator), "\n".join((*reasons, *(f"in {module}" for module in route.modules))))
            )
    title = f"Better routes that were refused on {report.soc}"
    return [Section(title, ("operator!", "why, and where"), tuple(rows))] if rows else []


def _short(name: str) -> str:
    """``npu.npu_rms_norm`` → ``npu_rms_norm``, ``pagoda.rope`` → ``rope``; "aten" is the reference implementation."""
    if name == "aten":
        return "the reference implementation in ATen"
    return name.removeprefix("npu.").removeprefix("pagoda.")


def _graph(report: NpuReport, layers: Sequence[LayerSummary]) -> Section:
    graph = report.graph
    title = f"Kernels that torchair's graph launches on {report.soc}"
    if graph.unavailable:
        return Section(title, (), (), f"Not converted: {graph.unavailable}")
    rows = []
    for kind in graph.layers:
        like = layers[kind.layers[0]] if kind.layers and kind.layers[0] < len(layers) else None
        rows.append(
            (
                in_runs(kind.layers),
                "" if like is None else str(len(like.operators_before)),
                "" if like is None else str(len(like.operators_after)),
                str(kind.launches),
                counted_names(kind.types),
            )
        )
    rows.append(("per step", "", "", str(sum(graph.per_step.values())), counted_names(graph.per_step)))
    copies = len(graph.cache_copies)
    whole = sum(len(kind.layers) for kind in graph.layers)
    note = f"{copies} hidden copies of a whole KV cache{': ' * bool(copies)}{', '.join(graph.cache_copies)}."
    if graph.converted < whole:
        note += f" {graph.converted} of {whole} layers were converted, one of each kind; the others are equal."
    if graph.other_steps is not None:
        note += (
            " These are the kernels of decode steps. Steps with prompts run another graph, whose layers "
            f"launch up to {graph.other_steps}; all columns but kernels describe that graph."
        )
    columns = ("layers!", "unmodified#", "lowered#", "kernels#", "operators of the Ascend IR")
    return Section(title, columns, tuple(rows), note)


def _decode_graphs(report: NpuReport) -> list[Section]:
    """Counts of the graphs of decode steps; [] if they were not made."""
    counts = report.graph.decode
    if not counts:
        return []
    rows = tuple((name.replace("_", " "), *(str(graph[name]) for graph in counts)) for name in counts[0])
    title = f"Decode steps as dynamic and as static graphs on {report.soc}"
    return [Section(title, ("converted layers", "dynamic#", "static#"), rows, "Static with static_decode=True.")]


def _schedules(report: NpuReport) -> list[Section]:
    """Streams, core limits and super kernels of the graph's operators; [] if there are none."""
    rows = []
    for schedule in report.graph.schedules:
        said = [f"{name.lstrip('_')} = {value}" for name, value in schedule.attributes.items()]
        rows.append(("\n".join(said), str(sum(schedule.types.values())), counted_names(schedule.types)))
    title = f"Schedules in torchair's graph on {report.soc}"
    note = "Directives for the graph engine; nothing was measured."
    columns = ("attributes!", "kernels#", "operators of the Ascend IR")
    return [Section(title, columns, tuple(rows), note)] if rows else []


_ROUTES = (
    "With schedule={'%s': True}, codegen='aclgraph' %s in the captures of decode steps, and codegen='ge' in the "
    "static graphs of static_decode=True; dynamic graphs ignore schedules."
)


def _plan(report: NpuReport) -> list[Section]:
    """Second stream, early fetches and fused launches of a decode step; [] if not requested."""
    plan = report.schedule
    return [] if plan is None else [*_branches(report, plan), *_super_kernels(report, plan)]


def _branches(report: NpuReport, plan: SchedulePlan) -> list[Section]:
    """Branches of a decode step for a second stream, and early fetches."""
    title = f"Branches of a decode step for a second stream on {report.soc}"
    if plan.unplanned:
        return [Section(title, (), (), f"None: {plan.unplanned}.")]
    rows = []
    for each in plan.branches:
        sides = _in_order(each.side), _in_order(each.main)
        rows.append((in_runs(each.layers), *sides, duration(each.seconds), duration(each.gain)))
    note = (
        "Predicted from shapes and published figures, with at least 2 µs per launch, for a step of "
        f"{duration(plan.step_seconds)} in the built layers; not measured. "
        f"{_ROUTES % ('streams', 'runs it')}"
    )
    columns = ("layers!", "second stream", "meanwhile", "alone#", "gain#")
    found = [Section(title, columns, tuple(rows), note)]
    if plan.refused:
        title = f"What stays on the main stream on {report.soc}"
        found.append(Section(title, ("where!", "why"), tuple(plan.refused)))
    return [*found, *_fetches(report, plan)]


def _fetches(report: NpuReport, plan: SchedulePlan) -> list[Section]:
    """The weights that a decode step could fetch early."""
    title = f"Weights that a decode step fetches into the L2 cache on {report.soc}"
    if plan.unfetched:
        return [Section(title, (), (), f"None: {plan.unfetched}.")]
    rows = []
    for each in plan.fetches:
        fetched = f"{each.weight}\n{size(each.bytes)} of {size(each.of_bytes)}"
        meanwhile = f"behind {_in_order([each.behind])}:\n{_in_order(each.window)}"
        rows.append((in_runs(each.layers), fetched, meanwhile, duration(each.idle), duration(each.gain)))
    note = (
        "Predicted from shapes and published figures; not measured. A fetch gets half of the bandwidth "
        "while the memory is idle. With 'streams' and 'prefetch' less is fetched, as branches on a second stream "
        "use the memory. "
        f"{_ROUTES % ('prefetch', 'fetches them')}"
    )
    found = [Section(title, ("layers!", "weight", "meanwhile", "idle#", "gain#"), tuple(rows), note)]
    if plan.not_fetched:
        title = f"Weights not fetched early on {report.soc}"
        found.append(Section(title, ("where!", "why"), tuple(plan.not_fetched)))
    return found


def _super_kernels(report: NpuReport, plan: SchedulePlan) -> list[Section]:
    """Launches of a decode step that can be fused."""
    title = f"Super kernels of a decode step on {report.soc}"
    if plan.unfused:
        return [Section(title, (), (), f"None: {plan.unfused}.")]
    rows = [
        (in_runs(each.layers), _in_order(each.launches), _time(each.seconds), _time(each.beyond))
        for each in plan.super_kernels
    ]
    note = (
        "Launches that the graph engine can fuse; not measured. Fusing saves at most the time of the launches beyond "
        "moving their bytes and doing their operations, predicted with at least 2 µs per launch. "
        "With schedule={'super_kernels': True}, codegen='ge' marks them in the static graphs of static_decode=True; "
        "codegen='aclgraph' has npu_options for it."
    )
    found = [Section(title, ("layers!", "one after the other", "alone#", "beyond#"), tuple(rows), note)]
    if plan.not_fused:
        title = f"Launches in no super kernel on {report.soc}"
        found.append(Section(title, ("where!", "why"), tuple(plan.not_fused)))
    return found


def _in_order(names: Sequence[str]) -> str:
    return " ".join(name.removeprefix("npu_") for name in names)


def _estimates(report: NpuReport) -> Section:
    columns = ("one sequence", *(f"{_step_name(e)}#" for e in report.estimates))
    rows: tuple[tuple[str, Callable[[Estimate], str]], ...] = (
        ("tokens in the KV cache after the step", lambda e: str(e.step.context)),
        ("weights read", lambda e: size(e.moved.weights)),
        ("KV cache read and written", lambda e: size(e.moved.cache)),
        ("activations read and written", lambda e: size(e.moved.activations)),
        ("operations of products and attention", lambda e: quantity(e.flops, "FLOP")),
        ("per token: bytes moved", lambda e: size(e.moved.total / e.step.tokens)),
        ("per token: operations", lambda e: quantity(e.flops / e.step.tokens, "FLOP")),
        ("weights and KV cache at the memory's bandwidth", lambda e: _time(e.memory_seconds)),
        ("operations at the chip's peak", lambda e: _time(e.compute_seconds)),
        ("minimum time of a step", lambda e: _time(e.seconds)),
        ("bound by", lambda e: e.bound_by or _UNKNOWN),
        ("maximum tokens per second", lambda e: f"{e.step.tokens / e.seconds:,.0f}" if e.seconds else _UNKNOWN),
    )
    note = (
        f"{_published(report)} An estimate from shapes, not measured: a step takes at least as long as reading every "
        "weight and key once, and as its operations at the peak, int8 at twice that. It excludes activations, "
        "which may stay on the chip, and the time to launch kernels."
    )
    cells = tuple((name, *(cell(e) for e in report.estimates)) for name, cell in rows)
    return Section("Estimate: the minimum time of a step", columns, cells, note)


def _step_name(estimate: Estimate) -> str:
    tokens = estimate.step.tokens
    return f"{estimate.name}, {tokens} token{'s' * (tokens > 1)}"


def _published(report: NpuReport) -> str:
    chip = report.chip
    if chip is None:
        return f"The published figures of {report.soc} are unknown."
    bandwidth = _UNKNOWN if chip.bandwidth is None else quantity(chip.bandwidth, "B/s")
    peak = _UNKNOWN if chip.peak is None else f"{quantity(chip.peak, 'FLOP/s')} in half precision"
    other = "" if report.dtype in HALF else f" (the model computes in {report.dtype})"
    return f"Published for {report.soc}: memory {bandwidth}, peak {peak}{other}."


def _time(seconds: float | None) -> str:
    return _UNKNOWN if seconds is None else duration(seconds)
