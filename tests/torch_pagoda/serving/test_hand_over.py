"""Engines that compute prompts for others, which read the blocks from a store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from stored_blocks import FINGERPRINT
from thread_client import ThreadClient

from torch_pagoda.runtime.block_store.folder import FolderStore
from torch_pagoda.serving.engine_process import hand_over
from torch_pagoda.serving.engine_process.client import EngineDied, EngineUnavailable
from torch_pagoda.serving.engine_process.pool_client import PoolClient
from torch_pagoda.serving.engine_process.wire import Submit

from toy_client import merged, read_all, toy_engine
from toy_program import ToyProgram

PROMPT = list(range(1, 42))
LENGTH = 10
"""Full blocks of four tokens that an engine can find of it."""


@dataclass
class Apart:
    """A pool of engines that read from a store, and those that write to it."""

    pool: PoolClient
    decode: list[ThreadClient]
    prefill: list[ThreadClient]

    async def ask(self, prompt: list[int], name: str = "r", **params: Any) -> tuple[tuple[object, ...], int]:
        """What is generated, and the cached tokens of the prompt."""
        given = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, **params}
        deltas = await read_all(self.pool.submit(Submit(name, [prompt], given)))
        return merged(deltas)[0, 0], deltas[-1].num_cached_tokens

    async def figures(self, name: str) -> list[float]:
        """Of the engines that generate, then of those that compute prompts."""
        found: list[float] = []
        for client in (*self.decode, *self.prefill):
            if client.state == "ready":
                found.append((await client.ask("stats"))[name])
        return found


@asynccontextmanager
async def apart(folder: Path, prefill: int = 1, **options: Any) -> AsyncIterator[Apart]:
    shared = {"kv_store": f"folder://{folder}", "fingerprint": FINGERPRINT, "swap_space": 1 << 20}

    def engine(**own: Any) -> ThreadClient:
        made = toy_engine(ToyProgram(vocab_size=258), enable_prefix_caching=True, **{**shared, **own})
        return ThreadClient(made, model="toy", reports_cache=True)

    first = [engine(kv_store_write="all", **options) for _ in range(prefill)]
    clients = [engine(kv_store_wait=30.0)]
    pool = PoolClient(clients, PoolClient(first))
    await pool.start()
    await pool.wait_ready()
    try:
        yield Apart(pool, clients, first)
    finally:
        await pool.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "kv"
    made.mkdir(mode=0o700)
    return made


async def alone(prompt: list[int]) -> tuple[object, ...]:
    client = ThreadClient(toy_engine(ToyProgram(vocab_size=258)), model="toy")
    await client.start()
    params = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    found = merged(await read_all(client.submit(Submit("r", [prompt], params))))[0, 0]
    await client.close()
    return found


def test_a_prompt_is_computed_by_one_engine_and_found_by_the_other(folder: Path) -> None:
    async def use() -> None:
        async with apart(folder) as engines:
            answer, cached = await engines.ask(PROMPT)
            assert (answer, cached) == (await alone(PROMPT), 4 * LENGTH)
            assert await engines.figures("prompt_tokens") == [len(PROMPT)] * 2
            assert await engines.figures("cached_tokens") == [4 * LENGTH, 0]
            assert await engines.figures("kv_store_hits") == [LENGTH, 0]
            assert sorted(engines.pool.stats_of_engines) == ["0", "prefill-0"]

    asyncio.run(use())


def test_what_an_engine_holds_or_no_cache_can_have_is_not_computed_apart(folder: Path) -> None:
    async def use() -> None:
        async with apart(folder) as engines:
            first = await engines.ask(PROMPT)
            assert await engines.ask(PROMPT) == first  # it lies in the engine that generates
            await engines.ask(PROMPT[:4])  # the last token is always computed: there is no block before it
            await engines.ask([9, *PROMPT], prompt_logprobs=1)
            assert (await engines.figures("finished_length"))[1] == 1
            await engines.ask([8, *PROMPT])
            assert (await engines.figures("finished_length"))[1] == 2

    asyncio.run(use())


def test_an_answer_of_stored_waits_for_the_store(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second engine is asked when every block is in the store, however slow that is."""
    slow, written = FolderStore.store, []

    def store(self: FolderStore, keys: Any, parts: Any) -> int:
        time.sleep(0.02)
        written.append(len(keys))
        return slow(self, keys, parts)

    monkeypatch.setattr(FolderStore, "store", store)

    async def use() -> None:
        async with apart(folder) as engines:
            assert (await engines.ask(PROMPT))[1] == 4 * LENGTH
            assert len(written) == LENGTH

    asyncio.run(use())


