"""Prompts computed by a replica of their own, beside replicas that do both: what long prompts cost those who stream.

    python benchmarks/prefill_apart.py                              # a random Llama of 88 million parameters
    python benchmarks/prefill_apart.py --model DIR --streams 8 --every 4 --store mooncake://HOST:50051

Two fleets on this host, each of two replicas with a thread each: "mixed" has two alike, "apart" one that computes
prompts (``--prefill-replicas 1``) and one that generates, over a store of blocks. They take turns. In a turn some
clients stream, one request of a prompt shorter than a block after the other, while long prompts, all different, come
at a steady pace. Choose one that a single replica keeps up with: prompts wait for one another, and that counts.

- between tokens: time between two events of a stream; how much of it is in gaps that a reader notices.
- first token: time from a long prompt to its first token.
- tokens per second: of all answers.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import openai
from fleet import Server
from random_llama import VOCAB_SIZE, random_llama
from report import add_arguments, conditions, markdown_table, save
from synthetic_tokenizer import EOS, synthetic_tokenizer

SHORT = 12
"""Tokens of a stream's prompt, below a block: every replica that generates computes them itself."""
STREAM = 512
"""Tokens of its answer."""
ANSWER = 16
"""Tokens of the answer to a long prompt."""
STALL = 0.5
"""Seconds between two tokens that a reader notices."""
SIDES = {
    "mixed": ("--replicas", "2"),
    "apart": ("--replicas", "1", "--prefill-replicas", "1"),
}


@dataclass
class Turns:
    """What was measured of one fleet.

    Attributes:
        gaps: seconds between two events of a stream.
        firsts: seconds to the first token of long prompts.
        tokens: all.
        seconds: of the turns.
        cached: tokens of long prompts that came from a cache or the store.
    """

    gaps: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    cached: int = 0

    def figures(self) -> dict[str, float]:
        """By name; times in milliseconds."""
        stalled = sum(gap for gap in self.gaps if gap > STALL)
        return {
            "between tokens, median (ms)": 1e3 * statistics.median(self.gaps),
            "between tokens, p99 (ms)": 1e3 * statistics.quantiles(self.gaps, n=100)[-1],
            "between tokens, most (ms)": 1e3 * max(self.gaps),
            f"share of the time that a stream stands still for {STALL} s and more": stalled / sum(self.gaps),
            "first token of a long prompt, median (ms)": 1e3 * statistics.median(self.firsts),
            "first token of a long prompt, most (ms)": 1e3 * max(self.firsts),
            "tokens per s": self.tokens / self.seconds,
        }


class Clients:
    """Streams and long prompts of one turn.

    Args:
        client: of the fleet.
        arguments: of the program.
        draw: makes the prompts, no two of which begin alike.
        turns: gets what is measured.
    """

    def __init__(
        self, client: openai.AsyncOpenAI, arguments: argparse.Namespace, draw: random.Random, turns: Turns
    ) -> None:
        self._client, self._arguments, self._draw, self._turns = client, arguments, draw, turns
        self._counts = False

    async def run(self, seconds: float) -> None:
        """Stream for so long; the long prompts that have begun meanwhile are answered to their ends."""
        given = self._arguments
        streams = [asyncio.create_task(self._stream()) for _ in range(given.streams)]
        await asyncio.sleep(given.settle)
        self._counts, begin = True, time.perf_counter()
        await asyncio.gather(*(self._long(i * given.every) for i in range(max(1, int(seconds / given.every)))))
        self._counts = False
        self._turns.seconds += time.perf_counter() - begin
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)

    async def _stream(self) -> None:
        """Requests one after the other."""
        while True:
            last = None
            async for count in self._events(SHORT, STREAM):
                now = time.perf_counter()
                if last is not None and count and self._counts:
                    self._turns.gaps.append(now - last)
                last = now

    async def _long(self, wait: float) -> None:
        await asyncio.sleep(wait)
        begin, is_first = time.perf_counter(), True
        async for count in self._events(self._arguments.prompt, ANSWER):
            if is_first and count:
                self._turns.firsts.append(time.perf_counter() - begin)
                is_first = False

    async def _events(self, length: int, tokens: int) -> AsyncIterator[int]:
        """The number of tokens in each event of a request."""
        prompt = [self._draw.randrange(EOS + 1, VOCAB_SIZE) for _ in range(length)]
        answer = await self._client.completions.create(
            model="model",
            prompt=prompt,
            max_tokens=tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        async for chunk in answer:
            count = sum(len(getattr(choice, "token_ids", None) or []) for choice in chunk.choices)
            self._turns.tokens += count * self._counts
            yield count
            if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None and length > SHORT:
                self._turns.cached += chunk.usage.prompt_tokens_details.cached_tokens or 0


async def turn(
    server: Server, arguments: argparse.Namespace, draw: random.Random, turns: Turns, seconds: float
) -> None:
    """One turn of a fleet."""
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", timeout=600, max_retries=0) as client:
        await Clients(client, arguments, draw, turns).run(seconds)


def main() -> None:
    """Run all and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--model", type=Path, help="checkpoint folder with a tokenizer; else a random Llama")
    parser.add_argument("--layers", type=int, default=12, help="of the random Llama")
    parser.add_argument("--store", help="address; else a folder")
    parser.add_argument("--streams", type=int, default=4, help="at once")
    parser.add_argument("--prompt", type=int, default=2000, help="tokens of a long prompt")
    parser.add_argument("--every", type=float, default=14.0, help="seconds between two long prompts")
    parser.add_argument("--seconds", type=float, default=42.0, help="of a turn")
    parser.add_argument("--settle", type=float, default=3.0, help="seconds of streams before a turn counts")
    parser.add_argument("--turns", type=int, default=2, help="of each fleet")
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # leaves by closing the fleets
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if arguments.model is None:
            arguments.model = folder / "model"
            random_llama(layers=arguments.layers).save_pretrained(arguments.model)
            synthetic_tokenizer(VOCAB_SIZE).save_pretrained(arguments.model)
        store = arguments.store or f"folder://{folder}/kv"
        servers, measured = {}, {}
        for name, options in SIDES.items():
            own = ("--kv-store", store) if name == "apart" else ()
            servers[name] = Server(arguments, "fleet", *options, "--cpus-per-replica", "1", *own)
            stack.callback(servers[name].close)
            measured[name] = Turns()
        for name in SIDES:
            asyncio.run(turn(servers[name], arguments, draw, Turns(), 0.0))  # warms up
        for number in range(arguments.turns):
            for name in list(SIDES)[:: -1 if number % 2 else 1]:
                asyncio.run(turn(servers[name], arguments, draw, measured[name], arguments.seconds))
            report(arguments, measured)


def report(arguments: argparse.Namespace, measured: dict[str, Turns]) -> None:
    """Print the figures so far, and their ratios."""
    mixed, apart = (measured[name].figures() for name in SIDES)
    rows = [[name, mixed[name], apart[name], apart[name] / mixed[name] if mixed[name] else ""] for name in mixed]
    count, cached = len(measured["apart"].firsts), measured["apart"].cached
    table = (
        markdown_table(["", *SIDES, "apart / mixed"], rows)
        + f"\n{count} prompts of {arguments.prompt} tokens, of which {cached / count:.0f} came from the store; "
        + " and ".join(f"{len(turns.gaps)} events of streams {name}" for name, turns in measured.items())
        + ".\n"
    )
    print(table, flush=True)
    save(arguments.out, "prefill_apart", {**conditions(1), "mixed": mixed, "apart": apart}, table)


if __name__ == "__main__":
    main()
