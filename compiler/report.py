"""Reports of what compiling a model did, for people and for tests."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..passes import PassRecord, Rejection


@dataclass(frozen=True)
class Verdict:
    """Outcome of a self-check.

    Attributes:
        ok: every compared row is within tolerance (half precision: nine rows of ten, for routers flip on ties).
        error: the largest ``max|Δlogit| / std(logits)`` over the compared rows.
        tolerance: what ``error`` was held against.
        rows: rows compared.
        reason: one line when not ok.
    """

    ok: bool
    error: float
    tolerance: float
    rows: int
    reason: str = ""


@dataclass(frozen=True)
class PassCheck:
    """Outcome of comparing the graph with the model after one pass.

    Attributes:
        name: the pass.
        error: as in ``Verdict``; infinite when the pass failed before anything could be compared.
        reason: why the pass is refused, "" when it is right.
    """

    name: str
    error: float
    reason: str = ""


@dataclass
class SizeCheck:
    """Outcome of compiling or capturing steps of one size ahead of requests, on an NPU.

    Attributes:
        name: such as "decode steps of 8 tokens".
        error: the largest difference from the operators called one by one, in standard deviations; infinite where it
            could not be compared.
        reason: why the size is not used, "" when it is.
        seconds: that it took.
    """

    name: str
    error: float = 0.0
    reason: str = ""
    seconds: float = 0.0


@dataclass
class CompileReport:
    """A report of what compiling a model did.

    Attributes:
        model: class name.
        passes: one record per pass, in order.
        attention_recognized: attention calls that read the paged cache.
        attention_total: those and the ones that were left over.
        verdict: of the self-check on the finished program; None when it was off.
        dropped_passes: passes that the self-check took out, with the reason.
        dropped_schedules: name of a schedule that was asked for and that no graph follows, or none that was compiled
            after another could not → why.
        dtype_advice: of a model for an NPU, which operators do not take its dtype, what stands in for them, and the
            dtype that has them; "" where there are none.
        checks: comparisons after single passes, in order; empty unless the passes were applied one by one.
        layers_compiled: the first decoder layers, of which one stands for all others; the passes' records are of
            these. None: all layers were compiled.
        stored: the program is one that an earlier process compiled; the rest of the report is of that time, but for
            ``seconds``.
        codegen: "inductor", "ge", "aclgraph" or "none", what the program really runs.
        sizes: of an NPU's program, what became of each size that was compiled or captured ahead.
        size_limits: why fewer sizes are planned than steps could use.
        seconds: wall time by phase (imports, load, reference, capture, passes, aten, verify, codegen, pack, cache).
    """

    model: str
    passes: list[PassRecord] = field(default_factory=list)
    attention_recognized: int = 0
    attention_total: int = 0
    verdict: Verdict | None = None
    dropped_passes: list[tuple[str, str]] = field(default_factory=list)
    dropped_schedules: dict[str, str] = field(default_factory=dict)
    dtype_advice: str = ""
    checks: list[PassCheck] = field(default_factory=list)
    layers_compiled: int | None = None
    stored: bool = False
    codegen: str = "none"
    sizes: list[SizeCheck] = field(default_factory=list)
    size_limits: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


def first_line(error: BaseException) -> str:
    """The first line of what an exception says, cut to a length that fits into another message."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return text[:300]


def rejection_line(rejection: Rejection) -> str:
    """A near miss of a pass in one line: the reason, the node and its module."""
    where = f" in {rejection.module}" if rejection.module else ""
    return f"{rejection.reason} ({rejection.node}{where})"
