"""How many norms, rotations, MLPs and MoE blocks of a model the passes recognize; used by ``coverage.py --fusions``.

What a model holds is counted by provenance (class names of modules, names of traced functions), what is recognized
by the canonical operators of the lowered graph: the two are independent.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

TARGETS = {"norm": 0.98, "rope": 0.95, "gated_mlp": 0.98, "moe": 0.90}
"""Kind → the share that has to be recognized over all architectures."""


@dataclasses.dataclass
class FusionRow:
    """What one architecture holds and what of it is recognized.

    Attributes:
        name: of the architecture.
        refused: why it is not compiled at all, "" when it is.
        expected: kind → number in the untouched graph.
        matched: kind → number recognized.
        missed: ``(kind, module, reason)`` of the rest.
        layer_before: operators of the busiest decoder layer of the untouched graph.
        layer_after: of the lowered one.
    """

    name: str
    refused: str = ""
    expected: dict[str, int] = dataclasses.field(default_factory=dict)
    matched: dict[str, int] = dataclasses.field(default_factory=dict)
    missed: list[tuple[str, str, str]] = dataclasses.field(default_factory=list)
    layer_before: int = 0
    layer_after: int = 0


def fusions_of(name: str, model: Any) -> FusionRow:
    """Explain a model and count."""
    import torch_pagoda

    found = torch_pagoda.explain(model, verify="off")
    row = FusionRow(name, refused=found.refused)
    if found.refused:
        return row
    for each in found.recognized:
        row.expected[each.kind], row.matched[each.kind] = each.expected, each.matched
        row.missed += [(each.kind, missed.module, missed.reason) for missed in each.missed]
    row.layer_before = max((len(layer.operators_before) for layer in found.layers), default=0)
    row.layer_after = max((len(layer.operators_after) for layer in found.layers), default=0)
    return row


def fusion_tables(rows: list[FusionRow]) -> str:
    """The rates over all rows, then one line per architecture, then every miss with its reason, as Markdown."""
    compiled = [row for row in rows if not row.refused]
    expected: Counter[str] = Counter()
    matched: Counter[str] = Counter()
    for row in compiled:
        expected.update(row.expected)
        matched.update(row.matched)
    lines = [f"{len(compiled)} architectures compile, {len(rows) - len(compiled)} are refused", ""]
    lines += ["| kind | recognized | of | rate | target |", "|---|---|---|---|---|"]
    for kind, total in expected.items():
        if total:
            target = f"{TARGETS[kind]:.0%}" if kind in TARGETS else ""
            lines.append(f"| {kind} | {matched[kind]} | {total} | {matched[kind] / total:.1%} | {target} |")
    kinds = list(expected)
    lines += ["", f"| architecture | {' | '.join(kinds)} | operators per layer |", "|---" * (len(kinds) + 2) + "|"]
    for row in compiled:
        counts = " | ".join(f"{row.matched[k]}/{row.expected[k]}" if row.expected[k] else "" for k in kinds)
        lines.append(f"| {row.name} | {counts} | {row.layer_before} → {row.layer_after} |")
    lines += ["", "Missed:", ""]
    misses = Counter((kind, row.name, reason) for row in compiled for kind, _, reason in row.missed)
    lines += [f"- {name}: {count} {kind}: {reason}" for (kind, name, reason), count in sorted(misses.items())]
    return "\n".join(lines) + "\n"


def unmet(rows: list[FusionRow]) -> list[str]:
    """The kinds whose rate is below its target."""
    short = []
    for kind, target in TARGETS.items():
        total = sum(row.expected.get(kind, 0) for row in rows)
        found = sum(row.matched.get(kind, 0) for row in rows)
        if total and found < target * total:
            short.append(f"{kind}: {found} of {total}, target {target:.0%}")
    return short
