"""A long run of mixed traffic against ``pagoda serve``, checked as it goes; exit status 1 on any violation.

    python benchmarks/serving_soak.py --minutes 30 --rate 6 --out results
    python benchmarks/serving_soak.py --minutes 2 --check-every 20 --kills 1 --fill 0

A real server of the shipped tiny model, in float32, with so small a cache that running requests are preempted and
swapped. Requests come at random moments, ``--rate`` of them per second in the mean: completions and conversations
whose answer is known, streamed or not, with several choices, stop strings, log-probabilities and a template of their
own; JSON of a thousand schemas, regular expressions, choices and grammars at temperature 1.5; tools that must be
called; ``/v1/responses`` and ``/v1/messages``; scored prompts; clients that leave, wait too short, send half a body
or read byte by byte; bodies that make no sense, wrong keys, unknown models; scrapers and browsers. At every check
there is a burst of more than may wait. In the last third of the run the engine's process is killed ``--kills`` times.
Before the run, ``--fill`` requests of the same traffic come as fast as they are answered: the engine keeps the last
128 kinds of steps that it recorded and the last 4,096 requests' times, which takes some thousand requests to fill.
They are checked like all others, and counted, but for the rate.

Checked at each answer: ``serving_soak_requests.py`` says what. Statuses 0 and 503, 408 where nobody was slow, and
streams that end with an error are violations, except from a kill until the engine has recovered, and while this whole
machine stood still (both are excused, and counted).

Checked every ``--check-every`` seconds, when all answers have come and all connections are closed:

- nothing runs or waits, and no block of the cache is used;
- no counter of ``/metrics`` has become smaller, also where another engine has started;
- files, threads and asyncio's tasks of the API process, and files and threads of the engine's, are as many as behind
  the first traffic, within ``SLACK``.

Checked at the end: the resident memory of the API process, and of the engine's until the first kill, grew by no more
than ``--most-growth`` MiB per 1,000 requests (the slope of the least-squares line, the first half left out, in which
caches of grammars fill; the server gives freed memory back here, so that none of it is taken for growth); SIGTERM
under eight streams lets them end, the exit status is 0, and no process is left; the server logged no traceback.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from report import add_arguments, conditions, markdown_table, plotter, save, save_plot
from serving_soak_requests import BODY_TIMEOUT, KEY, MAX_BODY_SIZE, MAX_MODEL_LEN, Traffic, Wrong
from soak import slope

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = (
    *("--port", "0", "--dtype", "float32", "--served-model-name", "tiny", "--api-key", KEY, "--enable-admin"),
    "--trust-request-chat-template",
    *("--chat-template", str(ROOT / "examples" / "chatml.jinja"), "--tool-call-parser", "hermes"),
    *("--max-num-seqs", "8", "--max-queue", "24", "--max-model-len", str(MAX_MODEL_LEN), "--num-blocks", "28"),
    *("--block-size", "16", "--swap-space", "4MiB", "--policy", "fair", "--max-body-size", str(MAX_BODY_SIZE)),
    *("--body-timeout", str(BODY_TIMEOUT), "--log-format", "json"),
)
MALLOC = {"MALLOC_TRIM_THRESHOLD_": str(2**17)}
"""glibc's own value; said aloud, it keeps the engine from raising it, see ``runtime/memory.py``."""
BURST = 80
MOST_AT_ONCE = 24
"""Requests under way beside a burst; what comes when there are as many is left out."""
FIRST_TRAFFIC = 200
"""Requests that fill pools of threads and connections."""
SLACK = 3
STOOD_STILL = 3.0
"""Seconds by which a sleep of one second is late when the machine gave us no time at all."""
MOST_RECOVERY = 60.0
"""Seconds after a kill in which answers may fail."""
EXCUSED = ("0", "408", "503", "error event")


@dataclass
class Sample:
    """What the server's processes hold when nothing is under way.

    Attributes:
        requests: that have ended before.
        minutes: since the start.
        engine_pid: of the engine.
        rss: MiB of the API process, of the engine, and of its other children together.
        fds, threads: of the API process and of the engine.
        tasks: of asyncio in the API process.
    """

    requests: int
    minutes: float
    engine_pid: int
    rss: tuple[float, float, float]
    fds: tuple[int, int]
    threads: tuple[int, int]
    tasks: int


