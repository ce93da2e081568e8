"""What a worker and ``peers.py`` say to each other: a JSON object per line, commands in, answers out.

Runs in the Python of each peer, so it imports nothing beyond the standard library.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Generate = Callable[[list[list[int]], list[int]], list[int]]
"""(prompts, tokens that each is to generate) → tokens that each has generated, greedily, EOS ignored."""


def peak_rss_mb() -> float:
    """The most memory that this process and those that it started have held, each by itself."""
    total, pids = 0.0, [os.getpid()]
    while pids:
        pid = pids.pop()
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            continue
        total += next(float(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")) / 1024
        pids += map(int, children)
    return total


def serve(load: Callable[[argparse.Namespace], Generate]) -> None:
    """Load what the command line says, and generate until there are no more commands.

    Answers ``{"ready": seconds}`` when loaded; to ``{"prompts": [...], "outputs": [...]}`` ``{"seconds": ...}``, to
    ``{"memory": true}`` ``{"peak_rss_mb": ...}``. Whatever a library prints goes to stderr.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, default=2048)
    args = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**found: Any) -> None:
        answers.write(json.dumps(found) + "\n")
        answers.flush()

    begin = time.perf_counter()
    generate = load(args)
    answer(ready=time.perf_counter() - begin)
    for line in sys.stdin:
        command = json.loads(line)
        if command.get("memory"):
            answer(peak_rss_mb=peak_rss_mb())
            continue
        begin = time.perf_counter()
        counts = generate(command["prompts"], command["outputs"])
        seconds = time.perf_counter() - begin
        if counts != command["outputs"]:
            raise SystemExit(f"asked for {command['outputs']} tokens, got {counts}")
        answer(seconds=seconds)
