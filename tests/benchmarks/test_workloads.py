"""The requests that benchmarks serve, and how their results are written down."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
import torch
from optimizations import left_padded, same_share
from report import markdown_table, save
from workloads import log_normal_lengths, log_normal_workload, random_prompt


def test_lengths_have_the_mean_and_the_spread() -> None:
    lengths = log_normal_lengths(20_000, 512, 0.5, 1 << 20, torch.Generator().manual_seed(0))
    assert statistics.fmean(lengths) == pytest.approx(512, rel=0.02)
    logs = torch.tensor(lengths).double().log()
    assert float(logs.std()) == pytest.approx(0.5, rel=0.02)


def test_lengths_are_cut() -> None:
    lengths = log_normal_lengths(1000, 64, 1.0, 128, torch.Generator().manual_seed(0))
    assert min(lengths) >= 2 and max(lengths) == 128


def test_a_workload_repeats_and_splits_its_lengths() -> None:
    one, same, other = (log_normal_workload(50, 100, 200, seed=seed) for seed in (1, 1, 2))
    assert one == same != other
    for prompt, output in zip(one.prompts, one.outputs, strict=True):
        assert 0 <= len(prompt) - output <= 1 <= output and len(prompt) + output <= 200
    assert one.num_tokens == sum(len(p) + o for p, o in zip(one.prompts, one.outputs, strict=True))


def test_prompts_have_no_common_beginning() -> None:
    generator = torch.Generator().manual_seed(0)
    assert len({tuple(random_prompt(4, generator)) for _ in range(100)}) == 100


def test_left_padding() -> None:
    ids, mask = left_padded([[7], [8, 9, 10]])
    assert ids.tolist() == [[0, 0, 7], [8, 9, 10]]
    assert mask.tolist() == [[0, 0, 1], [1, 1, 1]]


def test_tokens_count_as_the_same_up_to_the_first_difference() -> None:
    expected = [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert same_share(expected, expected) == 1
    assert same_share([[1, 2, 0, 4], [0, 6, 7, 8]], expected) == 2 / 8


def test_results_are_written(tmp_path: Path) -> None:
    table = markdown_table(["", "figure"], [["a", 1234.5678], ["b", 0.12345], ["c", 7]])
    assert table.splitlines() == ["|  | figure |", "|---|---:|", "| a | 1235 |", "| b | 0.123 |", "| c | 7 |"]
    save(tmp_path / "new", "found", {"a": 1}, table)
    assert json.loads((tmp_path / "new" / "found.json").read_text()) == {"a": 1}
    assert (tmp_path / "new" / "found.md").read_text() == table
    save(None, "found", {}, table)
