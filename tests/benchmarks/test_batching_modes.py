"""What benchmarks/batching_modes.py counts, by hand and beside a program that computes."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from batching_modes import (
    MODES,
    RecordedBatches,
    count_modes,
    mixed_workload,
    percentile,
    rows_as_rectangle,
    serve,
    tables,
    time_modes,
)
from workloads import Workload

from torch_pagoda.runtime.batching import StaticBatches

from toy_program import ToyProgram

VOCAB = 64


def test_rows_of_a_rectangle() -> None:
    # Two prompts as long as 5, and 4 tokens after the first for both.
    assert rows_as_rectangle([(3, 5), (5, 2)]) == 2 * (5 + 4)
    assert rows_as_rectangle([(3, 5)]) == 3 + 4


def test_nearest_rank() -> None:
    assert percentile(range(1, 201), 0.99) == 198
    assert percentile([7.0, 3.0], 0.99) == 7.0
    assert percentile([7.0, 3.0], 0.5) == 3.0


def test_counts_by_hand() -> None:
    workload = Workload([[1, 2, 3], [4], [5, 6], [7]], [2, 9, 3, 3])
    counts = count_modes(workload, 0, 2, VOCAB)
    static, continuous = counts["static"], counts["continuous"]
    # The first two take 9 steps, the last two 3 more.
    assert static.steps == 12 and static.mean_last == (2 + 9 + 12 + 12) / 4 and static.p99_last == 12
    assert static.computed == 7 + 17 - 4
    assert static.rectangular == 2 * (3 + 8) + 2 * (2 + 2)
    assert static.padding == pytest.approx(1 - 20 / 30)
    # The third begins in step 3, the fourth in step 6.
    assert continuous.steps == 9 and continuous.mean_last == (2 + 9 + 5 + 8) / 4
    assert continuous.computed == static.computed and continuous.padding == 0
    assert continuous.tokens_per_step == 17 / 9


def test_a_request_waits_from_its_own_arrival() -> None:
    workload = Workload([[1], [2], [3]], [2, 2, 2])
    assert count_modes(workload, 1, 3, VOCAB)["continuous"].mean_last == 2
    static = count_modes(workload, 1, 3, VOCAB)["static"]
    # The second and the third come after steps 1 and 2 and begin in step 3.
    assert static.mean_last == pytest.approx((2 + 3 + 2) / 3) and static.steps == 4
    # Where nobody is left the next one does not wait for its time.
    assert count_modes(workload, 50, 3, VOCAB)["continuous"].steps == 6


def test_lengths_alone_decide_the_counts() -> None:
    workload = mixed_workload(12, (2, 20), (2, 12), VOCAB, seed=3)
    counts = count_modes(workload, 2, 4, VOCAB)
    for mode, make in MODES.items():
        assert serve(ToyProgram(), workload, make(), every=2, batch=4)[0] == counts[mode], mode
    assert counts["continuous"].steps < counts["static"].steps
    assert counts["padded"].rectangular > counts["padded"].computed


def test_everybody_is_in_one_batch() -> None:
    workload = mixed_workload(10, (2, 20), (2, 12), VOCAB, seed=1)
    recorded = RecordedBatches(StaticBatches())
    serve(ToyProgram(), workload, recorded, every=0, batch=4)
    assert [len(batch) for batch in recorded.formed] == [4, 4, 2]
    lengths = [length for batch in recorded.formed for length in batch]
    assert lengths == [(len(p), n) for p, n in zip(workload.prompts, workload.outputs, strict=True)]


def test_a_workload_repeats_and_keeps_its_limits() -> None:
    one, same, other = (mixed_workload(2000, (16, 512), (8, 256), 1024, seed) for seed in (0, 0, 1))
    assert one == same != other
    lengths = [len(prompt) for prompt in one.prompts]
    assert 16 <= min(lengths) < 20 and 480 < max(lengths) <= 512
    assert 8 <= min(one.outputs) < 10 and 240 < max(one.outputs) <= 256
    # As many below the geometric middle as above.
    assert float(torch.tensor(lengths).median()) == pytest.approx((16 * 512) ** 0.5, rel=0.1)


def test_the_tables_hold_counts_and_times() -> None:
    workload = mixed_workload(4, (2, 4), (2, 4), VOCAB, seed=0)
    counts = count_modes(workload, 0, 2, VOCAB)
    rows = {
        mode: asdict(c) | {"tokens_per_step": c.tokens_per_step, "padding": c.padding} for mode, c in counts.items()
    }
    case = {"every": 0, "counts": rows}
    result = {"requests": 4, "batch": 2, "cases": [case, {**case, "every": 3}]}
    text = tables(result)
    assert "4 requests, 2 at a time, all requests at once" in text and "one request every 3 steps" in text
    assert "tokens/s" not in text and text.count(f"| continuous | {counts['continuous'].steps} |") == 2
    case["times"] = time_modes(ToyProgram(), workload, 0, 2, repeats=1)
    assert case["times"]["static"]["tokens_per_second"] > 0
    assert "| tokens/s | last token, mean (s) | p99 (s) |" in tables({**result, "cases": [case]})
