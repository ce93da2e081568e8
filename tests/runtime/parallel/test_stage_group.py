"""Groups of a pipeline: values go from stage to stage in order, sums stay within a stage, and all decide together."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch

from torch_pagoda.runtime.parallel.group import CollectiveFailed
from torch_pagoda.runtime.parallel.host_group import meet_on_host
from torch_pagoda.runtime.parallel.stage_group import PipelineGroup
from torch_pagoda.runtime.parallel.stage_values import StageValue, pack_values, packed_bytes, unpack_values

VALUES = (StageValue("a", torch.bfloat16, (1, None, 3)), StageValue("b", torch.int64, (2,)))


def given(step: int, place: int) -> list[torch.Tensor]:
    tokens = 1 + step % 3
    return [torch.full((1, tokens, 3), step + 8.0 * place).bfloat16(), torch.tensor([step, place])]


def test_values_are_packed_with_their_bits() -> None:
    values = [torch.randn(1, 5, 3).bfloat16()[:, ::1], torch.tensor([1, -7])]
    packed = pack_values([values[0].transpose(0, 1).contiguous().transpose(0, 1), values[1]])
    assert len(packed) == packed_bytes(VALUES, 5)
    found = unpack_values(packed, VALUES, 5)
    assert all(map(torch.equal, found, values))
    assert [value.dtype for value in found] == [torch.bfloat16, torch.int64]


def run(size: int, stages: int, task: Any) -> list[Any]:
    """What ``task`` returns of the group of each rank, all in threads."""
    meeting = os.memfd_create("test")
    found: list[Any] = [None] * size

    def be(rank: int) -> None:
        group = meet_on_host(meeting, rank, size, stages, 30.0)
        try:
            found[rank] = task(group, rank)
        except Exception as error:
            found[rank] = error
        finally:
            barrier.wait(30)
            group.close()

    barrier = threading.Barrier(size)
    threads = [threading.Thread(target=be, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    os.close(meeting)
    return found


def test_three_stages_pass_values_on_in_order() -> None:
    def task(group: PipelineGroup, rank: int) -> Any:
        stage = 2 - rank
        found = []
        for step in range(6):
            values = given(step, 0) if not stage else group.receive(VALUES, 1 + step % 3)
            found.append([value.clone() for value in values])
            if stage < 2:
                group.pass_on(values)
                for value in values:
                    value.zero_()  # as the next step would
        assert group.agree(rank, "max") == 2
        return found

    first, middle, last = reversed(run(3, 3, task))
    for step in range(6):
        assert all(map(torch.equal, first[step], given(step, 0)))
        assert all(map(torch.equal, last[step], middle[step]))
        assert all(map(torch.equal, last[step], first[step]))


@pytest.mark.parametrize("stages", [2])
def test_sums_and_values_stay_apart(stages: int) -> None:
    def task(group: PipelineGroup, rank: int) -> Any:
        stage, place = 1 - rank // 2, rank % 2
        total = group.all_reduce(torch.full((3,), float(10**stage * (1 + place))))
        assert group.size == 2
        if not stage:
            group.pass_on(given(4, place))
            return total.tolist()
        received = group.receive(VALUES, 2)
        return total.tolist(), received[1].tolist()

    assert run(4, stages, task) == [([30.0] * 3, [4, 0]), ([30.0] * 3, [4, 1]), [3.0] * 3, [3.0] * 3]


def test_a_rank_that_waits_is_let_go() -> None:
    def task(group: PipelineGroup, rank: int) -> Any:
        if rank:
            return None
        threading.Timer(0.3, group.abort).start()
        return group.receive(VALUES, 1)

    last, _ = run(2, 2, task)
    assert isinstance(last, CollectiveFailed)
