"""``pagoda fleet`` on a real Ray: two replicas of the small model, which are killed."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
from fleets import PROMPTS, SIZES, alone, ask_each, ask_many, client_of, metric, plain, streamed
from ray_clusters import free_ports, processes, wait_for

from served import Served

pytestmark = pytest.mark.fleet
pytest.importorskip("ray.serve", reason="a fleet needs Ray: pip install 'torch-pagoda[fleet]'")


@pytest.fixture(scope="module")
def fleet() -> Iterator[Served]:
    (port,) = free_ports(1)
    served = Served("--replicas", "2", "-tp", "1", "--cpus-per-replica", "1", *SIZES, command="fleet", port=port)
    yield served
    if served.process.poll() is None:
        served.stop()


def replicas(fleet: Served) -> list[int]:
    return processes(fleet.process.pid, "ServeReplica:pagoda:Engines")


def figures(fleet: Served, name: str) -> list[float]:
    return list(metric(fleet.text("/metrics"), name).values())


async def ask_and_kill(fleet: Served, victim: int) -> tuple[list[str], list[tuple[str, str | None]]]:
    async with client_of(fleet.url) as client:
        plains = [asyncio.create_task(plain(client, i)) for i in range(8)]
        texts: list[list[str]] = [[] for _ in range(8)]
        streams = [asyncio.create_task(streamed(client, i, texts[i])) for i in range(8)]
        while not all(texts):
            assert not any(task.done() for task in streams)
            await asyncio.sleep(0.02)
        os.kill(victim, signal.SIGKILL)
        return await asyncio.gather(*plains), await asyncio.gather(*streams)


def wait_until_back(fleet: Served, restarts: int) -> float:
    """Wait until two replicas take requests; returns the seconds."""
    begin = time.monotonic()
    wait_for(lambda: figures(fleet, "pagoda:engine_restarts_total") == [restarts] and fleet.get("/health") == {})
    return time.monotonic() - begin


def test_texts_are_those_of_one_engine_and_prefixes_are_hit(fleet: Served) -> None:
    found = asyncio.run(ask_each(fleet.url, 2 * PROMPTS))
    assert [text for text, _ in found] == 2 * alone(PROMPTS)
    assert all(cached for _, cached in found[2:])
    assert len(figures(fleet, "vllm:prefix_cache_hits_total")) == 2
    assert "<!doctype html>" in fleet.text("/")
    assert len(replicas(fleet)) == 2


@pytest.mark.parametrize("restarts", [1, 2])
def test_a_kill_loses_only_what_has_streamed(fleet: Served, restarts: int) -> None:
    """Of a replica, then of an engine process: the replica is unhealthy without it."""
    victims = processes(fleet.process.pid, "cli.engine_process") if restarts == 2 else replicas(fleet)
    plains, streams = asyncio.run(ask_and_kill(fleet, victims[0]))
    whole = [(text, error) for text, error in streams if error is None]
    cut = [(text, error) for text, error in streams if error is not None]
    assert len(plains) == 8 and whole and cut
    assert {error for _, error in cut} == {"The engine ended while running this request."}
    assert fleet.errors.count("is sent to another engine") >= restarts
    seconds = wait_until_back(fleet, restarts)
    print(f"a replica was back after {seconds:.0f} s")
    again = asyncio.run(ask_many(fleet.url, 8))
    assert again == plains
    for i, (text, _) in enumerate(streams):
        assert plains[i].startswith(text)


def test_a_signal_lets_what_is_under_way_end(fleet: Served) -> None:
    found: list[tuple[str, str | None]] = []

    async def ask() -> None:
        async with client_of(fleet.url) as client:
            found.append(await streamed(client, 0, []))

    everything = processes(fleet.process.pid, "ray") + processes(fleet.process.pid, "engine_process")
    thread = threading.Thread(target=lambda: asyncio.run(ask()))
    thread.start()
    while not sum(figures(fleet, "vllm:num_requests_running")):
        time.sleep(0.02)
    assert fleet.stop() == 0
    thread.join()
    assert found[0][1] is None and found[0][0]
    wait_for(lambda: not any(psutil.pid_exists(p) and psutil.Process(p).status() != "zombie" for p in everything))
