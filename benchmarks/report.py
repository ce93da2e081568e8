"""What a benchmark leaves behind: Markdown tables, a JSON file, plots."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; numbers with a point get three significant digits, at least down to the ones."""
    lines = [f"| {' | '.join(columns)} |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    lines += [f"| {' | '.join(map(_cell, row))} |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that every experiment has."""
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="DIR", help="write results as JSON, Markdown and PNG here")


def conditions(threads: int) -> dict[str, Any]:
    """Under what the figures were measured."""
    return {
        "threads": threads,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


def save(out: Path | None, name: str, result: dict[str, Any], tables: str) -> None:
    """Write ``name.json`` and ``name.md``; nothing where there is no folder."""
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    (out / f"{name}.md").write_text(tables)


def plotter(out: Path | None) -> Any | None:
    """matplotlib's pyplot, drawing to files; None when nothing is to be drawn or it is not installed."""
    if out is None:
        return None
    try:
        import matplotlib
    except ImportError:
        print("no plots: matplotlib is not installed; pip install 'torch-pagoda[bench]'")
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    out.mkdir(parents=True, exist_ok=True)
    return plt


def save_plot(plt: Any, figure: Any, path: Path) -> None:
    """Write the figure as PNG and close it."""
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    print(f"wrote {path}")
