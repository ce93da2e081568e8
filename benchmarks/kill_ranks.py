"""Ranks of ``pagoda serve`` that are killed or stopped under streams; exit status 1 if a token is wrong.

    python benchmarks/kill_ranks.py --out results         # the shipped tiny model, 2 ranks, 32 streams, 20 faults
    python benchmarks/kill_ranks.py --faults 4 --streams 8

A real server, and streams of the real ``openai`` client, each of which asks again as soon as it is answered. Between
random pauses each rank by turns, rank 0 and with it the engine's process included, gets SIGKILL or SIGSTOP. A request
may finish with exactly the text of transformers' ``generate``, or end with an error; what it got before is exact.
Served again is a fault when a request that was sent after it has finished.

Listed before the server starts and after it has ended: processes of this package, files in ``/dev/shm``, folders of
this package among the temporary ones.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from openai import APIError, AsyncOpenAI
from report import add_arguments, conditions, markdown_table, save

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parent / "examples" / "tiny-pydoc"
STARTS = (
    "def f",
    "Return the",
    "class Path",
    "The module",
    "Raise an error",
    "This function",
    "import os",
    "A list of",
)
MARKS = ("torch_pagoda.rank", "torch_pagoda.cli.engine_process")
"""In the command lines of processes that a server starts."""


@dataclass
class Fault:
    """A signal that a rank got.

    Attributes:
        rank, name: of the rank and the signal.
        at: when, by the clock of ``time.monotonic``.
        served_after: seconds until a request that was sent after it had finished.
        outcomes: of requests that were under way then.
    """

    rank: int
    name: str
    at: float
    served_after: float | None = None
    outcomes: Counter[str] = field(default_factory=Counter)


@dataclass
class Run:
    """The streams and the faults among them.

    Attributes:
        client: of the server.
        model: name of the model.
        wanted: the text of each prompt.
        tokens: of each answer.
        faults: up to now.
        wrong: texts that were none of the model's.
        outcomes: of all requests.
        errors: that requests ended with.
    """

    client: AsyncOpenAI
    model: str
    wanted: dict[str, str]
    tokens: int
    faults: list[Fault] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)

    async def stream(self, seed: int, done: asyncio.Event) -> None:
        """Ask until ``done``."""
        draw = random.Random(seed)
        while not done.is_set():
            prompt = draw.choice(list(self.wanted))
            sent, known = time.monotonic(), len(self.faults)
            outcome = await self._ask(prompt)
            self.outcomes[outcome] += 1
            for fault in self.faults[known:]:
                fault.outcomes[outcome] += 1
            if outcome == "exact":
                for fault in self.faults[:known]:
                    if fault.served_after is None and sent > fault.at:
                        fault.served_after = time.monotonic() - fault.at
            elif outcome == "error":
                await asyncio.sleep(0.5)

    async def _ask(self, prompt: str) -> str:
        text, finished = "", False
        try:
            async for chunk in await self.client.completions.create(
                model=self.model, prompt=prompt, max_tokens=self.tokens, temperature=0, stream=True,
                extra_body={"ignore_eos": True},
            ):  # fmt: skip
                for choice in chunk.choices:
                    text += choice.text
                    finished = finished or choice.finish_reason == "length"
        except APIError as error:
            self.errors[f"{type(error).__name__}: {error}"] += 1
        wanted = self.wanted[prompt]
        if text == wanted if finished else wanted.startswith(text):
            return "exact" if finished else "error"
        self.wrong.append(f"{prompt!r}: {text!r}, not {wanted!r}")
        return "wrong"


def ranks_of(server: int, size: int) -> list[int] | None:
    """Process ids by rank; None while they are not complete."""
    engines, others = [], []
    for process in psutil.Process(server).children(recursive=True):
        try:
            command = process.cmdline()
        except psutil.Error:
            continue
        if MARKS[0] in command:
            others.append((int(command[command.index(MARKS[0]) + 3]), process.pid))
        elif MARKS[1] in command:
            engines.append(process.pid)
    found = [*engines, *(pid for _, pid in sorted(others))]
    return found if len(engines) == 1 and len(found) == size else None


def left_behind() -> dict[str, list[str]]:
    """What servers of this package may leave."""
    commands = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        command = process.info["cmdline"] or [""]
        if command[0] == sys.executable and any(mark in command for mark in MARKS):
            commands.append(f"{process.info['pid']} {' '.join(command[1:6])}")
    folders = sorted(path.name for path in Path(tempfile.gettempdir()).glob("torch_pagoda-*"))
    return {"processes": commands, "/dev/shm": sorted(os.listdir("/dev/shm")), "temporary folders": folders}


def texts(model: str, tokens: int) -> dict[str, str]:
    """What transformers generates."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found = {}
    for prompt in STARTS:
        ids = tokenizer(prompt, return_tensors="pt")
        made = module.generate(**ids, max_new_tokens=tokens, do_sample=False, eos_token_id=None)
        prompt_text, text = (tokenizer.decode(x[0], skip_special_tokens=True) for x in (ids["input_ids"], made))
        found[prompt] = text.removeprefix(prompt_text)
    return found


