"""Fleets on a real Ray: their metrics, and requests of the ``openai`` client."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai

from torch_pagoda import LLM, SamplingParams

from served import MODEL, PATIENCE

PROMPTS = [f"{name}, which returns a list of all names that the module defines" for name in ("def", "class")]
TERMS: dict[str, Any] = {"model": "tiny", "max_tokens": 24, "temperature": 0}
LONG: dict[str, Any] = {**TERMS, "max_tokens": 300, "extra_body": {"ignore_eos": True}}
SIZES = ("--max-model-len", "512", "--block-size", "4", "--dtype", "float32", "--served-model-name", "tiny")


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", timeout=PATIENCE, max_retries=0)


def metric(text: str, name: str) -> dict[str, float]:
    """The samples of a metric by their labels, as ``/metrics`` writes these."""
    found = {}
    for line in text.splitlines():
        if line.startswith((f"{name}{{", f"{name} ")):
            labels, value = line[len(name) :].rsplit(" ", 1)
            found[labels] = float(value)
    return found


async def plain(client: openai.AsyncOpenAI, number: int, tokens: int = 300) -> str:
    terms = {**LONG, "max_tokens": tokens}
    answer = await client.completions.create(prompt=f"{PROMPTS[number % 2]} {number}", **terms)
    assert answer.usage is not None and answer.usage.completion_tokens == tokens
    return str(answer.choices[0].text)


async def streamed(client: openai.AsyncOpenAI, number: int, texts: list[str]) -> tuple[str, str | None]:
    """The text, whose parts are in ``texts`` as they come, and the error that it ended with."""
    try:
        stream = await client.completions.create(prompt=f"{PROMPTS[number % 2]} {number}", stream=True, **LONG)
        async for chunk in stream:
            texts += [choice.text for choice in chunk.choices]
    except (openai.APIError, httpx.HTTPError) as error:
        return "".join(texts), str(getattr(error, "message", error))
    return "".join(texts), None


async def ask_each(url: str, prompts: list[str]) -> list[tuple[str, int]]:
    """The texts, one after the other, and the cached tokens of their prompts."""
    found = []
    async with client_of(url) as client:
        for prompt in prompts:
            answer = await client.completions.create(prompt=prompt, **TERMS)
            assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
            found.append((str(answer.choices[0].text), answer.usage.prompt_tokens_details.cached_tokens or 0))
    return found


async def ask_many(url: str, count: int, tokens: int = 300) -> list[str]:
    """The texts of so many requests at once."""
    async with client_of(url) as client:
        return await asyncio.gather(*(plain(client, i, tokens) for i in range(count)))


def alone(prompts: list[str]) -> list[str]:
    """What one engine answers."""
    llm = LLM(str(MODEL), verify="off", codegen="none", dtype="float32", max_model_len=512)
    params = SamplingParams(max_tokens=24, temperature=0)
    texts = [str(output.outputs[0].text) for output in llm.generate(prompts, params)]
    llm.shutdown()
    return texts
