"""After a scripted load every counter says what the client counted."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from prometheus_client.parser import text_string_to_metric_families


def tokens_of(text: str) -> tuple[int, int]:
    """Input's and output's tokens as an answer of any kind says them, whole or in events."""
    bodies = [json.loads(text)] if text.startswith("{") else [json.loads(e) for e in data_of(text)]
    (usage,) = [u for body in bodies if (u := body.get("usage") or body.get("response", {}).get("usage"))]
    sent = usage.get("prompt_tokens", usage.get("input_tokens")) + usage.get("cache_read_input_tokens", 0)
    return sent, usage.get("completion_tokens", usage.get("output_tokens"))


def data_of(text: str) -> list[str]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [line for line in lines if line != "[DONE]"]


def test_every_counter_is_the_clients_own(serve):
    messages = [{"role": "user", "content": "Hi"}]
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    load = [
        ("/v1/completions", {"prompt": ["a", "b c"], "max_tokens": 3, "n": 2}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 5, **options}),
        ("/v1/chat/completions", {"messages": messages, "max_tokens": 4}),
        ("/v1/chat/completions", {"messages": messages, "max_tokens": 7, "n": 3, **options}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 2}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 6, "stream": True}),
        ("/v1/messages", {"messages": messages, "max_tokens": 1}),
        ("/v1/messages", {"messages": messages, "max_tokens": 8, "stream": True}),
    ]
    refused = [("/v1/completions", {"prompt": 3}), ("/v1/messages", {}), ("/v1/chat/completions", {"model": "x"})]

    async def run():
        async with serve() as client:
            answers = [await client.post(path, json=body) for path, body in load]
            bad = [await client.post(path, json=body) for path, body in refused]
            assert {a.status_code for a in answers} == {200} and not {b.status_code for b in bad} - {400, 404}
            return [tokens_of(answer.text) for answer in answers], (await client.get("/metrics")).text

    counted, text = asyncio.run(run())
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples[sample.name] = samples.get(sample.name, 0) + sample.value
    completions = 2 * 2 + 1 + 1 + 3 + 1 + 1 + 1 + 1
    assert samples["vllm:request_generation_tokens_sum"] == sum(output for _, output in counted)
    assert samples["vllm:request_generation_tokens_count"] == completions
    assert samples["vllm:request_success_total"] == completions
    # The prompts of one request are counted together by the client.
    assert samples["vllm:request_prompt_tokens_sum"] == sum(sent for sent, _ in counted)
    assert samples["vllm:request_prompt_tokens_count"] == len(load) + 1 == samples["vllm:request_params_n_count"]
    assert samples["pagoda:http_ttft_seconds_count"] == len(load)
    tokens = sum(output for _, output in counted)
    assert samples["vllm:inter_token_latency_seconds_count"] == tokens - completions
    assert samples["http_requests_total"] == len(load) + len(refused)
    assert samples["pagoda:disconnects_total"] == 0
