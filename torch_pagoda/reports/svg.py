"""Draws the operators of a decoder layer as SVG."""

from __future__ import annotations

from html import escape

from .drawing import Box, LayerGraph
from .layout import layered

_ROW = 64
_BOX_HEIGHT = 38
_CHARACTER = 7.1
_SMALL_CHARACTER = 5.6
_MARGIN = 14
_SMALLEST = 0.75  # of the drawn size; a narrower page scrolls

KINDS = {
    "projection": "projection",
    "attention": "attention",
    "norm": "norm",
    "rope": "rotary embedding",
    "activation": "activation",
    "moe": "experts",
    "": "other",
    "input": "from outside",
}
"""Kinds of boxes (CSS class ``k-NAME``) → text of the legend."""


def svg(graph: LayerGraph, title: str) -> str:
    """One ``<svg>`` element; colors come from the page's style sheet."""
    widths = [_width(box) for box in graph.boxes]
    layout = layered(widths, graph.arrows)
    width = layout.width + 2 * _MARGIN
    height = max(1, layout.ranks) * _ROW - (_ROW - _BOX_HEIGHT) + 2 * _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" style="min-width: {_SMALLEST * width:.0f}px" '
        f'role="img" aria-label="{escape(title)}">'
    ]
    ends = [end for _, end in graph.arrows]
    for route, end in zip(layout.routes, ends, strict=True):
        parts.append(_arrow([(x + _MARGIN, row) for x, row in route], graph.boxes[end]))
    for box, x, row, w in zip(graph.boxes, layout.x, layout.rank, widths, strict=True):
        parts.append(_box(box, x + _MARGIN, row * _ROW + _MARGIN, w))
    parts.append("</svg>")
    return "\n".join(parts)


def _width(box: Box) -> float:
    return max(len(_name(box)) * _CHARACTER, len(box.subtitle) * _SMALL_CHARACTER, 30) + 20


def _name(box: Box) -> str:
    """The operator without the common prefix ``aten.``."""
    return box.title.removeprefix("aten.")


def _box(box: Box, x: float, top: float, width: float) -> str:
    name, shape = escape(_name(box)), escape(box.subtitle)
    tooltip = escape("\n".join(part for part in (box.title, box.subtitle, *box.details) if part))
    kind = box.kind or "other"
    return (
        f'<g class="box k-{kind}"><title>{tooltip}</title>'
        f'<rect x="{x - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" height="{_BOX_HEIGHT}" rx="6"/>'
        f'<text x="{x:.1f}" y="{top + 16:.1f}">{name}</text>'
        f'<text class="shape" x="{x:.1f}" y="{top + 30:.1f}">{shape}</text></g>'
    )


def _arrow(points: list[tuple[float, int]], end: Box) -> str:
    """A smooth line through the points of a route, from the bottom of its first box to the top of its last."""
    x, row = points[0]
    y = row * _ROW + _MARGIN + _BOX_HEIGHT
    path = [f"M{x:.1f},{y:.1f}"]
    for i, (next_x, next_row) in enumerate(points[1:], 1):
        last = i == len(points) - 1
        next_y = next_row * _ROW + _MARGIN + (-3 if last else 0)
        bend = (next_y - y) / 2
        path.append(f"C{x:.1f},{y + bend:.1f} {next_x:.1f},{next_y - bend:.1f} {next_x:.1f},{next_y:.1f}")
        x, y = next_x, next_y
        if not last:  # straight past the boxes of this row
            y += _BOX_HEIGHT
            path.append(f"L{x:.1f},{y:.1f}")
    kind = " out" if end.kind == "output" else ""
    head = f"M{x - 3.5:.1f},{y - 5:.1f} L{x:.1f},{y + 2:.1f} L{x + 3.5:.1f},{y - 5:.1f} Z"
    return f'<path class="line{kind}" d="{" ".join(path)}"/><path class="head" d="{head}"/>'