async def faults(run: Run, server: int, args: argparse.Namespace) -> None:
    """Send the signals, each at a random moment once all ranks are there and serve."""
    draw = random.Random(args.seed)
    kinds = [(i % args.ranks, ("SIGKILL", "SIGSTOP")[i // args.ranks % 2]) for i in range(args.faults)]
    for rank, name in kinds:
        began = time.monotonic()
        while (pids := ranks_of(server, args.ranks)) is None or (run.faults and run.faults[-1].served_after is None):
            if time.monotonic() - began > args.most_seconds:
                raise SystemExit(f"not served again within {args.most_seconds:g} s: {run.faults[-1:]}")
            await asyncio.sleep(0.1)
        await asyncio.sleep(draw.uniform(0.2, 3))
        run.faults.append(Fault(rank, name, time.monotonic()))
        try:
            os.kill(pids[rank], getattr(signal, name))
        except ProcessLookupError:
            run.faults.pop()
            continue
        print(f"{len(run.faults)}: rank {rank} (pid {pids[rank]}) got {name}", flush=True)
    while run.faults[-1].served_after is None:
        await asyncio.sleep(0.1)


async def measure(args: argparse.Namespace, wanted: dict[str, str], server: int, url: str) -> Run:
    """Streams and faults against a server."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=args.most_seconds) as client:
        name = (await client.models.list()).data[0].id
        run = Run(client, name, wanted, args.tokens)
        done = asyncio.Event()
        streams = [asyncio.create_task(run.stream(args.seed * 1000 + i, done)) for i in range(args.streams)]
        try:
            await faults(run, server, args)
        finally:
            done.set()
            await asyncio.gather(*streams)
        return run


def main() -> int:
    """The benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--model", default=str(EXAMPLE), help="checkpoint folder")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--worker-restarts", type=int, default=3, help="of an engine; then another one starts")
    parser.add_argument("--most-seconds", type=float, default=300, help="until served again")
    args = parser.parse_args()

    wanted = texts(args.model, args.tokens)
    before = left_behind()
    command = [str(Path(sys.executable).with_name("pagoda")), "serve", args.model, "-tp", str(args.ranks)]
    command += ["--port", "0", "--dtype", "float32", "--max-num-seqs", str(args.streams), "--log-requests", "none"]
    command += ["--worker-restarts", str(args.worker_restarts), "--restart-engine", str(args.faults)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        if " on http://" not in line:
            raise SystemExit(f"the server did not start: {line!r}")
        try:
            run = asyncio.run(measure(args, wanted, server.pid, line.split()[-1]))
        finally:
            server.send_signal(signal.SIGTERM)
            status = server.wait(60)
    after = left_behind()

    columns = ("outcome", "exact", "error", "wrong")
    rows: list[list[Any]] = [
        [f"{i}: rank {fault.rank}, {fault.name}, again after {fault.served_after or 0:.1f} s"]
        + [fault.outcomes[outcome] for outcome in columns[1:]]
        for i, fault in enumerate(run.faults, 1)
    ]
    rows.append(["all requests", *(run.outcomes[outcome] for outcome in columns[1:])])
    listed = [[what, "<br>".join(before[what]) or "none", "<br>".join(after[what]) or "none"] for what in before]
    table = markdown_table(("requests under way at fault", *columns[1:]), rows)
    table += "\n" + markdown_table(("", "before", "after"), listed)
    table += "\n" + markdown_table(("error", "requests"), run.errors.most_common())
    print(table, f"exit status of the server: {status}", sep="\n")
    for wrong in run.wrong[:5]:
        print(f"WRONG {wrong}")
    result = {"conditions": conditions(1), "faults": [vars(fault) for fault in run.faults], "after": after}
    save(args.out, "kill_ranks", result, table)
    return 1 if run.wrong or status or set(after["processes"]) - set(before["processes"]) else 0


if __name__ == "__main__":
    sys.exit(main())
