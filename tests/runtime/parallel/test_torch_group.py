"""Groups over gloo: sums in rank order with equal bits, agreements, and what a missing rank raises."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from torch_pagoda.runtime.npu_errors.device_lost import lost_reason
from torch_pagoda.runtime.parallel.group import CollectiveFailed, GroupFailed
from torch_pagoda.runtime.parallel.torch_group import TorchGroup

SIZE = 3


@pytest.fixture
def meeting() -> Iterator[int]:
    descriptor = os.memfd_create("ranks")
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def ranks(meeting) -> Iterator[Callable[[Callable[[TorchGroup], Any]], list[Any]]]:
    """Calls a function on every rank, a thread each, and returns what they return."""
    with ThreadPoolExecutor(SIZE) as pool:
        groups = list(pool.map(lambda rank: TorchGroup.of_descriptor(meeting, rank, SIZE, 30), range(SIZE)))
        yield lambda function: list(pool.map(function, groups))


def numbers(rank: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return (drawn * 10.0 ** (4 * rank)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_sums_are_in_rank_order_with_equal_bits(ranks, dtype):
    shares = [numbers(rank % 2, dtype, 5, 33) for rank in range(SIZE)]
    wide = torch.promote_types(dtype, torch.float32)
    expected = ((shares[0].to(wide) + shares[1].to(wide)) + shares[2].to(wide)).to(dtype)
    for found in ranks(lambda group: group.all_reduce(shares[group.rank])):
        assert found.dtype is dtype and found.is_contiguous() and torch.equal(found, expected)


def test_strided_tensors_are_gathered_along_the_last_dim(ranks):
    shares = [numbers(rank, torch.bfloat16, 7, 5).t() for rank in range(SIZE)]
    for found in ranks(lambda group: group.all_gather(shares[group.rank])):
        assert found.is_contiguous() and torch.equal(found, torch.cat(shares, -1))


def test_broadcast_leaves_what_was_sent(ranks):
    shares = [torch.full((4,), rank) for rank in range(SIZE)]
    assert [found.tolist() for found in ranks(lambda group: group.broadcast(shares[group.rank], 1))] == [[1] * 4] * 3
    assert [share[0] for share in shares] == [0, 1, 2]


def test_ranks_agree(ranks):
    assert ranks(lambda group: group.agree(group.rank + 5, "min")) == [5] * 3
    assert ranks(lambda group: group.agree(group.rank + 5, "max")) == [7] * 3
    assert ranks(lambda group: group.agree(1 << 40, "equal")) == [1 << 40] * 3

    def differ(group: TorchGroup) -> Any:
        with pytest.raises(GroupFailed) as raised:
            group.agree(group.rank // 2, "equal", "number of blocks")
        return raised.value.rank, str(raised.value)

    told = "rank 2 has another number of blocks than rank 0: 1, not 0"
    assert ranks(differ) == [(2, told)] * 3
    assert lost_reason(GroupFailed(2, "ended")) == "rank 2 ended"


def test_a_rank_that_does_not_come_is_an_error(meeting):
    with pytest.raises(CollectiveFailed, match="rank 0 could not exchange tensors with other ranks: "):
        TorchGroup.of_descriptor(meeting, 0, 2, 0.2)


def test_a_rank_that_is_gone_is_an_error(meeting):
    def rank(number: int) -> str:
        group = TorchGroup.of_descriptor(meeting, number, 2, 30)
        if number:
            group.close()
        with pytest.raises(CollectiveFailed) as raised:
            group.all_reduce(torch.ones(2))
        return str(raised.value)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(rank, range(2))
    assert first.startswith("rank 0 could not exchange") and second == "rank 1 has left the group"


@pytest.mark.parametrize("size", [1, 2])
def test_what_has_the_number_of_the_file_in_which_ranks_met_is_left_alone(tmp_path, size):
    """torch opens that file again, by its name, when the group is freed; here the group is made, or nobody comes."""
    meeting = os.memfd_create("meeting")
    group = None
    try:
        group = TorchGroup.of_descriptor(meeting, 0, size, 0.2)
    except CollectiveFailed as failed:
        error = failed
    os.close(meeting)
    mine = tmp_path / "mine"
    opened = [os.open(mine, os.O_RDWR | os.O_CREAT) for _ in range(4)]
    assert meeting in opened
    if group is not None:
        group.close()
        group.close()
    else:
        del error
    gc.collect()
    assert mine.read_bytes() == b""
    for descriptor in opened:
        os.close(descriptor)
