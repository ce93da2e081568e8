"""Ranks in threads of one process: the leader's and the followers' code without processes, for quick tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from torch_pagoda.runtime.parallel.follow import Follower
from torch_pagoda.runtime.parallel.group import CollectiveFailed, GroupFailed
from torch_pagoda.runtime.parallel.leader import LeaderProgram
from torch_pagoda.runtime.parallel.messages import PREFIX_BYTES, Message, decode, encode, lengths
from torch_pagoda.runtime.program import Program
from torch_pagoda.runtime.step_metadata import StepMetadata


class ThreadGroup:
    """The rank of one thread."""

    name = "threads"

    def __init__(self, rank: int, shares: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(shares)
        self._shares, self._barrier = shares, barrier

    def _exchange(self, share: Any) -> list[Any]:
        try:
            self._shares[self.rank] = share
            self._barrier.wait(20)
            found = list(self._shares)
            self._barrier.wait(20)
        except threading.BrokenBarrierError as error:
            raise CollectiveFailed(self.rank, "waits in vain") from error
        return found

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = self._exchange(x.clone())
        for other in others:
            first = first + other
        return first

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange(x.clone()), -1)

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        return self._exchange(x.clone())[source].clone()

    def agree(self, value: int, how: str, name: str = "value") -> int:
        values = self._exchange(value)
        if how == "equal" and len(set(values)) > 1:
            raise GroupFailed(self.rank, f"has another {name}: {values}")
        return max(values) if how == "max" else min(values)

    def close(self) -> None:
        pass


class ThreadRanks:
    """Stands for ``Ranks``. Messages are encoded and decoded, as between processes.

    Args:
        make: the program of a rank.
        size: number of ranks.

    Attributes:
        sent: messages, as the followers got them.
    """

    load_timeout = step_timeout = 20.0
    are_children = True
    stages = 1
    seconds = 0.0

    def __init__(self, make: Callable[[ThreadGroup], Any], size: int = 2) -> None:
        self.size, self.num_restarts = size, 0
        self.sent: list[Message] = []
        self.failure: GroupFailed | None = None
        self.programs: list[Any] = []
        self._make = make
        self._begin()

    def _begin(self) -> None:
        self._barrier = threading.Barrier(self.size)
        shares: list[Any] = [None] * self.size
        groups = [ThreadGroup(rank, shares, self._barrier) for rank in range(self.size)]
        self.group = groups[0]
        self.programs = [*(self.programs or [self._make(groups[0])])[:1], *map(self._make, groups[1:])]
        self.followers = [Follower(*pair) for pair in zip(self.programs[1:], groups[1:], strict=True)]
        self._errors: list[BaseException] = []
        self._threads: list[threading.Thread] = []
        self._join: Callable[[], None] = lambda: None

    def lead(self) -> LeaderProgram:
        return LeaderProgram(self.programs[0], self)  # type: ignore[arg-type]

    def send(self, message: Message) -> None:
        encoded = encode(message, len(self.sent) + 1)
        header, _ = lengths(encoded[:PREFIX_BYTES])
        start = PREFIX_BYTES + header
        got = decode(encoded[PREFIX_BYTES:start], bytearray(encoded[start:]))
        self.sent.append(got)

        def do(follower: Follower) -> None:
            try:
                follower.do(got)
            except BaseException as error:
                self._errors.append(error)
                self._barrier.abort()

        self._threads = [threading.Thread(target=do, args=(follower,)) for follower in self.followers]
        for thread in self._threads:
            thread.start()

    @contextmanager
    def task(self, name: str, seconds: float | None = None) -> Iterator[None]:
        if self.failure is not None:
            raise self.failure
        errors: list[BaseException] = []
        try:
            yield
        except BaseException as error:
            errors.append(error)
            self._barrier.abort()
        for thread in self._threads:
            thread.join()
        causes = [*self._errors, *errors]
        if causes:
            cause = min(causes, key=lambda error: isinstance(error, CollectiveFailed))
            self.failure = cause if isinstance(cause, GroupFailed) else GroupFailed(0, f"failed in {name}: {cause}")
            raise self.failure from cause

    def start_again(self, program: Program) -> bool:
        self.failure = None
        self.num_restarts += 1
        self._begin()
        return self.num_restarts < 4

    def close(self) -> None:
        pass


class Striped:
    """A program that every rank runs whole, with caches of its own, and of whose logits it keeps every n-th column.

    So a copy or a step that one rank has missed shows.

    Args:
        program: any.
        group: the ranks.
    """

    def __init__(self, program: Any, group: ThreadGroup) -> None:
        self.program, self.group = program, group

    def __getattr__(self, name: str) -> Any:
        return getattr(self.program, name)

    def __call__(self, input_ids: torch.Tensor, position_ids: torch.Tensor, step: StepMetadata) -> torch.Tensor:
        logits = self.program(input_ids, position_ids, step)
        own = torch.arange(logits.shape[1]) % self.group.size == self.group.rank
        return self.group.all_reduce(torch.where(own, logits, 0.0))


def leading(make: Callable[[], Any], size: int = 2) -> tuple[LeaderProgram, ThreadRanks]:
    """A toy on ranks in threads."""
    ranks = ThreadRanks(lambda group: Striped(make(), group), size)
    return ranks.lead(), ranks


def kinds(messages: Sequence[Message]) -> list[str]:
    """Of messages."""
    return [message.kind for message in messages]
