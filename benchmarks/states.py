"""Models with state beside what their bytes take: kernels, decoding, prompts, shared prefixes, and the host's share.

    python benchmarks/states.py                            # all parts
    python benchmarks/states.py --only kernels prefixes --out results

kernels   the states that a decode step of S sequences reads and writes, per second, beside what multiplying the same
          memory in place reaches; layers of which each has states of its own, so that no cache holds them
decode    tokens/s of one request in bf16; the share of the machine's reading rate that weights, and states read and
          written, come to; both rates are of this run
prefill   a prompt of 1024: seconds of its step, and the share of it that the recurrence takes when it is run alone
prefixes  tokens that are computed: of a third request that shares 480 with two before it, and of each turn of a chat
          that only grows; bytes of snapshots beside those of the keys and values that they stand for
host      planning and packing a decode step of 64 sequences, with states and without

The shapes are Qwen3.5-0.8B's and, with a quarter of its layers, Granite 4.0 H Micro's (Mamba-2).
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from limits import machine_limits
from report import add_arguments, conditions, markdown_table, save
from shapes import (
    DECODE_PROMPT,
    DECODE_TOKENS,
    PREFILL_PROMPT,
    STATE_SHAPES,
    Prompts,
    random_model,
    weight_bytes_per_token,
)

from torch_pagoda import LLM, SamplingParams
from torch_pagoda.runtime.cache.cache_specs import bytes_per_block, bytes_per_slot
from torch_pagoda.runtime.ops.registration import OPERATORS
from torch_pagoda.runtime.ops.state.linear_recurrence import linear_recurrence
from torch_pagoda.runtime.program import StateSpec

linear_recurrence_cpu = OPERATORS[linear_recurrence].cpu

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

QWEN, GRANITE = STATE_SHAPES
SEQUENCES = (1, 8, 32, 64)
"""Of a decode step."""
RECURRENCES = {
    "gated delta rule, 16 × 128 × 128": (16, 16, 128, 128, True),
    "Mamba-2, 64 × 64 × 128": (1, 64, 64, 128, False),
}
"""Key heads, value heads, rows and columns of a state, and whether there is a beta."""
_MEMORY = 600_000_000  # bytes of states that a round goes through, more than any cache holds


def median_seconds(call: Callable[[], object], repeats: int) -> float:
    """Median time of a call, the first one left out."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def recurrence(kind: str, tokens: int, slots: int) -> tuple[tuple[Any, ...], torch.Tensor]:
    """Arguments of ``linear_recurrence_cpu`` in front of its state, and a state."""
    keys, values, rows, columns, has_beta = RECURRENCES[kind]
    query, key = torch.randn(2, 1, tokens, keys, columns).bfloat16()
    value, decay = torch.randn(1, tokens, values, rows).bfloat16(), -torch.rand(1, tokens, values)
    beta = torch.rand(1, tokens, values) if has_beta else None
    given = query, key, value, decay, beta, columns**-0.5, 1e-6 if has_beta else None
    return given, torch.zeros(slots, values, rows, columns)


