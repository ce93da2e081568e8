"""What cutting each architecture for several ranks makes of it; used by ``coverage.py --tensor-parallel 2,4``.

All ranks run in lockstep in one process: node by node, over parts of the weights and caches of their own. Their
logits are compared with transformers', over the model's own weights and in float32 over large and small ones, and
with each other bit by bit. What is cut is counted from the parts that the graph's inputs receive.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

TARGET = 150
"""Architectures of which every layer has to be cut."""
WHOLE = 0.1
"""Share of the layers' weights that may stay whole with a reason where every layer counts as cut. What nobody cuts,
as routers, latents and indexers, may be more of a tiny model."""


@dataclasses.dataclass
class ShardedRow:
    """One architecture with one number of ranks.

    Attributes:
        name: of the architecture.
        ranks: number of them.
        refused: why it is not compiled at all, "" when it is.
        error: largest error of a logit in standard deviations.
        caches: of attention and state, how many are cut, and how many there are; those of indexers and latents, which
            every rank needs whole, do not count.
        whole: share of the layers' weights that every rank holds whole.
        reductions: over the ranks, of a step.
        reasons: why a layer stays whole, each with how often.
    """

    name: str
    ranks: int
    refused: str = ""
    error: float = 0.0
    caches: tuple[int, int] = (0, 0)
    whole: float = 0.0
    reductions: int = 0
    reasons: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> str:
        """By which the command line's list has it."""
        return f"{self.name}@{self.ranks}"

    @property
    def cut(self) -> bool:
        """Every layer is cut."""
        throughout = self.caches[0] == self.caches[1] and (self.whole <= WHOLE or not self.reasons)
        return not self.refused and throughout


def sharded_row(name: str, model: Any, ranks: int) -> ShardedRow:
    """Cut a model, compare it, and count.

    Args:
        name: of the architecture.
        model: it.
        ranks: number of them.
    """
    from torch_pagoda.compiler.capture.trace import capture
    from torch_pagoda.compiler.options import CompileOptions
    from torch_pagoda.compiler.pipeline import References, rewrite
    from torch_pagoda.compiler.report import CompileReport
    from torch_pagoda.compiler.verify.self_check import reference_of_model
    from torch_pagoda.passes import SHARDING, UnsupportedModel

    row = ShardedRow(name, ranks)
    report = CompileReport(name)
    options = CompileOptions(codegen="none", target="cpu", tensor_parallel_size=ranks)
    try:
        reference = reference_of_model(model)  # first: some models settle into their final form at the first call
        traced = rewrite(capture(model), options, References(reference), report).traced
    except UnsupportedModel as error:
        row.refused = " ".join(str(error).split())[:300]
        return row
    assert report.verdict is not None
    row.error = report.verdict.error
    row.caches = _cut_caches(traced)
    row.whole = _whole_share(traced, model)
    row.reductions = sum("all_reduce" in str(node.target) for node in traced.graph.nodes)
    rejections = [each for record in report.passes if record.name == SHARDING for each in record.rejections]
    row.reasons = dict(Counter(rejection.reason for rejection in rejections))
    if not traced.notes.parts:
        row.reasons["nothing is cut"] = 1
    return row


def _cut_caches(traced: Any) -> tuple[int, int]:
    """How many caches ranks hold parts of, and how many there are."""
    from torch_pagoda.passes.graph.fx_nodes import cache_index
    from torch_pagoda.passes.sharding.walk import SHARDED

    readers = [
        node
        for node in traced.graph.nodes
        if any(cache_index(n) is not None for n in node.all_input_nodes)
        and "lightning_indexer" not in str(node.target)
    ]
    return sum(node.meta.get(SHARDED, False) for node in readers), len(readers)


def _whole_share(traced: Any, model: Any) -> float:
    """The share of the matrices inside the layers that are no parts."""
    from torch_pagoda.compiler.capture.layer_kinds import find_decoder_layers
    from torch_pagoda.compiler.weights.tensor_contents import module_tensors

    path, _ = find_decoder_layers(model)
    inside = {id(t): n for n, t in module_tensors(model).items() if n.startswith(f"{path}.") and t.dim() > 1}
    wholes = traced.constants | {name: part.whole for name, part in traced.notes.parts.items()}
    sizes = {id(tensor): tensor.numel() for tensor in wholes.values() if id(tensor) in inside}
    cut = {id(part.whole) for part in traced.notes.parts.values()}
    total = sum(sizes.values())
    return sum(size for key, size in sizes.items() if key not in cut) / total if total else 0.0


def say(row: ShardedRow) -> str:
    """What is printed of a row."""
    if row.refused:
        return f"{row.ranks} ranks: {row.refused}"
    counts = f"caches {row.caches[0]}/{row.caches[1]}, whole {row.whole:.0%}, {row.reductions} reductions"
    return f"{row.ranks} ranks: error {row.error:.1e}, {counts} {row.reasons or ''}"


def sharded_tables(rows: Sequence[ShardedRow]) -> str:
    """Counts, and the architectures that are not cut throughout with their reasons, as Markdown."""
    lines = []
    for ranks in sorted({row.ranks for row in rows}):
        own = [row for row in rows if row.ranks == ranks]
        exact = [row for row in own if not row.refused]
        lines += [
            f"{ranks} ranks: {len(exact)} of {len(own)} architectures exact, {sum(row.cut for row in exact)} with "
            f"every layer cut (target {TARGET})",
            "",
            "| architecture | attention and states cut | layers' weights whole | reductions | why |",
            "|---|---|---|---|---|",
        ]
        for row in own:
            if row.cut:
                continue
            why = row.refused or "; ".join(f"{reason} ({count})" for reason, count in row.reasons.items())
            lines.append(
                f"| {row.name} | {row.caches[0]} of {row.caches[1]} | {row.whole:.0%} | {row.reductions} | {why} |"
            )
        lines.append("")
    return "\n".join(lines)
