"""Replicas of a fleet behind one client, without Ray between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from stored_blocks import FINGERPRINT
from thread_client import ThreadClient

from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.serving.engine_process.client import EngineDied, EngineUnavailable, RequestRefused
from torch_pagoda.serving.engine_process.wire import Submit
from torch_pagoda.serving.fleet.fleet_client import FleetClient
from torch_pagoda.serving.fleet.replica_client import NotThisReplica
from torch_pagoda.serving.fleet.replica_server import ReplicaServer

from toy_client import merged, read_all, toy_engine
from toy_program import ToyProgram

PROMPT = list(range(1, 18))
FORGET_SECONDS = 60.0


class Host:
    """Replicas in this process, and faults on the way to them."""

    def __init__(self) -> None:
        self.servers: dict[str, ReplicaServer] = {}
        self.engines: dict[str, ThreadClient] = {}
        self.left: set[str] = set()
        self.delays: dict[str, asyncio.Event] = {}

    async def open(self, name: str, engine: Engine, weights: str = "w") -> None:
        client = self.engines[name] = ThreadClient(engine, model="toy", reports_cache=True)
        await client.start()
        self.servers[name] = ReplicaServer(client, weights, FORGET_SECONDS)

    async def close(self) -> None:
        for client in self.engines.values():
            await client.close()

    def connect(self, name: str) -> Way:
        return Way(self, name)


class Way:
    def __init__(self, host: Host, name: str) -> None:
        self.host, self.name = host, name

    async def news(self, link: str) -> AsyncIterator[bytes]:
        frames = self.host.servers[self.name].news(link)
        try:
            async for frame in frames:
                yield frame
        finally:
            await frames.aclose()

    async def take(self, link: str, frame: bytes) -> None:
        if self.name in self.host.left:
            raise NotThisReplica(f"{self.name} has left")
        if self.name in self.host.delays and b"submit" in frame:
            await self.host.delays[self.name].wait()
        await self.host.servers[self.name].take(link, frame)


def caching(**options: object) -> Engine:
    return toy_engine(ToyProgram(vocab_size=258), enable_prefix_caching=True, **options)


@asynccontextmanager
async def fleet(*names: str) -> AsyncIterator[tuple[Host, FleetClient]]:
    """Replicas with these names, ready, and their client."""
    host = Host()
    client = FleetClient(host.connect)
    for name in names:
        await host.open(name, caching())
    client.set_replicas(set(names))
    await client.wait_for(len(names))
    try:
        yield host, client
    finally:
        await client.close()
        await host.close()


def test_tokens_are_those_of_one_engine_and_prefixes_are_found() -> None:
    submits = [Submit(f"r{i}", [[*PROMPT, i]], {"max_tokens": 6, "temperature": 0.8, "seed": i}) for i in range(6)]

    async def ask(count: int) -> list[object]:
        async with fleet(*(f"e{i}" for i in range(count))) as (_, client):
            answers = [merged(await read_all(client.submit(submit))) for submit in submits]
            hits = sorted(one["prefix_hit_tokens"] for one in await client.ask("stats"))
            assert hits == [0] * (count - 1) + [5 * 16]
            return answers

    assert asyncio.run(ask(3)) == asyncio.run(ask(1))


def test_a_lost_replica_loses_only_what_has_streamed_and_another_takes_its_place() -> None:
    async def use() -> None:
        async with fleet("a") as (host, client):
            streamed = client.submit(Submit("s", [PROMPT], {"max_tokens": 400, "ignore_eos": True}))
            waiting = client.submit(Submit("w", [PROMPT], {"max_tokens": 90, "ignore_eos": True}, streams=False))
            await streamed.next()
            await host.open("b", caching())
            client.set_replicas({"a", "b"})
            await client.wait_for(2)
            host.engines["a"]._lose("lost in this test")  # its state is "dead" from now on
            with pytest.raises(EngineDied, match="a is lost: the engine of the replica has ended"):
                await read_all(streamed)
            assert len(merged(await read_all(waiting))[0, 0][1]) == 90
            while not (before := client.stats["generated_tokens"]):  # replicas report them now and then
                await asyncio.sleep(0.01)
            await host.open("c", caching())
            client.set_replicas({"b", "c"})
            await client.wait_for(2)
            assert len(client.stats_of_engines) == 2 and client.stats["restarts"] == 1
            assert client.stats["generated_tokens"] >= before

    asyncio.run(use())


def test_a_link_that_is_lost_is_opened_again_and_nothing_is_counted_twice() -> None:
    async def use() -> None:
        async with fleet("a") as (host, client):
            submit = Submit("s", [PROMPT], {"max_tokens": 9, "ignore_eos": True, "temperature": 0})
            first = merged(await read_all(client.submit(submit)))
            while client.stats["generated_tokens"] < 9:
                await asyncio.sleep(0.01)
            host.servers["a"]._links.clear()  # as if it had forgotten the front
            while client.state == "ready":
                await asyncio.sleep(0.01)
            await client.wait_for(1)
            assert client.stats["generated_tokens"] == 9 and client.stats["restarts"] == 0
            assert merged(await read_all(client.submit(submit))) == first
            while client.stats["generated_tokens"] < 18:
                await asyncio.sleep(0.01)
            assert client.stats["generated_tokens"] == 18

    asyncio.run(use())


def test_a_replica_that_leaves_ends_its_work_and_gets_no_more() -> None:
    async def use() -> None:
        async with fleet("a") as (host, client):
            stream = client.submit(Submit("s", [PROMPT], {"max_tokens": 200, "ignore_eos": True}))
            await stream.next()
            client.set_replicas(set())
            assert client.state == "loading"
            with pytest.raises(EngineUnavailable):
                client.submit(Submit("x", [PROMPT], {}))
            host.left.add("a")
            await read_all(stream)
            while host.servers["a"]._links:
                await asyncio.sleep(0.01)
            assert host.engines["a"].num_prompts == 0
            await host.open("b", caching())
            client.set_replicas({"b"})
            await client.wait_for(1)
            assert len(client.stats_of_engines) == 1

    asyncio.run(use())


def test_a_call_that_reaches_another_replica_is_sent_again() -> None:
    async def use() -> None:
        async with fleet("a", "b") as (host, client):
            host.left.add("a")
            submits = [Submit(f"r{i}", [[*PROMPT, i]], {"max_tokens": 5, "ignore_eos": True}) for i in range(6)]
            found = await asyncio.gather(*(read_all(client.submit(submit)) for submit in submits))
            assert [len(merged(deltas)[0, 0][1]) for deltas in found] == [5] * 6
            host.left.add("b")
            with pytest.raises(RequestRefused, match="has left"):
                await read_all(client.submit(Submit("last", [PROMPT], {})))

    asyncio.run(use())


def test_a_replica_with_other_weights_gets_no_requests() -> None:
    async def use() -> None:
        async with fleet("a") as (host, client):
            await host.open("b", caching(), weights="others")
            client.set_replicas({"a", "b"})
            with pytest.raises(EngineDied, match="b differs from replica a in its weights; give all hosts the same"):
                await client.wait_for(2)
            client.set_replicas({"b"})
            await client.wait_for(1)

    asyncio.run(use())


def test_replicas_that_compute_prompts_are_routed_to_and_compared(tmp_path: Path) -> None:
    store = {"kv_store": f"folder://{tmp_path}/kv", "fingerprint": FINGERPRINT, "swap_space": 1 << 20}

    async def use() -> None:
        host = Host()
        await host.open("p", caching(**store, kv_store_write="all"))
        await host.open("e", caching(**store, kv_store_wait=30.0))
        await host.open("other", caching(), weights="others")
        prefill = FleetClient(host.connect)
        client = FleetClient(host.connect, prefill)
        client.set_replicas({"e"})
        await client.wait_for(1)
        prefill.set_replicas({"other"})
        with pytest.raises(EngineDied, match="other differs from replica e in its weights"):
            await prefill.wait_for(1)
        prefill.set_replicas({"p"})
        await prefill.wait_for(1)
        submit = Submit("r", [PROMPT], {"max_tokens": 5, "ignore_eos": True})
        assert (await read_all(client.submit(submit)))[-1].num_cached_tokens == 16
        assert client.state == "ready" and sorted(client.stats_of_engines) == ["0", "prefill-0"]
        await client.close()
        await host.close()

    asyncio.run(use())


def test_a_cancellation_that_overtakes_its_request_holds() -> None:
    async def use() -> None:
        async with fleet("a") as (host, client):
            host.delays["a"] = asyncio.Event()
            stream = client.submit(Submit("c", [PROMPT], {"max_tokens": 400, "ignore_eos": True}))
            await asyncio.sleep(0)
            stream.cancel()
            await asyncio.sleep(0.01)
            host.delays["a"].set()
            assert (await read_all(stream))[-1].finish_reason == "cancelled"

    asyncio.run(use())


def test_requests_of_a_front_that_is_gone_are_cancelled() -> None:
    async def use() -> None:
        async with fleet("a") as (host, client):
            server = host.servers["a"]
            stream = client.submit(Submit("s", [PROMPT], {"max_tokens": 400, "ignore_eos": True}))
            await stream.next()
            server.forget_fronts()
            assert server._links
            (link,) = server._links.values()
            link.heard -= FORGET_SECONDS
            server.forget_fronts()
            assert not server._links
            while host.engines["a"].num_prompts:
                await asyncio.sleep(0.01)

    asyncio.run(use())
