"""Ranks in processes of their own sum and gather exactly, and fail together."""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path

import pytest
import torch
from rank_processes import exchange, exchange_in_two_groups, fail_at, random_cases, ranks

from torch_pagoda.runtime.npu_errors.device_lost import DeviceLost
from torch_pagoda.runtime.ops.native import load_kernels
from torch_pagoda.runtime.parallel import shared_group
from torch_pagoda.runtime.parallel.group import GroupFailed
from torch_pagoda.runtime.parallel.shared_group import SharedGroup

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="no C++ kernels")

SIZES = [1, 2, 15, 1000, 16384, 16385, 65536, 65537, 262144 + 3, 2_000_003]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_sums_and_rows_of_every_size(tmp_path, size):
    cases = [("all_reduce", torch.float32, (n,)) for n in SIZES]
    cases += [("all_reduce", dtype, (n,)) for n in (3, 32769, 400_001) for dtype in (torch.bfloat16, torch.float16)]
    cases += [("all_gather", dtype, (2, n)) for n in (1, 5000, 200_001) for dtype in (torch.bfloat16, torch.int64)]
    cases += [("all_gather", torch.bool, (3, 1, 70_001)), ("all_gather", torch.float32, (0, 4))]
    cases += [("all_gather", torch.float32, (40_000, 1)), ("all_reduce", torch.float16, (3, 0))]
    with ranks(tmp_path, size, exchange, cases, False) as running:
        found = running.answers()
    assert len(set(found)) == 1 and len(found[0]) == 128, found


@pytest.mark.parametrize("size", [2, 4])
def test_a_prompt_s_sums(tmp_path, size):
    """8 M elements: 1024 tokens of 8192."""
    with ranks(tmp_path, size, exchange, [("all_reduce", torch.float32, (1024, 8192))], False) as running:
        found = running.answers()
    assert len(set(found)) == 1 and len(found[0]) == 128, found


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("slot_bytes", [4096, 1 << 18])
def test_a_thousand_calls_of_ranks_that_dawdle(tmp_path, size, slot_bytes):
    """The counters of rounds wrap around on the way; with small slots most calls take many rounds."""
    cases = random_cases(1000, 20_000)
    with ranks(tmp_path, size, exchange, cases, True, slot_bytes=slot_bytes) as running:
        found = running.answers()
    assert len(set(found)) == 1 and len(found[0]) == 128, found


def test_two_groups_at_once(tmp_path):
    with ranks(tmp_path, 2, exchange_in_two_groups, random_cases(60, 3000), tmp_path) as running:
        found = running.answers()
    assert found[0] == found[1] and len(found[0][0]) == 60 * 128, found


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("SIGKILL", r"rank 1 \(pid \d+\) ended before exchange 36 \(step 3\)"),
        ("SIGSTOP", r"rank 1 \(pid \d+, stopped\) did not reach exchange 36 \(step 3\) within 0.5 s"),
        ("words", r"rank 1 \(pid \d+\) stopped the group in exchange 3[56] \(step 3\): its memory is full"),
    ],
)
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_that_fails_is_named_by_the_others(tmp_path, size, how, words):
    with ranks(tmp_path, size, fail_at, 35, how, 0.5 if how == "SIGSTOP" else 600.0) as running:
        for rank in range(size):
            if rank != 1:
                culprit, said = running.answer(rank)
                assert culprit == 1
                assert re.fullmatch(words, said), said


@pytest.mark.parametrize("how", ["shape", "operator", "step"])
def test_ranks_that_run_different_steps_are_stopped(tmp_path, how):
    with ranks(tmp_path, 2, fail_at, 35, how, 600.0) as running:
        for _, said in running.answers():
            assert "exchange different tensors in exchange 36" in said, said


def test_it_is_a_lost_device():
    assert issubclass(GroupFailed, DeviceLost)


