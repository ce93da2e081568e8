"""Figures of a report as SVG: bars, and a chip's roofline. Every drawn number is also written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH = 320  # fits a phone without being scaled
_BAR, _STEP = 14, 20
_NUMBERS = 84  # for what is written beside a bar
_PLOT = 190
_MARGIN = 14


@dataclass(frozen=True)
class Bar:
    """One bar.

    Attributes:
        label: the label.
        value: its length, at least 0.
        text: the value as text.
        kind: CSS class, "before" or "after".
    """

    label: str
    value: float
    text: str
    kind: str = "after"


@dataclass(frozen=True)
class Point:
    """A step in a roofline.

    Attributes:
        name: name of the step.
        intensity: operations per byte.
        speed: operations per second.
        text: both as text.
    """

    name: str
    intensity: float
    speed: float
    text: str


def bars(title: str, entries: Sequence[Bar]) -> str:
    """Horizontal bars on one scale from 0, each below its label and left of its number."""
    longest = max((bar.value for bar in entries), default=0) or 1
    room = _WIDTH - _NUMBERS
    parts = []
    y = 0
    for bar in entries:
        width = bar.value / longest * room
        parts += [
            f'<text x="0" y="{y + 12}">{escape(bar.label)}</text>',
            f'<rect class="{bar.kind}" x="0" y="{y + 17}" width="{width:.1f}" height="{_BAR}"/>',
            f'<text x="{width + 6:.1f}" y="{y + 28}">{escape(bar.text)}</text>',
        ]
        y += _STEP + _BAR + 4
    said = "; ".join(f"{bar.label}: {bar.text}" for bar in entries)
    return _svg(title, said, y, parts)


def roofline(title: str, points: Sequence[Point], bandwidth: float, peak: float, roof: str) -> str:
    """Operations per second against operations per byte, on logarithmic scales.

    Args:
        title: title of the figure.
        points: steps.
        bandwidth: memory bandwidth in bytes per second: the slope of the roof.
        peak: operations per second: the flat part of the roof.
        roof: both as text.
    """
    ridge = peak / bandwidth
    xs = [math.log10(x) for x in (ridge, *(point.intensity for point in points))]
    left, right = min(xs) - 0.5, max(xs) + 0.7
    low, high = math.log10(bandwidth) + left, math.log10(peak) + 0.3

    def at(intensity: float, speed: float) -> tuple[float, float]:
        x = (math.log10(intensity) - left) / (right - left) * _WIDTH
        return x, _PLOT - (math.log10(speed) - low) / (high - low) * _PLOT

    ends = [at(10**left, 10**low), at(ridge, peak), at(10**right, peak)]
    parts = [
        f'<path class="axis" d="M0,0 V{_PLOT} H{_WIDTH}"/>',
        f'<path class="roof" d="M{" L".join(f"{x:.1f},{y:.1f}" for x, y in ends)}"/>',
        f'<text class="dim" x="{_WIDTH}" y="{_PLOT + 15}" text-anchor="end">operations per byte →</text>',
        '<text class="dim" x="5" y="10">↑ operations per second</text>',
    ]
    y = _PLOT + 36
    for number, point in enumerate(points, 1):
        x, height = at(point.intensity, point.speed)
        parts += [
            f'<circle cx="{x:.1f}" cy="{height:.1f}" r="5"/>',
            f'<text x="{x + 8:.1f}" y="{height + 16:.1f}">{number}</text>',
            f'<text x="0" y="{y}">{number}: {escape(point.name)}</text>',
            f'<text x="12" y="{y + 16}">{escape(point.text)}</text>',
        ]
        y += 38
    parts.append(f'<text x="0" y="{y}">{escape(roof)}</text>')
    said = "; ".join((*(f"{point.name}: {point.text}" for point in points), roof))
    return _svg(title, said, y + 6, parts)


def _svg(title: str, description: str, height: float, parts: Sequence[str]) -> str:
    box = f"0 0 {_WIDTH} {height + _MARGIN:.0f}"
    return (
        f'<svg class="chart" role="img" viewBox="{box}" width="{_WIDTH}" height="{height + _MARGIN:.0f}">'
        f"<title>{escape(title)}</title><desc>{escape(description)}</desc>{''.join(parts)}</svg>"
    )