def test_without_the_first_engine_the_second_computes(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def use() -> None:
        async with apart(folder) as engines:
            expected = await alone(PROMPT)
            asking = asyncio.create_task(engines.ask(PROMPT))
            while not any(client.num_prompts for client in engines.prefill):
                await asyncio.sleep(0)
            engines.prefill[0]._lose("lost in this test")
            text, cached = await asking
            assert text == expected and cached <= 4 * LENGTH  # what it had stored by then
            assert "request r is computed without a prefill: lost in this test" in caplog.text
            assert (await engines.ask([7, *PROMPT]))[1] == 0  # nobody is asked any more
            assert caplog.text.count("without a prefill") == 1

    asyncio.run(use())


def test_another_engine_computes_the_prompt_of_one_that_is_lost(folder: Path) -> None:
    async def use() -> None:
        async with apart(folder, prefill=2) as engines:
            asking = asyncio.create_task(engines.ask(PROMPT))
            while not any(client.num_prompts for client in engines.prefill):
                await asyncio.sleep(0)
            busy = next(client for client in engines.prefill if client.num_prompts)
            busy._lose("lost in this test")
            assert await asking == (await alone(PROMPT), 4 * LENGTH)

    asyncio.run(use())


def test_an_engine_that_refuses_costs_nothing(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def use() -> None:
        async with apart(folder, max_model_len=8) as engines:
            assert await engines.ask(PROMPT) == (await alone(PROMPT), 0)
            assert "request r is computed without a prefill" in caplog.text and "max_model_len" in caplog.text

    asyncio.run(use())


def test_an_engine_that_is_not_heard_is_not_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hand_over, "_PREFILL_SECONDS", 0.05)

    async def use() -> None:
        async with apart(folder) as engines:
            monkeypatch.setattr(engines.prefill[0], "_take_step", lambda step: None)
            assert (await engines.ask(PROMPT))[0] == await alone(PROMPT)
            assert "request r is computed without a prefill: it takes more than 0.05 s" in caplog.text

    asyncio.run(use())


def test_a_store_that_takes_nothing_costs_hits_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FolderStore, "store", lambda self, keys, parts: 0)

    async def use() -> None:
        async with apart(folder) as engines:
            assert await engines.ask(PROMPT) == (await alone(PROMPT), 0)

    asyncio.run(use())


def test_a_request_that_is_cancelled_meanwhile_ends_so(folder: Path) -> None:
    async def use() -> None:
        async with apart(folder) as engines:
            for wait in (0, 1):
                stream = engines.pool.submit(Submit(f"c{wait}", [[wait, *PROMPT]], {"max_tokens": 90}))
                for _ in range(wait):
                    await asyncio.sleep(0)
                stream.cancel()
                assert (await read_all(stream))[-1].finish_reason == "cancelled"
            assert [client.num_prompts for client in (*engines.decode, *engines.prefill)] == [0, 0]

    asyncio.run(use())


def test_a_cancellation_reaches_the_engine_that_computes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use() -> None:
        async with apart(folder) as engines:
            cancelled: list[str] = []
            monkeypatch.setattr(engines.prefill[0], "_take_step", lambda step: None)
            monkeypatch.setattr(engines.prefill[0], "_cancel", cancelled.append)
            stream = engines.pool.submit(Submit("c", [PROMPT], {}))
            while not engines.prefill[0].num_prompts:
                await asyncio.sleep(0)
            stream.cancel()
            assert cancelled == ["c"]

    asyncio.run(use())


def test_a_deadline_counts_from_the_submission(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use() -> None:
        async with apart(folder) as engines:
            monkeypatch.setattr(hand_over, "_PREFILL_SECONDS", 0.2)
            monkeypatch.setattr(engines.prefill[0], "_take_step", lambda step: None)
            submit, submitted = engines.decode[0].submit, list[Submit]()
            monkeypatch.setattr(engines.decode[0], "submit", lambda one: submitted.append(one) or submit(one))
            await read_all(engines.pool.submit(Submit("d", [PROMPT], {"max_tokens": 2}, {"deadline": 30.0})))
            assert submitted[0].options["deadline"] <= 30 - 0.2

    asyncio.run(use())


def test_an_engine_that_ends_meanwhile_ends_the_request(folder: Path) -> None:
    async def use() -> None:
        async with apart(folder) as engines:
            stream = engines.pool.submit(Submit("r", [PROMPT], {}))
            engines.decode[0]._lose("lost in this test")
            with pytest.raises(EngineDied, match="no engine is ready"):
                await stream.next()
            with pytest.raises(EngineUnavailable):
                engines.pool.submit(Submit("x", [PROMPT], {}))

    asyncio.run(use())
