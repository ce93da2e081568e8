"""An explanation as tables for a terminal."""

from __future__ import annotations

from rich import box
from rich.console import JustifyMethod, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from .explanation import Explanation
from .npu_sections import Section, npu_sections
from .wording import (
    alike,
    built_line,
    counted,
    drop_in_line,
    groups_of_layers,
    launches_line,
    leftover_rows,
    milliseconds,
    operator_list,
    size,
    verdict_line,
)


def tables(explanation: Explanation) -> list[RenderableType]:
    """What is worth saying, in the order in which it is read."""
    parts: list[RenderableType] = [_heading(explanation), ""]
    if explanation.passes:
        parts.append(_passes(explanation))
    if any(r.expected for r in explanation.recognised):
        parts.append(_recognised(explanation))
    if explanation.layers:
        parts += _layers(explanation)
    if any(p.near_misses for p in explanation.passes):
        parts.append(_near_misses(explanation))
    if explanation.leftovers:
        parts.append(_leftovers(explanation))
    for section in npu_sections(explanation):
        parts += _section(section)
    return parts


def _heading(explanation: Explanation) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    verdict = explanation.verdict
    bad = bool(explanation.refused) or (verdict is not None and not verdict.ok)
    right = "red" if bad else "green" if verdict is not None else ""
    grid.add_row("model", Text(explanation.model, style="bold"))
    if explanation.built_layers is not None:
        grid.add_row("built", built_line(explanation))
    soc = "" if explanation.npu is None else f" ({explanation.npu.soc})"
    grid.add_row("target", f"{explanation.target}{soc}, opt_level {explanation.opt_level}")
    grid.add_row("self-check", Text(verdict_line(explanation), style=right))
    grid.add_row("decoder layer", Text(launches_line(explanation), style="bold"))
    grid.add_row("torch.compile", escape(drop_in_line(explanation)))
    for reason in explanation.drop_in.reasons:
        grid.add_row("", Text(reason, style="yellow"))
    if explanation.target_graph.cache_copies:
        grid.add_row("cache", Text(f"{explanation.target_graph.cache_copies} copies of whole caches", style="red"))
    times = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in explanation.seconds.items())
    grid.add_row("seconds", times)
    return grid


def _table(title: str, *columns: str) -> Table:
    """A table. Numbers stand in the columns whose name ends in ``#``; those that end in ``!`` are never broken."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in columns:
        justify: JustifyMethod = "right" if name.endswith("#") else "left"
        table.add_column(name.rstrip("#!"), justify=justify, no_wrap=name.endswith(("#", "!")), overflow="fold")
    return table


def _passes(explanation: Explanation) -> Table:
    names = ["pass!", "level#", "matches#", "expected#", "near misses#", "ms#"]
    if any(p.dropped for p in explanation.passes):
        names.append("")
    table = _table("Passes", *names)
    for p in explanation.passes:
        short = p.expected is not None and p.matches < p.expected
        each = f" ({p.expected_per_layer}/layer)" if p.expected else ""
        cells: list[RenderableType] = [
            Text(p.title, style="" if p.matches else "dim"),
            str(p.level) if p.level >= 0 else "",
            Text(str(p.matches), style="yellow" if short else "bold" if p.matches else "dim"),
            "" if p.expected is None else f"{p.expected}{each}",
            Text(str(len(p.near_misses)), style="yellow" if p.near_misses else "dim"),
            milliseconds(p.seconds),
            Text(f"left out: {p.dropped}" if p.dropped else "", style="red"),
        ]
        table.add_row(*cells[: len(names)])
    return table


def _recognised(explanation: Explanation) -> Table:
    table = _table("Recognised", "kind!", "in the model#", "recognised#", "missed")
    for r in explanation.recognised:
        if r.expected:
            missed = counted((alike(m.module), m.reason) for m in r.missed)
            lines = "\n".join(f"{module}{_times(count)}: {reason}" for (module, reason), count in missed)
            done = Text(str(r.matched), style="green" if r.matched == r.expected else "yellow")
            table.add_row(r.kind, str(r.expected), done, Text(lines))
    return table


def _layers(explanation: Explanation) -> list[RenderableType]:
    names = ("layers!", "before#", "after#", "per token before#", "after#", "weights#")
    table = _table("Operators per decoder layer", *names)
    lists = Table.grid(padding=(0, 2, 0, 0))
    lists.add_column(no_wrap=True)
    lists.add_column(overflow="fold")
    for numbers, layer in groups_of_layers(explanation.layers):
        after = bool(layer.operators_after)
        table.add_row(
            numbers,
            str(len(layer.operators_before)),
            Text(str(len(layer.operators_after)) if after else "", style="bold"),
            size(layer.traffic_before.per_token),
            size(layer.traffic_after.per_token) if after else "",
            size(layer.traffic_after.weights if after else layer.traffic_before.weights),
        )
        if after:
            lists.add_row(f"layer {numbers}" if numbers.isdigit() else numbers, operator_list(layer.operators_after))
    return [table, lists, ""]


def _near_misses(explanation: Explanation) -> Table:
    table = _table("Near misses", "pass!", "module", "reason")
    for p in explanation.passes:
        for (module, reason), count in counted((alike(m.module), m.reason) for m in p.near_misses):
            table.add_row(p.name, Text(module + _times(count)), Text(reason))
    return table


def _leftovers(explanation: Explanation) -> Table:
    table = _table("Leftovers", "region!", "module", "operators", "reason")
    for region, module, operators, reason in leftover_rows(explanation.leftovers):
        table.add_row(region, Text(module), Text(operators), Text(reason))
    return table


def _section(section: Section) -> list[RenderableType]:
    table = _table(section.title, *section.columns)
    for row in section.rows:
        table.add_row(*map(Text, row))
    parts: list[RenderableType] = [table if section.columns else Text(section.title, style="bold")]
    if section.note:
        parts += [Text(section.note, style="dim"), ""]
    return parts


def _times(count: int) -> str:
    return f" ×{count}" if count > 1 else ""
