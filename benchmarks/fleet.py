"""Several engines behind one address beside servers of their own, taking turns: ``pagoda serve -dp``.

    python benchmarks/fleet.py                               # TinyLlama's shape in bfloat16, 2 engines
    python benchmarks/fleet.py --rounds 5 --out results

Random weights, written as a checkpoint. A round is 32 requests of mixed lengths, half of which begin with one of
eight prefixes; clients of two servers alternate between them. A figure is the median of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import cycle
from pathlib import Path

import httpx
from report import conditions, markdown_table, save
from shapes import OUTPUT_LENGTHS, PROMPT_LENGTHS, SHAPES, random_model

PREFIXES, PREFIX_TOKENS = 8, 256


class Server:
    """A server in a process, with an equal share of the processors where it is one of several.

    Args:
        folder: the checkpoint.
        options: of ``pagoda serve``.
        processors: that it keeps to.
    """

    def __init__(self, folder: str, options: list[str], processors: set[int]) -> None:
        command = [sys.executable, "-c", "from torch_pagoda.cli import main; main()", "serve", folder, "--port", "0"]
        self._process = subprocess.Popen(
            [*command, "--verify", "off", *options],
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, processors),
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        found = re.search(r" on (http://\S+)", line)
        if found is None:
            raise SystemExit(f"pagoda serve ended with status {self._process.wait()}")
        self.url = found[1]

    def close(self) -> None:
        """End the server."""
        self._process.terminate()
        self._process.wait(60)


async def ask(urls: list[str], seed: int, vocab_size: int) -> float:
    """Send the requests of one round; returns the seconds until all have ended."""
    rng = random.Random(seed)
    fixed = random.Random(0)
    prefixes = [[fixed.randrange(3, vocab_size) for _ in range(PREFIX_TOKENS)] for _ in range(PREFIXES)]

    async def one(client: httpx.AsyncClient, url: str, length: int, tokens: int) -> None:
        begin = rng.choice(prefixes) if rng.random() < 0.5 else []
        prompt = [*begin, *(rng.randrange(3, vocab_size) for _ in range(length))]
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = await client.post(f"{url}/v1/completions", json=body)
        answer.raise_for_status()

    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:
        start = time.perf_counter()
        requests = zip(cycle(urls), PROMPT_LENGTHS, OUTPUT_LENGTHS, strict=False)
        await asyncio.gather(*(one(client, *request) for request in requests))
        return time.perf_counter() - start


def main() -> None:
    """Measure the sides in turn, and print their rates and ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="tinyllama-1.1b")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, metavar="DIR", help="write results as JSON and Markdown here")
    args = parser.parse_args()
    count, everything = args.engines, sorted(os.sched_getaffinity(0))
    shares = [set(everything[i::count]) for i in range(count)]
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(args.shape)
        vocab_size = model.config.vocab_size
        model.save_pretrained(folder)
        del model
        Server(folder, [], set(everything)).close()  # compiles what the others take from the cache
        sides = {
            f"-dp {count}": [Server(folder, ["-dp", str(count)], set(everything))],
            f"{count} servers": [Server(folder, [], share) for share in shares],
            f"-tp {count}": [Server(folder, ["-tp", str(count)], set(everything))],
            "1 engine": [Server(folder, [], set(everything))],
        }
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(args.rounds + 1):
            for name, servers in list(sides.items())[:: 1 if turn % 2 else -1]:
                took = asyncio.run(ask([server.url for server in servers], turn, vocab_size))
                if turn:  # the first warms up
                    seconds[name].append(took)
        for servers in sides.values():
            for server in servers:
                server.close()
    rates = {name: sum(OUTPUT_LENGTHS) / statistics.median(values) for name, values in seconds.items()}
    reference = rates[f"{count} servers"]
    table = markdown_table(["", "tok/s", "ratio"], [[name, rate, rate / reference] for name, rate in rates.items()])
    print(table)
    save(args.out, "fleet", {"conditions": conditions(count), "rates": rates}, table)


if __name__ == "__main__":
    main()
