"""Exchanges of ranks in threads, and mistakes that one rank makes."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from faulty_exchanges import ulp
from thread_ranks import ThreadGroup

from torch_pagoda.npu_tools.selftest import collectives
from torch_pagoda.npu_tools.selftest.collectives import Case, cases, exchange

RANKS = 3
Spoil = Callable[[torch.Tensor], torch.Tensor]


class Spoilt(ThreadGroup):
    """A rank that makes a mistake in what it gets."""

    spoil: Spoil = staticmethod(lambda found: found)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self.spoil(super().all_reduce(x))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self.spoil(super().all_gather(x))

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        return self.spoil(super().broadcast(x, source))


def exchanged(case: Case, spoil: Spoil | None = None, rank: int = 1) -> list[dict[str, Any]]:
    """What every rank finds, where one may spoil what it gets."""
    barrier = threading.Barrier(RANKS)
    shares: list[Any] = [None] * RANKS
    groups = [Spoilt(each, shares, barrier) for each in range(RANKS)]
    if spoil is not None:
        groups[rank].spoil = spoil  # type: ignore[method-assign]
    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(lambda group: exchange(case, group, torch.device("cpu")), groups))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "broadcast"])
def test_right_exchanges_are_right(kind: str) -> None:
    for case in cases(kind, 8, (1, 5)):
        found = exchanged(case)
        assert [each["wrong"] for each in found] == [""] * RANKS and json.dumps(found, allow_nan=False)
        assert found[0]["bytes"] == case.rows * case.width * getattr(torch, case.dtype).itemsize


def test_sums_in_the_order_of_the_ranks_are_told_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("all_reduce", "bfloat16", 5, 64)
    assert not exchanged(case)[0]["in_order"], "these are rounded after each addition"
    reduce = ThreadGroup.all_reduce
    monkeypatch.setattr(Spoilt, "all_reduce", lambda self, x: reduce(self, x.float()).to(x.dtype))
    assert exchanged(case)[0]["in_order"]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_sum_that_is_off_by_one_ulp_at_one_rank_is_named(dtype: str) -> None:
    for rank in (1, 2):
        found = exchanged(Case("all_reduce", dtype, 5, 64), ulp, rank)
        assert [each["wrong"] for each in found] == [f"rank {rank} has other bits than rank 0"] * RANKS


@pytest.mark.parametrize(
    ("kind", "spoil", "words"),
    [
        ("all_reduce", lambda found: found + 1, "has another sum of integers than the exact one"),
        ("all_reduce", lambda found: found.flip(-1), "has another sum of integers than the exact one"),
        (
            "all_reduce",
            lambda found: found if bool((found == found.round()).all()) else 1.01 * found,
            "has a sum that is off by more than its roundings",
        ),
        ("all_reduce", lambda found: found * torch.nan, "has another sum of integers than the exact one"),
        ("all_gather", lambda found: found.roll(8, -1), "did not get what the ranks sent"),
        ("broadcast", lambda found: found.roll(1, -1), "did not get what a rank sent"),
    ],
)
def test_other_mistakes_are_named(kind: str, spoil: Spoil, words: str) -> None:
    dtype = "int64" if kind == "broadcast" else "bfloat16"
    assert exchanged(Case(kind, dtype, 5, 8), spoil)[0]["wrong"] == f"rank 1 {words}"


def test_sums_that_change_are_wrong_where_they_are_not_to(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[int] = Counter()

    def every_other(self: ThreadGroup, x: torch.Tensor) -> torch.Tensor:
        calls[self.rank] += 1
        found = ThreadGroup.all_reduce(self, x)
        return ulp(found) if calls[self.rank] % 2 else found

    monkeypatch.setattr(Spoilt, "all_reduce", every_other)
    case = Case("all_reduce", "float32", 5, 64)
    found = exchanged(case)[0]
    assert found["wrong"] == "" and not found["repeats"]
    monkeypatch.setenv("HCCL_DETERMINISTIC", "true")
    calls.clear()
    assert exchanged(case)[0]["wrong"].endswith("has other bits a second time, with HCCL_DETERMINISTIC")


def test_exchanges_are_those_of_the_model() -> None:
    assert [str(case) for case in cases("all_reduce", 64, (1, 8))][:2] == [
        "all_reduce of float32[1, 64]",
        "all_reduce of float32[8, 64]",
    ]
    assert [str(case) for case in cases("broadcast", 64, (1, 8))] == [
        "broadcast of int64[1, 1]",
        "broadcast of int64[1, 8]",
    ]
    assert collectives._LARGEST * 64 <= 256, "sums of 64 ranks are exact in bfloat16"
