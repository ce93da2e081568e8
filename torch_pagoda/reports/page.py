"""Findings as one self-contained HTML file."""

from __future__ import annotations

from html import escape

from ..rendering.document import document, section_html
from .drawing import LayerGraph
from .figures import figures
from .findings import Findings
from .model_sections import heading, sections
from .svg import KINDS, svg

_STYLE = """
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
.figures { display: flex; flex-wrap: wrap; gap: 24px 48px; } .figures figure { margin: 0; max-width: 100%; }
.figures figcaption { font-weight: 600; margin-bottom: 6px; }
svg.chart { max-width: 100%; height: auto; overflow: visible; }
svg.chart text { font: 12px system-ui, "DejaVu Sans", sans-serif; text-anchor: start; }
svg.chart text.dim { fill: var(--dim); } svg.chart text[text-anchor="end"] { text-anchor: end; }
svg.chart rect { stroke: none; fill: var(--good); } svg.chart rect.before { fill: var(--edge); }
svg.chart path { fill: none; stroke: var(--edge); } svg.chart path.roof { stroke: var(--text); stroke-width: 2; }
svg.chart circle { fill: var(--good); }
"""


def page(found: Findings, layer: int | None = None) -> str:
    """The whole page.

    Args:
        found: the findings.
        layer: index of the layer to draw; None: the first one with most operators left.
    """
    parts = [
        f"<h1>{escape(found.model)}</h1>",
        _heading(found),
        *figures(found),
        *(part for section in sections(found) for part in section_html(section)),
        *_drawings(found, layer),
    ]
    return document(f"{found.model}: what pagoda does to it", parts, _STYLE + _colors())


def _colors() -> str:
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
