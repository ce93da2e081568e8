"""Drawings of a page: operators and bytes per layer, seconds, and the steps under a chip's roof."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from .charts import Bar, Point, bars, roofline
from .findings import Findings, LayerSummary, groups_of_layers
from .npu import NpuReport
from .wording import quantity, size


def figures(found: Findings) -> list[str]:
    """The figures of a page, with a heading; [] where there is nothing to draw."""
    drawn: list[tuple[str, str]] = []
    if found.layers:
        drawn += [
            _layers(
                found,
                "Operators per decoder layer",
                lambda layer: (len(layer.operators_before), len(layer.operators_after)),
                lambda count: f"{count:.0f}",
            ),
            _layers(
                found,
                "Bytes per token and decoder layer",
                lambda layer: (layer.traffic_before.per_token, layer.traffic_after.per_token),
                size,
            ),
        ]
    if found.seconds:
        title = "Seconds per phase"
        entries = [Bar(phase, seconds, f"{seconds:.2f} s") for phase, seconds in found.seconds.items()]
        drawn.append((title, bars(title, entries)))
    if found.npu is not None and (roof := _roof(found.npu)):
        drawn.append(roof)
    if not drawn:
        return []
    boxes = [f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>" for title, svg in drawn]
    return ["<h2>At a glance</h2>", '<div class="figures">', *boxes, "</div>"]


def _layers(
    found: Findings,
    title: str,
    values: Callable[[LayerSummary], tuple[float, float]],
    written: Callable[[float], str],
) -> tuple[str, str]:
    """Bars before and after for each group of layers that are alike."""
    entries = []
    for numbers, layer in groups_of_layers(found.layers):
        before, after = values(layer)
        name = f"layer {numbers}" if numbers.isdigit() else f"layers {numbers}"
        entries.append(Bar(f"{name}, before", before, written(before), "before"))
        if layer.operators_after:
            entries.append(Bar(f"{name}, after", after, written(after)))
    return title, bars(title, entries)


def _roof(report: NpuReport) -> tuple[str, str] | None:
    """The least time of each step as a speed, under the roof of the chip; None where its figures are not known."""
    chip = report.chip
    if chip is None or chip.bandwidth is None or chip.peak is None:
        return None
    points = []
    for step in report.estimates:
        read = step.moved.weights + step.moved.cache
        if not step.seconds or not step.bound_by or not read or not step.flops:
            return None
        intensity, speed = step.flops / read, step.flops / step.seconds
        text = f"{intensity:.3g} FLOP/B, {quantity(speed, 'FLOP/s')}, by {step.bound_by}"
        points.append(Point(step.name, intensity, speed, text))
    title = f"At most, on {report.soc}"
    roof = f"roof: {quantity(chip.bandwidth, 'B/s')}, {quantity(chip.peak, 'FLOP/s')}"
    return title, roofline(title, points, chip.bandwidth, chip.peak, roof)