@dataclass
class Soak:
    """The run.

    Attributes:
        process, url: of the server.
        traffic: that it gets.
        draw: decides when.
        violations: what went wrong.
        samples: one for each check.
        kills: seconds until ``/health`` was 200 after each.
        stood_still: seconds in which the machine gave this process no time.
        num_ended: requests, of which ``num_filled`` came before the run.
    """

    process: subprocess.Popen[str]
    url: str
    traffic: Traffic
    draw: random.Random
    violations: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    kills: list[float] = field(default_factory=list)
    stood_still: float = 0.0
    num_ended: int = 0
    num_filled: int = 0
    _excused: list[tuple[float, float]] = field(default_factory=list)
    _under_way: set[asyncio.Task[None]] = field(default_factory=set)
    _counters: dict[str, float] = field(default_factory=dict)
    _begin: float = field(default_factory=time.monotonic)

    def violate(self, message: str) -> None:
        """Note a violation."""
        self.violations.append(message)
        print(f"VIOLATION {message}", flush=True)

    @property
    def minutes(self) -> float:
        """Minutes since the start in which the machine did not stand still."""
        return (time.monotonic() - self._begin - self.stood_still) / 60

    async def run(self, minutes: float, rate: float, check_every: float, kills: int, fill: int) -> None:
        """Traffic for so long, with checks and kills in it, behind ``fill`` requests."""
        await self.traffic.prepare()
        watcher = asyncio.create_task(self._watch_the_clock())
        await self.check()
        await self._fill(fill)
        self._begin, self.stood_still, self.num_filled = time.monotonic(), 0.0, self.num_ended
        kill_at = [minutes * (2 + i / kills) / 3 for i in range(kills)]
        next_check = check_every / 60
        while self.minutes < minutes:
            await asyncio.sleep(self.draw.expovariate(rate))
            if len(self._under_way) < MOST_AT_ONCE:
                self._start(self.traffic.one())
            if kill_at and self.minutes >= kill_at[0]:
                kill_at.pop(0)
                await self._kill()
            if self.minutes >= next_check:
                next_check += check_every / 60
                self._start(self.traffic.burst(BURST))
                await self.check()
        await self.check()
        watcher.cancel()

    async def _fill(self, num_requests: int) -> None:
        """So many requests, ``MOST_AT_ONCE`` at any time, and a check behind the first ones and behind all."""
        for count in (min(num_requests, FIRST_TRAFFIC), num_requests - FIRST_TRAFFIC):
            for _ in range(count):
                while len(self._under_way) >= MOST_AT_ONCE:
                    done, _ = await asyncio.wait(self._under_way, timeout=120, return_when=asyncio.FIRST_COMPLETED)
                    if not done:
                        raise SystemExit(f"none of {MOST_AT_ONCE} requests has ended for 120 s")
                self._start(self.traffic.one())
            if count > 0:
                await self.check()

    def _start(self, request: Any) -> None:
        task = asyncio.create_task(self._follow(request))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _follow(self, request: Any) -> None:
        begin = time.monotonic()
        try:
            ended = await request
        except Wrong as error:
            ended, wrong = "wrong", str(error)
        except Exception as error:  # a mistake of this program is one more thing to look at
            ended, wrong = "wrong", repr(error)
        else:
            kind, _, how = ended.partition(": ")
            is_slow = kind == "slow_body" and how in ("408", "0")
            wrong = f"{ended} for no reason" if how in EXCUSED and not is_slow else ""
        self.num_ended += BURST if ended == "burst" else 1
        if wrong and any(begin < end and start < time.monotonic() for start, end in self._excused):
            ended += " (excused)"
        elif wrong:
            self.violate(f"after {self.minutes:.1f} minutes: {wrong}"[:600])
        self.traffic.counts[ended] += 1

    async def _watch_the_clock(self) -> None:
        """Note when this process, and so perhaps the server, was given no time."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(1)
            now = time.monotonic()
            if now - before > 1 + STOOD_STILL:
                self.stood_still += now - before - 1
                self._excused.append((before - 5, now + 15))
            before = now

    async def _kill(self) -> None:
        """End the engine's process as the system would, and wait until there is another one."""
        begin = time.monotonic()
        self._excused.append((begin, begin + MOST_RECOVERY))
        os.kill(self._engine().pid, signal.SIGKILL)
        async with httpx.AsyncClient(base_url=self.url, trust_env=False) as client:
            while time.monotonic() < begin + MOST_RECOVERY:
                await asyncio.sleep(0.1)
                if (await client.get("/health")).status_code == 200:
                    break
            else:
                self.violate(f"no engine {MOST_RECOVERY:.0f} s after one was killed")
        self.kills.append(time.monotonic() - begin)
        self._excused[-1] = (begin, time.monotonic() + 0.5)

    def _engine(self) -> psutil.Process:
        children = psutil.Process(self.process.pid).children()
        return next(child for child in children if "engine_process" in " ".join(child.cmdline()))

    async def check(self) -> None:
        """Wait until nothing is under way, and look at what the server holds then."""
        end = time.monotonic() + 120
        while self._under_way and time.monotonic() < end + self.stood_still:
            await asyncio.wait(self._under_way, timeout=1)
        if self._under_way:
            self.violate(f"{len(self._under_way)} requests have not ended after 120 s")
        await self.traffic.close()
        headers = {"authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(base_url=self.url, headers=headers, trust_env=False, timeout=60) as client:
            load: dict[str, Any] = {}
            for _ in range(150):
                load = (await client.get("/load")).json()
                if not any(load.values()):
                    break
                await asyncio.sleep(0.1)
            else:
                self.violate(f"nothing is under way, but /load says {load}")
            await asyncio.sleep(0.5)  # closed connections are noticed
            info = await client.get("/server_info")
            if info.status_code == 200:
                self._sample(info.json()["tasks"])
            else:
                self.violate(f"/server_info: {info.status_code} {info.text}")
            self._look_at_counters((await client.get("/metrics")).text)
        self.traffic.open()

    def _sample(self, tasks: int) -> None:
        api, engine = psutil.Process(self.process.pid), self._engine()
        others = [child for child in api.children(recursive=True) if child.pid != engine.pid]
        both = (api, engine)
        rss = [process.memory_info().rss / 2**20 for process in both]
        sample = Sample(
            self.num_ended,
            self.minutes,
            engine.pid,
            (rss[0], rss[1], sum(child.memory_info().rss for child in others) / 2**20),
            (api.num_fds(), engine.num_fds()),
            (api.num_threads(), engine.num_threads()),
            tasks,
        )
        self.samples.append(sample)
        print(f"{sample.minutes:.1f} min, {sample}", flush=True)
        if len(self.samples) < 3:  # pools of threads are filled by the first traffic
            return
        first = self.samples[1]
        for name in ("fds", "threads"):
            for process, before, after in zip(
                ("API", "engine"), getattr(first, name), getattr(sample, name), strict=True
            ):
                if after > before + SLACK:
                    self.violate(f"the {process} process has {after} {name}; after the first traffic it had {before}")
        if sample.tasks > first.tasks + SLACK:
            self.violate(f"the API process has {sample.tasks} tasks; after the first traffic it had {first.tasks}")

    def _look_at_counters(self, text: str) -> None:
        for line in text.splitlines():
            name, _, value = line.rpartition(" ")
            if re.match(r"[\w:]+_(total|count|sum)\b", name) is None:
                continue
            if float(value) < self._counters.get(name, 0):
                self.violate(f"{name} went from {self._counters[name]} to {value}")
            self._counters[name] = float(value)

    def counter(self, name: str) -> float:
        """The sum of a counter's samples at the last check."""
        return sum(value for key, value in self._counters.items() if key.startswith(f"{name}{{") or key == name)

    def growth(self, process: int) -> float:
        """MiB per 1,000 requests of the API process (0) or of the first engine (1)."""
        samples = self.samples
        if process == 1:
            samples = [sample for sample in samples if sample.engine_pid == samples[0].engine_pid]
        late = [(float(sample.requests), sample.rss[process]) for sample in samples[len(samples) // 2 :]]
        return 1_000 * slope(late) if len(late) > 1 else 0.0

    async def stop(self) -> None:
        """SIGTERM under eight streams: all end, and so does everything."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        body = {"prompt": "class", "max_tokens": 300, "ignore_eos": True, "stream": True}
        streams = [asyncio.create_task(self.traffic.ask("/v1/completions", body)) for _ in range(8)]
        async with httpx.AsyncClient(base_url=self.url, trust_env=False) as client:
            headers = {"authorization": f"Bearer {KEY}"}
            while not any(stream.done() for stream in streams):
                if (await client.get("/load", headers=headers)).json()["server_load"] == len(streams):
                    break
                await asyncio.sleep(0.02)
        self.process.terminate()
        for answer in await asyncio.gather(*streams):
            if answer.status != 200 or not answer.is_done or answer.choices()[0][1] != "length":
                self.violate(f"a stream under SIGTERM ended with {answer.status} and {answer.failure}")
        await self.traffic.close()
        status = await asyncio.to_thread(self.process.wait, 60)
        if status != 0:
            self.violate(f"the exit status after SIGTERM is {status}")
        await asyncio.sleep(1)
        if left := [child.pid for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]:
            self.violate(f"processes {left} are left")


def start(log: Path) -> tuple[subprocess.Popen[str], str]:
    """The server's process, and its address."""
    command = [str(Path(sys.executable).with_name("pagoda")), "serve", str(ROOT / "examples" / "tiny-pydoc")]
    with log.open("w") as errors:
        process = subprocess.Popen(
            [*command, *OPTIONS], stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, **MALLOC}
        )
    assert process.stdout is not None
    line = process.stdout.readline()
    if " on http://" not in line:
        raise SystemExit(f"the server did not start: {log.read_text()[-2000:]}")
    return process, line.rsplit(" ", 1)[1].strip()


def tables(result: dict[str, Any]) -> str:
    """All figures as Markdown."""
    first, last = result["samples"][1], result["samples"][-1]
    text = markdown_table(
        ("", "after the first traffic", "at the end"),
        [
            ("minutes", first["minutes"], last["minutes"]),
            ("requests", first["requests"], last["requests"]),
            *((f"RSS of {n} (MiB)", first["rss"][i], last["rss"][i]) for i, n in enumerate(_PROCESSES)),
            *((f"files of {n}", first["fds"][i], last["fds"][i]) for i, n in enumerate(_PROCESSES[:2])),
            *((f"threads of {n}", first["threads"][i], last["threads"][i]) for i, n in enumerate(_PROCESSES[:2])),
            ("tasks of the API process", first["tasks"], last["tasks"]),
        ],
    )
    figures = {name: f"{value:+.3f}" for name, value in result["growth"].items()} | result["figures"]
    text += "\n" + markdown_table(("", "figure"), list(figures.items()))
    text += "\n" + markdown_table(("requests ended", "count"), sorted(result["counts"].items()))
    return text + f"\nviolations: {len(result['violations'])}\n"


_PROCESSES = ("the API process", "the engine", "its other children")


def plot(out: Path | None, result: dict[str, Any]) -> None:
    plt = plotter(out)
    if plt is None or out is None:
        return
    figure, axis = plt.subplots(figsize=(7, 4))
    for i, name in enumerate(_PROCESSES):
        axis.plot([s["requests"] for s in result["samples"]], [s["rss"][i] for s in result["samples"]], label=name)
    axis.set_xlabel("requests")
    axis.set_title("resident memory (MiB)")
    axis.set_ylim(bottom=0)
    axis.legend()
    save_plot(plt, figure, out / "serving_soak.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--rate", type=float, default=6, help="requests per second in the mean")
    parser.add_argument("--check-every", type=float, default=60, help="seconds")
    parser.add_argument(
        "--fill", type=int, default=6_000, help="requests before the run, as fast as they are answered"
    )
    parser.add_argument("--kills", type=int, default=3, help="of the engine's process; a server starts three again")
    parser.add_argument("--most-growth", type=float, default=1.0, help="MiB per 1,000 requests")
    add_arguments(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        process, url = start(log)
        draw = random.Random(args.seed)
        soak = Soak(process, url, Traffic(url, draw), draw)
        try:
            asyncio.run(_whole(soak, args))
        finally:
            process.kill()
            process.wait()
        text = log.read_text()
    if count := text.count("Traceback"):
        soak.violate(f"{count} tracebacks in the server's log, the first: {text[text.index('Traceback') :][:2000]}")
    growth = {f"RSS growth of {_PROCESSES[i]} (MiB per 1,000 requests)": soak.growth(i) for i in (0, 1)}
    for name, grown in growth.items():
        if grown > args.most_growth:
            soak.violate(f"{name} is {grown:.3f}, --most-growth={args.most_growth}")
    for name in ("vllm:num_preemptions_total", "pagoda:disconnects_total", "pagoda:requests_refused_total"):
        if not soak.counter(name):
            soak.violate(f"{name} is 0: the run does not test that")
    result: dict[str, Any] = {
        **conditions(args.threads),
        "growth": growth,
        "figures": {
            "requests per second": (soak.num_ended - soak.num_filled) / max(soak.minutes, 0.01) / 60,
            "generated tokens": int(soak.counter("vllm:generation_tokens_total")),
            "preemptions": int(soak.counter("vllm:num_preemptions_total")),
            "disconnects": int(soak.counter("pagoda:disconnects_total")),
            "refusals": int(soak.counter("pagoda:requests_refused_total")),
            "engines killed, seconds until /health": ", ".join(f"{s:.1f}" for s in soak.kills) or "none",
            "seconds in which the machine stood still": round(soak.stood_still),
        },
        "counts": dict(Counter(soak.traffic.counts)),
        "samples": [vars(sample) for sample in soak.samples],
        "violations": soak.violations,
    }
    shown = tables(result)
    print(shown)
    save(args.out, "serving_soak", result, shown)
    plot(args.out, result)
    sys.exit(1 if soak.violations else 0)


async def _whole(soak: Soak, args: argparse.Namespace) -> None:
    await soak.run(args.minutes, args.rate, args.check_every, args.kills, args.fill)
    await soak.stop()


if __name__ == "__main__":
    main()
