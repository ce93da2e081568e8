"""What benchmarks/cache_after_a_rush.py counts."""

from __future__ import annotations

from typing import Any

import pytest
from cache_after_a_rush import LULL, serve
from workloads import Workload

# Four run at a time and take 2, 2, 2 and 12 blocks of 16; the last in the queue comes when the others have ended.
RUSH = Workload([[7] * 20] * 4, [4, 4, 4, 170])
LONGEST = 192


def counted(least: int | None) -> dict[str, dict[str, Any]]:
    """With a cache of 48 blocks; the lull takes a block or two, for long."""
    lull = Workload([[7] * 4] * 20, [20] * 20)
    return serve(RUSH, lull, [4, 1], batch=4, longest=LONGEST, least=least)


def test_a_cache_that_keeps_its_size() -> None:
    found = counted(None)
    assert list(found) == ["4", "1", LULL]
    assert found["4"]["in_use"] == 8 and found["4"]["cut"] == found["4"]["kept"] == 8
    assert found["1"]["in_use"] == 2 and found["1"]["cut"] == 8, "the last one lies behind the others' free blocks"
    assert found[LULL]["in_use"] == 1
    assert {figures["size"] for figures in found.values()} == {48}
    assert {figures["moved"] for figures in found.values()} == {0}
    # It keeps what it has touched, whatever is in use.
    assert found[LULL]["kept"] >= 12


def test_an_elastic_cache_shrinks_and_moves() -> None:
    found = counted(3)
    assert found["4"]["size"] >= 8
    assert found[LULL]["size"] == pytest.approx(3, abs=3) and found[LULL]["in_use"] == 1
    assert found["1"]["kept"] <= found[LULL]["kept"]
