"""``pagoda serve -dp 2``: two engine processes behind one address."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import openai
import psutil
import pytest

from torch_pagoda import LLM, SamplingParams

from served import MODEL, PATIENCE, Served

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="each engine needs a processor")

PROMPTS = [
    f"{name}, which returns a list of all names that the module defines" for name in ("def", "class", "import")
]
TERMS: dict[str, Any] = {"model": "tiny", "max_tokens": 24, "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    # In float32: with half precision, a prompt whose beginning is cached rounds otherwise.
    sizes = ("--max-model-len", "512", "--block-size", "4", "--dtype", "float32")
    served = Served("-dp", "2", "--served-model-name", "tiny", *sizes)
    yield served
    served.kill()


def engines(server: Served) -> list[int]:
    children = psutil.Process(server.process.pid).children()
    return [child.pid for child in children if "torch_pagoda.cli.engine_process" in child.cmdline()]


def metric(server: Served, name: str) -> list[float]:
    text = server.text("/metrics")
    return [float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"vllm:{name}{{engine=")]


def test_texts_are_those_of_one_engine_and_prefixes_are_hit(server: Served) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", timeout=PATIENCE, max_retries=0) as client:
        found = [client.completions.create(prompt=prompt, **TERMS) for prompt in 2 * PROMPTS]
    texts = [answer.choices[0].text for answer in found]
    llm = LLM(str(MODEL), verify="off", codegen="none", dtype="float32", max_model_len=512)
    alone = [llm.generate(p, SamplingParams(max_tokens=24, temperature=0))[0].outputs[0].text for p in PROMPTS]
    llm.shutdown()
    assert texts == 2 * alone
    assert all(answer.usage.prompt_tokens_details.cached_tokens for answer in found[3:])  # type: ignore[union-attr]
    processors = [set(os.sched_getaffinity(pid)) for pid in engines(server)]
    assert len(processors) == 2 and not processors[0] & processors[1]
    assert len(metric(server, "prefix_cache_hits_total")) == 2


def test_a_killed_engine_loses_no_request_that_has_streamed_nothing(server: Served) -> None:
    async def ask() -> list[Any]:
        terms = {**TERMS, "max_tokens": 400, "extra_body": {"ignore_eos": True}}
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", timeout=PATIENCE, max_retries=0) as c:
            tasks = [asyncio.create_task(c.completions.create(prompt=PROMPTS[i % 3], **terms)) for i in range(12)]
            while sum(metric(server, "num_requests_running")) < 6:
                assert not all(task.done() for task in tasks)
                await asyncio.sleep(0.02)
            os.kill(engines(server)[0], signal.SIGKILL)
            return await asyncio.gather(*tasks)

    found = asyncio.run(ask())
    assert {answer.usage.completion_tokens for answer in found} == {400}
    assert len({answer.choices[0].text for answer in found}) == 3
