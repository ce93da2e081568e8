"""What lowering for an Ascend NPU makes of each architecture; used by ``coverage.py --target npu``.

Models have the sizes that the limits allow, in float32 that counts as bfloat16, so that the lowered graph can be run
by the reference kernels and compared with transformers. What a model holds is counted in its untouched graph by
provenance, what is lowered by the routes of the passes: the two are independent.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

KINDS = ("attention", "norm", "rope", "gated_mlp", "activation", "moe")
REQUIRED = ("attention", "norm", "rope", "gated_mlp", "activation")
"""Kinds of which nothing may be left in ATen that the limits allow."""
TARGET = 110
"""Architectures of which that has to hold."""

# Reasons that are not a limit of an operator but of how the graph is laid out.
_NOT_A_LIMIT = ("are not the halves of one tensor", "lie in turns", "computed, not parameters")


@dataclasses.dataclass
class NpuRow:
    """One architecture.

    Attributes:
        name: of the architecture.
        refused: why it is not compiled at all, "" when it is.
        error: largest error of a logit in standard deviations, by the reference kernels.
        expected: kind → number in the untouched graph.
        matched: kind → number that became a canonical operator.
        lowered: kind → number of canonical operators that became operators of the NPU.
        limited: ``(operator, reason)`` of those that the limits keep in ATen.
        gaps: ``(operator or kind, reason)`` of those that they would allow.
        illegal: calls of the graph, and of the one that decode steps have, that break a limit; there must be none.
        dropped: ``(pass, reason)`` of those that the comparison with the model took out: over its own weights, and in
            float32 over large and small ones (``compiler.verify.graph_check``).
        launches: operators of the last decoder layer that launch work, before (None where the untouched graph cannot
            be counted) and after; None for a model whose conversion was not reached.
    """

    name: str
    refused: str = ""
    error: float = 0.0
    expected: dict[str, int] = dataclasses.field(default_factory=dict)
    matched: dict[str, int] = dataclasses.field(default_factory=dict)
    lowered: dict[str, int] = dataclasses.field(default_factory=dict)
    limited: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    gaps: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    illegal: list[str] = dataclasses.field(default_factory=list)
    dropped: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    launches: tuple[int | None, int] | None = None

    @property
    def clean(self) -> bool:
        """Nothing is left in ATen that the limits allow, nothing that is emitted breaks one or is not right."""
        return not self.refused and not self.gaps and not self.illegal and not self.dropped


def npu_row(name: str, model: Any, graph_mode: str = "ge") -> NpuRow:
    """Lower a model, compare it, and count.

    Args:
        name: of the architecture.
        model: of sizes that the limits allow, in float32.
        graph_mode: see ``NpuTarget``.
    """
    import torch
    from npu_calls import illegal_calls

    from torch_pagoda.compiler.capture.aten import to_aten
    from torch_pagoda.compiler.capture.trace import capture
    from torch_pagoda.compiler.options import CompileOptions
    from torch_pagoda.compiler.pipeline import run_pipeline
    from torch_pagoda.compiler.report import CompileReport
    from torch_pagoda.compiler.verify.self_check import reference_of_model
    from torch_pagoda.passes import UnsupportedModel
    from torch_pagoda.passes.graph.provenance import decoder_layers, launches_work
    from torch_pagoda.passes.lower.npu.decode_graph import decode_graph_or_reason
    from torch_pagoda.reports.expected import expected_matches
    from torch_pagoda.reports.recognition import recognition
    from torch_pagoda.runtime.npu_target import NpuTarget

    row = NpuRow(name)
    report = CompileReport(name)
    try:
        reference = reference_of_model(model)
        captured = capture(model)
        try:
            untouched = to_aten(captured.traced.copy(), captured.context)
        except Exception:  # masks made under vmap, which only passes take away
            untouched = None
        # Lowering swallows norms and rotations; what was recognized is seen best before.
        canonical_report = CompileReport(name)
        canonical = run_pipeline(captured, CompileOptions(codegen="none", target="cpu"), None, canonical_report)
        captured.traced.npu = NpuTarget(graph_mode=graph_mode, float32_as=torch.bfloat16)
        lowered = run_pipeline(captured, CompileOptions(codegen="none", target="npu"), reference, report)
    except UnsupportedModel as error:
        row.refused = " ".join(str(error).split())[:200]
        return row
    assert report.verdict is not None and lowered.npu is not None
    row.error = report.verdict.error
    row.dropped = list(report.dropped_passes)
    decode, reason = decode_graph_or_reason(lowered)
    if reason:
        row.dropped.append(("decode_graph", reason))
    graphs = [lowered] if decode is None else [lowered, decode]
    row.illegal = [call for graph in graphs for call in illegal_calls(graph, lowered.npu)]
    layers = decoder_layers(lowered.graph, tokens=lowered.placeholder(lowered.input_ids))
    row.launches = None, sum(launches_work(n) for n in layers.nodes(len(layers.paths) - 1))
    if untouched is not None:
        before = decoder_layers(untouched.graph, tokens=untouched.placeholder(untouched.input_ids))
        row.launches = sum(launches_work(n) for n in before.nodes(len(before.paths) - 1)), row.launches[1]
        like = decoder_layers(canonical.graph, before, canonical.placeholder(canonical.input_ids))
        expected = expected_matches(untouched.graph, before)
        for found in recognition(expected, canonical.graph, like, canonical_report.passes):
            row.expected[found.kind], row.matched[found.kind] = found.expected, found.matched
            if found.kind in REQUIRED:
                row.gaps += [(found.kind, missed.reason) for missed in found.missed]
    _count_routes(row, report.passes)
    return row


def _count_routes(row: NpuRow, records: Any) -> None:
    kinds = {
        "pagoda.paged_attention": "attention",
        "pagoda.rms_norm": "norm",
        "pagoda.add_rms_norm": "norm",
        "pagoda.layer_norm": "norm",
        "pagoda.add_layer_norm": "norm",
        "pagoda.rope": "rope",
        "pagoda.gated_activation": "gated_mlp",
        "pagoda.activation": "activation",
        "pagoda.moe": "moe",
    }
    lowered: Counter[str] = Counter()
    for route in (route for record in records for route in record.routes):
        kind = kinds.get(route.operator)
        if kind is None:
            continue
        reasons = [reason for _, reason in route.refused]
        by_formula = "aten" in route.chosen
        if not by_formula:
            lowered[kind] += 1
        said = "; ".join(dict.fromkeys(reasons))
        if any(text in reason for reason in reasons for text in _NOT_A_LIMIT) and kind in REQUIRED:
            row.gaps.append((route.operator, said))
        elif by_formula and reasons:
            row.limited.append((route.operator, said))
        elif by_formula and kind not in ("activation",):
            row.gaps.append((route.operator, "no reason given"))
    row.lowered = dict(lowered)


def _launches(row: NpuRow) -> str:
    """A cell: how many operators of a layer launch work, before and after."""
    if row.launches is None:
        return "not converted"
    before, after = row.launches
    return f"{'not counted' if before is None else before} → {after}"


def npu_tables(rows: list[NpuRow]) -> str:
    """Counts over all rows, one line per architecture, then what is left with its reasons, as Markdown."""
    compiled = [row for row in rows if not row.refused]
    clean = [row for row in compiled if row.clean]
    lines = [
        f"{len(compiled)} architectures are lowered, {len(rows) - len(compiled)} are refused; "
        f"{len(clean)} leave nothing in ATen that the limits allow (target {TARGET}); "
        f"{sum(bool(row.illegal) for row in rows)} hold a call that breaks a limit, "
        f"{sum(bool(row.dropped) for row in rows)} lose a pass that is not right",
        "",
        f"| architecture | {' | '.join(KINDS)} | launches of a layer | error | kept by limits | gaps |",
        "|---" * (len(KINDS) + 5) + "|",
    ]
    for row in compiled:
        counts = " | ".join(
            f"{row.matched.get(kind, 0)}/{row.expected[kind]}" if row.expected.get(kind) else "" for kind in KINDS
        )
        lines.append(
            f"| {row.name} | {counts} | {_launches(row)} | {row.error:.1e} | {len(row.limited)} | {len(row.gaps)} |"
        )
    for title, of in (("Kept in ATen by a limit", "limited"), ("Left though the limits allow it", "gaps")):
        said = Counter((row.name, *each) for row in compiled for each in getattr(row, of))
        lines += ["", f"{title}:", ""]
        lines += [f"- {name}: {count} {what}: {reason}" for (name, what, reason), count in sorted(said.items())]
    lines += ["", "Taken out, as it is not right:", ""]
    lines += [f"- {row.name}: {dropped}: {reason}" for row in rows for dropped, reason in row.dropped]
    lines += ["", "Breaking a limit:", ""]
    lines += [f"- {row.name}: {illegal}" for row in rows for illegal in row.illegal]
    return "\n".join(lines) + "\n"
