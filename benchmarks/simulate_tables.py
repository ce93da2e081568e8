"""The figures of simulations as Markdown and as plots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

LIMIT_US = 50.0
"""What the scheduler may take per scheduled sequence."""

_COLORS = {"fcfs": "#4269d0", "priority": "#ff725c", "sjf": "#3ca951", "fair": "#a463f2", "prefix": "#9c6b4e"}


def run_tables(runs: list[dict[str, Any]]) -> str:
    """Three tables: what users see, what the cache does, and what the scheduler takes."""
    users = [
        ("req/s", lambda r: f"{r['requests_per_second']:.1f}"),
        ("tok/s", lambda r: f"{r['generated_tokens_per_second']:,.0f}"),
        ("goodput (req/s)", lambda r: f"{r['goodput']:.1f}"),
        ("kept", lambda r: _share(r["attainment"])),
        ("kept, urgent", lambda r: _share(r["by_priority"].get("0", {}).get("attainment"))),
        ("TTFT p50 / p90 / p99 (s)", lambda r: _figures(r["ttft"], ("p50", "p90", "p99"), ".2f")),
        ("TTFT urgent p99 (s)", lambda r: _figures(r["by_priority"].get("0", {}).get("ttft", {}), ("p99",), ".2f")),
        ("TPOT p50 / p99 (ms)", lambda r: _figures(r["tpot"], ("p50", "p99"), ".0f", 1e3)),
        ("longest wait (s)", lambda r: f"{r['longest_wait']:.1f}"),
        ("most waiting", lambda r: f"{r['most_waiting']:,}"),
        ("Jain", lambda r: "–" if r["jain_index"] is None else f"{r['jain_index']:.2f}"),
        ("timeouts", lambda r: f"{r['timeouts']:,}"),
    ]
    cache = [
        ("preemptions", lambda r: f"{r['preemptions']:,}"),
        ("swaps", lambda r: f"{r['swaps']:,}"),
        ("blocks out / in", lambda r: f"{r['blocks_swapped_out']:,} / {r['blocks_swapped_in']:,}"),
        ("recomputed tokens", lambda r: f"{r['recomputed_tokens']:,} ({r['recomputed_share']:.1%})"),
        ("prefix hits", lambda r: _share(r["prefix_hit_rate"])),
        ("evictions", lambda r: f"{r['evictions']:,}"),
        ("blocks used, mean / peak", lambda r: " / ".join(_share(x) for x in r["block_utilization"].values())),
    ]
    scheduler = [
        ("scheduled sequences", lambda r: f"{r['scheduler']['scheduled']:,}"),
        ("steps", lambda r: f"{r['scheduler']['steps']:,}"),
        *_scheduler_columns(lambda r: r["scheduler"]),
    ]
    parts = [
        ("What users see", users),
        ("What the cache does", cache),
        ("What the scheduler takes, µs per scheduled sequence", scheduler),
    ]
    return "\n".join(f"### {title}\n\n{_table(runs, [*_RUN, *columns])}" for title, columns in parts)


def growth_table(rows: list[dict[str, Any]]) -> str:
    """One row for each policy and queue, and what the longest queue costs beside the shortest."""
    columns = [
        ("policy", lambda r: r["policy"]),
        ("waiting", lambda r: f"{r['waiting']:,}"),
        ("running", lambda r: f"{r['running']:,}"),
        *_scheduler_columns(lambda r: r),
    ]
    lines = ["### What the scheduler takes against the queue, µs per scheduled sequence", "", _table(rows, columns)]
    for policy in dict.fromkeys(row["policy"] for row in rows):
        own = sorted((row for row in rows if row["policy"] == policy), key=lambda row: row["waiting"])
        mean, median = (own[-1][key] / own[0][key] for key in ("mean_us", "p50_us"))
        lines.append(
            f"- {policy}: {own[-1]['waiting']:,} waiting cost {mean:.2f} times what {own[0]['waiting']:,} cost on "
            f"average, {median:.2f} times in the median"
        )
    return "\n".join(lines) + "\n"


def name_of(run: dict[str, Any]) -> str:
    """Of everything about a run but its policy."""
    return f"{run['arrivals']}-{run['load']:g}-{run['preemption']}"


def plot_ttft(runs: list[dict[str, Any]], objective: float, path: Path) -> None:
    """Share of requests that had their first token after so long, a line for each policy. Needs matplotlib."""
    figure, axes = _axes()
    for run in runs:
        points = [(max(seconds, 1e-3), float(q[1:]) / 100) for q, seconds in run["ttft_cdf"].items()]
        axes.plot(*zip(*points, strict=True), color=_COLORS.get(run["policy"]), label=run["policy"])
    axes.axvline(objective, color="#888888", linewidth=1, linestyle="--", label=f"promised: {objective:g} s")
    axes.set_xscale("log")
    axes.set_ylim(0, 1)
    axes.set(xlabel="time to first token (s)", ylabel="share of requests")
    first = runs[0]
    axes.set_title(
        f"{first['arrivals']} arrivals at {first['load']:g} of capacity, preemption {first['preemption']}, "
        f"{first['requests']:,} requests"
    )
    axes.legend(loc="upper left", frameon=False)
    figure.savefig(path, dpi=130)


def plot_growth(rows: list[dict[str, Any]], path: Path) -> None:
    """Mean microseconds per scheduled sequence against the queue's length. Needs matplotlib."""
    figure, axes = _axes()
    for policy in dict.fromkeys(row["policy"] for row in rows):
        own = [row for row in rows if row["policy"] == policy]
        axes.plot(
            [row["waiting"] for row in own],
            [row["mean_us"] for row in own],
            marker="o",
            color=_COLORS.get(policy),
            label=policy,
        )
    axes.axhline(LIMIT_US, color="#888888", linewidth=1, linestyle="--", label=f"limit: {LIMIT_US:g} µs")
    axes.set_xscale("log")
    axes.set_ylim(0, 1.1 * max(LIMIT_US, *(row["mean_us"] for row in rows)))
    axes.set(xlabel="requests that wait", ylabel="scheduler, µs per scheduled sequence (mean)")
    axes.set_title(f"Scheduler against queue, {rows[0]['running']:,} sequences running")
    axes.legend(loc="center left", frameon=False)
    figure.savefig(path, dpi=130)


def can_plot() -> bool:
    """Whether matplotlib is there."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def _axes() -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.6), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


_RUN = [
    ("arrivals", lambda r: r["arrivals"]),
    ("load", lambda r: f"{r['load']:g}"),
    ("preemption", lambda r: r["preemption"]),
    ("policy", lambda r: r["policy"]),
]


def _scheduler_columns(of: Any) -> list[tuple[str, Any]]:
    names = {"plan_us": "plan", "settle_us": "settle", "add_us": "add", "mean_us": "all", "p50_us": "p50"}
    columns: list[tuple[str, Any]] = [
        (title, lambda r, key=key: f"{of(r)[key]:.1f}") for key, title in (names | {"p99_us": "p99"}).items()
    ]
    return [*columns, ("longest step (ms)", lambda r: f"{of(r)['longest_step_ms']:.1f}")]


def _table(rows: list[dict[str, Any]], columns: list[tuple[str, Any]]) -> str:
    lines = ["| " + " | ".join(title for title, _ in columns) + " |", "|---" * len(columns) + "|"]
    lines += ["| " + " | ".join(cell(row) for _, cell in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _figures(values: dict[str, float | None], which: tuple[str, ...], form: str, scale: float = 1.0) -> str:
    found = [values.get(key) for key in which]
    return " / ".join("–" if value is None else format(value * scale, form) for value in found)
