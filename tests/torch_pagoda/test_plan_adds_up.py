"""The figures that ``pagoda plan`` prints add up as they are printed."""

from __future__ import annotations

import io
from decimal import Decimal

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from torch_pagoda.cli.memory_table import apportioned, block_line, memory_table
from torch_pagoda.reports.memory_plan import MemoryPlan, plan_memory
from torch_pagoda.runtime.program import CacheSpec, StateSpec

sizes = st.integers(0, 2**34)
memories = st.one_of(st.integers(1, 2**20), st.integers(2**20, 2**40))


def plan_of(memory: int, weights: int, activations: int, windows: tuple[int, ...] = (0,)) -> MemoryPlan:
    """A plan of layers with these windows; one that is below 0 stands for a state."""
    specs = [
        CacheSpec(3, 40, 40, torch.bfloat16, window)
        if window >= 0
        else StateSpec("conv_state", (9, 999), torch.float32)
        for window in windows
    ]
    return plan_memory(
        specs,
        memory=memory,
        weight_bytes=weights,
        activation_bytes=activations,
        block_size=32,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        max_model_len=8192,
        by_window=True,
    )


def rows_of(found: MemoryPlan) -> list[tuple[str, Decimal, Decimal]]:
    """Label and the two figures of each row."""
    sheet = io.StringIO()
    Console(file=sheet, width=80).print(memory_table(found))
    lines = sheet.getvalue().splitlines()[1:]
    assert max(map(len, lines)) <= 80
    return [(label, Decimal(a), Decimal(b)) for label, a, b in (line.rstrip().rsplit(maxsplit=2) for line in lines)]


@settings(max_examples=60, deadline=None)
@given(memories, sizes, sizes, st.sampled_from([(0,), (128, 0), (64,), (0, -1), (-1,)]))
@example(2**30, 7_740_000, 12_600_000, (0,))
@example(2**26, 7_740_000, 12_600_000, (0,))
@example(100 * 2**10, 7_740_000, 12_600_000, (0,))
@example(2**36, 349 * 10**9, 0, (0,))
def test_parts_add_up_to_the_whole(memory: int, weights: int, activations: int, windows: tuple[int, ...]) -> None:
    found = plan_of(memory, weights, activations, windows)
    rows = rows_of(found)
    *parts, whole = rows
    assert whole[0] == "all"
    inner = [row for row in parts if row[0].startswith("  ")]
    outer = [row for row in parts if not row[0].startswith("  ")]
    (cache,) = [row for row in outer if row[0] in ("KV cache", "KV cache and states", "states")]
    for column, unit in ((1, 2**30), (2, 10**9)):
        figures = [row[column] for row in rows]
        assert len({figure.as_tuple().exponent for figure in figures}) == 1  # as many decimals everywhere
        last = Decimal(1).scaleb(int(whole[column].as_tuple().exponent))
        assert sum(row[column] for row in outer) == whole[column]
        assert sum(row[column] for row in inner) == (cache[column] if inner else 0)
        exact = [weights, activations, found.cache_bytes]
        for row, size in zip(outer, exact, strict=False):
            assert abs(row[column] - Decimal(size) / unit) <= last  # nobody's figure is bent by more than rounding
        assert all(figure >= 0 for figure, row in zip(figures, rows, strict=True) if row[0] != "not there")
    lacks = max(0, weights + activations - memory)
    assert [row[0] for row in outer].count("not there") == bool(lacks)


def test_bytes_of_blocks_and_what_is_left_make_up_the_cache() -> None:
    found = plan_of(2**30, 7_740_000, 12_600_000)
    line = block_line(found)
    (pool,) = found.pools
    left = found.cache_bytes - pool.num_blocks * pool.block_bytes
    assert f"{pool.num_blocks:,} blocks" in line and f"{left:,} bytes are left over" in line


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=6), st.integers(1, 10**5))
def test_shares_are_whole_units_and_none_is_off_by_one(parts: list[int], unit: int) -> None:
    whole = round(sum(parts) / unit)
    shares = apportioned(parts, unit, whole)
    assert sum(shares) == whole
    assert all(abs(share - part / unit) <= 1 for share, part in zip(shares, parts, strict=True))
