"""What each pass is worth: tok/s with all passes, without each one, and without any but the attention passes; used by
``throughput.py --ablate``.

All engines live in one process over one model and take turns, so that drift of the machine hits all alike.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from torch_pagoda import LLM, SamplingParams
from torch_pagoda.passes import PASSES

PHASES: dict[str, tuple[list[int], int]] = {
    "decode, 1 request": ([64], 48),
    "decode, 32 requests": ([16] * 32, 24),
    "prefill 1024": ([1024], 1),
}
"""Name → prompt lengths and generated tokens of each. Prefill counts prompt tokens, the others generated ones."""

ALL, LEVEL_0 = "all passes", "opt_level=0"


def ablated_passes() -> list[str]:
    """The passes without which a model can be compiled, in order."""
    return list(dict.fromkeys(p.name for p in PASSES if not p.required and not p.option))


def ablate(model: PreTrainedModel, prompts: Any, rounds: int, settings: dict[str, Any]) -> dict[str, Any]:
    """tok/s of every phase, medians over ``rounds``, by what runs: ALL, LEVEL_0, or all but the named pass."""
    settings = {"max_num_seqs": 32, "max_model_len": 2048, "num_blocks": 512, "verify": "off", **settings}
    engines = {ALL: LLM(model, **settings), LEVEL_0: LLM(model, opt_level=0, **settings)}
    for name in ablated_passes():
        engines[name] = LLM(model, passes={"skip": [name]}, **settings)
    times: dict[str, dict[str, list[float]]] = {name: {phase: [] for phase in PHASES} for name in engines}
    for round_number in range(rounds + 1):  # the first warms up
        for phase, (lengths, tokens) in PHASES.items():
            for name, llm in engines.items():
                params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
                given = prompts(lengths)
                start = time.perf_counter()
                llm.generate(given, params)
                if round_number:
                    times[name][phase].append(time.perf_counter() - start)
    rates: dict[str, Any] = {}
    for name, measured in times.items():
        rates[name] = {}
        for phase, (lengths, tokens) in PHASES.items():
            counted = sum(lengths) if tokens == 1 else len(lengths) * tokens
            rates[name][phase] = counted / statistics.median(measured[phase])
    return rates


def show_ablation(console: Console, shape: str, rates: dict[str, Any]) -> None:
    """tok/s without each pass, and its ratio to all passes: below 1 the pass pays."""
    table = Table(title=f"{shape}: tok/s without each pass (ratio to all of them; below 1: the pass pays)")
    table.add_column("without")
    for phase in PHASES:
        table.add_column(phase, justify="right")
    everything = rates[ALL]
    table.add_row(f"({ALL} run)", *(f"{everything[phase]:.1f}" for phase in PHASES))
    for name, measured in rates.items():
        if name != ALL:
            cells = (f"{measured[p]:.1f} ({measured[p] / everything[p]:.3f})" for p in PHASES)
            table.add_row(f"({LEVEL_0})" if name == LEVEL_0 else name, *cells)
    console.print(table)
