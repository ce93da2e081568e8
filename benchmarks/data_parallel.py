"""Throughput of ``pagoda serve -dp 2`` beside two servers and beside ``-tp 2``, one thread for each engine or rank.

    python benchmarks/data_parallel.py                       # TinyLlama's shape in bfloat16, random weights
    python benchmarks/data_parallel.py --rounds 5 --out results

All servers run at once and are asked in turn: 32 requests of mixed lengths together, 16 to each of the two servers. A
rate is all generated tokens by the time until the last answer; figures are medians of the rounds, and of each round's
ratios to the two servers.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path

from fleet import Server
from report import conditions, markdown_table, save
from server_client import ask
from shapes import OUTPUT_LENGTHS, PROMPT_LENGTHS, SHAPES, Prompts, random_model

SIDES = {"2 servers": [(), ()], "-dp 2": [("-dp", "2")], "-tp 2": [("-tp", "2")]}
"""Side → the options of its servers."""


async def seconds(servers: list[Server], prompts: list[list[int]]) -> float:
    """Ask all servers at once, each for its share of the prompts, until the last one has answered."""
    bodies = [
        {"model": "model", "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        for prompt, count in zip(prompts, OUTPUT_LENGTHS, strict=True)
    ]
    begin = time.perf_counter()
    answers = await asyncio.gather(*(ask(servers[i % len(servers)].port, body) for i, body in enumerate(bodies)))
    took = time.perf_counter() - begin
    assert [answer.tokens for answer in answers] == OUTPUT_LENGTHS
    return took


def main() -> None:
    """Measure all sides in turn, and print their rates and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tinyllama-1.1b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, metavar="DIR", help="write results as JSON and Markdown here")
    given = parser.parse_args()
    prompts = Prompts()
    rates: dict[str, list[float]] = {name: [] for name in SIDES}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        random_model(given.shape).save_pretrained(folder)
        running = {
            name: [stack.enter_context(closing(Server(Path(folder), "serve", *options))) for options in side]
            for name, side in SIDES.items()
        }
        for turn in range(given.rounds + 1):
            for name in list(SIDES)[:: 1 if turn % 2 else -1]:
                took = asyncio.run(seconds(running[name], prompts(PROMPT_LENGTHS)))
                if turn:  # the first one warms up
                    rates[name].append(sum(OUTPUT_LENGTHS) / took)
    base = next(iter(rates.values()))
    rows: list[list[object]] = []
    for name, found in rates.items():
        ratios = sorted(rate / other for rate, other in zip(found, base, strict=True))
        rows.append([name, statistics.median(found), statistics.median(ratios), ratios[0], ratios[-1]])
    table = markdown_table(["", "tok/s", "ratio", "least", "most"], rows)
    print(table)
    save(given.out, "data_parallel", {**conditions(1), "rates": rates}, table)


if __name__ == "__main__":
    main()
