"""Tables of an engine's profile on a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table

from ..runtime.profiling.profile import Percentiles, Profile
from .number_table import number_table


def profile_table(profile: Profile) -> RenderableType:
    """Kinds of steps, phases of a step, and latencies, as tables of at most 80 columns."""
    return Group(_steps(profile), "", _phases(profile), "", _latencies(profile), *_rates(profile))


def _steps(profile: Profile) -> Table:
    """One row per kind of step."""
    table = number_table("steps", "count", "seconds", "share", "in tokens", "decode tokens", "p50 ms")
    for kind, total in profile.totals.items():
        time = profile.step_time.get(kind)
        table.add_row(
            kind,
            str(total.num_steps),
            f"{total.seconds:.3f}",
            _share(total.seconds, profile.busy_seconds),
            str(total.num_prefill_tokens),
            str(total.num_decode_tokens),
            "" if time is None else f"{1000 * time.p50:.2f}",
        )
    return table


def _phases(profile: Profile) -> Table:
    """One row per phase; work in the background of steps comes last."""
    table = number_table("phase", "seconds", "share", "us per step")
    for name, seconds in profile.phases.items():
        each = 1e6 * seconds / profile.num_steps if profile.num_steps else 0.0
        table.add_row(name, f"{seconds:.3f}", _share(seconds, profile.busy_seconds), f"{each:.1f}")
    for name, seconds in profile.background.items():
        table.add_row(f"{name}, background", f"{seconds:.3f}", "", "")
    return table


def _latencies(profile: Profile) -> Table:
    """One row per latency, in milliseconds."""
    table = number_table("ms", "count", "mean", "p50", "p90", "p99", "max")
    rows: tuple[tuple[str, Percentiles | None], ...] = (
        ("queue", profile.queue_time),
        ("ttft", profile.ttft),
        ("tpot", profile.tpot),
        ("itl", profile.itl),
    )
    for name, found in rows:
        if found is not None:
            times = (found.mean, found.p50, found.p90, found.p99, found.max)
            table.add_row(name, str(found.count), *(f"{1000 * seconds:.2f}" for seconds in times))
    return table


def _rates(profile: Profile) -> tuple[str, ...]:
    return (
        "",
        f"{profile.num_requests} requests, {profile.num_steps} steps in {profile.busy_seconds:.2f} s "
        f"({profile.wall_seconds:.2f} s by the clock)",
        f"{profile.input_tokens_per_second:.1f} tok/s in, {profile.output_tokens_per_second:.1f} tok/s out",
    )


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else ""
