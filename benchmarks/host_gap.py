"""Time in which a device has nothing to do because its host is not done, per step, with and without a step ahead.

    python benchmarks/host_gap.py                       # 1, 8 and 64 sequences, steps of 2, 5 and 20 ms
    python benchmarks/host_gap.py --sequences 64 --milliseconds 5 --steps 400

The device is a thread that works off a queue (``tests/support/queued_device.py``); a step takes it a set time and
computes next to nothing. What the host does is real: batcher, block manager, packing, sampling, settling, text ends.
Of the host's time per step, what it spends on imitating a device's operators (some ten, 20 to 60 µs each) is a part;
and the imitated device's work takes the same interpreter's lock. So both are upper bounds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from queued_device import QueuedProgram

from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.program import CacheSpec, KVCache
from torch_pagoda.runtime.requests.sampling_params import SamplingParams
from torch_pagoda.runtime.step_metadata import StepMetadata

PROMPT = 32


class BlankProgram:
    """Obeys ``runtime.program.Program``; its logits favor the token after the last one."""

    def __init__(self, vocab_size: int = 1024) -> None:
        self.caches = [CacheSpec(1, 8, 8, torch.float32)]
        self.vocab_size = vocab_size
        self.max_model_len: int | None = 4096
        self.restart_length: int | None = None
        self.rope_switch: int | None = None
        self.block_size: int | None = None
        self.device = torch.device("cpu")
        self._logits = torch.eye(vocab_size).roll(1, 1)

    def reserve(self, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, num_drafts: int = 0) -> int:
        return 0

    def bind(self, kv_cache: KVCache) -> None:
        pass

    def __call__(self, input_ids: torch.Tensor, position_ids: torch.Tensor, step: StepMetadata) -> torch.Tensor:
        return self._logits[input_ids[0, step.logits_rows]]


def measure(sequences: int, seconds: float, steps: int, *, ahead: bool) -> dict[str, float]:
    """Decode with so many sequences; median and mean gap in seconds, and the host's time per step."""
    program = QueuedProgram(BlankProgram(), seconds, strict=False)
    engine = Engine(
        program,  # type: ignore[arg-type]
        num_blocks=sequences * (PROMPT + steps + 64) // 32 + 64,
        max_num_seqs=sequences,
        async_scheduling=ahead,
    )
    params = SamplingParams(temperature=0, max_tokens=steps + 1, stop_token_ids=[1023], ignore_eos=True)
    prompts: Sequence[Any] = [[(7 * i + j) % 500 for j in range(PROMPT)] for i in range(sequences)]
    for prompt in prompts:
        engine.submit(prompt, params)
    started = time.perf_counter()
    while engine.has_unfinished():
        engine.step_pieces()
    host = time.perf_counter() - started - program.queue.waited
    gaps = program.queue.gaps[steps // 10 :]  # without the prompts, and the first steps
    return {"median": median(gaps), "mean": mean(gaps), "host": host / len(program.queue.gaps)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--milliseconds", type=float, nargs="+", default=[2, 5, 20])
    parser.add_argument("--steps", type=int, default=150)
    given = parser.parse_args()
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-4)  # a real device does not wait for the interpreter's lock
    print("sequences  step ms         mode   gap ms    mean  of step  host µs a sequence")
    measure(2, 1e-3, 50, ahead=True)  # what is made once
    for sequences in given.sequences:
        for milliseconds in given.milliseconds:
            for ahead in (False, True):
                found = measure(sequences, milliseconds / 1e3, given.steps, ahead=ahead)
                mode = "one ahead" if ahead else "synchronous"
                print(
                    f"{sequences:>9} {milliseconds:>8g} {mode:>12} {found['median'] * 1e3:>8.3f} "
                    f"{found['mean'] * 1e3:>7.3f} {found['median'] * 1e5 / milliseconds:>7.1f}% "
                    f"{found['host'] * 1e6:>8.0f} {found['host'] * 1e6 / sequences:>10.1f}",
                    flush=True,
                )
                time.sleep(0.1)


if __name__ == "__main__":
    main()