def measure_kernels(repeats: int) -> list[dict[str, Any]]:
    rows = []
    for kind in RECURRENCES:
        for count in SEQUENCES:
            given, state = recurrence(kind, count, count)
            size = state.numel() * 4
            states = [torch.zeros_like(state) for _ in range(max(2, _MEMORY // size))]
            starts, slots = torch.arange(count + 1, dtype=torch.int32), torch.arange(count, dtype=torch.int32)

            def step(given: Any = given, states: Any = states, starts: Any = starts, slots: Any = slots) -> None:
                for own in states:
                    linear_recurrence_cpu(*given, own, starts, slots, slots)

            def memory(states: Any = states) -> None:
                for own in states:
                    own.mul_(0.5)

            # In turns, so that drift of the machine hits both.
            times = [(median_seconds(step, 1), median_seconds(memory, 1)) for _ in range(repeats)]
            moved = 2 * size * len(states) / 1e9
            ours, theirs = (moved / statistics.median(side) for side in zip(*times, strict=True))
            rows.append({"kernel": kind, "sequences": count, "gb_s": ours, "memory_gb_s": theirs})
    return rows


def run(llm: LLM, prompts: list[list[int]], tokens: int) -> float:
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts, params)
    return time.perf_counter() - start


def measure_models(repeats: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    decode, prefill = [], []
    for shape in (QWEN, GRANITE):
        model = random_model(shape)
        weights = weight_bytes_per_token(model)
        settings: dict[str, Any] = {"max_num_seqs": 32, "max_model_len": 2048, "enable_prefix_caching": False}
        llm = LLM(model, pack_weights=True, verify="off", **settings)
        states = bytes_per_slot(llm.program.caches)
        prompts = Prompts()
        run(llm, prompts([16]), 4)
        rates, times, firsts, steps = [], [], [], []
        for _ in range(repeats):
            rates.append(machine_limits(1).read_gb_per_s)
            firsts.append(run(llm, prompts([DECODE_PROMPT]), 1))
            times.append(run(llm, prompts([DECODE_PROMPT]), DECODE_TOKENS))
            steps.append(run(llm, prompts([PREFILL_PROMPT]), 1))
        seconds = (statistics.median(times) - statistics.median(firsts)) / (DECODE_TOKENS - 1)
        size, rate = (weights + 2 * states) / 1e9, statistics.median(rates)
        decode.append(
            {
                "shape": shape,
                "tok_s": 1 / seconds,
                "gb_per_token": size,
                "state_mib": states / 2**20,
                "gb_s": size / seconds,
                "read_gb_s": rate,
            }
        )
        kind = list(RECURRENCES)[shape == GRANITE]
        given, state = recurrence(kind, PREFILL_PROMPT, 1)
        layers = sum(isinstance(spec, StateSpec) and spec.name == "recurrent_state" for spec in llm.program.caches)
        starts, slot = torch.tensor([0, PREFILL_PROMPT], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        alone = median_seconds(lambda: linear_recurrence_cpu(*given, state, starts, slot, slot), repeats)  # noqa: B023
        step = statistics.median(steps)
        prefill.append({"shape": shape, "step_s": step, "recurrence_s": alone * layers, "layers": layers})
        del llm, model
    return decode, prefill


def measure_prefixes() -> dict[str, Any]:
    from tiny_models import build_tiny_model

    llm = LLM(build_tiny_model("qwen3_5_text", max_position_embeddings=8192), block_size=16, num_blocks=2048)
    prompts, computed = Prompts(), []

    def ask(ids: list[int], tokens: int = 1) -> list[int]:
        before = llm.stats()["computed_tokens"]
        (answer,) = llm.generate([ids], SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True))
        computed.append(llm.stats()["computed_tokens"] - before)
        return list(answer.outputs[0].token_ids)

    def fresh(count: int) -> list[int]:
        return [token % 250 for token in prompts([count])[0]]

    shared = fresh(480)
    for _ in range(3):
        ask(shared + fresh(40))
    third, chat, turns = computed[2], fresh(700), []
    for _ in range(6):
        answer = ask(chat, 50)
        turns.append((len(chat), computed[-1]))
        chat = chat + answer + fresh(30)
    # The answer's tokens but the last are computed when they are sampled; of the prompt all that is new has to be.
    pairs = itertools.pairwise(turns)
    again = [work - 49 - (length - before - 49) for (before, _), (length, work) in pairs]
    stats = llm.stats()
    snapshots = stats["state_slots_cached"] * bytes_per_slot(llm.program.caches)
    kept = stats["blocks_cached"] * bytes_per_block(llm.program.caches, 16)
    return {"third": third, "of": 520, "again": again, "snapshot_bytes": snapshots, "kv_bytes": kept}


def measure_host() -> dict[str, float]:
    from tiny_models import build_tiny_model

    result = {}
    for kind in ("qwen3_5_text", "llama"):
        llm = LLM(build_tiny_model(kind), max_num_seqs=64, block_size=16, num_blocks=1024)
        prompts = [[token % 250 for token in ids] for ids in Prompts()([20] * 64)]
        run(llm, prompts[:1], 4)
        llm.profile(reset=True)
        run(llm, prompts, 200)
        profile = llm.profile()
        steps = sum(totals.num_steps for totals in profile.totals.values())
        result[kind] = 1e3 * (profile.phases["schedule"] + profile.phases["pack"]) / steps
    return result


PARTS = ("kernels", "decode", "prefixes", "host")


def tables(result: dict[str, Any]) -> str:
    """All that was measured, in Markdown."""
    text = []
    if "kernels" in result:
        rows = [
            (r["kernel"], r["sequences"], r["gb_s"], r["memory_gb_s"], f"{r['gb_s'] / r['memory_gb_s']:.0%}")
            for r in result["kernels"]
        ]
        text.append(markdown_table(("state kernel", "sequences", "GB/s", "memory GB/s", "of memory"), rows))
    if "decode" in result:
        rows = [
            (r["shape"], r["tok_s"], r["gb_per_token"], r["state_mib"], f"{r['gb_s'] / r['read_gb_s']:.0%}")
            for r in result["decode"]
        ]
        columns = ("one request", "tok/s", "GB a token", "MiB of states", "of read")
        text.append(markdown_table(columns, rows))
        rows = [
            (r["shape"], 1e3 * r["step_s"], 1e3 * r["recurrence_s"], f"{r['recurrence_s'] / r['step_s']:.0%}")
            for r in result["prefill"]
        ]
        text.append(markdown_table((f"prompt of {PREFILL_PROMPT}", "ms", "ms of recurrences", "share"), rows))
    if "prefixes" in result:
        found = result["prefixes"]
        text.append(f"third request: {found['third']} of {found['of']} tokens are computed")
        text.append(f"turns of a chat: {', '.join(map(str, found['again']))} tokens are computed again")
        text.append(
            f"kept: {found['snapshot_bytes']:,} bytes of snapshots, {found['kv_bytes']:,} of keys and values\n"
        )
    if "host" in result:
        ways = ", ".join(f"{kind} {ms:.3f}" for kind, ms in result["host"].items())
        text.append(f"ms of planning and packing a step of 64 sequences: {ways}\n")
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--repeats", type=int, default=5)
    add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    result: dict[str, Any] = {"conditions": conditions(args.threads)}
    if "kernels" in args.only:
        result["kernels"] = measure_kernels(args.repeats)
    if "decode" in args.only:
        result["decode"], result["prefill"] = measure_models(args.repeats)
    if "prefixes" in args.only:
        result["prefixes"] = measure_prefixes()
    if "host" in args.only:
        result["host"] = measure_host()
    text = tables(result)
    print(text)
    save(args.out, "states", result, text)


if __name__ == "__main__":
    main()
