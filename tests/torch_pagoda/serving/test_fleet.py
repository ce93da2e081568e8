"""``pagoda fleet`` on a real Ray: two replicas of the small model, which are killed."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import psutil
import pytest

from torch_pagoda import LLM, SamplingParams

from served import MODEL, PATIENCE, Served

pytestmark = pytest.mark.fleet
pytest.importorskip("ray.serve", reason="a fleet needs Ray: pip install 'torch-pagoda[fleet]'")

PROMPTS = [f"{name}, which returns a list of all names that the module defines" for name in ("def", "class")]
TERMS: dict[str, Any] = {"model": "tiny", "max_tokens": 24, "temperature": 0}
LONG: dict[str, Any] = {**TERMS, "max_tokens": 300, "extra_body": {"ignore_eos": True}}
BACK_SECONDS = 180.0


@pytest.fixture(scope="module")
def fleet() -> Iterator[Served]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    sizes = ("--max-model-len", "512", "--block-size", "4", "--dtype", "float32", "--served-model-name", "tiny")
    served = Served("--replicas", "2", "-tp", "1", "--cpus-per-replica", "1", *sizes, command="fleet", port=port)
    yield served
    if served.process.poll() is None:
        served.stop()


def client_of(fleet: Served) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="x", timeout=PATIENCE, max_retries=0)


def processes(fleet: Served, mark: str) -> list[int]:
    """Ids of the processes of a fleet that have a text in their commands."""
    found = []
    for process in psutil.Process(fleet.process.pid).children(recursive=True):
        try:
            if mark in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.NoSuchProcess:
            continue
    return found


def replicas(fleet: Served) -> list[int]:
    return processes(fleet, "ServeReplica:pagoda:Engines")


def metric(fleet: Served, name: str) -> list[float]:
    text = fleet.text("/metrics")
    return [
        float(line.split()[-1])
        for line in text.splitlines()
        if line.startswith(f"{name}{{") or f"{name} " in line[: len(name) + 1]
    ]


async def plain(client: openai.AsyncOpenAI, number: int) -> str:
    answer = await client.completions.create(prompt=f"{PROMPTS[number % 2]} {number}", **LONG)
    assert answer.usage is not None and answer.usage.completion_tokens == 300
    return str(answer.choices[0].text)


async def streamed(client: openai.AsyncOpenAI, number: int, texts: list[str]) -> tuple[str, str | None]:
    """The text, whose parts are in ``texts`` as they come, and the error that it ended with."""
    try:
        stream = await client.completions.create(prompt=f"{PROMPTS[number % 2]} {number}", stream=True, **LONG)
        async for chunk in stream:
            texts += [choice.text for choice in chunk.choices]
    except openai.APIError as error:
        return "".join(texts), error.message
    return "".join(texts), None


async def ask_and_kill(fleet: Served, victim: int) -> tuple[list[str], list[tuple[str, str | None]]]:
    async with client_of(fleet) as client:
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
    while metric(fleet, "pagoda:engine_restarts_total") != [restarts] or fleet.get("/health") != {}:
        assert time.monotonic() < begin + BACK_SECONDS, fleet.errors[-3000:]
        time.sleep(0.5)
    return time.monotonic() - begin


def test_texts_are_those_of_one_engine_and_prefixes_are_hit(fleet: Served) -> None:
    async def ask() -> list[Any]:
        async with client_of(fleet) as client:
            return [await client.completions.create(prompt=prompt, **TERMS) for prompt in 2 * PROMPTS]

    found = asyncio.run(ask())
    llm = LLM(str(MODEL), verify="off", codegen="none", dtype="float32", max_model_len=512)
    alone = [llm.generate(p, SamplingParams(max_tokens=24, temperature=0))[0].outputs[0].text for p in PROMPTS]
    llm.shutdown()
    assert [answer.choices[0].text for answer in found] == 2 * alone
    assert all(answer.usage.prompt_tokens_details.cached_tokens for answer in found[2:])
    assert len(metric(fleet, "vllm:prefix_cache_hits_total")) == 2
    assert "<!doctype html>" in fleet.text("/")
    assert len(replicas(fleet)) == 2


@pytest.mark.parametrize("restarts", [1, 2])
def test_a_kill_loses_only_what_has_streamed(fleet: Served, restarts: int) -> None:
    """Of a replica, then of an engine process: the replica is unhealthy without it."""
    victims = processes(fleet, "cli.engine_process") if restarts == 2 else replicas(fleet)
    plains, streams = asyncio.run(ask_and_kill(fleet, victims[0]))
    whole = [(text, error) for text, error in streams if error is None]
    cut = [(text, error) for text, error in streams if error is not None]
    assert len(plains) == 8 and whole and cut
    assert {error for _, error in cut} == {"The engine ended while running this request."}
    assert fleet.errors.count("is sent to another engine") >= restarts
    seconds = wait_until_back(fleet, restarts)
    print(f"a replica was back after {seconds:.0f} s")
    again = asyncio.run(ask_again(fleet))
    assert again == plains
    for i, (text, _) in enumerate(streams):
        assert plains[i].startswith(text)


async def ask_again(fleet: Served) -> list[str]:
    async with client_of(fleet) as client:
        return await asyncio.gather(*(plain(client, i) for i in range(8)))


def test_a_signal_lets_what_is_under_way_end(fleet: Served) -> None:
    found: list[tuple[str, str | None]] = []

    async def ask() -> None:
        async with client_of(fleet) as client:
            found.append(await streamed(client, 0, []))

    everything = processes(fleet, "ray") + processes(fleet, "engine_process")
    thread = threading.Thread(target=lambda: asyncio.run(ask()))
    thread.start()
    while not sum(metric(fleet, "vllm:num_requests_running")):
        time.sleep(0.02)
    assert fleet.stop() == 0
    thread.join()
    assert found[0][1] is None and found[0][0]
    end = time.monotonic() + PATIENCE
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in everything):
        assert time.monotonic() < end
        time.sleep(0.2)
