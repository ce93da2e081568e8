"""The figures of a report's page."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from torch_pagoda.compiler.costs.traffic import Moved, Step, Traffic
from torch_pagoda.compiler.targets.npu.socs import chip
from torch_pagoda.reports.charts import Bar, Point, bars, roofline
from torch_pagoda.reports.drop_in import CAPTURED_WHOLE
from torch_pagoda.reports.explanation import Explanation
from torch_pagoda.reports.figures import figures
from torch_pagoda.reports.findings import LayerSummary, TargetGraph
from torch_pagoda.reports.npu import Estimate, NpuReport
from torch_pagoda.reports.npu_graph import GeReport
from torch_pagoda.reports.page import page


def explanation(soc: str = "Ascend910B3") -> Explanation:
    before, after = Traffic(4096, 10), Traffic(1024, 10)
    layers = [
        LayerSummary(i, f"layers.{i}", ("aten.mul",) * 41, ("npu.x",) * 11, before, after, {}) for i in range(3)
    ]
    known = chip(soc)
    decode = Estimate("decode", Step(1, 8, 1), Moved(800, 200, 30), 4000, 2e-6, 1e-6)
    prefill = Estimate("prefill", Step(8, 8, 1), Moved(800, 200, 30), 900_000, 2e-6, 5e-6)
    npu = NpuReport(soc, known, 128, "bfloat16", (), GeReport("not asked for"), (decode, prefill))
    graph = TargetGraph({}, 11, 0, 1024, 0)
    seconds = {"capture": 2.0, "verify <&": 1.0}
    return Explanation(
        "Model", "npu", 2, [], layers, [], [], graph, CAPTURED_WHOLE, None, "", seconds, npu=npu, built_layers=None
    )


def drawn(found: Explanation) -> dict[str, ElementTree.Element]:
    """The figures by title, parsed; each says in words what it shows."""
    svgs = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", "\n".join(figures(found)), re.DOTALL)]
    for svg in svgs:
        assert svg.get("role") == "img" and svg[0].tag == "title" and svg[1].tag == "desc"
        texts = " ".join(text.text or "" for text in svg.iter("text"))
        for said in (svg[1].text or "").split("; "):
            assert said.rpartition(": ")[2] in texts
    return {svg[0].text or "": svg for svg in svgs}


def test_layers_seconds_and_steps_are_drawn_with_their_numbers() -> None:
    found = drawn(explanation())
    assert list(found) == [
        "Operators per decoder layer",
        "Bytes per token and decoder layer",
        "Seconds per phase",
        "At most, on Ascend910B3",
    ]
    assert found["Operators per decoder layer"][1].text == "layers 0-2, before: 41; layers 0-2, after: 11"
    assert found["Bytes per token and decoder layer"][1].text == "layers 0-2, before: 4 KiB; layers 0-2, after: 1 KiB"
    assert found["Seconds per phase"][1].text == "capture: 2.00 s; verify <&: 1.00 s"
    said = found["At most, on Ascend910B3"][1].text or ""
    assert "decode: 4 FLOP/B, 2 GFLOP/s, by memory" in said and "prefill: 900 FLOP/B, 180 GFLOP/s, by compute" in said


def test_a_chip_without_figures_has_no_roof() -> None:
    assert "At most, on Ascend910B4-1" not in drawn(explanation("Ascend910B4-1"))


def test_bars_are_as_long_as_their_values() -> None:
    svg = ElementTree.fromstring(bars("t", [Bar("a", 40, "40"), Bar("b", 10, "10"), Bar("c", 0, "0")]))
    widths = [float(rect.get("width", "")) for rect in svg.iter("rect")]
    assert widths[0] == pytest.approx(4 * widths[1]) and widths[2] == 0 < widths[1]


def test_a_step_that_reaches_the_roof_lies_on_it() -> None:
    points = [Point("slope", 1, 100, ""), Point("ridge", 10, 1000, ""), Point("flat", 50, 1000, "")]
    svg = ElementTree.fromstring(roofline("t", points, bandwidth=100, peak=1000, roof=""))
    roof = [
        tuple(map(float, p.split(","))) for p in re.findall(r"[\d.-]+,[\d.-]+", svg.findall("path")[1].get("d", ""))
    ]
    (x0, y0), (x1, y1), (x2, y2) = roof
    slope, ridge, flat = [(float(c.get("cx", "")), float(c.get("cy", ""))) for c in svg.iter("circle")]
    assert ridge == pytest.approx((x1, y1), abs=0.2)
    assert flat[1] == pytest.approx(y2, abs=0.2) and x1 < flat[0] < x2
    assert (slope[1] - y0) / (slope[0] - x0) == pytest.approx((y1 - y0) / (x1 - x0), rel=0.02)


def test_the_page_holds_them_and_wide_tables_scroll_by_themselves() -> None:
    text = page(explanation())
    assert text.count('<svg class="chart"') == 4 and "verify &lt;&amp;" in text
    assert text.count("<table") == text.count('<div class="scroll" tabindex="0"><table') > 0
    assert ".scroll { overflow-x: auto; }" in text
    assert not re.search(r"(src|href)=|url\(|@import", text)
