"""Ours beside another engine, in one run: decode, prefill, 32 requests, cold start, memory.

    python benchmarks/peers.py --peer openvino-genai --shape tinyllama-1.1b --weights bf16
    python benchmarks/peers.py --all --out results

Each side is a process of its own, in an environment of its own with pinned versions (see ``peer_setup.py``). The
two take turns phase by phase, and whoever has no turn is stopped, so that drift of the machine hits both and neither
takes the other's time. Prompts are fresh in every round. The machine's limits are measured in the same run.

  decode       tokens/s after the first, one request, prompt of 128, 128 tokens
  TTFT 128     milliseconds from the request to the token, prompt of 128
  prefill      prompt tokens/s, prompt of 1024
  32 requests  generated tokens/s of the requests in ``shapes.py``, all there from the beginning
  first token  seconds from the start of a fresh process to its first token: loading, compiling, a prompt of 128
  memory       the most that the process held, and those that it started
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from limits import ceiling, machine_limits
from peer_setup import OURS, PEERS, WORKERS, Peer, model_folder, python_of
from report import conditions, markdown_table, save
from shapes import DECODE_PROMPT, DECODE_TOKENS, OUTPUT_LENGTHS, PREFILL_PROMPT, PROMPT_LENGTHS, SHAPES, Prompts

PHASES = {
    "decode": ([DECODE_PROMPT], [DECODE_TOKENS]),
    "first": ([DECODE_PROMPT], [1]),
    "prefill": ([PREFILL_PROMPT], [1]),
    "offline": (PROMPT_LENGTHS, OUTPUT_LENGTHS),
}


class Worker:
    """A process that generates; stopped whenever it is not asked to."""

    def __init__(self, command: list[str], env: dict[str, str], log: Path) -> None:
        self._log = log
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            env=env,
            text=True,
            start_new_session=True,
        )
        self._answer()
        self._signal(signal.SIGSTOP)

    def ask(self, **command: Any) -> dict[str, Any]:
        """Send a command and wait for the answer."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        found = self._answer()
        self._signal(signal.SIGSTOP)
        return found

    def close(self) -> None:
        """End the process and those that it started."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            tail = "\n".join(self._log.read_text().splitlines()[-15:])
            raise SystemExit(f"{' '.join(map(str, self._process.args))} ended; its last words:\n{tail}")  # type: ignore[arg-type]
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


@contextlib.contextmanager
def started(name: str, peer: Peer, shape: str, weights: str, threads: int, caches: Path) -> Iterator[Worker]:
    """A worker with its model loaded, whose compile caches lie in a folder."""
    python = python_of(name, peer)
    model = model_folder(shape, peer, python, weights)
    env = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TORCH_PAGODA_CACHE": str(caches / "pagoda"),
        "VLLM_CACHE_ROOT": str(caches / "vllm"),
        "PYTHONPATH": str(WORKERS),
    }
    command = [str(python), "-u", str(WORKERS / peer.worker), "--model", str(model)]
    worker = Worker([*command, "--weights", weights, "--threads", str(threads)], env, caches / f"{name}.log")
    try:
        yield worker
    finally:
        worker.close()


def first_token(name: str, peer: Peer, shape: str, weights: str, threads: int, caches: Path) -> dict[str, float]:
    """Seconds to the first token of a fresh process."""
    prompts = Prompts()([DECODE_PROMPT])
    begin = time.perf_counter()
    with started(name, peer, shape, weights, threads, caches) as worker:
        worker.ask(prompts=prompts, outputs=[1])
        return {"seconds": time.perf_counter() - begin, **worker.ask(memory=True)}


def compare(name: str, shape: str, weights: str, rounds: int, threads: int, *, starts: bool) -> dict[str, Any]:
    """All phases of ours and of a peer's, in turn."""
    sides = {"ours": ("ours", OURS), "theirs": (name, PEERS[name])}
    result: dict[str, Any] = {"peer": name, "shape": shape, "weights": weights, **conditions(threads)}
    with tempfile.TemporaryDirectory() as folder:
        for side, (label, peer) in sides.items():
            python = python_of(label, peer)
            model_folder(shape, peer, python, weights)
            if starts:
                given = (label, peer, shape, weights, threads, Path(folder))
                result[f"cold, {side}"] = first_token(*given)
                result[f"warm, {side}"] = first_token(*given)
        limits = [asdict(machine_limits())]
        times: dict[str, dict[str, list[float]]] = {phase: {side: [] for side in sides} for phase in PHASES}
        with contextlib.ExitStack() as stack:
            workers = {
                side: stack.enter_context(started(label, peer, shape, weights, threads, Path(folder)))
                for side, (label, peer) in sides.items()
            }
            prompts = Prompts()
            for worker in workers.values():
                worker.ask(prompts=prompts([16] * 4), outputs=[4] * 4)
            for _ in range(rounds):
                for phase, (lengths, outputs) in PHASES.items():
                    for side, worker in workers.items():
                        found = worker.ask(prompts=prompts(lengths), outputs=outputs)
                        times[phase][side].append(found["seconds"])
            for side, worker in workers.items():
                result[f"memory, {side}"] = worker.ask(memory=True)["peak_rss_mb"]
        limits.append(asdict(machine_limits()))
    result["seconds"] = times
    result["limits"] = limits
    if weights == "bf16":
        result["ceiling"] = ceiling(shape)
    return result


