"""Starts the other ranks, or takes those that were started, gives them a program, and ends them."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import torch

from ..ops.collectives import drop_group, set_group
from ..program import Program
from ..restart_limit import RestartLimit
from .facts import digest_of, facts, refuse_differences
from .group import GroupFailed, RankGroup
from .host_group import meet_on_host
from .leader import LeaderProgram
from .messages import Message, encode
from .watch import AnyWorker, Watch
from .workers import COMMAND, Worker, no_more, start_workers

END_SECONDS = 5.0


class Launch(Protocol):
    """How the other ranks come to be, once."""

    def start(self) -> Sequence[AnyWorker]:
        """Those of ranks 1 and above."""

    def meeting(self, timeout: float) -> Callable[[], RankGroup]:
        """What makes the group of all ranks, of which each exchange waits so many seconds; for another thread."""

    def close(self) -> None:
        """Let go of what they were started with."""


class Children:
    """Child processes as ranks.

    Args:
        command, size, stages, threads, environment: see ``start_workers``.
        meet: makes the group in this process, of the descriptor, rank, number of ranks, of stages, and timeout.
    """

    def __init__(
        self,
        command: Sequence[str],
        size: int,
        stages: int,
        threads: int,
        environment: Callable[[int], Mapping[str, str]] = no_more,
        meet: Callable[[int, int, int, int, float], RankGroup] = meet_on_host,
    ) -> None:
        self._command, self._size, self._stages, self._threads = command, size, stages, threads
        self._environment, self._meet = environment, meet
        self._meeting = os.memfd_create("torch_pagoda-ranks")

    def start(self) -> list[Worker]:
        """See ``Launch``."""
        return start_workers(self._command, self._size, self._stages, self._meeting, self._threads, self._environment)

    def meeting(self, timeout: float) -> Callable[[], RankGroup]:
        """See ``Launch``."""
        meeting = os.dup(self._meeting)

        def meet() -> RankGroup:
            try:
                return self._meet(meeting, 0, self._size, self._stages, timeout)
            finally:
                os.close(meeting)

        return meet

    def close(self) -> None:
        """See ``Launch``."""
        os.close(self._meeting)


class Ranks:
    """This process as rank 0, and child processes as the others, which start at once, or what else starts them.

    Give them a program by ``load``, prepare this rank's own meanwhile, and lead by ``lead``. ``close``, the garbage
    collector and the end of this process end the others. They fail together: each method then raises ``GroupFailed``.

    Args:
        size: number of ranks.
        stages: of a pipeline, that as many ranks each run; the first ranks run the last one.
        launch: starts the others, at each start anew; None: as child processes.
        known: what they have to tell besides, as they do.
        command: starts one of the others; ``torch_pagoda.rank`` says which arguments follow.
        threads: of each of the others; None: as many as torch has here.
        environment, meet: see ``Children``.
        load_timeout: seconds until all have loaded, and for warm-up.
        step_timeout: seconds for one step, and for any other message.
        restarts: how often others are started in place of those that failed; None: three times in ten minutes.

    Attributes:
        are_children: the others are child processes, so they are on this host.

    Raises:
        OSError: a process could not be started.
        Exception: what ``launch`` raises.
    """

    def __init__(
        self,
        size: int,
        *,
        stages: int = 1,
        launch: Callable[[], Launch] | None = None,
        known: Mapping[str, Any] = MappingProxyType({}),
        command: Sequence[str] = COMMAND,
        threads: int | None = None,
        environment: Callable[[int], Mapping[str, str]] = no_more,
        meet: Callable[[int, int, int, int, float], RankGroup] = meet_on_host,
        load_timeout: float = 3600.0,
        step_timeout: float = 300.0,
        restarts: RestartLimit | None = None,
    ) -> None:
        self.size, self.stages = size, stages
        self.load_timeout, self.step_timeout = load_timeout, step_timeout
        self.num_restarts = 0
        self.are_children = launch is None
        self._former_seconds = 0.0
        threads = torch.get_num_threads() if threads is None else threads
        self._known = {**facts(threads), **known}
        self._launch = launch or partial(Children, tuple(command), size, stages, threads, environment, meet)
        self._restarts = RestartLimit() if restarts is None else restarts
        self._load: Message | None = None
        self._start()

    @property
    def group(self) -> RankGroup:
        """All ranks, once they are to load."""
        if not self._met:
            raise RuntimeError("the ranks have not met; call load() first")
        return self._met[0]

    @property
    def failure(self) -> GroupFailed | None:
        """What has failed, if the other ranks were ended because of it."""
        return self._watch.failure

    @property
    def seconds(self) -> float:
        """Those that this rank has spent in exchanges of tensors, also with ranks that others have replaced."""
        return self._former_seconds + sum(group.seconds for group in self._met)

    @property
    def pids(self) -> list[int]:
        """Process ids of the other ranks."""
        return [worker.pid for worker in self._watch.workers]

    def load(self, message: Message) -> None:
        """Let the other ranks load their programs; returns when they have begun.

        Args:
            message: of kind ``"load"``; ``load_program`` of the other ranks gets it.

        Raises:
            GroupFailed: a rank ended, or runs other versions, threads or another processor.
        """
        self._load = message
        with self.task("loading", self.load_timeout):
            answers = self._watch.answers("here")
            refuse_differences(self._known, {rank: answer.values for rank, answer in answers.items()})
            self.send(message)
            self._met.append(self._meet())
        set_group(self.group)

    def lead(self, program: Program) -> LeaderProgram:
        """The program of all ranks, of which ``program`` is this one's part; waits until the others have loaded.

        Raises:
            GroupFailed: a rank could not, or holds another program.
        """
        self._wait_loaded(program)
        return LeaderProgram(program, self)

    def start_again(self, program: Program) -> bool:
        """Start other ranks in place of those that failed, and wait until they have loaded; False if there were too
        many of late.

        Raises:
            GroupFailed: the new ones failed, too.
        """
        if self._load is None or not self._restarts.allows_one():
            return False
        self.close()
        self.num_restarts += 1
        self._former_seconds = self.seconds
        self._start()
        self.load(self._load)
        self._wait_loaded(program)
        return True

    def task(self, name: str, seconds: float | None = None) -> AbstractContextManager[None]:
        """See ``Watch.task``; by default of ``step_timeout`` seconds."""
        return self._watch.task(name, self.step_timeout if seconds is None else seconds)

    def send(self, message: Message) -> None:
        """Send a message to all other ranks, inside ``task``."""
        self._number += 1
        encoded = encode(message, self._number)
        for worker in self._watch.workers:
            worker.channel.send_bytes(encoded)

    def close(self) -> None:
        """End the other ranks; a second call does nothing."""
        self._end()

    def _start(self) -> None:
        self._number = 0
        self._met: list[RankGroup] = []
        self._launched = self._launch()
        try:
            self._watch = Watch(self._launched.start, partial(_abort, self._met))
        except BaseException:
            self._launched.close()
            raise
        self._end = weakref.finalize(self, _end, self._watch, self._launched, self._met, os.getpid())

    def _meet(self) -> RankGroup:
        """The group, which torch waits for without a word of what becomes of the others."""
        found: Future[RankGroup] = Future()

        def run(meet: Callable[[], RankGroup]) -> None:
            try:
                found.set_result(meet())
            except BaseException as error:
                found.set_exception(error)

        meet = self._launched.meeting(self.load_timeout)
        thread = threading.Thread(target=run, args=(meet,), name="pagoda-meeting", daemon=True)
        thread.start()
        self._watch.wait(thread)
        return found.result()

    def _wait_loaded(self, program: Program) -> None:
        with self.task("loading", self.load_timeout):
            own = digest_of(program)
            answers = self._watch.answers("loaded")
            refuse_differences(own, {rank: answer.values for rank, answer in answers.items()})


def _end(watch: Watch, launched: Launch, met: Sequence[RankGroup], pid: int) -> None:
    """End the other ranks and leave the group, unless this is a fork of the process that has them."""
    if os.getpid() != pid:
        return
    watch.end(END_SECONDS)
    launched.close()
    for group in met:
        drop_group(group.name)
        group.close()


def _abort(met: Sequence[RankGroup]) -> None:
    """Let this rank leave an exchange in which it waits for the others in memory that they share."""
    for group in met:
        group.abort()
