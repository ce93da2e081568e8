"""Sections of a report about a model and its passes, for a terminal and a page."""

from __future__ import annotations

from collections.abc import Iterable

from ..rendering.section import Cell, Section, Styled
from .findings import Findings, groups_of_layers
from .npu_sections import npu_sections
from .rank_sections import rank_sections, stage_sections
from .regions import Leftover
from .wording import alike, counted, milliseconds, operator_list, size, times


def heading(found: Findings) -> list[tuple[str, Styled]]:
    """Lines above all tables, each with its name."""
    verdict = found.verdict
    bad = bool(found.refused) or (verdict is not None and not verdict.ok)
    soc = "" if found.npu is None else f" ({found.npu.soc}, CANN {found.npu.cann})"
    copies = found.target_graph.cache_copies
    times = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in found.seconds.items())
    return [
        *([("built", Styled(_built_line(found), ""))] if found.built_layers is not None else []),
        ("target", Styled(f"{found.target}{soc}, opt_level {found.opt_level}", "")),
        ("self-check", Styled(_verdict_line(found), "bad" if bad else "good" if verdict is not None else "")),
        *([("dtype", Styled(found.npu.dtype_advice, "warn"))] if found.npu and found.npu.dtype_advice else []),
        ("decoder layer", Styled(_launches_line(found), "strong")),
        *([("memory", Styled(_memory_line(found), ""))] if found.target_graph.launches_per_layer is not None else []),
        ("torch.compile", Styled(_drop_in_line(found), "")),
        *(("", Styled(reason, "warn")) for reason in found.drop_in.reasons),
        *([("cache", Styled(f"{copies} copies of whole caches", "bad"))] if copies else []),
        ("seconds", Styled(times, "")),
    ]


def _memory_line(found: Findings) -> str:
    graph = found.target_graph
    state = f", {size(graph.state_bytes)} of state per sequence" if graph.state_bytes else ""
    each = f", on each of {found.shares.ranks} ranks" if found.shares is not None else ""
    return f"{size(graph.token_bytes)} of keys and values per token{state}{each}"


def sections(found: Findings) -> list[Section]:
    """All tables, in reading order."""
    parts = [_passes(found), _recognized(found), _layers(found), _near_misses(found), _leftovers(found)]
    of_ranks = [*stage_sections(found.stages), *rank_sections(found.shares)]
    return [*of_ranks, *(section for section in parts if section.rows), *npu_sections(found)]


def _passes(found: Findings) -> Section:
    rows = []
    for p in found.passes:
        short = p.expected is not None and p.matches < p.expected
        each = f" ({p.expected_per_layer}/layer)" if p.expected else ""
        rows.append(
            (
                Styled(p.title, "" if p.matches else "dim"),
                str(p.level) if p.level >= 0 else "",
                Styled(str(p.matches), "warn" if short else "strong" if p.matches else "dim"),
                "" if p.expected is None else f"{p.expected}{each}",
                Styled(str(len(p.near_misses)), "warn" if p.near_misses else "dim"),
                milliseconds(p.seconds),
                Styled(f"dropped: {p.dropped}" if p.dropped else "", "bad"),
            )
        )
    columns = ("pass`!", "level#", "matches#", "expected#", "near misses#", "ms#", "")
    if not any(p.dropped for p in found.passes):
        return Section("Passes", columns[:-1], tuple(row[:-1] for row in rows))
    return Section("Passes", columns, tuple(rows))


def _recognized(found: Findings) -> Section:
    rows: list[tuple[Cell, ...]] = []
    for r in found.recognized:
        if r.expected:
            missed = counted((alike(m.module), m.reason) for m in r.missed)
            lines = "\n".join(f"{times(module, count)}: {reason}" for (module, reason), count in missed)
            matched = Styled(str(r.matched), "good" if r.matched == r.expected else "warn")
            rows.append((r.kind, str(r.expected), matched, lines))
    hint = "The counts of the model come from its modules and functions, independently of the passes."
    columns = ("kind!", "in the model#", "recognized#", "missed")
    return Section("Recognized", columns, tuple(rows), hint=hint)


