"""Does the scheduler take longer when more requests wait? What a scheduled sequence costs against the queue."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable
from typing import Any

from simulate_engine import EngineSizes, Simulation, StepCost
from simulate_traces import Workload, requests_of

QUEUES = (100, 1_000, 10_000, 100_000)

WORKLOAD = Workload(
    prompt_sigma=0.0, system_sigma=0.0, system_share=1.0, output_median=64.0, output_sigma=0.4, max_tokens=256
)
"""Prompts of one length and the same ``max_tokens``: with a longer queue the shortest of it would be shorter, so that
each scheduled sequence would stand for more admissions. Outputs differ, or all would end together."""


def queue_growth(
    policies: list[str],
    queues: list[int],
    sizes: EngineSizes,
    cost: StepCost,
    num_steps: int,
    seed: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[dict[str, Any]]:
    """The scheduler's own microseconds per scheduled sequence, for each policy and length of the queue.

    The same number of sequences runs at any time, with blocks for all, and as many requests wait: one arrives when
    another ends. Measured after each of the first has ended about twice over.
    """
    sizes = dataclasses.replace(
        sizes, num_blocks=sizes.max_num_seqs * (-(-1024 // sizes.block_size)), num_host_blocks=0
    )
    workload = dataclasses.replace(WORKLOAD, seed=seed)
    rows = []
    for policy in policies:
        for waiting in queues:
            population = waiting + sizes.max_num_seqs
            simulation = Simulation(
                sizes.batcher(policy, "recompute", cost, workload.max_model_len),
                cost,
                requests_of(workload),
                1 << 62,
                population=population,
                clock=clock,
            )
            simulation.run(200)
            gc.collect()
            before = simulation.num_steps
            simulation.run(num_steps)
            figures = simulation.tally.scheduler(before)
            batcher = simulation.batcher
            rows.append({"policy": policy, "waiting": batcher.num_waiting, "running": batcher.num_running} | figures)
    return rows
