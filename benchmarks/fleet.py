"""``pagoda fleet`` beside ``pagoda serve -dp``: CPU time and memory of what is not the engines; a replica is killed.

    python benchmarks/fleet.py                                     # examples/tiny-pydoc: the worst case for a front
    python benchmarks/fleet.py --model DIR --requests 200 --tokens 64

Both have the same engines and answer the same streams of the ``openai`` client, whose own time is not counted.

- cost: CPU seconds per token of all processes but the engines, without their start.
- memory: bytes that belong to these processes alone (USS), before and after the requests.
- kill: requests, every second one streamed, while one replica is SIGKILLed: how many failed that had streamed nothing
  (none may), how many streams ended with an error, and the seconds until as many replicas take requests as before.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import openai
import psutil
from report import add_arguments, conditions, markdown_table, save

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "tiny-pydoc"
ENGINE = "torch_pagoda.cli.engine_process"
REPLICA = "ServeReplica:pagoda:Engines"
BACK_SECONDS = 300.0


class Server:
    """A server on a free port; one thread for each engine or rank.

    Args:
        model: the checkpoint.
        command: of ``pagoda``.
        options: of the command.

    Attributes:
        port: of its API.
        url: of its API.
    """

    def __init__(self, model: Path, command: str, *options: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        argv = [sys.executable, "-m", "torch_pagoda", command, str(model), "--port", str(self.port), *options]
        argv += ["--served-model-name", "model", "--log-requests", "none", "--max-num-seqs", "32"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("pagoda: serving"):
                return
        raise SystemExit(f"pagoda {command} did not start")

    def processes(self, mark: str = "") -> Iterator[psutil.Process]:
        """Its processes that have a text in their commands."""
        parent = psutil.Process(self._process.pid)
        for process in (parent, *parent.children(recursive=True)):
            with suppress(psutil.Error):
                if mark in " ".join(process.cmdline()):
                    yield process

    def others(self) -> Iterator[psutil.Process]:
        """Its processes that are no engines."""
        for process in self.processes():
            with suppress(psutil.Error):
                if ENGINE not in process.cmdline():
                    yield process

    def cpu_seconds(self) -> float:
        """Of all processes but the engines."""
        return sum(sum(process.cpu_times()[:2]) for process in self.others())

    def memory_mb(self) -> float:
        """Of all processes but the engines, what belongs to each alone."""
        return sum(process.memory_full_info().uss for process in self.others()) / 2**20

    def restarts(self) -> int:
        """Engines that were started after the first ones."""
        with urllib.request.urlopen(f"{self.url}/metrics") as response:
            text = response.read().decode()
        found = re.search(r"^pagoda:engine_restarts_total (\S+)$", text, re.MULTILINE)
        return 0 if found is None else int(float(found[1]))

    def close(self) -> None:
        """SIGTERM."""
        self._process.terminate()
        self._process.wait(120)


async def answers(server: Server, arguments: argparse.Namespace, *, mixed: bool = False) -> list[tuple[int, bool]]:
    """Send all requests at once, ``mixed`` every second one without a stream; returns the tokens read and whether
    the request failed, of each."""
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", timeout=600, max_retries=0) as client:

        async def one(number: int) -> tuple[int, bool]:
            streams, count = not mixed or number % 2 == 0, 0
            body = {"ignore_eos": True, "return_token_ids": True}
            try:
                answer = await client.completions.create(
                    model="model",
                    prompt=f"def number_{number % 20}(",
                    max_tokens=arguments.tokens,
                    temperature=0,
                    stream=streams,
                    extra_body=body,
                )
                if not streams:
                    return answer.usage.completion_tokens, False
                async for chunk in answer:
                    count += sum(len(getattr(choice, "token_ids", None) or []) for choice in chunk.choices)
                return count, count < arguments.tokens
            except openai.APIError:
                return count, True

        return await asyncio.gather(*(one(number) for number in range(arguments.requests)))


def cost(server: Server, arguments: argparse.Namespace) -> tuple[float, float]:
    """CPU microseconds per token of what is no engine, and tokens per second."""
    asyncio.run(answers(server, arguments))
    before, begin = server.cpu_seconds(), time.monotonic()
    found = asyncio.run(answers(server, arguments))
    seconds = time.monotonic() - begin
    tokens = sum(count for count, _ in found)
    if any(failed for _, failed in found):
        raise SystemExit("a request failed")
    return 1e6 * (server.cpu_seconds() - before) / tokens, tokens / seconds


async def kill(server: Server, arguments: argparse.Namespace) -> dict[str, float]:
    """Kill a replica while requests run."""
    asking = asyncio.create_task(answers(server, arguments, mixed=True))
    await asyncio.sleep(arguments.kill_after)
    next(server.processes(REPLICA)).send_signal(signal.SIGKILL)
    begin = time.monotonic()
    found = await asking
    while not await asyncio.to_thread(server.restarts):
        if time.monotonic() > begin + BACK_SECONDS:
            raise SystemExit("the replica did not come back")
        await asyncio.sleep(0.5)
    return {
        "requests": len(found),
        "failed that had streamed nothing": sum(failed and not count for count, failed in found),
        "streams that ended with an error": sum(failed and count > 0 for count, failed in found),
        "seconds until the replica was back": round(time.monotonic() - begin, 1),
    }


def main() -> None:
    """Run all and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--model", type=Path, default=EXAMPLE, help="checkpoint folder")
    parser.add_argument("--requests", type=int, default=200, help="requests at once")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each")
    parser.add_argument("--kill-after", type=float, default=3.0, help="seconds from the first request to the kill")
    arguments = parser.parse_args()
    rows: list[list[object]] = []
    figures: dict[str, dict[str, float]] = {}
    for name, options in (
        ("pagoda serve -dp 2", ("serve", "-dp", "2")),
        ("pagoda fleet --replicas 2", ("fleet", "--replicas", "2", "--cpus-per-replica", "1")),
    ):
        server = Server(arguments.model, *options)
        try:
            idle = server.memory_mb()
            micros, rate = cost(server, arguments)
            figures[name] = {
                "CPU µs per token": micros,
                "tokens per s": rate,
                "MB idle": idle,
                "MB after": server.memory_mb(),
                "processes": sum(1 for _ in server.others()),
            }
            rows.append([name, *figures[name].values()])
            if options[0] == "fleet":
                figures["kill"] = asyncio.run(kill(server, arguments))
        finally:
            server.close()
    serve, fleet = (of["CPU µs per token"] for name, of in figures.items() if name != "kill")
    tables = (
        markdown_table(["", *figures["pagoda serve -dp 2"]], rows)
        + f"\nA token of the fleet costs {fleet / serve:.1f} times the server's CPU time, without the engines'.\n\n"
        + markdown_table(["kill", ""], figures["kill"].items())
    )
    print(tables)
    save(arguments.out, "fleet", {**conditions(arguments.threads), **figures}, tables)


if __name__ == "__main__":
    main()
