"""Throughput of several ranks with one thread each beside one process with as many threads, taking turns.

    python benchmarks/rank_throughput.py                     # TinyLlama's shape in bfloat16, 2 ranks
    python benchmarks/rank_throughput.py --ranks 4 --rounds 5 --out results

Random weights, written as a checkpoint. Decode is one request, prefill a prompt of 1024, and the third phase 32
requests of mixed lengths. A figure is the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from report import conditions, markdown_table, save
from shapes import (
    DECODE_PROMPT,
    DECODE_TOKENS,
    OUTPUT_LENGTHS,
    PREFILL_PROMPT,
    PROMPT_LENGTHS,
    SHAPES,
    Prompts,
    random_model,
)

PHASES: dict[str, tuple[list[int], list[int]]] = {
    "first": ([DECODE_PROMPT], [1]),
    "decode": ([DECODE_PROMPT], [DECODE_TOKENS]),
    "prefill": ([PREFILL_PROMPT], [1]),
    "32 requests": (PROMPT_LENGTHS, OUTPUT_LENGTHS),
}
"""Phase → lengths of its prompts, and of what is generated."""


def serve(folder: str, ranks: int) -> None:
    """Load a model and run the phases that stdin names, with fresh prompts; their seconds go to stdout."""
    from torch_pagoda import LLM, SamplingParams

    llm = LLM(folder, tensor_parallel_size=ranks)
    prompts = Prompts()
    print(json.dumps({"ready": llm.compile_report.seconds}), flush=True)
    for line in sys.stdin:
        lengths, outputs = PHASES[line.strip()]
        params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in outputs]
        given = prompts(lengths)
        start = time.perf_counter()
        llm.generate(given, params)
        print(json.dumps(time.perf_counter() - start), flush=True)
    llm.shutdown()


class Side:
    """A process that serves the model.

    Args:
        folder: the checkpoint.
        ranks: processes that hold it together.
        threads: of each.
    """

    def __init__(self, folder: str, ranks: int, threads: int) -> None:
        command = [sys.executable, __file__, "--serve", folder, "--ranks", str(ranks)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, env=environment, **pipes)
        self._answer()

    def seconds(self, phase: str) -> float:
        """Run a phase."""
        assert self._process.stdin is not None
        print(phase, file=self._process.stdin, flush=True)
        return float(self._answer())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the process ended with status {self._process.wait()}")
        return json.loads(line)


def rates(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Tokens per second of each phase."""
    typical = {phase: statistics.median(values) for phase, values in seconds.items()}
    return {
        "decode": (DECODE_TOKENS - 1) / (typical["decode"] - typical["first"]),
        "prefill": PREFILL_PROMPT / typical["prefill"],
        "32 requests": sum(OUTPUT_LENGTHS) / typical["32 requests"],
    }


def main() -> None:
    """Measure both sides in turn, and print their rates and ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="tinyllama-1.1b")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, metavar="DIR", help="write results as JSON and Markdown here")
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.ranks)
        return
    with tempfile.TemporaryDirectory() as folder:
        random_model(args.shape).save_pretrained(folder)
        sides = {
            f"{args.ranks} ranks × 1 thread": (args.ranks, 1),
            f"1 process × {args.ranks} threads": (1, args.ranks),
        }
        running = {name: Side(folder, *counts) for name, counts in sides.items()}
        seconds: dict[str, dict[str, list[float]]] = {name: {phase: [] for phase in PHASES} for name in sides}
        for turn in range(args.rounds):
            for phase in PHASES:
                for name in list(running)[:: 1 if turn % 2 else -1]:
                    seconds[name][phase].append(running[name].seconds(phase))
        for side in running.values():
            side.close()
    found = {name: rates(values) for name, values in seconds.items()}
    several, one = found.values()
    rows = [[phase, several[phase], one[phase], several[phase] / one[phase]] for phase in several]
    table = markdown_table(["tok/s", *found, "ratio"], rows)
    print(table)
    save(args.out, "rank_throughput", {"conditions": conditions(args.ranks), "rates": found}, table)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