def rates(times: dict[str, dict[str, list[float]]], side: str) -> dict[str, list[float]]:
    """Figures of each round."""
    seconds = {phase: of[side] for phase, of in times.items()}
    pairs = zip(seconds["decode"], seconds["first"], strict=True)
    return {
        "decode (tok/s)": [(DECODE_TOKENS - 1) / (whole - first) for whole, first in pairs],
        "TTFT 128 (ms)": [1e3 * s for s in seconds["first"]],
        "prefill 1024 (tok/s)": [PREFILL_PROMPT / s for s in seconds["prefill"]],
        "32 requests (tok/s)": [sum(OUTPUT_LENGTHS) / s for s in seconds["offline"]],
    }


def table(result: dict[str, Any]) -> str:
    """The comparison as Markdown."""
    name = result["peer"]
    ours, theirs = rates(result["seconds"], "ours"), rates(result["seconds"], "theirs")
    rows: list[tuple[object, ...]] = []
    for figure in ours:
        sign = -1 if figure.startswith("TTFT") else 1
        ratios = [(a / b) ** sign for a, b in zip(ours[figure], theirs[figure], strict=True)]
        spread = f"{min(ratios):.2f}–{max(ratios):.2f}"
        both = (statistics.median(ours[figure]), statistics.median(theirs[figure]))
        rows.append((figure, *both, f"{statistics.median(ratios):.2f}×", spread))
    for figure, unit in (("cold", "first token, cold (s)"), ("warm", "first token, warm (s)")):
        if f"{figure}, ours" in result:
            a, b = (result[f"{figure}, {side}"]["seconds"] for side in ("ours", "theirs"))
            rows.append((unit, a, b, f"{b / a:.2f}×", ""))
    a, b = result["memory, ours"], result["memory, theirs"]
    rows.append(("peak memory (MB)", a, b, f"{b / a:.2f}×", ""))
    read = statistics.mean(found["read_gb_per_s"] for found in result["limits"])
    gemm = statistics.mean(found["gemm_gflops"] for found in result["limits"])
    lines = [
        f"### {result['shape']}, {result['weights']}, {result['threads']} threads\n",
        markdown_table(("", "torch-pagoda", name, "ratio", "min–max"), rows),
        f"Limits in the same run: read {read:.1f} GB/s, GEMM {gemm:.0f} GFLOP/s"
        + (f", 32 requests {result['ceiling']:.1f} tok/s" if "ceiling" in result else "")
        + ". A ratio above 1 is in our favour.\n",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=PEERS)
    parser.add_argument("--shape", choices=SHAPES, default="tinyllama-1.1b")
    parser.add_argument("--weights", choices=("bf16", "int8", "int4"), default="bf16")
    parser.add_argument("--all", action="store_true", help="every peer, shape and width that there is")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--no-start", action="store_true", help="skip the cold and warm starts")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write results as JSON and Markdown here")
    args = parser.parse_args()
    if args.all == (args.peer is not None):
        parser.error("give --peer or --all")
    if args.all:
        chosen = [(name, shape, w) for shape in SHAPES for name, peer in PEERS.items() for w in peer.weights]
    elif args.weights not in PEERS[args.peer].weights:
        parser.error(f"--peer {args.peer} has no {args.weights} weights")
    else:
        chosen = [(args.peer, args.shape, args.weights)]
    results, tables = [], []
    for name, shape, weights in chosen:
        results.append(compare(name, shape, weights, args.rounds, args.threads, starts=not args.no_start))
        tables.append(table(results[-1]))
        print(tables[-1], flush=True)
        save(args.out, "peers", {"results": results}, "\n".join(tables))


if __name__ == "__main__":
    sys.exit(main())
