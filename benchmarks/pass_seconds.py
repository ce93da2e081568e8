"""How long each pass on the ATen graph takes on 5,000 nodes: without a pattern, and on a deep Llama.

    python benchmarks/pass_seconds.py

A pass that finds nothing has 0.2 s; the exit status is 1 when one takes longer. Times are the best of three, on
copies of one graph, with the graph's lint where something matched. The deep Llama is a narrow one; its graph goes
through the passes in order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import fx

from torch_pagoda.compiler.pass_runs import run_passes
from torch_pagoda.passes import PASSES, Pass, TracedGraph

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from aten_graphs import aten_of_model

from tiny_models import build_tiny_model

NODES = 5000
LIMIT = 0.2
"""Seconds that a pass without a match may take."""


def graph_without_patterns() -> TracedGraph:
    graph = fx.Graph()
    mode = torch._subclasses.FakeTensorMode()
    with mode:
        example = torch.empty(4, 6)
    node = graph.placeholder("x")
    node.meta["example_value"] = example
    for i in range(NODES):
        node = graph.call_function(torch.ops.aten.sub.Tensor, (node, float(i)))
        node.meta["example_value"] = example
    graph.output((node,))
    return TracedGraph(fx.GraphModule({}, graph), mode, {})


def deep_llama() -> TracedGraph:
    per_layer = len(aten_of_model(build_tiny_model("llama", num_hidden_layers=2)).graph.nodes)
    per_layer -= len(aten_of_model(build_tiny_model("llama", num_hidden_layers=1)).graph.nodes)
    return aten_of_model(build_tiny_model("llama", num_hidden_layers=-(-NODES // per_layer)))


def best_of_three(entry: Pass, graph: Callable[[], TracedGraph]) -> tuple[float, int]:
    """Seconds and matches of one pass."""
    best, matches = float("inf"), 0
    for _ in range(3):
        (record,) = run_passes(graph(), [entry])
        best, matches = min(best, record.seconds), record.matches
    return best, matches


def main() -> int:
    console = Console()
    empty, llama = graph_without_patterns(), deep_llama()
    title = f"seconds per pass: {len(empty.graph.nodes)} nodes without a pattern, {len(llama.graph.nodes)} of a Llama"
    table = Table("pass", title=title)
    for heading in ("no pattern", "Llama", "matches"):
        table.add_column(heading, justify="right")
    slow = []
    for entry in PASSES:
        if entry.stage != "aten" or entry.option:
            continue
        idle, _ = best_of_three(entry, empty.copy)
        busy, matches = best_of_three(entry, llama.copy)
        run_passes(llama, [entry])
        table.add_row(entry.name, f"{idle:.3f}", f"{busy:.3f}", str(matches))
        if idle > LIMIT:
            slow.append(entry.name)
    console.print(table)
    if slow:
        console.print(f"over {LIMIT} s without a match: {', '.join(slow)}")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