def _layers(found: Findings) -> Section:
    rows = []
    for numbers, layer in groups_of_layers(found.layers):
        after = bool(layer.operators_after)
        rows.append(
            (
                numbers,
                str(len(layer.operators_before)),
                Styled(str(len(layer.operators_after)) if after else "", "strong"),
                size(layer.traffic_before.per_token),
                size(layer.traffic_after.per_token) if after else "",
                size(layer.traffic_after.weights if after else layer.traffic_before.weights),
                operator_list(layer.operators_after),
            )
        )
    columns = ("layers!", "before#", "after#", "per token before#", "after#", "weights#", "operators after`~")
    return Section("Operators per decoder layer", columns, tuple(rows))


def _near_misses(found: Findings) -> Section:
    rows = [
        (p.name, times(module, count), reason)
        for p in found.passes
        for (module, reason), count in counted((alike(m.module), m.reason) for m in p.near_misses)
    ]
    return Section("Near misses", ("pass`!", "module`", "reason"), tuple(rows))


def _leftovers(found: Findings) -> Section:
    hint = "Operators of attention, norms, rotary embeddings and activations that no pass rewrote."
    if found.npu is not None:
        hint = "ATen operators left in decoder layers."
    columns = ("region!", "module`", "operators`", "reason")
    return Section("Leftovers", columns, tuple(_leftover_rows(found.leftovers)), hint=hint)


def _leftover_rows(leftovers: Iterable[Leftover]) -> list[tuple[str, str, str, str]]:
    """Region, module, operators and reason, with equal modules of all layers joined."""
    names: dict[tuple[str, str, str], dict[str, None]] = {}
    modules: dict[tuple[str, str, str], set[str]] = {}
    for x in leftovers:
        key = (x.region, alike(x.module), x.reason)
        names.setdefault(key, {})[x.operator] = None
        modules.setdefault(key, set()).add(x.module)
    rows = []
    for (region, module, reason), operators in names.items():
        count = len(modules[region, module, reason])
        rows.append((region, times(module, count), " · ".join(operators), reason))
    return rows


def _verdict_line(found: Findings) -> str:
    """The outcome in one sentence."""
    if found.refused:
        return f"refused: {found.refused}"
    verdict = found.verdict
    if verdict is None and found.built_layers is not None:
        return "not compared with the model: its weights have no values"
    if verdict is None:
        return "not compared with the model (verify is off)"
    right = "equal to the model" if verdict.ok else verdict.reason
    compared = f"error {verdict.error:.2g} standard deviations over {verdict.rows} rows"
    return f"{right}: {compared}, limit {verdict.tolerance:.2g}"


def _drop_in_line(found: Findings) -> str:
    """Graph breaks and recompiles in one sentence."""
    seen = found.drop_in
    if not seen.observed:
        return "0 graph breaks: the model was captured as one whole graph (give an example to count recompiles too)"
    breaks = f"{seen.graph_breaks} graph break{'s' if seen.graph_breaks != 1 else ''}"
    return f"{breaks}, {seen.graphs} graphs, {seen.recompiles} recompiles on the example and on longer inputs"


def _built_line(found: Findings) -> str:
    """The examined layers, if not all were."""
    return (
        f"{found.built_layers} of {len(found.layers)} layers, from the configuration, without values in "
        "the weights; matches and sites below are counted in these, what a step costs is extrapolated to all"
    )


def _launches_line(found: Findings) -> str:
    """Operators per decoder layer before and after."""
    if not found.layers:
        return "no decoder layers found"
    heaviest = max(found.layers, key=lambda layer: layer.traffic_before.per_token)
    before = f"{found.launches_before} operators and {size(heaviest.traffic_before.per_token)} per token"
    if found.refused:
        return f"{before} per decoder layer"
    after = size(heaviest.traffic_after.per_token)
    return f"{before} → {found.target_graph.launches_per_layer} operators and {after} per token"
