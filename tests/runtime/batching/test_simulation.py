"""The simulation of benchmarks/simulate.py: it does what an engine does, and its figures are right."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))
from simulate import Run, report_growth, report_runs, simulate
from simulate_engine import EngineSizes, Simulation, StepCost, capacity
from simulate_figures import Fairness, Objective, Tally
from simulate_growth import queue_growth
from simulate_traces import ARRIVALS, Workload, arrival_times, requests_of

from torch_pagoda.runtime.batching import POLICIES, Schedule, ScheduledRequest
from torch_pagoda.runtime.blocks import CacheCopy
from torch_pagoda.runtime.requests.request import Request
from torch_pagoda.runtime.requests.sampling_params import SamplingParams

SIZES = EngineSizes(num_blocks=40, block_size=8, max_num_seqs=8, max_num_batched_tokens=48, num_host_blocks=24)
WORKLOAD = Workload(
    prompt_median=24, output_median=20, system_median=16, num_system_prompts=4, num_clients=6, max_model_len=256
)
COST = StepCost(base=0.05)
NUM_REQUESTS = 300


def run_of(**changes: Any) -> Run:
    run = Run("fcfs", "auto", 1.0, 3.0, NUM_REQUESTS, WORKLOAD, SIZES, COST, Objective(ttft=2.0, tpot=0.2))
    return dataclasses.replace(run, **changes)


@pytest.mark.parametrize("policy", POLICIES)
def test_all_requests_finish_and_the_invariants_hold(policy: str) -> None:
    for preemption in ("recompute", "swap"):
        report = simulate(run_of(policy=policy, preemption=preemption, check_every=5))
        assert (report["requests"], report["timeouts"]) == (NUM_REQUESTS, 0)
        outputs = [request.num_outputs for request in itertools.islice(requests_of(WORKLOAD), NUM_REQUESTS)]
        assert report["generated_tokens_per_second"] * report["seconds"] == pytest.approx(sum(outputs))
        assert report["scheduler"]["scheduled"] >= sum(outputs)
        assert 0 < report["block_utilization"]["mean"] <= report["block_utilization"]["peak"] <= 1
        assert report["preemptions"] > 0, "the cache is meant to be too small"
        assert (report["swaps"] > 0) is (preemption == "swap")
        assert (report["recomputed_tokens"] > 0) or preemption == "swap"
        assert 0 < report["prefix_hit_rate"] < 1
        assert report["ttft"]["p50"] <= report["ttft"]["p90"] <= report["ttft"]["p99"]


def test_the_seed_decides_everything_but_the_scheduler_s_time() -> None:
    def figures(seed: int) -> dict[str, Any]:
        workload = dataclasses.replace(WORKLOAD, arrivals="bursty", seed=seed)
        report = simulate(run_of(workload=workload, preemption="swap", num_requests=150))
        del report["scheduler"], report["seed"]
        return report

    assert figures(1) == figures(1)
    assert figures(1) != figures(2)


def test_urgent_requests_gain_by_priority() -> None:
    def urgent(policy: str) -> dict[str, Any]:
        return simulate(run_of(policy=policy, load=1.4))["by_priority"]["0"]

    first, prior = urgent("fcfs"), urgent("priority")
    assert first["requests"] == prior["requests"] > 10
    assert prior["attainment"] > first["attainment"] + 0.1
    assert prior["ttft"]["p50"] < first["ttft"]["p50"]


def test_clients_gain_by_fairness() -> None:
    """Three clients that send 60, 25 and 15 % of the requests, each more than a third of what is served."""
    workload = dataclasses.replace(WORKLOAD, num_clients=3, zipf=1.3, prompt_sigma=0.3, output_sigma=0.3)
    index = {}
    slow = StepCost(base=0.3)  # for more than a few windows
    for policy in ("fcfs", "fair"):
        index[policy] = simulate(run_of(policy=policy, workload=workload, cost=slow, load=20.0))["jain_index"]
    assert index["fair"] > index["fcfs"] + 0.1


def test_requests_time_out() -> None:
    report = simulate(run_of(workload=dataclasses.replace(WORKLOAD, timeout=5.0), load=3.0))
    assert report["timeouts"] > 0
    assert report["requests"] + report["timeouts"] == NUM_REQUESTS
    assert report["longest_wait"] < 5.5
    assert report["attainment"] <= report["requests"] / NUM_REQUESTS


def test_requests_do_not_depend_on_their_rate() -> None:
    def described(rate: float) -> list[Any]:
        requests = itertools.islice(requests_of(WORKLOAD, rate), 50)
        return [(list(r.prompt_token_ids), r.num_outputs, r.client, r.priority, r.params) for r in requests]

    assert described(1.0) == described(7.0)
    for request in itertools.islice(requests_of(WORKLOAD), 2000):
        assert 1 <= request.num_outputs <= request.params.max_tokens
        assert request.num_prompt_tokens + request.params.max_tokens <= WORKLOAD.max_model_len


@pytest.mark.parametrize("arrivals", ARRIVALS)
def test_arrivals_have_their_rate(arrivals: str) -> None:
    workload = dataclasses.replace(WORKLOAD, arrivals=arrivals)
    times = np.fromiter(itertools.islice(arrival_times(workload, 40.0), 200_000), np.float64)
    assert (np.diff(times) >= 0).all()
    assert len(times) / times[-1] == pytest.approx(40.0, rel=0.1)
    per_second = np.bincount(times.astype(np.int64))
    dispersion = per_second.var() / per_second.mean()  # 1 in a Poisson process
    assert dispersion == pytest.approx(1.0, rel=0.1) if arrivals == "poisson" else dispersion > 3


def test_what_a_step_costs() -> None:
    def share(start: int, num_tokens: int) -> ScheduledRequest:
        return ScheduledRequest(Request("r", [1] * 100, SamplingParams()), num_tokens, start, True)

    copies = [CacheCopy("in", 0, 0, block) for block in range(3)]
    cost = StepCost(
        base=1000.0, per_prefill_token=100.0, per_decode_sequence=10.0, per_kv_token=0.1, per_copied_block=1.0
    )
    items = [share(20, 1), share(30, 1), share(10, 5)]
    step = 1000 + 5 * 100 + 2 * 10 + 0.1 * (21 + 31 + 15)
    assert cost.seconds(Schedule(items, num_tokens=7)) == pytest.approx(step)
    assert cost.seconds(Schedule(items, num_tokens=7, copies=copies)) == pytest.approx(step + 3)
    assert cost.seconds(Schedule(items, num_tokens=7, overlapped_copies=copies)) == pytest.approx(step)
    slow = dataclasses.replace(cost, per_copied_block=2000.0)
    assert slow.seconds(Schedule(items, num_tokens=7, overlapped_copies=copies)) == pytest.approx(6000)


def test_capacity_is_what_a_full_engine_serves() -> None:
    sizes = dataclasses.replace(SIZES, num_blocks=400)
    most = capacity(WORKLOAD, sizes, COST)
    served = simulate(run_of(sizes=sizes, load=5.0, capacity=most, num_requests=600))
    assert served["requests_per_second"] == pytest.approx(most, rel=0.1)


def test_jain_index() -> None:
    fairness = Fairness(window=10.0)
    for client in "abc":
        fairness.arrived(client, 0.0)
    fairness.began("c")  # it does not want more
    for client, tokens in (("a", 30), ("b", 10), ("c", 500)):
        fairness.served(client, tokens)
    fairness.advance(9.0)
    assert fairness.index is None
    fairness.advance(10.0)
    assert fairness.index == pytest.approx(40**2 / (2 * (30**2 + 10**2)))


def test_scheduler_s_time_per_sequence() -> None:
    tally = Tally(SIZES.batcher("fcfs", "auto", COST, 256), Objective())
    tally.step_took(1.0, 1.0, 1.0, 1)  # left out below
    for _ in range(99):
        tally.step_took(10e-6, 5e-6, 5e-6, 10)
    tally.step_took(700e-6, 200e-6, 100e-6, 10)
    found = tally.scheduler(first_step=1)
    assert (found["steps"], found["scheduled"]) == (100, 1000)
    assert (found["p50_us"], found["p99_us"]) == pytest.approx((2.0, 2.0))
    assert found["longest_step_ms"] == pytest.approx(1.0)
    assert found["mean_us"] == pytest.approx((99 * 20 + 1000) / 1000)
    assert found["plan_us"] + found["settle_us"] + found["add_us"] == pytest.approx(found["mean_us"])


def test_a_population_stays_the_same() -> None:
    batcher = SIZES.batcher("fcfs", "auto", COST, 256)
    simulation = Simulation(batcher, COST, requests_of(WORKLOAD), 1000, population=20)
    ended = 0
    for _ in range(60):
        simulation.run(1)
        ended = simulation.tally.num_finished - ended
        assert batcher.num_waiting + batcher.num_running <= 20
    assert simulation.tally.num_finished > 0
    assert simulation.tally.most_waiting >= 12


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with reports of both kinds."""
    out = tmp_path_factory.mktemp("simulation")
    reports = [simulate(run_of(policy=policy, num_requests=40)) for policy in ("fcfs", "sjf")]
    report_runs(reports, {"objective": {"ttft": 2.0, "tpot": 0.2}}, out)
    report_growth(queue_growth(["fcfs", "prefix"], [10, 60], SIZES, COST, num_steps=20, seed=0), out)
    return out


def test_reports_are_written(written: Path) -> None:
    table = (written / "simulation.md").read_text()
    assert table.count("| poisson | 1 | auto | sjf |") == 3
    runs = json.loads((written / "simulation.json").read_text())["runs"]
    assert [(run["policy"], run["requests"]) for run in runs] == [("fcfs", 40), ("sjf", 40)]
    rows = json.loads((written / "queue-growth.json").read_text())
    assert [row["policy"] for row in rows] == ["fcfs", "fcfs", "prefix", "prefix"]
    for row, asked in zip(rows, [10, 60, 10, 60], strict=True):
        # Where blocks or budget keep some of those that could run from running, they wait.
        assert asked <= row["waiting"] < asked + SIZES.max_num_seqs
        assert row["waiting"] + row["running"] == asked + SIZES.max_num_seqs
        assert (row["steps"], row["mean_us"] > 0) == (20, True)
    assert "- prefix: 6" in (written / "queue-growth.md").read_text()


def test_plots_are_drawn(written: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("ttft-poisson-1-auto", "queue-growth"):
        assert (written / f"{name}.png").read_bytes().startswith(b"\x89PNG")
