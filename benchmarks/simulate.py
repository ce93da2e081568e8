"""A discrete-event simulation of the batcher and the block manager: the real ones, with a model that only costs time.

Requests with log-normal lengths, shared system prompts, clients and priorities arrive at a multiple of what the
engine can do; see ``simulate_traces.py`` for what they are like, ``simulate_engine.py`` for what a step costs.

    python benchmarks/simulate.py --requests 1000000 --out results
    python benchmarks/simulate.py --policy fcfs fair --arrivals bursty --load 0.8 1.1 --preemption recompute swap
    python benchmarks/simulate.py --num-blocks 768 --output-median 256    # so few blocks that many are preempted
    python benchmarks/simulate.py --queue-growth --out results    # what the scheduler takes against the queue

Reported for each run: throughput, goodput (requests per second that keep both promises, for the time to the first
token and for each further one), percentiles of both times, preemptions, what they cost, prefix hits, use of the
blocks, the longest wait, fairness between clients, and the microseconds that the scheduler itself took per scheduled
sequence. All but the last depend on the seed alone. ``--out`` writes JSON, Markdown and, where matplotlib is
installed (``pip install 'torch-pagoda[bench]'``), plots.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import multiprocessing
import resource
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from simulate_engine import EngineSizes, Simulation, StepCost, capacity
from simulate_figures import Objective
from simulate_growth import QUEUES, queue_growth
from simulate_tables import can_plot, growth_table, name_of, plot_growth, plot_ttft, run_tables
from simulate_traces import ARRIVALS, Workload, requests_of

from torch_pagoda.runtime.batching import POLICIES, PREEMPTION_MODES

CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}
"""What the scheduler's time is measured with."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One simulation.

    Attributes:
        load: arrivals per second as a multiple of ``capacity``.
        capacity: requests per second, of ``simulate_engine.capacity``.
    """

    policy: str
    preemption: str
    load: float
    capacity: float
    num_requests: int
    workload: Workload
    sizes: EngineSizes
    cost: StepCost
    objective: Objective
    check_every: int = 0
    clock: str = "wall"


def simulate(run: Run) -> dict[str, Any]:
    """Run it; the report of its tally, with what names it and what this process took."""
    gc.collect()
    began = time.perf_counter()
    simulation = Simulation(
        run.sizes.batcher(run.policy, run.preemption, run.cost, run.workload.max_model_len),
        run.cost,
        requests_of(run.workload, run.load * run.capacity),
        run.num_requests,
        objective=run.objective,
        check_every=run.check_every,
        clock=CLOCKS[run.clock],
    )
    report = simulation.run().report()
    report["scheduler"]["wall_seconds"] = time.perf_counter() - began
    report["scheduler"]["peak_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    name = {
        "arrivals": run.workload.arrivals,
        "load": run.load,
        "preemption": run.preemption,
        "policy": run.policy,
        "seed": run.workload.seed,
        "capacity": run.capacity,
    }
    return name | report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--policy", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--preemption", nargs="+", choices=PREEMPTION_MODES, default=["auto"])
    parser.add_argument("--arrivals", nargs="+", choices=ARRIVALS, default=["poisson", "bursty"])
    parser.add_argument("--load", nargs="+", type=float, default=[0.95], help="multiples of the capacity")
    parser.add_argument("--ttft", type=float, default=Objective.ttft, help="seconds that are promised")
    parser.add_argument("--tpot", type=float, default=Objective.tpot, help="seconds per token that are promised")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, a process each; 1 for clean timings")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="for the scheduler's time; cpu where others use the cores too"
    )
    parser.add_argument("--check", type=int, default=0, metavar="N", help="verify all invariants every N steps")
    parser.add_argument("--queue-growth", action="store_true", help="time the scheduler against the queue instead")
    parser.add_argument("--queues", nargs="+", type=int, default=list(QUEUES), help="for --queue-growth")
    parser.add_argument("--steps", type=int, default=400, help="for --queue-growth: steps that are measured")
    parser.add_argument("--out", type=Path, help="folder for JSON, Markdown and plots")
    _add_fields(parser, "engine", EngineSizes)
    _add_fields(parser, "workload", Workload, leave_out=("arrivals",))
    _add_fields(parser, "cost of a step (seconds)", StepCost)
    args = parser.parse_args()
    if args.requests < 1 or min(args.load) <= 0:
        parser.error(f"--requests {args.requests} --load {args.load}: both must be above 0")
    sizes, cost = _from_fields(EngineSizes, args), _from_fields(StepCost, args)
    if args.queue_growth:
        rows = queue_growth(args.policy, args.queues, sizes, cost, args.steps, args.seed, CLOCKS[args.clock])
        report_growth(rows, args.out)
        return

    runs: list[Run] = []
    for arrivals in args.arrivals:
        workload = dataclasses.replace(_from_fields(Workload, args), arrivals=arrivals)
        most = runs[0].capacity if runs else capacity(workload, sizes, cost)  # it does not depend on arrivals
        for load, preemption, policy in itertools.product(args.load, args.preemption, args.policy):
            runs.append(
                Run(
                    policy,
                    preemption,
                    load,
                    most,
                    args.requests,
                    workload,
                    sizes,
                    cost,
                    Objective(args.ttft, args.tpot),
                    args.check,
                    args.clock,
                )
            )
    values = {"workload": workload, "engine": sizes, "cost": cost, "objective": runs[0].objective}
    settings = {name: dataclasses.asdict(value) for name, value in values.items()}
    reports: list[dict[str, Any]] = []
    for report in _in_turn(runs, args.jobs):
        reports.append(report)
        print(f"{len(reports)} of {len(runs)} runs: {name_of(report)}, {report['policy']}", file=sys.stderr)
        if args.out:
            _write_runs(reports, settings, args.out)  # what is there, should a later one not come to its end
    report_runs(reports, settings, args.out)


def _in_turn(runs: list[Run], jobs: int) -> Iterator[dict[str, Any]]:
    """The reports, in order; of so many processes if it is more than one."""
    if jobs == 1:
        yield from map(simulate, runs)
        return
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(jobs, mp_context=context, max_tasks_per_child=1) as pool:
        yield from pool.map(simulate, runs)


def report_runs(reports: list[dict[str, Any]], settings: dict[str, Any], out: Path | None) -> None:
    """Print the tables of all runs, and write what ``--out`` asks for."""
    ended = reports[0]["requests"] + reports[0]["timeouts"]
    objective = settings["objective"]
    markdown = (
        f"{ended:,} requests for each row; capacity {reports[0]['capacity']:.1f} requests/s; promised: first token "
        f"within {objective['ttft']:g} s and {1e3 * objective['tpot']:g} ms per further token\n\n"
    ) + run_tables(reports)
    print(markdown)
    if out is None:
        return
    _write_runs(reports, settings, out)
    (out / "simulation.md").write_text(markdown)
    if not _plots():
        return
    for name in dict.fromkeys(map(name_of, reports)):
        plot_ttft([r for r in reports if name_of(r) == name], objective["ttft"], out / f"ttft-{name}.png")


def _write_runs(reports: list[dict[str, Any]], settings: dict[str, Any], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "simulation.json").write_text(json.dumps({"settings": settings, "runs": reports}, indent=1) + "\n")


def report_growth(rows: list[dict[str, Any]], out: Path | None) -> None:
    """Print the table of ``--queue-growth``, and write what ``--out`` asks for."""
    markdown = growth_table(rows)
    print(markdown)
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    (out / "queue-growth.json").write_text(json.dumps(rows, indent=1) + "\n")
    (out / "queue-growth.md").write_text(markdown)
    if _plots():
        plot_growth(rows, out / "queue-growth.png")


def _plots() -> bool:
    if can_plot():
        return True
    print("no plots: matplotlib is missing; pip install 'torch-pagoda[bench]'", file=sys.stderr)
    return False


def _add_fields(parser: argparse.ArgumentParser, title: str, of: Any, leave_out: tuple[str, ...] = ()) -> None:
    """An option for each field of a dataclass."""
    group = parser.add_argument_group(title)
    for field in dataclasses.fields(of):
        if field.name in leave_out:
            continue
        option = "--" + field.name.replace("_", "-")
        if isinstance(field.default, bool):
            group.add_argument(option, action=argparse.BooleanOptionalAction, default=field.default)
            continue
        # Of the annotations that may be None, timeout is in seconds and max_tokens a count.
        kind = float if "float" in str(field.type) else int
        group.add_argument(option, type=kind, default=field.default, help=f"default: {field.default}")


def _from_fields(of: Any, args: argparse.Namespace) -> Any:
    return of(**{f.name: getattr(args, f.name) for f in dataclasses.fields(of) if f.name != "arrivals"})


if __name__ == "__main__":
    main()
