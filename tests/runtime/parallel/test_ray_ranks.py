"""Ranks that Ray starts, without it: which work they get, how an end is told, and what is left of them.

Those beside rank 0 are threads here, which hold the ends of their channels.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_ray import HERE, PLACED, FakeRay

from torch_pagoda.runtime.parallel import ray_ranks
from torch_pagoda.runtime.parallel.facts import facts
from torch_pagoda.runtime.parallel.group import GroupFailed
from torch_pagoda.runtime.parallel.ray_placement import PLACEMENT
from torch_pagoda.runtime.parallel.ray_ranks import RayRank, RayRanks
from torch_pagoda.runtime.parallel.torchrun import LaunchedRanks, Place
from torch_pagoda.runtime.parallel.watch import Watch

THREADS = 2


def load_program(message: object, group: object) -> Any:
    raise AssertionError("nothing is loaded here")


class Others:
    """The other ranks: each comes to rank 0, and then waits until it is told how to end.

    Attributes:
        terms: of the work of each.
        channels: of those that came.
    """

    def __init__(self) -> None:
        self.terms: list[tuple[Any, ...]] = []
        self.channels: list[Any] = []
        self.end = threading.Event()
        self.error: Exception | None = None

    def follow(self, *terms: Any) -> None:
        self.terms.append(terms)
        place, stages, store, *_ = terms
        self.channels.append(LaunchedRanks(place, 30, stages, store=store).join())
        self.end.wait()
        if self.error is not None:
            raise self.error


@pytest.fixture
def others() -> Iterator[Others]:
    made = Others()
    yield made
    made.end.set()
    for channel in made.channels:
        channel.close()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RayRanks]]:
    """Makes them; they give back what they have."""
    monkeypatch.delenv(PLACEMENT, raising=False)
    made: list[RayRanks] = []

    def make(size: int = 2, stages: int = 1) -> RayRanks:
        made.append(RayRanks(size, stages, THREADS, {"CPU": THREADS}, load_program))
        return made[-1]

    yield make
    for one in made:
        one.close()


def failure(watch: Watch) -> str:
    """What it says of the rank that ends."""
    with pytest.raises(GroupFailed) as failed, watch.task("loading", 10):
        watch.answers("here")
    watch.end(0)
    return str(failed.value)


def dead(reason: str) -> Exception:
    """What Ray says of an actor."""
    return RuntimeError(f"The actor died unexpectedly before finishing this task.\n\tpid: 7\n{reason}\nSee the logs.")


def test_each_has_its_place_its_threads_and_its_work(monkeypatch, ranks, others):
    ray = FakeRay([HERE, "a", HERE], others.follow).install(monkeypatch)
    launch = ranks(3, 3)
    workers = launch.start()
    assert [(worker.rank, worker.actor) for worker in workers] == list(enumerate(ray.actors, 1))
    assert [(actor.bundle, actor.num_cpus) for actor in ray.actors] == [(2, THREADS), (1, THREADS)]
    store = launch._launched.store
    assert store[0] == "127.0.0.1"  # which Ray tells of this host
    expected = [(Place(rank, 3, 3), 3, store, THREADS, load_program) for rank in (1, 2)]
    assert sorted(others.terms, key=lambda terms: terms[0].rank) == expected
    descriptors = [worker.pidfd for worker in workers]
    for worker in workers:
        worker.kill()
    assert ray.killed == ray.actors and not ray.removed
    for descriptor in descriptors:
        with pytest.raises(OSError):
            os.fstat(descriptor)
    launch.close()
    assert ray.removed == [ray.group]


def test_ranks_of_a_replica_reserve_what_it_has_for_them(monkeypatch, ranks, others):
    ray = FakeRay([HERE, "a"], others.follow).install(monkeypatch)
    launch = ranks()
    monkeypatch.setenv(PLACEMENT, PLACED.hex())
    (worker,) = launch.start()
    assert worker.actor.num_cpus == ray.group.bundle_specs[1]["CPU"] == 3
    worker.kill()


def test_the_end_of_a_channel_names_the_rank_before_ray_does(monkeypatch, ranks, others):
    monkeypatch.setattr(ray_ranks, "_REASON_SECONDS", 0.05)
    FakeRay([HERE, "a"], others.follow).install(monkeypatch)
    watch = Watch(ranks().start)
    while not others.channels:  # which a thread of its own appends
        time.sleep(0.01)
    others.channels.pop().close()
    told = failure(watch)
    assert re.fullmatch(rf"rank 1 \(pid {os.getpid()}, host .*\) ended (at the start|in loading)", told), told


def test_ray_names_the_rank_whose_channel_stays(monkeypatch, ranks, others):
    """As where its host is lost, which closes nothing."""
    FakeRay([HERE, "a"], others.follow).install(monkeypatch)
    watch = Watch(ranks().start)
    others.error = dead("The actor is dead because its node has died.")
    others.end.set()
    told = failure(watch)
    assert ") ended: The actor is dead because its node has died. " in told, told


def test_one_that_fails_before_it_comes_ends_the_start(monkeypatch, ranks):
    def follow(*terms: Any) -> None:
        raise RuntimeError("Traceback:\n  there\nOSError: no route to rank 0\n")

    ray = FakeRay([HERE, "a", "a"], follow).install(monkeypatch)
    monkeypatch.setattr(ray_ranks, "_START_SECONDS", 5.0)
    with pytest.raises(GroupFailed, match=r"^rank [12] ended: OSError: no route to rank 0$"):
        ranks(3).start()
    assert ray.killed == ray.actors and len(ray.actors) == 2


@pytest.mark.parametrize(
    ("name", "told"),
    [("GetTimeoutError", "within 120 s"), ("RayError", ": The actor is dead because its node has died.")],
)
def test_one_whose_process_does_not_start_is_named(monkeypatch, ranks, others, name, told):
    def begin() -> None:
        raise getattr(ray.exceptions, name)(dead("The actor is dead because its node has died."))

    ray = FakeRay([HERE, "a"], others.follow, begin).install(monkeypatch)
    with pytest.raises(GroupFailed) as failed:
        ranks().start()
    assert str(failed.value).removeprefix("rank 1 was not started by Ray").strip() == told.strip()
    assert ray.killed == ray.actors and not others.terms


def test_nothing_is_killed_by_one_that_has_left_ray(monkeypatch, ranks, others):
    """At the exit of the process Ray is gone first, and the others with it."""
    ray = FakeRay([HERE, "a"], others.follow).install(monkeypatch)
    launch = ranks()
    (worker,) = launch.start()
    ray.is_initialized = lambda: False
    worker.kill()
    launch.close()
    assert not ray.killed and not ray.removed


def test_a_rank_computes_with_the_threads_that_rank_0_names(monkeypatch):
    followed: list[tuple[Any, ...]] = []
    monkeypatch.setattr(ray_ranks, "LaunchedRanks", lambda *place, store: (*place, store))
    monkeypatch.setattr(ray_ranks, "follow_first", lambda *how: followed.append((*how, torch.get_num_threads())))
    before = torch.get_num_threads()
    try:
        RayRank().follow(Place(1, 2, 2), 2, ("a-host", 7), before + 1, load_program)
    finally:
        torch.set_num_threads(before)
    launched = (Place(1, 2, 2), 120.0, 2, ("a-host", 7))
    assert followed == [(launched, load_program, facts(before + 1), before + 1)]
