"""What each pass is worth: tok/s with all passes, without each one, and without any but the attention passes; used by
``throughput.py --ablate``.

All engines live in one process over one model and take turns, in another order each round, so that drift of the
machine hits all alike. One engine is there twice: what tells the two apart is noise.
"""

from __future__ import annotations

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

ALL, AGAIN, LEVEL_0 = "all passes", "all passes, again", "opt_level=0"


def ablate(model: PreTrainedModel, prompts: Any, rounds: int, settings: dict[str, Any]) -> dict[str, Any]:
    """tok/s of every phase, best of ``rounds``, by what runs: ALL (and AGAIN), LEVEL_0, or all but the named pass.

    Passes that match nothing in the model are left out.
    """
    settings = {"max_num_seqs": 32, "max_model_len": 2048, "num_blocks": 512, "verify": "off", **settings}
    engines = {ALL: LLM(model, **settings), AGAIN: LLM(model, **settings)}
    engines[LEVEL_0] = LLM(model, opt_level=0, **settings)
    for name in matching_passes(engines[ALL]):
        engines[name] = LLM(model, passes={"skip": [name]}, **settings)
    order = list(engines)
    times: dict[str, dict[str, float]] = {name: dict.fromkeys(PHASES, float("inf")) for name in engines}
    for round_number in range(rounds + 1):  # the first warms up
        for phase, (lengths, tokens) in PHASES.items():
            order = [*order[5:], *order[:5]]
            for name in order:
                params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
                given = prompts(lengths)
                start = time.perf_counter()
                engines[name].generate(given, params)
                if round_number:
                    times[name][phase] = min(times[name][phase], time.perf_counter() - start)
    rates: dict[str, Any] = {}
    for name, measured in times.items():
        rates[name] = {}
        for phase, (lengths, tokens) in PHASES.items():
            counted = sum(lengths) if tokens == 1 else len(lengths) * tokens
            rates[name][phase] = counted / measured[phase]
    return rates


def matching_passes(llm: LLM) -> list[str]:
    """The passes that found something in the model and without which it can be compiled, in order."""
    optional = {p.name for p in PASSES if not p.required and not p.option}
    return list(dict.fromkeys(r.name for r in llm.compile_report.passes if r.matches and r.name in optional))


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
            table.add_row(f"({name})" if name in (AGAIN, LEVEL_0) else name, *cells)
    console.print(table)
