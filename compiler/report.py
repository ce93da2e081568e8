"""Reports about compiling a model, for people and for tests."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..passes import PassRecord, Rejection


@dataclass(frozen=True)
class Verdict:
    """Outcome of a self-check.

    Attributes:
        ok: every compared row is within tolerance (in half precision nine of ten, as routers flip on ties).
        error: the largest ``max|Δlogit| / std(logits)`` over the compared rows.
        tolerance: the limit of ``error``.
        rows: number of compared rows.
        reason: one line if not ok.
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
        error: as in ``Verdict``; infinite if the pass failed before a comparison.
        reason: why the pass is rejected; "" if it is right.
    """

    name: str
    error: float
    reason: str = ""


@dataclass
class SizeCheck:
    """Outcome of compiling or capturing steps of one size ahead of time, on an NPU.

    Attributes:
        name: for example "decode steps of 8 tokens".
        error: the largest difference from single operator calls, in standard deviations; infinite if it could not be
            compared.
        reason: why the size is not used; "" if it is.
        seconds: duration.
    """

    name: str
    error: float = 0.0
    reason: str = ""
    seconds: float = 0.0


@dataclass
class CompileReport:
    """A report about compiling a model.

    Attributes:
        model: class name.
        passes: one record per pass, in order.
        attention_recognized: attention calls that read the paged cache.
        attention_total: those and the remaining ones.
        verdict: result of the self-check of the finished program; None if it was off.
        dropped_passes: passes that the self-check dropped, with the reasons.
        dropped_schedules: name of a requested schedule that graphs do not follow → the reason.
        dtype_advice: for an NPU: operators that do not support the model's dtype, their replacements, and the dtype
            that they support; "" if there are none.
        checks: comparisons after single passes, in order; empty unless passes were applied one by one.
        layers_compiled: number of leading decoder layers that were compiled, the last of them for all others; the
            passes' records count only these. None: all layers.
        layers_streamed: number of decoder layers that rank 0 loaded one after the other to compare, since the whole
            model does not fit into its memory; 0: it did.
        stored: the program comes from an earlier process; so does the rest of the report, except ``seconds``.
        codegen: "inductor", "ge", "aclgraph" or "none": the code that runs.
        sizes: for an NPU, the outcome of each size compiled or captured ahead of time.
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
    layers_streamed: int = 0
    stored: bool = False
    codegen: str = "none"
    sizes: list[SizeCheck] = field(default_factory=list)
    size_limits: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, truncated to fit into another message."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return text[:300]


def rejection_line(rejection: Rejection) -> str:
    """A near miss of a pass in one line: the reason, the node and its module."""
    where = f" in {rejection.module}" if rejection.module else ""
    return f"{rejection.reason} ({rejection.node}{where})"
