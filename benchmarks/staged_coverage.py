"""What parting each architecture into stages of a pipeline makes of it; for ``coverage.py --pipeline-parallel 2``.

The stages run in lockstep in one process, one after the other, over caches of their own. Their logits are compared
with transformers', over the model's own weights and in float32 over large and small ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass
class StagedRow:
    """One architecture with one number of stages.

    Attributes:
        name: of the architecture.
        stages: number of them.
        refused: why it is not compiled, "" when it is.
        error: largest error of a logit in standard deviations.
        crossing: of each boundary, the sizes of the values that cross there; 0 for the number of tokens.
    """

    name: str
    stages: int
    refused: str = ""
    error: float = 0.0
    crossing: list[list[list[int]]] = dataclasses.field(default_factory=list)

    @property
    def key(self) -> str:
        """By which the command line's list has it."""
        return f"{self.name}@{self.stages}"

    @property
    def values(self) -> int:
        """The most values that cross at a boundary."""
        return max((len(found) for found in self.crossing), default=0)


def staged_row(name: str, model: Any, stages: int) -> StagedRow:
    """Part a model into stages and compare them.

    Args:
        name: of the architecture.
        model: it.
        stages: number of them.
    """
    from torch_pagoda.compiler.capture.trace import capture
    from torch_pagoda.compiler.options import CompileOptions
    from torch_pagoda.compiler.pipeline import References, rewrite
    from torch_pagoda.compiler.report import CompileReport
    from torch_pagoda.compiler.verify.self_check import reference_of_model
    from torch_pagoda.passes import UnsupportedModel

    row, report = StagedRow(name, stages), CompileReport(name)
    options = CompileOptions(codegen="none", target="cpu", pipeline_parallel_size=stages)
    try:
        reference = reference_of_model(model)  # first: some models settle into their final form at the first call
        traced = rewrite(capture(model), options, References(reference), report).traced
    except UnsupportedModel as error:
        row.refused = " ".join(str(error).split())[:300]
        return row
    assert report.verdict is not None
    row.error = report.verdict.error
    row.crossing = [[[size or 0 for size in value.sizes] for value in b.values] for b in traced.notes.boundaries]
    return row


def say(row: StagedRow) -> str:
    """What is printed of a row."""
    if row.refused:
        return f"{row.stages} stages: {row.refused}"
    return f"{row.stages} stages: error {row.error:.1e}, {row.values} values cross {row.crossing}"


def staged_tables(rows: Sequence[StagedRow]) -> str:
    """Counts, and the architectures that are refused or where more than two values cross, as Markdown."""
    lines = []
    for stages in sorted({row.stages for row in rows}):
        own = [row for row in rows if row.stages == stages]
        exact = [row for row in own if not row.refused]
        counts = [sum(row.values == count for row in exact) for count in (1, 2)]
        lines += [
            f"{stages} stages: {len(exact)} of {len(own)} architectures exact; one value crosses in {counts[0]}, two "
            f"in {counts[1]}, more in {len(exact) - sum(counts)}",
            "",
            "| architecture | values that cross | why not |",
            "|---|---|---|",
            *(f"| {row.name} | {row.values or ''} | {row.refused} |" for row in own if row.refused or row.values > 2),
            "",
        ]
    return "\n".join(lines)
