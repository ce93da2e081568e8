"""Several engines behind one client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from thread_client import ThreadClient

from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.serving.engine_process.client import EngineDied, EngineUnavailable, RequestRefused
from torch_pagoda.serving.engine_process.pool_client import PoolClient
from torch_pagoda.serving.engine_process.wire import Submit

from toy_client import merged, read_all, toy_engine
from toy_program import ToyProgram

PROMPT = list(range(1, 18))


@asynccontextmanager
async def pool(*engines: Engine, reports: bool = True) -> AsyncIterator[tuple[PoolClient, list[ThreadClient]]]:
    clients = [ThreadClient(engine, model="toy", reports_cache=reports) for engine in engines]
    opened = PoolClient(clients)
    await opened.start()
    await opened.wait_ready()
    try:
        yield opened, clients
    finally:
        await opened.close()


def caching(**options: object) -> Engine:
    return toy_engine(ToyProgram(vocab_size=258), enable_prefix_caching=True, **options)


def test_tokens_are_those_of_one_engine() -> None:
    submits = [Submit(f"r{i}", [[*PROMPT, i]], {"max_tokens": 6, "temperature": 0.8, "seed": i}) for i in range(8)]

    async def ask(*engines: Engine) -> list[object]:
        async with pool(*engines) as (client, _):
            return [merged(d) for d in await asyncio.gather(*(read_all(client.submit(s)) for s in submits))]

    assert asyncio.run(ask(caching(), caching(), caching())) == asyncio.run(ask(caching()))


def test_a_prompt_goes_where_its_prefix_is() -> None:
    async def use() -> None:
        async with pool(caching(), caching()) as (client, clients):
            for i in range(5):
                await read_all(client.submit(Submit(f"r{i}", [[*PROMPT, i]], {"max_tokens": 2})))
            hits = [one["prefix_hit_tokens"] for one in await client.ask("stats")]
            assert sorted(hits) == [0, 4 * 16] and client.stats["prefix_hit_tokens"] == sum(hits)
            assert sum(one.num_prompts for one in clients) == 0
            await client.ask("reset_prefix_cache")
            assert not client._router._held

    asyncio.run(use())


def test_facts_are_those_of_all() -> None:
    async def use() -> None:
        engines = [toy_engine(max_num_seqs=2, max_queue=3), toy_engine(max_num_seqs=4, max_queue=5)]
        async with pool(*engines, reports=False) as (client, clients):
            assert (client.hello.max_num_seqs, client.hello.max_queue) == (6, 8)
            assert client.state == "ready" and client.seconds_since_heard == 0
            assert client.stats["block_size"] == 4 and client.stats["blocks_total"] == 128
            assert len(client.stats_of_engines) == 2
            for number, used in enumerate((0.25, 0.75)):
                clients[number]._counters.update({"utilization": used, "prefix_hit_rate": 0.9, "draft_length": 3})
            assert client.stats["utilization"] == 0.5 and client.stats["draft_length"] == 3

    asyncio.run(use())


def test_an_engine_that_ends_loses_only_what_has_streamed() -> None:
    """The requests of a lost engine that were not answered yet are answered by another one."""

    async def use() -> None:
        slow = ToyProgram(vocab_size=258)
        async with pool(toy_engine(slow), caching()) as (client, clients):
            first, second = clients
            first.num_prompts, second.num_prompts = 0, 100  # so that both go to the first engine
            streamed = client.submit(Submit("s", [PROMPT], {"max_tokens": 200}))
            waiting = client.submit(Submit("w", [PROMPT], {"max_tokens": 9}, streams=False))
            await streamed.next()
            second.num_prompts = 0
            first._lose("the engine was lost in this test")
            first._set_state("dead")
            with pytest.raises(EngineDied):
                await read_all(streamed)
            assert len(merged(await read_all(waiting))[0, 0][1]) == 9
            assert client.state == "ready"
            second._set_state("dead")
            assert client.state == "dead"
            with pytest.raises(EngineUnavailable):
                client.submit(Submit("x", [PROMPT], {}))

    asyncio.run(use())


def test_a_cancelled_request_and_a_wrong_one_stay_where_they_are() -> None:
    async def use() -> None:
        async with pool(caching(), caching()) as (client, clients):
            with pytest.raises(RequestRefused, match="max_tokens"):
                await client.submit(Submit("bad", [PROMPT], {"max_tokens": -1})).next()
            stream = client.submit(Submit("c", [PROMPT], {"max_tokens": 400, "ignore_eos": True}))
            stream.cancel()
            assert (await read_all(stream))[-1].finish_reason == "cancelled"
            assert sum(one.num_prompts for one in clients) == 0

    asyncio.run(use())


def test_a_full_queue_is_tried_elsewhere() -> None:
    async def use() -> None:
        engines = [toy_engine(max_num_seqs=1, max_queue=2) for _ in range(2)]
        async with pool(*engines, reports=False) as (client, clients):
            clients[1].num_prompts = 100  # the router takes the first, whose queue is soon full
            submits = [Submit(f"q{i}", [PROMPT], {"max_tokens": 20, "ignore_eos": True}) for i in range(4)]
            found = await asyncio.gather(*(read_all(client.submit(s)) for s in submits))
            assert [len(merged(deltas)[0, 0][1]) for deltas in found] == [20] * 4

    asyncio.run(use())
