"""Ranks that Ray starts: an actor for each of those beside rank 0, on the hosts of a cluster.

Ray places them, starts them and tells of their ends. They find each other, and rank 0 leads them, as those of a
launcher (:mod:`~.torchrun`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from .facts import facts
from .follow import LoadProgram
from .group import GroupFailed, RankGroup
from .ray_placement import RayPlacement
from .torchrun import LaunchedRanks, LaunchedWorker, Place, follow_first

_START_SECONDS = 120.0
"""In which Ray starts a process that has imported torch, and in which it reaches this one."""

_REASON_SECONDS = 1.0


class RayRank:
    """The actor of one rank, in a process of its own."""

    def begin(self) -> None:
        """No-op; returns when the process is there and has this package."""

    def follow(
        self, place: Place, stages: int, store: tuple[str, int], threads: int, load_program: LoadProgram
    ) -> None:
        """Follow rank 0 to its end; see ``LaunchedRanks`` and ``take_part``."""
        torch.set_num_threads(threads)
        follow_first(LaunchedRanks(place, _START_SECONDS, stages, store=store), load_program, facts(threads))


@dataclass(frozen=True, kw_only=True)
class RayWorker(LaunchedWorker):
    """A rank that Ray started; ``pidfd`` becomes readable when Ray tells of its end, if its channel's does not.

    Attributes:
        actor: Ray's handle of it.
        work: its work, to the end.
    """

    actor: Any
    work: _Work

    def how_it_ended(self) -> str:
        """In words, which are Ray's where the process has died."""
        return self.work.how_it_ended()

    def kill(self) -> None:
        """End it at once; once."""
        self.work.close()
        _kill(self.actor)
        self.channel.close()


class RayRanks:
    """Actors of Ray as ranks (``launch.Launch``).

    Args:
        size: number of ranks, this process included.
        stages: that they run, of a pipeline.
        threads: of each.
        resources: that each reserves, as Ray names them; see ``RayPlacement``.
        load_program: makes another rank's program; Ray imports it there.

    Raises:
        GroupFailed: this host has no address for others.
    """

    def __init__(
        self, size: int, stages: int, threads: int, resources: Mapping[str, float], load_program: LoadProgram
    ) -> None:
        import ray

        self._size, self._stages, self._threads, self._resources = size, stages, threads, resources
        self._load_program = load_program
        place = Place(0, size, size)
        self._launched = LaunchedRanks(place, _START_SECONDS, stages, store=(ray.util.get_node_ip_address(), 0))
        self._placement: RayPlacement | None = None

    def start(self) -> list[RayWorker]:
        """See ``Launch``.

        Raises:
            ValueError: the cluster has no room for them.
            GroupFailed: one did not come.
        """
        self._placement = placement = RayPlacement(self._size, self._resources)
        actors = {rank: self._actor(placement, rank) for rank in range(1, self._size)}
        works: dict[int, _Work] = {}
        try:
            for rank, actor in actors.items():
                _wait_begun(rank, actor)
            for rank, actor in actors.items():
                place = Place(rank, self._size, self._size)
                terms = (place, self._stages, self._launched.store, self._threads, self._load_program)
                works[rank] = _Work(actor.follow.remote(*terms).future())
            workers = self._launched.start(lambda: _refuse_ended(works))
        except BaseException:
            for work in works.values():
                work.close()
            for actor in actors.values():
                _kill(actor)
            raise
        return [
            RayWorker(
                **{**vars(worker), "pidfd": works[worker.rank].descriptor},
                actor=actors[worker.rank],
                work=works[worker.rank],
            )
            for worker in workers
        ]

    def meeting(self, timeout: float) -> Callable[[], RankGroup]:
        """See ``Launch``."""
        return self._launched.meeting(timeout)

    def close(self) -> None:
        """See ``Launch``."""
        self._launched.close()
        if self._placement is not None:
            self._placement.close()

    def _actor(self, placement: RayPlacement, rank: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where = PlacementGroupSchedulingStrategy(placement.group, placement.bundles[rank])
        kind = ray.remote(num_cpus=placement.resources["CPU"], scheduling_strategy=where)(RayRank)
        return kind.remote()


class _Work:
    """The work of an actor, whose end a descriptor tells."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future
        self._lock = threading.Lock()
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        future.add_done_callback(lambda _: self._tell())

    @property
    def is_over(self) -> bool:
        return self._future.done()

    def how_it_ended(self) -> str:
        """In words; waits a little for Ray's, which may come behind the end of the channel."""
        with suppress(TimeoutError):
            error = self._future.exception(_REASON_SECONDS)
            return "ended" if error is None else f"ended: {_reason(error)}"
        return "ended"

    def close(self) -> None:
        with self._lock:
            if self.descriptor >= 0:
                os.close(self.descriptor)
            self.descriptor = -1

    def _tell(self) -> None:
        with self._lock:
            if self.descriptor >= 0:
                os.eventfd_write(self.descriptor, 1)


def _wait_begun(rank: int, actor: Any) -> None:
    """Wait until a rank's process is there.

    Raises:
        GroupFailed: it is not.
    """
    import ray

    try:
        ray.get(actor.begin.remote(), timeout=_START_SECONDS)
    except ray.exceptions.GetTimeoutError:
        raise GroupFailed(rank, f"was not started by Ray within {_START_SECONDS:g} s") from None
    except ray.exceptions.RayError as error:
        raise GroupFailed(rank, f"was not started by Ray: {_reason(error)}") from error


def _refuse_ended(works: Mapping[int, _Work]) -> None:
    for rank, work in works.items():
        if work.is_over:
            raise GroupFailed(rank, work.how_it_ended())


def _kill(actor: Any) -> None:
    """End an actor's process, unless this one has left Ray, which ends it then."""
    import ray

    if ray.is_initialized():
        with suppress(ray.exceptions.RayError):
            ray.kill(actor)


def _reason(error: BaseException) -> str:
    """What Ray says in several lines: why the actor is dead, or the last line of what it raised."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    dead = [line for line in lines if line.startswith("The actor is dead because")]
    return (dead or lines[-1:] or [type(error).__name__])[0][:200]
