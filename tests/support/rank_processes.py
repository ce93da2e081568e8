"""Processes that are the ranks of a shared group, forked from one that has loaded torch and the kernels.

A scenario is a function of this module: it gets its rank's group, and what it returns or raises goes to the test.
"""

from __future__ import annotations

import functools
import hashlib
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_pagoda.runtime.ops.native import load_kernels
from torch_pagoda.runtime.parallel.group import GroupFailed
from torch_pagoda.runtime.parallel.shared_group import SharedGroup

load_kernels()

SECONDS = 60  # until a rank that answers nothing counts as hung
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__])

Case = tuple[str, torch.dtype, tuple[int, ...]]


class Ranks:
    """Running processes, in the order of their ranks.

    Attributes:
        processes: one of each rank.
    """

    def __init__(self, folder: Path, size: int, scenario: Callable[..., Any], *args: Any, slot_bytes: int = 1 << 18):
        _start_server()
        pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(size)]
        self._answers = [reader for reader, _ in pipes]
        self.processes = [
            _CONTEXT.Process(target=_run, args=(folder, rank, size, slot_bytes, writer, scenario, args))
            for rank, (_, writer) in enumerate(pipes)
        ]
        for process, (_, writer) in zip(self.processes, pipes, strict=True):
            process.start()
            writer.close()

    def answer(self, rank: int) -> Any:
        """What a rank's scenario returned, or the error that it raised."""
        assert self._answers[rank].poll(SECONDS), f"rank {rank} hangs"
        return self._answers[rank].recv()

    def answers(self) -> list[Any]:
        """Of all ranks."""
        return [self.answer(rank) for rank in range(len(self.processes))]


@functools.cache
def _start_server() -> None:
    """Start the process that the ranks are forked from, which finds this module by the environment alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        forkserver.ensure_running()


@contextmanager
def ranks(folder: Path, size: int, scenario: Callable[..., Any], *args: Any, **settings: Any) -> Iterator[Ranks]:
    """Ranks that run a scenario, and are killed at the end of the block."""
    started = Ranks(folder, size, scenario, *args, **settings)
    try:
        yield started
    finally:
        for process in started.processes:
            process.kill()
            process.join()


def _run(
    folder: Path,
    rank: int,
    size: int,
    slot_bytes: int,
    answer: Connection,
    scenario: Callable[..., Any],
    args: Sequence[Any],
) -> None:
    torch.set_num_threads(1)
    try:
        group = SharedGroup.create(folder, size, slot_bytes=slot_bytes) if rank == 0 else joined(folder, rank)
        group.meet()
        found = scenario(group, *args)
    except Exception as error:
        found = (error.rank, str(error)) if isinstance(error, GroupFailed) else repr(error)
    answer.send(found)


def joined(folder: Path, rank: int, name: str = "tensor_parallel") -> SharedGroup:
    """The group of a folder, as soon as it was created."""
    for _ in range(SECONDS * 100):
        try:
            return SharedGroup.join(folder, rank, name)
        except FileNotFoundError:
            time.sleep(0.01)
    raise TimeoutError(f"no group {name} in {folder}")


def random_cases(count: int, most: int) -> list[Case]:
    """Calls of both operators with tensors of up to ``most`` elements, mostly small ones."""
    draw = random.Random(count)
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    cases: list[Case] = []
    for _ in range(count):
        elements = int(most ** draw.random())
        if draw.random() < 0.7:
            cases.append(("all_reduce", draw.choice(dtypes), (elements,)))
        else:
            rows = draw.randint(1, 5)
            cases.append(
                ("all_gather", draw.choice([*dtypes, torch.int64, torch.bool]), (rows, elements // rows + 1))
            )
    return cases


def exchange(group: SharedGroup, cases: Sequence[Case], delayed: bool) -> str:
    """Make calls, hold each result against torch's own sum of what all ranks gave, and digest them all."""
    digest, draw = hashlib.blake2b(), random.Random(group.rank)
    for number, (operator, dtype, shape) in enumerate(cases):
        given = [_tensor(number, rank, dtype, shape) for rank in range(group.size)]
        if delayed and draw.random() < 0.3:
            time.sleep(draw.random() * 1e-3)
        found = getattr(group, operator)(given[group.rank])
        expected = ordered_sum(given) if operator == "all_reduce" else torch.cat(given, dim=-1)
        if found.dtype != dtype or not torch.equal(found, expected):
            wrong = (found != expected).sum().item()
            raise AssertionError(f"{wrong} elements of call {number}, {operator} of {shape} {dtype}, are wrong")
        digest.update(found.view(torch.uint8).numpy().tobytes() if found.numel() else b"")
    return digest.hexdigest()


def _tensor(number: int, rank: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number * 1000 + rank)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).mul_(10.0 ** (rank - 1)).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 1 << 40, shape, generator=generator).to(dtype)


def ordered_sum(given: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum in the order of the ranks in float32, rounded once."""
    total = given[0].float()
    for x in given[1:]:
        total = total + x.float()
    return total.to(given[0].dtype)


def exchange_in_two_groups(group: SharedGroup, cases: Sequence[Case], folder: Path) -> tuple[str, str]:
    """Take turns between two groups, the second of which numbers the ranks the other way round."""
    rank = group.size - 1 - group.rank
    other = SharedGroup.create(folder, group.size, "other", 4096) if rank == 0 else joined(folder, rank, "other")
    other.meet()
    found = [exchange(each, [case], False) for case in cases for each in (group, other)]
    return "".join(found[::2]), "".join(found[1::2])


def fail_at(group: SharedGroup, at: int, how: str, timeout: float) -> None:
    """Sum on and on, until rank 1 dies, stops, gives up or does something else at a call."""
    group.timeout = timeout
    for number in range(10_000):
        group.step = number // 10
        if group.rank == 1 and number == at:
            if how == "shape":
                group.all_reduce(torch.ones(7))
            elif how == "operator":
                group.all_gather(torch.ones(64))
            elif how == "step":
                group.step += 1
            elif how == "words":
                group.stop("its memory is full")
                time.sleep(SECONDS)
            else:
                os.kill(os.getpid(), getattr(signal, how))
        group.all_reduce(torch.ones(64))
