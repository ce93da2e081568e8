"""Findings as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from .drawing import LayerGraph
from .figures import figures
from .findings import Findings
from .model_sections import heading, sections
from .section import Section, as_styled, split_marks
from .svg import KINDS, svg

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
.dim { color: var(--dim); }
table { border-collapse: collapse; } th, td { padding: 3px 14px 3px 0; text-align: left; vertical-align: top; }
th { font-weight: 600; border-bottom: 1px solid var(--line); color: var(--dim); }
tbody tr:nth-child(even) { background: var(--soft); } td.number, th.number { text-align: right; white-space: nowrap; }
td.line { white-space: nowrap; }
td.code { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 12.5px; }
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


def page(found: Findings, layer: int | None = None) -> str:
    """The whole page.

    Args:
        found: what to show.
        layer: index of the layer to draw; None for the first of those with most operators left.
    """
    parts = [
        f"<h1>{escape(found.model)}</h1>",
        _heading(found),
        *figures(found),
        *(part for section in sections(found) for part in section_html(section)),
        *_drawings(found, layer),
    ]
    return document(f"{found.model}: what pagoda does to it", parts)


def document(title: str, parts: Iterable[str]) -> str:
    """An HTML file of parts, which are HTML already."""
    head = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}{_colours()}</style></head><body>",
    ]
    return "\n".join((*head, *parts, "</body></html>")) + "\n"


def _colours() -> str:
    kinds = [kind for kind in KINDS if kind != "input"]
    return "".join(
        f"svg .k-{kind or 'other'} rect, .legend .k-{kind or 'other'} {{ fill: var(--{kind or 'other'}); "
        f"background: var(--{kind or 'other'}); }}\n"
        for kind in kinds
    )


def _heading(found: Findings) -> str:
    items = "".join(
        f'<dt>{escape(name)}</dt><dd class="{style}">{escape(text)}</dd>' for name, (text, style) in heading(found)
    )
    return f"<dl>{items}</dl>"


def section_html(section: Section) -> list[str]:
    """A section as parts of a document."""
    parts = [f"<h2>{escape(section.title)}</h2>"]
    parts += [f"<p>{escape(text)}</p>" for text in (section.hint, section.note) if text]
    if section.columns:
        parts.append(_table(section))
    return parts


def _table(section: Section) -> str:
    columns = [split_marks(column) for column in section.columns]
    kinds = [_kind(marks) for _, marks in columns]
    head = "".join(f'<th class="{kind}">{escape(name)}</th>' for (name, _), kind in zip(columns, kinds, strict=True))
    lines = []
    for row in section.rows:
        cells = []
        for cell, kind in zip(row, kinds, strict=True):
            text, style = as_styled(cell)
            text = text.replace(" +\n", " + ").replace("\n", "; ")
            cells.append(f'<td class="{f"{kind} {style}".strip()}">{escape(text)}</td>')
        lines.append(f"<tr>{''.join(cells)}</tr>")
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    # A table that is wider than the page scrolls by itself; tabindex lets the keyboard do it, too.
    return f'<div class="scroll" tabindex="0">{table}</div>'


def _kind(marks: str) -> str:
    if "#" in marks:
        return "number"
    return " ".join(name for mark, name in (("`", "code"), ("!", "line")) if mark in marks)


def _drawings(found: Findings, layer: int | None) -> list[str]:
    if not found.drawings:
        return []
    if layer is None:
        most = found.target_graph.launches_per_layer or found.launches_before
        counts = [len(x.operators_after or x.operators_before) for x in found.layers]
        layer = counts.index(most)
    before, after = found.drawings[layer]
    legend = "".join(
        f'<span><i class="k-{kind or "other"}"></i>{escape(words)}</span>'
        for kind, words in KINDS.items()
        if kind in {box.kind for box in (*before.boxes, *after.boxes)}
    )
    path = found.layers[layer].path
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
