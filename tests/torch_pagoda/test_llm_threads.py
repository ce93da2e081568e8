"""An ``LLM`` called by several threads."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch_pagoda as pagoda

PROMPTS: list[Any] = ["the cat", [5, 9, 11, 40, 41, 42, 7], "one two three is returned if there is none", [3]]
PARAMS = pagoda.SamplingParams(max_tokens=12, temperature=0.8, seed=3, stop=["zzz"])


def test_threads_get_what_one_thread_gets(checkpoint: Path, fast: dict[str, Any]) -> None:
    llm = pagoda.LLM(checkpoint, **fast)
    alone = [(output.outputs[0].token_ids, output.outputs[0].text) for output in llm.generate(PROMPTS, PARAMS)]

    def generate() -> list[list[tuple[list[int], str]]]:
        return [
            [(output.outputs[0].token_ids, output.outputs[0].text) for output in llm.generate(PROMPTS, PARAMS)]
            for _ in range(4)
        ]

    def stream() -> list[tuple[list[int], str]]:
        results = []
        for prompt in PROMPTS:
            pieces = list(llm.stream(prompt, PARAMS))
            tokens = [token for piece in pieces for token in piece.token_ids]
            results.append((tokens, "".join(piece.text for piece in pieces)))
        return results

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # what is not guarded breaks at once
    try:
        with ThreadPoolExecutor(3) as pool:
            first, second, streamed = pool.submit(generate), pool.submit(generate), pool.submit(stream)
    finally:
        sys.setswitchinterval(before)
    assert first.result() == second.result() == [alone] * 4
    assert streamed.result() == alone
