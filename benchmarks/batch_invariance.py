"""What batch invariance costs: prefill and decode with `batch_invariant=True` beside the default, in turns.

python benchmarks/batch_invariance.py MODEL --dtype bfloat16 --rounds 3
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import torch_pagoda as pagoda

SHAPES = {"decode 1": (1, 16, 64), "decode 16": (16, 16, 64), "prefill 1024": (1, 1024, 1)}
"""Name → requests, tokens of each prompt, tokens of each answer."""


def seconds(llm: pagoda.LLM, requests: int, length: int, answer: int, seed: int) -> float:
    """Of one batch of random prompts, none of which was seen before."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(3, 200, (requests, length), generator=generator).tolist()
    start = time.perf_counter()
    llm.generate(prompts, pagoda.SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True))
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="examples/tiny-pydoc")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    sides = {
        name: pagoda.LLM(given.model, dtype=given.dtype, batch_invariant=name == "invariant")
        for name in ("default", "invariant")
    }
    print(f"{given.model}, {given.dtype}, {torch.get_num_threads()} threads: median seconds of {given.rounds} rounds")
    for shape, (requests, length, answer) in SHAPES.items():
        length = min(length, sides["default"].max_model_len - answer)
        found: dict[str, list[float]] = {name: [] for name in sides}
        for round_ in range(given.rounds + 1):  # the first one warms up
            for name, llm in sides.items():
                took = seconds(llm, requests, length, answer, round_)
                if round_:
                    found[name].append(took)
        default, invariant = (statistics.median(found[name]) for name in ("default", "invariant"))
        print(
            f"{shape:14} default {default:8.3f}  invariant {invariant:8.3f}  {invariant / default:.2f} times as long",
            flush=True,
        )


if __name__ == "__main__":
    main()
