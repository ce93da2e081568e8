"""``pagoda serve`` beside the engine without a server: throughput, CPU time per token, latency, overload, leaving.

    python benchmarks/serving.py                                   # examples/tiny-pydoc, the worst case for a server
    python benchmarks/serving.py --model DIR --tokens 64           # a checkpoint
    python benchmarks/serving.py --shape tinyllama-1.1b            # random weights of that shape, and words
    python benchmarks/serving.py --vllm-bench                      # instead, beside "vllm serve"; installs vLLM

Everything runs on this machine and takes its cores from each other, as it would for a user: the server's two
processes, and a client that reads raw sockets.

- throughput: the same prompts by ``LLM.generate``, by requests with one answer and by streamed ones, in turn. CPU
  time is that of the server's processes, without their start; the client's is not counted.
- latency: from the engine's step to the moment when the client has read its tokens; and the time to a first token of
  an idle server, beside that of the engine alone.
- overload: ten times as many requests at once as may run and wait. The others are refused at once: CPU time of the
  API process for each, which is what it takes more than for the served ones alone; and the client's for each request.
- leaving: clients that go in the middle of an answer, streamed or not; how many tokens are computed for nobody, and
  whether all blocks come back.
- slow: readers that take a byte now and then beside normal ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import uvloop
from report import add_arguments, conditions, markdown_table, save
from server_client import Answer, Exchange, ask, exchange, get, metric, read_answer
from serving_vllm_bench import NAME, side_by_side, vllm_serving
from shapes import SHAPES, random_model
from synthetic_tokenizer import synthetic_tokenizer

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parent / "examples" / "tiny-pydoc"
EXPERIMENTS = ("throughput", "latency", "overload", "leaving", "slow")


@dataclass(frozen=True)
class Work:
    """A number of requests of one kind.

    Attributes:
        model: checkpoint folder.
        vocab_size: token ids lie below it.
        requests, prompt_tokens, output_tokens: how many, and of each.
        options: command-line options of the engine.
    """

    model: Path
    vocab_size: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    options: tuple[str, ...]

    def prompts(self, seed: int) -> list[list[int]]:
        """Random token ids that no earlier seed gave."""
        draw = random.Random(seed)
        return [[draw.randrange(3, self.vocab_size) for _ in range(self.prompt_tokens)] for _ in range(self.requests)]

    def body(self, prompt: list[int], **more: Any) -> dict[str, Any]:
        """Of a request: greedy, of a fixed length."""
        return {
            "prompt": prompt,
            "max_tokens": self.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            **more,
        }


class Server:
    """``pagoda serve`` on a free port.

    Attributes:
        port: that it listens on.
    """

    def __init__(self, work: Work, *options: str) -> None:
        command = [str(Path(sys.executable).with_name("pagoda")), "serve", str(work.model), "--port", "0"]
        command += [*work.options, "--no-enable-prefix-caching", "--log-requests", "none", *options]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if " on http://" not in line:
            raise SystemExit(f"the server did not start: {line!r}")
        self.port = int(line.strip().rsplit(":", 1)[1])
        front = psutil.Process(self._process.pid)
        self._processes = [front, *front.children(recursive=True)]

    def cpu_seconds(self) -> list[float]:
        """CPU seconds of the API process and of its children."""
        return [sum(process.cpu_times()[:2]) for process in self._processes]

    def resident_mb(self) -> float:
        """Memory of the API process."""
        return float(self._processes[0].memory_info().rss) / 2**20

    def close(self) -> int:
        """SIGTERM; returns the exit status."""
        self._process.terminate()
        return self._process.wait(60)


@contextmanager
def serving(work: Work, *options: str) -> Iterator[Server]:
    """A server for a ``with`` block."""
    server = Server(work, *options)
    try:
        yield server
    finally:
        server.close()


def offline(work: Work, rounds: int) -> Iterator[dict[str, float]]:
    """``LLM.generate`` in a process of its own: seconds, CPU seconds and tokens of each round, one at a time."""
    command = [sys.executable, str(HERE / "serving_offline.py"), str(work.model), *work.options]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdout.readline()  # ready
        for seed in range(rounds):
            request = {"prompts": work.prompts(seed), "tokens": work.output_tokens}
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            yield json.loads(process.stdout.readline())
    finally:
        process.stdin.close()
        process.wait(60)


async def exchange_all(port: int, bodies: Sequence[dict[str, Any]]) -> list[Exchange]:
    """All requests at once; what came is not read."""
    return await asyncio.gather(*(exchange(port, body) for body in bodies))


async def run_all(port: int, bodies: Sequence[dict[str, Any]]) -> list[Answer]:
    """All requests at once; answers are read when all have come."""
    return [read_answer(found) for found in await exchange_all(port, bodies)]


def throughput(work: Work, rounds: int) -> dict[str, Any]:
    """Rounds of the three ways in turn; medians."""
    found: dict[str, list[tuple[float, float, list[float]]]] = {"offline": [], "answer": [], "stream": []}
    alone = offline(work, rounds + 1)
    with serving(work) as server:
        for seed in range(rounds + 1):
            result = next(alone)
            rows = {"offline": (result["tokens"] / result["seconds"], result["cpu"] / result["tokens"], [])}
            for name in ("answer", "stream"):
                more = {"stream": True, "stream_options": {"include_usage": True}} if name == "stream" else {}
                bodies = [work.body(prompt, **more) for prompt in work.prompts(seed)]
                before, begin = server.cpu_seconds(), time.monotonic()
                answers = uvloop.run(run_all(server.port, bodies))
                seconds = max(answer.ended for answer in answers) - begin
                used = [after - b for after, b in zip(server.cpu_seconds(), before, strict=True)]
                tokens = sum(answer.tokens for answer in answers)
                if tokens != work.requests * work.output_tokens:
                    wrong = next(answer for answer in answers if answer.tokens != work.output_tokens)
                    raise SystemExit(f"{name}: {tokens} tokens came; {wrong!r}")
                rows[name] = (tokens / seconds, sum(used) / tokens, [part / tokens for part in used])
            if seed:  # the first round fills caches
                for name, row in rows.items():
                    found[name].append(row)
    alone.close()
    result = {}
    for name, rows in found.items():
        parts = [statistics.median(values) * 1e6 for values in zip(*(row[2] for row in rows), strict=True)]
        result[name] = {
            "tokens_per_second": statistics.median(row[0] for row in rows),
            "cpu_us_per_token": statistics.median(row[1] for row in rows) * 1e6,
            "cpu_us_by_process": parts,
        }
    return result


def _delays(made: Sequence[dict[str, Any]], answers: dict[str, Answer]) -> list[float]:
    """Milliseconds from the step that made a piece of text to the event that brought it, for each piece."""
    characters = dict.fromkeys(answers, 0)
    delays = []
    for piece in made:
        answer = answers[piece["prompt"]]
        characters[piece["prompt"]] += piece["characters"]
        event = bisect_left(answer.characters, characters[piece["prompt"]])
        delays.append((answer.events[event] - piece["time"]) * 1e3)
    return delays


def latency(work: Work) -> dict[str, Any]:
    """Milliseconds that a step's text takes from the engine to the client, and a first token.

    Text is found again by its place in the answer: an event may carry several steps' text; some tokens have none.
    """
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "steps.jsonl"
        os.environ["PAGODA_BENCHMARK_STEPS"] = str(trace)
        try:
            command = [sys.executable, str(HERE / "serving_traced.py"), str(work.model), "--port", "0"]
            command += [*work.options, "--no-enable-prefix-caching", "--log-requests", "none"]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        finally:
            del os.environ["PAGODA_BENCHMARK_STEPS"]
        assert process.stdout is not None
        line = process.stdout.readline()
        port = int(line.strip().rsplit(":", 1)[1])
        try:
            stream = {"stream": True, "stream_options": {"include_usage": True}}
            uvloop.run(run_all(port, [work.body(prompt, **stream) for prompt in work.prompts(100)]))  # warm
            first = []
            for prompt in work.prompts(101)[:20]:
                begin = time.monotonic()
                answer = uvloop.run(ask(port, work.body(prompt, **stream) | {"max_tokens": 1}))
                first.append(answer.events[0] - begin)
            trace.write_text("")
            answers = uvloop.run(run_all(port, [work.body(prompt, **stream) for prompt in work.prompts(102)]))
        finally:
            process.terminate()
            process.wait(60)
        made = [json.loads(line) for line in trace.read_text().splitlines()]
    delays = _delays(
        made, {json.dumps(prompt[:8]): answer for prompt, answer in zip(work.prompts(102), answers, strict=True)}
    )
    alone = offline(Work(work.model, work.vocab_size, 1, work.prompt_tokens, 1, work.options), 20)
    engine_first = [result["seconds"] for result in alone]
    return {
        "texts": len(delays),
        "p50_ms": _percentile(delays, 0.5),
        "p99_ms": _percentile(delays, 0.99),
        "ttft_p50_ms": _percentile(first, 0.5) * 1e3,
        "engine_ttft_p50_ms": _percentile(engine_first[2:], 0.5) * 1e3,
    }


def overload(work: Work) -> dict[str, Any]:
    """640 requests at once where 64 run and 128 wait."""
    options = ("--max-num-seqs", "64", "--max-queue", "128")
    many = Work(work.model, work.vocab_size, 640, 16, 32, tuple(_without(work.options, "--max-num-seqs")))
    with serving(many, *options) as server:
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        uvloop.run(run_all(server.port, [many.body(prompt, **stream) for prompt in many.prompts(0)[:192]]))
        rates, front_cpu = [], []
        for count in (192, 640):
            bodies = [many.body(prompt, **stream) for prompt in many.prompts(count)[:count]]
            before, own = server.cpu_seconds()[0], time.process_time()
            memory, begin = server.resident_mb(), time.monotonic()
            found = uvloop.run(exchange_all(server.port, bodies))
            own = time.process_time() - own
            answers = [read_answer(each) for each in found]
            served = [answer for answer in answers if answer.status == 200]
            rates.append(sum(answer.tokens for answer in served) / (max(each.ended for each in served) - begin))
            front_cpu.append(server.cpu_seconds()[0] - before)
        refused = [answer.seconds * 1e3 for answer in answers if answer.status == 429]
        return {
            "served": len(served),
            "refused": len(refused),
            "refusal_p50_ms": _percentile(refused, 0.5),
            "refusal_p99_ms": _percentile(refused, 0.99),
            "refusal_cpu_ms": (front_cpu[1] - front_cpu[0]) / max(len(refused), 1) * 1e3,
            "client_cpu_ms": own / len(answers) * 1e3,
            "throughput_ratio": rates[1] / rates[0],
            "memory_growth_mb": server.resident_mb() - memory,
        }


def leaving(work: Work, count: int) -> dict[str, Any]:
    """Clients that close their connection after some events, or before their one answer."""
    draw = random.Random(0)

    async def run(port: int) -> dict[str, Any]:
        for stream in (True, False):
            for start in range(0, count, 50):
                tasks = []
                for prompt in work.prompts(1000 + start)[:50]:
                    body = work.body(prompt, stream=stream) | {"max_tokens": 400}
                    if stream:
                        tasks.append(ask(port, body, leave_after=draw.randrange(1, 20)))
                    else:
                        tasks.append(_leave_early(port, body, draw.random() / 2))
                await asyncio.gather(*tasks)
        for _ in range(100):
            _, text = await get(port, "/metrics")
            if metric(text, "vllm:num_requests_running") + metric(text, "vllm:num_requests_waiting") == 0:
                break
            await asyncio.sleep(0.1)
        return {
            "left": 2 * count,
            "disconnects_counted": metric(text, "pagoda:disconnects_total"),
            "kv_cache_usage_after": metric(text, "vllm:kv_cache_usage_perc"),
            "running_after": metric(text, "vllm:num_requests_running"),
        }

    with serving(work) as server:
        return uvloop.run(run(server.port))


async def _leave_early(port: int, body: dict[str, Any], seconds: float) -> None:
    """Send a request and close the connection after a while, without having read anything."""
    with suppress(TimeoutError):
        await asyncio.wait_for(ask(port, body), seconds)


def slow(work: Work, count: int) -> dict[str, Any]:
    """Readers that take a byte each 100 ms, beside eight normal ones."""

    async def crawl(port: int, body: dict[str, Any], stop: asyncio.Event) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2)
        content = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        try:
            while not stop.is_set() and await reader.read(1):
                await asyncio.sleep(0.1)
        except ConnectionError:
            pass
        finally:
            writer.close()

    def gaps(answers: Sequence[Answer]) -> float:
        found = [b - a for answer in answers for a, b in zip(answer.events, answer.events[1:], strict=False)]
        return _percentile(found, 0.5) * 1e3

    async def run(server: Server) -> dict[str, Any]:
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        eight = [work.body(prompt, **stream) for prompt in work.prompts(7)[:8]]
        alone = gaps(await run_all(server.port, eight))
        memory, stop = server.resident_mb(), asyncio.Event()
        bodies = [work.body(prompt, stream=True) | {"max_tokens": 8} for prompt in work.prompts(8)]
        crawlers = [asyncio.create_task(crawl(server.port, bodies[i % len(bodies)], stop)) for i in range(count)]
        await asyncio.sleep(2)
        beside = gaps(await run_all(server.port, [work.body(p, **stream) for p in work.prompts(9)[:8]]))
        grown = server.resident_mb() - memory
        stop.set()
        await asyncio.gather(*crawlers)
        return {
            "readers": count,
            "gap_p50_alone_ms": alone,
            "gap_p50_beside_ms": beside,
            "kb_per_connection": grown * 1024 / count,
        }

    with serving(work, "--max-queue", str(2 * count)) as server:
        return uvloop.run(run(server))


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def vllm_bench(work: Work, rounds: int) -> list[dict[str, Any]]:
    """``vllm bench serve`` against ours and, where it starts, ``vllm serve``: a row for each number of streams."""
    longest = int(work.options[work.options.index("--max-model-len") + 1])
    with (
        serving(work, "--dtype", "bfloat16", "--served-model-name", NAME) as ours,
        vllm_serving(work.model, work.requests, longest) as theirs,
    ):
        ports = {"pagoda serve": ours.port} | ({"vllm serve": theirs.port} if theirs else {})
        return side_by_side(ports, work.model, 4 * work.requests, work.prompt_tokens, work.output_tokens, rounds)


def _without(options: Sequence[str], name: str) -> list[str]:
    """Command-line options without one and its value."""
    if name not in options:
        return list(options)
    at = list(options).index(name)
    return [*options[:at], *options[at + 2 :]]


def table(results: dict[str, Any]) -> str:
    """Markdown of what was measured."""
    text = ""
    for name, found in results.items():
        text += f"\n**{name}**\n\n"
        if isinstance(found, list):
            text += markdown_table(tuple(found[0]), [tuple(row.values()) for row in found])
        elif name == "throughput":
            base = found["offline"]
            rows = [
                (
                    way,
                    row["tokens_per_second"],
                    row["tokens_per_second"] / base["tokens_per_second"],
                    row["cpu_us_per_token"],
                    row["cpu_us_per_token"] - base["cpu_us_per_token"],
                    " + ".join(f"{part:.0f}" for part in row["cpu_us_by_process"]) or "–",
                )
                for way, row in found.items()
            ]
            columns = ("", "tokens/s", "of offline", "CPU µs a token", "more than offline", "API + others")
            text += markdown_table(columns, rows)
        else:
            text += markdown_table(("", ""), list(found.items()))
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", type=Path, default=EXAMPLE)
    source.add_argument("--shape", choices=list(SHAPES))
    parser.add_argument("--only", choices=EXPERIMENTS, action="append")
    parser.add_argument(
        "--vllm-bench", action="store_true", help="load it and vllm serve by vllm bench serve, instead"
    )
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--leaving", type=int, default=250, help="clients that leave, streamed and not")
    parser.add_argument("--readers", type=int, default=1000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model
        if arguments.shape:
            model = Path(folder) / arguments.shape
            random_model(arguments.shape).save_pretrained(model)
            synthetic_tokenizer(SHAPES[arguments.shape]().vocab_size).save_pretrained(model)
        vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
        length = arguments.prompt_tokens + max(arguments.tokens, 400)
        options = ("--max-num-seqs", str(arguments.requests), "--max-model-len", str(length))
        work = Work(model, vocab_size, arguments.requests, arguments.prompt_tokens, arguments.tokens, options)
        results: dict[str, Any] = {}
        for name in ("vllm-bench",) if arguments.vllm_bench else arguments.only or EXPERIMENTS:
            if name == "vllm-bench":
                results[name] = vllm_bench(work, arguments.rounds)
            elif name == "throughput":
                results[name] = throughput(work, arguments.rounds)
            elif name == "latency":
                results[name] = latency(work)
            elif name == "overload":
                results[name] = overload(work)
            elif name == "leaving":
                fifty = Work(model, vocab_size, 50, arguments.prompt_tokens, arguments.tokens, options)
                results[name] = leaving(fifty, arguments.leaving)
            else:
                results[name] = slow(work, arguments.readers)
            print(table({name: results[name]}), flush=True)
    save(arguments.out, "serving", {"conditions": conditions(arguments.threads), **results}, table(results))


if __name__ == "__main__":
    main()
