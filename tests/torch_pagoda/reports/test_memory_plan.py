"""The planners: what fits into a memory, pools of blocks, and the block size for expected lengths."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_pagoda.reports.block_size_plan import LogNormalLengths, expected_blocks, plan_block_size
from torch_pagoda.reports.memory_plan import MemoryPlan, listed_lengths, plan_memory
from torch_pagoda.runtime.cache.cache_specs import bytes_per_block
from torch_pagoda.runtime.cache.pool_plan import plan_pools
from torch_pagoda.runtime.program import CacheSpec, StateSpec

FULL = CacheSpec(2, 8, 8, torch.float16)  # 64 bytes per token
WINDOW = CacheSpec(2, 8, 8, torch.float16, sliding_window=32)


def plan(memory: int, specs: list[CacheSpec | StateSpec] | None = None, **changes: int | bool) -> MemoryPlan:
    settings = {
        "weight_bytes": 1000,
        "activation_bytes": 500,
        "block_size": 16,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 256,
    }
    return plan_memory(specs or [FULL, FULL], memory=memory, **(settings | changes))  # type: ignore[arg-type]


def test_memory_is_divided_and_limits_follow() -> None:
    # 20 blocks of 2 layers x 16 tokens x 64 bytes, and a rest that is too small for another.
    found = plan(1500 + 20 * 2048 + 2047)
    assert (found.token_bytes, found.block_bytes, found.num_blocks, found.num_tokens) == (128, 2048, 20, 320)
    assert found.cache_bytes == 20 * 2048 + 2047
    assert found.longest_sequence == 256
    # Room for 335 tokens contiguously, and each sequence reserves 256.
    assert (found.contiguous_sequences, found.contiguous_longest_sequence) == (1, 256)
    assert [limit.tokens for limit in found.limits] == [64, 128, 256]
    assert [limit.paged for limit in found.limits] == [5, 2, 1]
    assert [limit.running for limit in found.limits] == [4, 2, 1]
    assert [limit.contiguous for limit in found.limits] == [1, 1, 1]
    assert [limit.sequence_bytes for limit in found.limits] == [4 * 2048, 8 * 2048, 16 * 2048]
    assert [limit.contiguous_utilization for limit in found.limits] == [0.25, 0.5, 1.0]
    assert found.missing_bytes == 0


def test_states_are_planned_beside_blocks() -> None:
    states = [
        StateSpec("conv_state", (3, 10), torch.float16, 1),
        StateSpec("recurrent_state", (2, 5), torch.float32, 1),
    ]
    found = plan(1500 + 8 * 100 + 20 * 2048 + 5, [FULL, *states, FULL])
    assert (found.token_bytes, found.block_bytes, found.state_bytes, found.state_slots) == (128, 2048, 100, 8)
    assert [pool.num_blocks for pool in found.pools] == [20] and found.longest_sequence == 256
    assert [limit.sequence_bytes for limit in found.limits] == [100 + n * 2048 for n in (4, 8, 16)]
    assert [limit.running for limit in found.limits] == [4, 2, 1]
    lacking = plan(1500 + 2 * 100 + 2047, [FULL, *states, FULL])
    assert (lacking.state_slots, lacking.num_blocks, lacking.missing_bytes, lacking.longest_sequence) == (0, 0, 1, 0)


def test_a_model_without_attention_is_planned_by_its_states() -> None:
    found = plan(1500 + 3 * 100 + 99, [StateSpec("recurrent_state", (5, 5), torch.float32)])
    assert (found.pools, found.num_blocks, found.token_bytes, found.state_slots) == ((), 0, 0, 3)
    assert [(limit.sequence_bytes, limit.paged, limit.running) for limit in found.limits] == [(100, 3, 3)] * 3
    assert found.contiguous_sequences == 3 and found.longest_sequence == 256 and found.missing_bytes == 0
    json.dumps(found.to_dict())


def test_the_last_block_of_a_sequence_counts_whole() -> None:
    found = plan(1500 + 20 * 2048, max_model_len=100)
    longest = found.limits[-1]
    assert (longest.tokens, longest.sequence_bytes, longest.paged) == (100, 7 * 2048, 2)
    assert longest.paged_utilization == pytest.approx(100 / 112)


def test_too_little_memory_is_told_in_bytes() -> None:
    found = plan(1400)
    assert (found.num_blocks, found.longest_sequence, found.contiguous_sequences) == (0, 0, 0)
    assert found.missing_bytes == 1000 + 500 + 2048 - 1400
    assert [limit.paged for limit in found.limits] == [0, 0, 0]
    assert plan(1400 + found.missing_bytes).num_blocks == 1


def test_spare_blocks_are_not_given_to_sequences() -> None:
    assert plan(1500 + 20 * 2048, spare_blocks=3).num_blocks == 17
    assert plan(1500 + 2 * 2048, spare_blocks=3).num_blocks == 0


def test_int8_counts_its_scales() -> None:
    specs = [CacheSpec(2, 8, 8, torch.int8)]
    found = plan(10**6, specs)
    assert found.token_bytes == bytes_per_block(specs, 1) == 2 * (8 + 8) + 2 * 2 * 4
    assert found.num_blocks == (10**6 - 1500) // (16 * found.token_bytes)


@pytest.mark.parametrize(
    ("longest", "expected"),
    [(2048, [512, 1024, 2048]), (3000, [512, 1024, 2048, 3000]), (512, [128, 256, 512]), (1, [1]), (3, [1, 3])],
)
def test_lengths_that_are_listed(longest: int, expected: list[int]) -> None:
    assert listed_lengths(longest) == expected


def test_a_plan_is_plain_data() -> None:
    plain = json.loads(json.dumps(plan(10**6).to_dict()))
    assert plain["num_blocks"] == plain["pools"][0]["num_blocks"] == plan(10**6).num_blocks
    assert plain["limits"][-1]["tokens"] == 256


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_size": 0}, "block_size=0"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"weight_bytes": -1}, "weight_bytes=-1"),
        ({"spare_blocks": -1}, "spare_blocks=-1"),
    ],
)
def test_sizes_out_of_range_are_refused(change: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan(10**6, **change)
    with pytest.raises(ValueError, match="no keys and values"):
        plan_memory(
            [],
            memory=1,
            weight_bytes=0,
            activation_bytes=0,
            block_size=1,
            max_num_seqs=1,
            max_num_batched_tokens=1,
            max_model_len=1,
        )


def test_one_window_lets_more_and_longer_sequences_run() -> None:
    # A window of 32 touches 3 blocks of 16; a chunk of 64 tokens takes 4 more while the prompt is computed.
    found = plan(1500 + 20 * 1024, [WINDOW], max_model_len=10_000)
    assert [pool.num_blocks for pool in found.pools] == [20]
    assert found.longest_sequence == 10_000
    last = found.limits[-1]
    assert (last.sequence_bytes, last.paged, last.running) == (3 * 1024, (20 - 4) // 3, 4)
    # 20 blocks hold one block less than the window of 320 touches.
    wide = plan(1500 + 20 * 1024, [CacheSpec(2, 8, 8, torch.float16, sliding_window=320)], max_model_len=10_000)
    assert wide.longest_sequence == 320


def test_different_windows_share_a_pool_unless_they_are_told_apart() -> None:
    specs = [WINDOW, FULL, WINDOW]
    shared = plan(1500 + 100 * 3 * 1024, specs, max_model_len=1024)
    assert [(pool.window, pool.layers, pool.num_blocks) for pool in shared.pools] == [(0, (0, 1, 2), 100)]
    apart = plan(1500 + 100 * 3 * 1024, specs, max_model_len=1024, by_window=True)
    # 4 sequences hold 3 blocks each, and a step brings 4: the rest of the memory goes to the layer without a window.
    assert [(pool.window, pool.layers, pool.num_blocks) for pool in apart.pools] == [
        (32, (0, 2), 16),
        (0, (1,), 300 - 2 * 16),
    ]
    assert (shared.limits[-1].running, apart.limits[-1].running) == (1, 4)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([0, 16, 40, 100, 4096]), min_size=1, max_size=6),
    st.integers(0, 2_000_000),
    st.sampled_from([1, 8, 16]),
    st.integers(1, 20),
    st.integers(1, 300),
    st.integers(1, 2000),
    st.booleans(),
)
def test_pools_fit_and_take_nothing_that_others_can_use(
    windows: list[int], memory: int, block_size: int, seqs: int, batched: int, longest: int, by_window: bool
) -> None:
    specs = [CacheSpec(1, 4, 4, torch.float16, sliding_window=window) for window in windows]
    limits = {"max_num_seqs": seqs, "max_num_batched_tokens": batched, "max_model_len": longest}
    pools = plan_pools(specs, memory, block_size, **limits, by_window=by_window)
    assert sorted(i for pool in pools for i in pool.layers) == list(range(len(specs)))
    assert sum(pool.block_bytes for pool in pools) == bytes_per_block(specs, block_size)
    used = sum(pool.block_bytes * pool.num_blocks for pool in pools)
    assert used <= memory
    # What is left over is less than a block of all.
    assert memory - used < bytes_per_block(specs, block_size)
    even = memory // bytes_per_block(specs, block_size)
    for pool in pools:
        useful = seqs * pool.blocks_of(longest, block_size) + -(-batched // block_size)
        assert pool.num_blocks >= min(even, useful)


def test_the_cost_model_follows_the_square_root() -> None:
    # Far above the block size the best one is sqrt(2 * overhead * mean).
    lengths = list(range(1, 4096))
    for overhead in (0.1, 0.4, 1.7):
        ideal = math.sqrt(2 * overhead * 2048)
        found = plan_block_size(lengths, [8, 16, 32, 64, 128, 256], block_overhead=overhead)
        assert ideal / math.sqrt(2) < found.block_size <= ideal * math.sqrt(2)


def test_waste_and_blocks_of_samples_are_counted_exactly() -> None:
    found = plan_block_size([10, 16, 33], [32, 16], block_overhead=1.0)
    assert found.mean_tokens == pytest.approx(59 / 3)
    assert [cost.block_size for cost in found.costs] == [16, 32]
    small, large = found.costs
    assert (small.blocks, small.wasted_tokens) == (pytest.approx(5 / 3), pytest.approx((6 + 0 + 15) / 3))
    assert small.fragmentation == pytest.approx(21 / 80)
    assert (large.blocks, large.wasted_tokens) == (pytest.approx(4 / 3), pytest.approx((22 + 16 + 31) / 3))
    assert small.cost == pytest.approx(7 + 5 / 3)
    assert found.block_size == 16


def test_without_overhead_the_smallest_wins_and_of_equals_the_larger() -> None:
    assert plan_block_size([100, 57, 3], [64, 8, 16], block_overhead=0.0).block_size == 8
    assert plan_block_size([64, 128], [8, 16, 32], block_overhead=0.0).block_size == 32


@pytest.mark.parametrize(("mean", "sigma"), [(300.0, 0.8), (40.0, 1.5), (700.0, 0.0)])
def test_a_distribution_agrees_with_samples_from_it(mean: float, sigma: float) -> None:
    lengths = LogNormalLengths(mean, sigma, longest=4096)
    mu = math.log(mean) - sigma**2 / 2
    draw = random.Random(0)
    samples = [min(4096, math.ceil(math.exp(draw.gauss(mu, sigma)) - 1e-9)) for _ in range(40_000)]
    for size in (1, 16, 128):
        assert expected_blocks(lengths, size) == pytest.approx(expected_blocks(samples, size), rel=0.03)


@settings(max_examples=50, deadline=None)
@given(st.floats(1, 5000), st.floats(0, 2), st.sampled_from([1, 4, 16, 64]))
def test_expected_blocks_are_between_their_bounds(mean: float, sigma: float, size: int) -> None:
    lengths = LogNormalLengths(mean, sigma, longest=2048)
    tokens, blocks = expected_blocks(lengths, 1), expected_blocks(lengths, size)
    assert 1 <= blocks <= 2048 / size
    assert tokens - 1e-6 <= size * blocks <= tokens + size - 1 + 1e-6
    assert tokens <= mean + 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: plan_block_size([]), "lengths is empty"),
        (lambda: plan_block_size([4, 0]), "lengths has 0"),
        (lambda: plan_block_size([4], []), "candidates="),
        (lambda: plan_block_size([4], [0, 8]), "candidates="),
        (lambda: plan_block_size([4], block_overhead=-1.0), "block_overhead=-1"),
        (lambda: LogNormalLengths(0.0, 1.0), "mean=0"),
        (lambda: LogNormalLengths(10.0, -1.0), "sigma=-1"),
        (lambda: LogNormalLengths(10.0, float("nan")), "sigma=nan"),
        (lambda: LogNormalLengths(10.0, 1.0, longest=0), "longest=0"),
    ],
)
def test_nonsense_about_lengths_is_refused(call: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()  # type: ignore[operator]
