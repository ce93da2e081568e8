"""Words and numbers that the tables of a terminal and of a page share: alike entries joined, bytes, milliseconds."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from .explanation import Explanation, LayerSummary
    from .regions import Leftover

Entry = TypeVar("Entry", bound=Hashable)

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def alike(path: str) -> str:
    """``model.layers.7.mlp`` → ``model.layers.*.mlp``: the same for all layers."""
    return _NUMBER.sub("*", path)


def counted(entries: Iterable[Entry]) -> list[tuple[Entry, int]]:
    """Distinct entries in order of their first appearance, with how often they come."""
    counts: dict[Entry, int] = {}
    for entry in entries:
        counts[entry] = counts.get(entry, 0) + 1
    return list(counts.items())


def in_runs(numbers: Iterable[int]) -> str:
    """``0-3, 5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)


def groups_of_layers(layers: Iterable[LayerSummary]) -> list[tuple[str, LayerSummary]]:
    """Layers with the same operators as one: their numbers, and the first of them."""
    groups: dict[Hashable, list[LayerSummary]] = {}
    for layer in layers:
        key = (layer.operators_before, layer.operators_after, layer.traffic_before, layer.traffic_after)
        groups.setdefault(key, []).append(layer)
    return [(in_runs(layer.index for layer in group), group[0]) for group in groups.values()]


def leftover_rows(leftovers: Iterable[Leftover]) -> list[tuple[str, str, str, str]]:
    """Region, module, operators and reason, with the same module of all layers as one."""
    names: dict[tuple[str, str, str], dict[str, None]] = {}
    modules: dict[tuple[str, str, str], set[str]] = {}
    for x in leftovers:
        key = (x.region, alike(x.module), x.reason)
        names.setdefault(key, {})[x.operator] = None
        modules.setdefault(key, set()).add(x.module)
    rows = []
    for (region, module, reason), operators in names.items():
        count = len(modules[region, module, reason])
        rows.append((region, module + (f" ×{count}" if count > 1 else ""), " · ".join(operators), reason))
    return rows


def operator_list(operators: Iterable[str]) -> str:
    """``pagoda.rms_norm · aten.linear ×2``: in order, repetitions next to each other joined."""
    joined: list[tuple[str, int]] = []
    for name in operators:
        if joined and joined[-1][0] == name:
            joined[-1] = (name, joined[-1][1] + 1)
        else:
            joined.append((name, 1))
    return " · ".join(name if count == 1 else f"{name} ×{count}" for name, count in joined)


def counted_names(counts: Mapping[str, int]) -> str:
    """``RmsNorm · MatMul ×4``."""
    return " · ".join(name if count == 1 else f"{name} ×{count}" for name, count in counts.items())


def quantity(count: float, unit: str) -> str:
    """A number of things with a decimal prefix: ``1.6 TB/s``."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if count < 1000 or prefix == "P":
            return f"{count:.3g} {prefix}{unit}"
        count /= 1000
    raise AssertionError


def duration(seconds: float) -> str:
    """A time in the unit that suits it, three digits."""
    for unit in ("s", "ms", "µs"):
        if seconds >= 1:
            return f"{seconds:.3g} {unit}"
        seconds *= 1000
    return f"{seconds:.3g} ns"


def size(count: float) -> str:
    """Bytes in KiB, MiB, ...: three digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1000 or unit == "GiB":
            return f"{count:.3g} {unit}"
        count /= 1024
    raise AssertionError


def milliseconds(seconds: float) -> str:
    """A time in ms, fine enough to tell fast passes apart."""
    return f"{1000 * seconds:.1f}" if seconds < 0.1 else f"{1000 * seconds:.0f}"


def verdict_line(explanation: Explanation) -> str:
    """The outcome in one sentence."""
    if explanation.refused:
        return f"refused: {explanation.refused}"
    verdict = explanation.verdict
    if verdict is None and explanation.built_layers is not None:
        return "not compared with the model: its weights have no values"
    if verdict is None:
        return "not compared with the model (verify is off)"
    right = "equal to the model" if verdict.ok else verdict.reason
    compared = f"error {verdict.error:.2g} standard deviations over {verdict.rows} rows"
    return f"{right}: {compared}, limit {verdict.tolerance:.2g}"


def drop_in_line(explanation: Explanation) -> str:
    """Graph breaks and recompiles in one sentence."""
    seen = explanation.drop_in
    if not seen.observed:
        return "0 graph breaks: the model was captured as one whole graph (give an example to count recompiles too)"
    breaks = f"{seen.graph_breaks} graph break{'s' if seen.graph_breaks != 1 else ''}"
    return f"{breaks}, {seen.graphs} graphs, {seen.recompiles} recompiles on the example and on longer inputs"


def built_line(explanation: Explanation) -> str:
    """Which layers were looked at, where not all were."""
    return (
        f"{explanation.built_layers} of {len(explanation.layers)} layers, from the configuration, without values in "
        "the weights; matches and sites below are counted in these, what a step costs is extrapolated to all"
    )


def launches_line(explanation: Explanation) -> str:
    """Operators per decoder layer before and after."""
    if not explanation.layers:
        return "no decoder layers found"
    heaviest = max(explanation.layers, key=lambda layer: layer.traffic_before.per_token)
    before = f"{explanation.launches_before} operators and {size(heaviest.traffic_before.per_token)} per token"
    if explanation.refused:
        return f"{before} per decoder layer"
    after = size(heaviest.traffic_after.per_token)
    return f"{before} → {explanation.target_graph.launches_per_layer} operators and {after} per token"
