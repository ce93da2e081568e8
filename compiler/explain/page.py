"""An explanation as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from .drawing import LayerGraph
from .explanation import Explanation
from .figures import figures
from .npu_sections import npu_sections
from .svg import KINDS, svg
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

_STYLE = """
:root { color-scheme: light dark; --text: #1c2430; --dim: #66707f; --line: #d6dbe2; --back: #fff; --soft: #f5f7f9;
  --good: #14733a; --bad: #b42318; --warn: #9a5b00; --edge: #8a94a3;
  --projection: #dbe7fb; --attention: #fde0d5; --norm: #dcf1e2; --rope: #ece2fb; --activation: #fdf0c8;
  --moe: #d7f0f2; --other: #eef0f3; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e8ee; --dim: #98a2b1; --line: #343c48; --back: #14181e;
  --soft: #1b2028; --good: #5fcf8b; --bad: #ff8a7a; --warn: #e9b252; --edge: #6c7685;
  --projection: #23395f; --attention: #5c2f20; --norm: #1e4a2d; --rope: #402a63; --activation: #554413;
  --moe: #174c51; --other: #2a303a; } }
body { font: 14px/1.45 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; color: var(--text);
  background: var(--back); margin: 0 auto; padding: 24px 32px 64px; max-width: 1800px; }
h1 { font-size: 22px; margin: 0 0 12px; } h2 { font-size: 16px; margin: 34px 0 8px; }
p { margin: 4px 0 8px; max-width: 75em; color: var(--dim); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 3px 18px; margin: 0; }
dt { color: var(--dim); } dd { margin: 0; overflow-wrap: anywhere; }
.good { color: var(--good); } .bad { color: var(--bad); } .warn { color: var(--warn); } .strong { font-weight: 600; }
table { border-collapse: collapse; } th, td { padding: 3px 14px 3px 0; text-align: left; vertical-align: top; }
th { font-weight: 600; border-bottom: 1px solid var(--line); color: var(--dim); }
tbody tr:nth-child(even) { background: var(--soft); } td.number, th.number { text-align: right; white-space: nowrap; }
td.code { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 12.5px; }
tr.none td { color: var(--dim); }
.drawings { display: flex; gap: 20px; align-items: flex-start; overflow-x: auto; padding-bottom: 8px; }
.drawings figure { margin: 0; padding: 10px; flex: 0 1 auto; border: 1px solid var(--line);
  border-radius: 8px; background: var(--back); }
.drawings svg { max-width: 100%; height: auto; }
.drawings figcaption { font-weight: 600; margin: 0 4px 6px; }
.legend { display: flex; flex-wrap: wrap; gap: 6px 16px; margin: 4px 0 12px; }
.legend span { display: inline-flex; align-items: center; gap: 6px; color: var(--dim); }
.legend i { width: 14px; height: 14px; border-radius: 3px; border: 1px solid var(--edge); }
svg text { font: 12px ui-monospace, "DejaVu Sans Mono", monospace; fill: var(--text); text-anchor: middle; }
svg text.shape { font-size: 9.5px; fill: var(--dim); }
svg rect { fill: var(--other); stroke: var(--edge); stroke-width: 1; }
svg .box:hover rect { stroke: var(--text); stroke-width: 2; }
svg .line { fill: none; stroke: var(--edge); stroke-width: 1.3; } svg .head { fill: var(--edge); }
svg .k-input rect, svg .k-output rect { fill: var(--back); stroke-dasharray: 4 3; }
.scroll { overflow-x: auto; } h1, h2, p { overflow-wrap: anywhere; }
.figures { display: flex; flex-wrap: wrap; gap: 24px 48px; } .figures figure { margin: 0; max-width: 100%; }
.figures figcaption { font-weight: 600; margin-bottom: 6px; }
svg.chart { max-width: 100%; height: auto; overflow: visible; }
svg.chart text { font: 12px system-ui, "DejaVu Sans", sans-serif; text-anchor: start; }
svg.chart text.dim { fill: var(--dim); } svg.chart text[text-anchor="end"] { text-anchor: end; }
svg.chart rect { stroke: none; fill: var(--good); } svg.chart rect.before { fill: var(--edge); }
svg.chart path { fill: none; stroke: var(--edge); } svg.chart path.roof { stroke: var(--text); stroke-width: 2; }
svg.chart circle { fill: var(--good); }
@media (max-width: 600px) { body { padding: 12px 14px 40px; } dl { grid-template-columns: 1fr; }
  dd { margin-bottom: 6px; } }
"""


def page(explanation: Explanation, layer: int | None = None) -> str:
    """The whole page.

    Args:
        explanation: what to show.
        layer: index of the layer to draw; None for the first of those with most operators left.
    """
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(explanation.model)}: what pagoda does to it</title>",
        f"<style>{_STYLE}{_colours()}</style></head><body>",
        f"<h1>{escape(explanation.model)}</h1>",
        _heading(explanation),
        *figures(explanation),
        *_passes(explanation),
        *_recognised(explanation),
        *_near_misses(explanation),
        *_layers(explanation),
        *_leftovers(explanation),
        *_npu(explanation),
        *_drawings(explanation, layer),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _colours() -> str:
    kinds = [kind for kind in KINDS if kind != "input"]
    return "".join(
        f"svg .k-{kind or 'other'} rect, .legend .k-{kind or 'other'} {{ fill: var(--{kind or 'other'}); "
        f"background: var(--{kind or 'other'}); }}\n"
        for kind in kinds
    )


def _heading(explanation: Explanation) -> str:
    verdict = explanation.verdict
    bad = bool(explanation.refused) or (verdict is not None and not verdict.ok)
    right = "bad" if bad else "good" if verdict is not None else ""
    times = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in explanation.seconds.items())
    soc = "" if explanation.npu is None else f" ({explanation.npu.soc})"
    rows = [
        *((("built", built_line(explanation), ""),) if explanation.built_layers is not None else ()),
        ("target", f"{explanation.target}{soc}, opt_level {explanation.opt_level}", ""),
        ("self-check", verdict_line(explanation), right),
        ("decoder layer", launches_line(explanation), "strong"),
        ("torch.compile", drop_in_line(explanation), ""),
        *(("", reason, "warn") for reason in explanation.drop_in.reasons),
        (
            "cache copies",
            str(explanation.target_graph.cache_copies),
            "bad" * bool(explanation.target_graph.cache_copies),
        ),
        ("seconds", times, ""),
    ]
    items = "".join(f'<dt>{escape(name)}</dt><dd class="{kind}">{escape(text)}</dd>' for name, text, kind in rows)
    return f"<dl>{items}</dl>"


def _table(columns: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]], code: Sequence[str] = ()) -> str:
    """A table. A column whose name ends in ``#`` holds numbers; those of ``code`` are set in a fixed font.

    Args:
        columns: their names.
        rows: class of the row, and its cells.
        code: names of columns.
    """
    kinds = ["number" if name.endswith("#") else "code" if name in code else "" for name in columns]
    head = "".join(
        f'<th class="{kind}">{escape(name.removesuffix("#"))}</th>' for name, kind in zip(columns, kinds, strict=True)
    )
    lines = []
    for row, cells in rows:
        written = "".join(f'<td class="{kind}">{escape(cell)}</td>' for cell, kind in zip(cells, kinds, strict=True))
        lines.append(f'<tr class="{row}">{written}</tr>')
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    # A table that is wider than the page scrolls by itself; tabindex lets the keyboard do it, too.
    return f'<div class="scroll" tabindex="0">{table}</div>'


def _passes(explanation: Explanation) -> list[str]:
    if not explanation.passes:
        return []
    rows = [
        (
            "" if p.matches or p.dropped else "none",
            (
                p.title,
                str(p.level) if p.level >= 0 else "",
                str(p.matches),
                "" if p.expected is None else str(p.expected),
                "" if p.expected_per_layer is None else str(p.expected_per_layer),
                str(len(p.near_misses)),
                milliseconds(p.seconds),
                f"left out: {p.dropped}" if p.dropped else "",
            ),
        )
        for p in explanation.passes
    ]
    columns = ("pass", "level#", "matches#", "expected#", "per layer#", "near misses#", "ms#", "")
    return ["<h2>Passes</h2>", _table(columns, rows, code=("pass",))]


def _recognised(explanation: Explanation) -> list[str]:
    rows = []
    for r in explanation.recognised:
        if r.expected:
            missed = counted((alike(m.module), m.reason) for m in r.missed)
            text = "; ".join(f"{module}{_times(count)}: {reason}" for (module, reason), count in missed)
            rows.append(("", (r.kind, str(r.expected), str(r.matched), text)))
    if not rows:
        return []
    note = "<p>What the model holds is counted by the modules and functions it comes from, apart from the passes.</p>"
    return ["<h2>Recognised</h2>", note, _table(("kind", "in the model#", "recognised#", "missed"), rows)]


def _near_misses(explanation: Explanation) -> list[str]:
    rows = [
        ("", (p.name, module + _times(count), reason))
        for p in explanation.passes
        for (module, reason), count in counted((alike(m.module), m.reason) for m in p.near_misses)
    ]
    if not rows:
        return []
    return ["<h2>Near misses</h2>", _table(("pass", "module", "reason"), rows, code=("pass", "module"))]


def _layers(explanation: Explanation) -> list[str]:
    rows = []
    for numbers, layer in groups_of_layers(explanation.layers):
        after = bool(layer.operators_after)
        cells = (
            numbers,
            str(len(layer.operators_before)),
            str(len(layer.operators_after)) if after else "",
            size(layer.traffic_before.per_token),
            size(layer.traffic_after.per_token) if after else "",
            size(layer.traffic_after.weights if after else layer.traffic_before.weights),
            operator_list(layer.operators_after),
        )
        rows.append(("", cells))
    if not rows:
        return []
    columns = ("layers", "operators before#", "after#", "bytes per token before#", "after#", "weights#")
    return ["<h2>Decoder layers</h2>", _table((*columns, "operators after"), rows, code=("operators after",))]


def _leftovers(explanation: Explanation) -> list[str]:
    rows = [("", row) for row in leftover_rows(explanation.leftovers)]
    if not rows:
        return []
    columns = ("region", "module", "operators", "reason")
    note = "<p>Operators of attention, norms, rotary embeddings and activations that no pass took.</p>"
    if explanation.npu is not None:
        note = "<p>Operators of ATen that decoder layers still hold.</p>"
    return ["<h2>Leftovers</h2>", note, _table(columns, rows, code=("module", "operators"))]


def _npu(explanation: Explanation) -> list[str]:
    parts = []
    for section in npu_sections(explanation):
        parts.append(f"<h2>{escape(section.title)}</h2>")
        if section.note:
            parts.append(f"<p>{escape(section.note)}</p>")
        if section.columns:
            columns = tuple(name.removesuffix("!") for name in section.columns)
            rows = (("", [cell.replace(" +\n", " + ").replace("\n", "; ") for cell in row]) for row in section.rows)
            parts.append(_table(columns, rows))
    return parts


def _drawings(explanation: Explanation, layer: int | None) -> list[str]:
    if not explanation.drawings:
        return []
    if layer is None:
        most = explanation.target_graph.launches_per_layer or explanation.launches_before
        counts = [len(x.operators_after or x.operators_before) for x in explanation.layers]
        layer = counts.index(most)
    before, after = explanation.drawings[layer]
    legend = "".join(
        f'<span><i class="k-{kind or "other"}"></i>{escape(words)}</span>'
        for kind, words in KINDS.items()
        if kind in {box.kind for box in (*before.boxes, *after.boxes)}
    )
    path = explanation.layers[layer].path
    return [
        f"<h2>{escape(path)}, operator by operator</h2>",
        "<p>Views, parameters and the metadata of a step are not drawn. T is the number of tokens of a step. "
        "Hover over a box for its module and source line.</p>",
        f'<div class="legend">{legend}</div>',
        '<div class="drawings">',
        _figure("before", before, path),
        _figure("after", after, path) if after.boxes else "",
        "</div>",
    ]


def _figure(when: str, graph: LayerGraph, path: str) -> str:
    count = sum(box.kind not in ("input", "output") for box in graph.boxes)
    caption = f"{when}: {count} operators"
    return f"<figure><figcaption>{escape(caption)}</figcaption>{svg(graph, f'{path} {when}')}</figure>"


def _times(count: int) -> str:
    return f" ×{count}" if count > 1 else ""