class TestOneProcess:
    """A group of one rank, and what a rank is told at the door."""

    @pytest.fixture
    def group(self, tmp_path):
        group = SharedGroup.create(tmp_path, 1)
        group.meet()
        yield group
        group.close()

    def test_nothing_is_left_in_the_folder(self, tmp_path, group):
        assert not list(tmp_path.iterdir())

    def test_descriptors_are_closed(self, tmp_path):
        before = os.listdir("/proc/self/fd")
        group = SharedGroup.create(tmp_path, 1)
        group.meet()
        group.close()
        assert len(os.listdir("/proc/self/fd")) == len(before)

    def test_what_was_left_raises(self, group):
        group.close()
        with pytest.raises(GroupFailed, match="rank 0 has left the group"):
            group.all_reduce(torch.ones(2))
        group.stop("again")

    def test_a_stopped_group_raises_at_once(self, group):
        group.stop("no more")
        for call in (group.all_reduce, group.all_gather):
            with pytest.raises(GroupFailed, match=r"stopped the group .*: no more") as raised:
                call(torch.ones(2))
            assert raised.value.rank == 0

    def test_other_dtypes_have_no_sums(self, group):
        with pytest.raises(ValueError, match=r"dtype torch.int64; sums of ranks are of fp32, bf16 or fp16"):
            group.all_reduce(torch.ones(2, dtype=torch.int64))

    def test_columns_need_not_lie_beside_each_other(self, group):
        x = torch.arange(6.0).view(2, 3).T
        assert torch.equal(group.all_reduce(x), x) and group.all_reduce(x).is_contiguous()
        assert torch.equal(group.all_gather(x), x)

    @pytest.mark.parametrize(("size", "slot_bytes"), [(0, 4096), (65, 4096), (2, 100), (2, 0)])
    def test_sizes_that_there_are_not(self, tmp_path, size, slot_bytes):
        with pytest.raises(
            ValueError, match=f"size is {size}, slot_bytes {slot_bytes}; give 1 to 64 ranks, whole pages"
        ):
            SharedGroup.create(tmp_path, size, slot_bytes=slot_bytes)

    def test_a_second_group_of_a_name_is_refused(self, tmp_path):
        first = SharedGroup.create(tmp_path, 2)
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(FileExistsError):
            SharedGroup.create(tmp_path, 2)
        assert len(os.listdir("/proc/self/fd")) == before
        first.close()

    def test_a_rank_that_never_joins_is_named(self, tmp_path):
        group = SharedGroup.create(tmp_path, 2)
        group.timeout = 0.05
        with pytest.raises(GroupFailed, match=r"rank 1 did not join the group within 0.05 s"):
            group.meet()
        group.close()

    @pytest.mark.parametrize(
        ("place", "value", "rank", "error", "words"),
        [
            (0, b"somebody", 1, ValueError, "is no group's memory"),
            (8, 2, 1, ValueError, "has version 2 of a group's memory; this process knows 1"),
            (16, 3, 1, ValueError, "is damaged: .* bytes for 3 ranks with slots of 1048576"),
            (16, 1 << 40, 1, ValueError, "is damaged"),
            (24, 4097, 1, ValueError, "is damaged"),
            (24, -4096, 1, ValueError, "is damaged"),
            (32, 5, 1, ValueError, "is damaged"),
            (32, None, 0, ValueError, "rank 0 can't join the group in .*; it has ranks 1 to 1 beside its first"),
            (32, None, 2, ValueError, "rank 2 can't join"),
            (128 + 128 + 24, 77, 1, ValueError, "process 77 is rank 1 of the group in .* already"),
        ],
    )
    def test_what_is_not_the_group_s_memory_is_refused(self, tmp_path, place, value, rank, error, words):
        group = SharedGroup.create(tmp_path, 2)
        if value is not None:
            group._memory[place : place + 8] = value if isinstance(value, bytes) else struct.pack("=q", value)
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(error, match=words):
            SharedGroup.join(tmp_path, rank)
        assert len(os.listdir("/proc/self/fd")) == before
        group.close()

    def test_other_files_are_refused(self, tmp_path):
        path = tmp_path / "tensor_parallel.group"
        with pytest.raises(FileNotFoundError):
            SharedGroup.join(tmp_path, 1)
        path.write_bytes(b"pagodaSG")
        with pytest.raises(ValueError, match="is no group's memory"):
            SharedGroup.join(tmp_path, 1)
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(OSError, match="is no memory of this user's"):
            SharedGroup.join(tmp_path, 1)

    def test_a_folder_that_others_write_is_refused(self, tmp_path: Path):
        tmp_path.chmod(0o777)
        for enter in (lambda: SharedGroup.create(tmp_path, 2), lambda: SharedGroup.join(tmp_path, 1)):
            with pytest.raises(OSError, match="others may write to"):
                enter()

    def test_without_kernels_it_is_refused(self, tmp_path, monkeypatch):
        monkeypatch.setattr(shared_group, "kernel_function", lambda *_: None)
        with pytest.raises(RuntimeError, match="there are no C\\+\\+ kernels"):
            SharedGroup.create(tmp_path, 2)
