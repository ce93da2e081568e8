"""Cost of structured output: compiling, masks, the kernels that apply them, and throughput beside free text.

    python benchmarks/structured_output.py [--part costs|throughput] [--vocabulary 151936] [--requests 32]
    python benchmarks/structured_output.py --part throughput --shape tinyllama-1.1b     # random weights of that shape

``costs`` are CPU times of one thread over a vocabulary of random words; ``throughput`` compares the generated tokens
per second of structured and free requests, which take turns on one model (``--model`` or ``--shape``).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from shapes import SHAPES, random_model
from synthetic_tokenizer import EOS, synthetic_tokenizer

from torch_pagoda import LLM, SamplingParams
from torch_pagoda.runtime.ops.structured import apply_bitmask_, masked_argmax
from torch_pagoda.runtime.structured.asked import read_structured_outputs
from torch_pagoda.runtime.structured.grammar import Grammar, compile_grammar
from torch_pagoda.runtime.structured.masks import MaskPool
from torch_pagoda.runtime.structured.vocabulary import Vocabulary, vocabulary_of

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mail": {"type": "string", "pattern": "^[a-z]{1,12}@[a-z]{1,12}\\.org$"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
        "kind": {"enum": ["customer", "supplier", "other"]},
    },
    "required": ["name", "age", "mail", "tags", "kind"],
    "additionalProperties": False,
}


def wide_schema(count: int) -> dict[str, Any]:
    """An object with so many properties, of five kinds."""
    kinds = list(PERSON["properties"].values())  # type: ignore[attr-defined]
    names = [f"field_{i}" for i in range(count)]
    properties = {name: kinds[i % len(kinds)] for i, name in enumerate(names)}
    return {"type": "object", "properties": properties, "required": names[::2], "additionalProperties": False}


def cpu_seconds(action: Callable[[], object]) -> float:
    """CPU time that a call takes."""
    started = time.process_time()
    action()
    return time.process_time() - started


def quantiles(seconds: list[float]) -> str:
    """Median, 99th percentile and maximum in µs."""
    ordered = sorted(seconds)
    high = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return " / ".join(f"{value * 1e6:.0f}" for value in (statistics.median(ordered), high, ordered[-1]))


def compile_seconds(vocabulary: Vocabulary, properties: int, count: int = 20) -> list[float]:
    """Each of so many schemas compiled once; they differ by a name."""
    found = []
    for i in range(count):
        schema = {**wide_schema(properties), "title": f"{properties}-{i}"}
        asked = read_structured_outputs({"json": schema})
        found.append(cpu_seconds(lambda asked=asked: compile_grammar(asked, vocabulary)))  # type: ignore[misc]
    return found


def walk(grammar: Grammar, steps: int, seed: int) -> tuple[list[float], list[float]]:
    """Follow random tokens through a grammar; returns the seconds of each mask and of each token taken."""
    rng, pool = random.Random(seed), MaskPool()
    masks: list[float] = []
    taken: list[float] = []
    state = grammar.start()
    for _ in range(steps):
        started = time.process_time()
        mask = pool.fill([state], [False])
        masks.append(time.process_time() - started)
        allowed = np.flatnonzero(np.unpackbits(mask[0].numpy().view(np.uint8), bitorder="little"))
        token = int(rng.choice(allowed))
        started = time.process_time()
        is_finished = state.consume(token)
        taken.append(time.process_time() - started)
        if is_finished:
            state = grammar.start()
    return masks, taken


def kernel_seconds(vocab: int, dtype: torch.dtype, density: float) -> dict[str, float]:
    """Seconds per row of both kernels, the least of several rounds, for a mask with that share of tokens."""
    rows = 8
    logits = torch.randn(rows, vocab).to(dtype)
    words = ((torch.rand(rows, -(-vocab // 32), 32) < density).long() << torch.arange(32)).sum(-1)
    bitmask = torch.where(words >= 2**31, words - 2**32, words).int()
    index = torch.arange(rows)

    def least(kernel: Callable[..., object]) -> float:
        calls = 20

        def run() -> None:
            for _ in range(calls):
                kernel(logits, bitmask, index)

        return min(cpu_seconds(run) for _ in range(15)) / calls / rows

    return {"masked_argmax": least(masked_argmax), "apply_bitmask_": least(apply_bitmask_)}


def print_costs(size: int, console: Console) -> None:
    """All costs at a vocabulary of ``size``."""
    torch.set_num_threads(1)
    tokenizer = synthetic_tokenizer(size)
    made: list[Vocabulary] = []
    seconds = cpu_seconds(lambda: made.append(vocabulary_of(tokenizer, size, [EOS])))
    console.print(f"vocabulary of {made[0].size} tokens: {seconds:.2f} s once; CPU time of one thread throughout")
    compile_seconds(made[0], 3, 1)
    table = Table("what", "p50 / p99 / max µs")
    for properties in (5, 20, 50):
        table.add_row(f"compile, {properties} properties", quantiles(compile_seconds(made[0], properties)))
    asks: dict[str, dict[str, Any]] = {
        "person": {"json": PERSON},
        "50 properties": {"json": wide_schema(50)},
        "any object": {"json_object": True},
        "regex": {"regex": "[A-Z][a-z]{2,20}( [A-Z][a-z]{2,20})*: [0-9]{1,5}"},
        "choice of 100": {"choice": [f"label {i} of many" for i in range(100)]},
    }
    for name, asked in asks.items():
        masks, taken = walk(compile_grammar(read_structured_outputs(asked), made[0]), 2000, seed=1)
        table.add_row(f"mask, {name}", quantiles(masks))
        table.add_row(f"token, {name}", quantiles(taken))
    for dtype in (torch.float32, torch.bfloat16):
        for density in (0.0, 0.001, 0.5, 1.0):
            for kernel, least in kernel_seconds(size, dtype, density).items():
                table.add_row(f"{kernel}, {dtype}, {density:g} of the tokens", f"{least * 1e6:.1f} a row, least")
    console.print(table)


def print_throughput(model: str, requests: int, rounds: int, console: Console) -> None:
    """Generated tokens per second, structured and free in turns, greedy, with the same number of tokens."""
    llm = LLM(model)
    asked = {"json": {"type": "array", "items": PERSON, "minItems": 50}}
    common = {"temperature": 0, "max_tokens": 128, "ignore_eos": True}
    kinds = {"free": SamplingParams(**common), "structured": SamplingParams(**common, structured_outputs=asked)}
    prompts = [f"{i}: write a list of people" for i in range(requests)]
    speeds: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(rounds + 1):
        for name, params in kinds.items():
            started = time.perf_counter()
            outputs = llm.generate(prompts, params)
            seconds = time.perf_counter() - started
            if turn:  # the first one compiles and warms
                speeds[name].append(sum(len(output.outputs[0].token_ids) for output in outputs) / seconds)
    free, structured = (statistics.median(speeds[name]) for name in ("free", "structured"))
    rounds_of = {name: [round(speed, 1) for speed in each] for name, each in speeds.items()}
    console.print(
        f"{requests} requests on {model}: free {free:.1f} tok/s, structured {structured:.1f} tok/s, "
        f"ratio {structured / free:.3f}; rounds {json.dumps(rounds_of)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["costs", "throughput"], default="costs")
    parser.add_argument("--vocabulary", type=int, default=151_936)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", default="examples/tiny-pydoc", help="folder or hub id, for the throughput")
    source.add_argument("--shape", choices=list(SHAPES), help="random weights and words, instead")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    console = Console()
    if options.part == "costs":
        print_costs(options.vocabulary, console)
    elif options.shape:
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / options.shape
            random_model(options.shape).save_pretrained(model)
            synthetic_tokenizer(SHAPES[options.shape]().vocab_size).save_pretrained(model)
            print_throughput(str(model), options.requests, options.rounds, console)
    else:
        print_throughput(options.model, options.requests, options.rounds, console)


if __name__ == "__main__":
    main()
