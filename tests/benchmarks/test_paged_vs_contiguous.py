"""What benchmarks/paged_vs_contiguous.py counts, on an engine without a model."""

from __future__ import annotations

import pytest
import torch
from paged_vs_contiguous import (
    SAME_BATCH,
    CacheUse,
    NoModel,
    Run,
    cache_of_random_llama,
    compare,
    run,
    same_batch_blocks,
    tables,
)
from random_llama import random_llama
from workloads import Workload, log_normal_workload

from torch_pagoda.runtime.program import CacheSpec

CACHES = [CacheSpec(1, 4, 4, torch.float32)]


def serve(workload: Workload, block_size: int, slots: int, longest: int) -> Run:
    return run(
        NoModel(CACHES, longest),
        workload,
        block_size=block_size,
        num_blocks=slots // block_size,
        max_num_seqs=64,
        max_model_len=longest,
    )


def test_the_figures_of_a_cache() -> None:
    use = CacheUse(block_size=16, num_blocks=10)
    use.add(tokens=24, blocks=2, running=1, waiting=1)
    use.add(tokens=112, blocks=8, running=3, waiting=2)
    use.add(tokens=160, blocks=10, running=4, waiting=0)  # not saturated: nobody waits
    assert use.utilization == pytest.approx((24 / 32 + 112 / 128) / 2)
    assert use.cache_utilization == pytest.approx((24 + 112) / 2 / 160)
    assert (use.mean_batch, use.largest_batch, use.peak_blocks) == (2, 3, 10)


def test_a_contiguous_reservation_holds_one_request_at_a_time() -> None:
    found = serve(Workload([[5] * 10] * 3, [6] * 3), block_size=32, slots=32, longest=32)
    assert found.use.largest_batch == 1 and found.use.peak_blocks == 1
    assert found.generated == 18 and found.preemptions == 0
    # After the prompt and after each of the 5 tokens that are computed (the last one is not): 10 … 15 of 32. When the
    # last step of a request has ended nobody runs, and while the third runs nobody waits.
    assert [tokens for tokens, _, _ in found.use.samples] == [10, 11, 12, 13, 14] * 2
    assert found.use.utilization == pytest.approx(12 / 32)


def test_pages_hold_more_on_the_same_memory() -> None:
    workload = log_normal_workload(24, 128, 256)
    contiguous = serve(workload, block_size=256, slots=1024, longest=256)
    paged = serve(workload, block_size=16, slots=1024, longest=256)
    assert contiguous.use.largest_batch == 4
    assert paged.use.largest_batch > 4
    assert contiguous.use.utilization < 0.5 < 0.9 < paged.use.utilization
    assert paged.use.cache_utilization > contiguous.use.cache_utilization
    assert paged.steps < contiguous.steps


def test_memory_of_the_same_batch() -> None:
    assert same_batch_blocks(CACHES, 64, 128, 128, seed=0) == SAME_BATCH
    paged = same_batch_blocks(CACHES, 64, 16, 128, seed=0)
    assert SAME_BATCH < paged < SAME_BATCH * 128 // 16


def test_without_a_model_there_are_counts_and_no_rates() -> None:
    figures = compare(NoModel(CACHES, 64), 32, 64, reservations=2, requests=12, repeats=1, seed=0)
    case = {"length": 32, "reservations": 2, **figures}
    text = tables({"cases": [case]})
    assert "tokens/s" not in text and "| steps |" in text
    assert f"| {figures['contiguous']['steps']} → {figures['paged']['steps']} |" in text
    case["length"], weighed = 512, {"cases": [case], "weight_bytes": 1 << 20}
    assert "| tokens/s | ratio (claimed) |" in tables(weighed)


def test_the_cache_is_that_of_the_model() -> None:
    config = random_llama(layers=2).config
    width = config.num_key_value_heads * config.head_dim
    assert [(c.num_kv_heads * c.key_dim, c.dtype) for c in cache_of_random_llama(2)] == [(width, torch.bfloat16)] * 2
