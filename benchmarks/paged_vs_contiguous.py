"""Paged blocks against contiguous reservations, on the same memory: utilization, memory, batch size, throughput.

    python benchmarks/paged_vs_contiguous.py --out results
    python benchmarks/paged_vs_contiguous.py --count    # what lengths alone decide: all but the rates, in a minute
    python benchmarks/paged_vs_contiguous.py --lengths 64 --requests 8 --layers 2 --repeats 1    # a quick look

Contiguous allocation keeps a sequence's keys and values in one piece, so it has to reserve ``max_model_len`` tokens
when the sequence begins. Here that is the same engine with blocks of ``max_model_len`` tokens: the compiled program,
the kernels, the batcher and the bytes of the cache are the same on both sides, and the only difference is how many
tokens a block holds. Prefix caching is off.

At each length L there are ``--requests`` requests whose length, prompt and output together and half each, is
log-normal with mean L and a standard deviation of 0.5 of the logarithm, cut at ``max_model_len`` = ``--headroom`` L.
All are there from the beginning. The cache has room for ``--reservations`` times ``max_model_len`` tokens, once for
each number given. The default headroom of 2 is what makes contiguous reservations 38 % full, as claimed, or nearly.

  utilization        tokens stored / token slots of the blocks that are allocated, mean over the saturated steps:
                     those after which requests still wait
  of the whole cache tokens stored / token slots of the cache, likewise
  mean, largest batch sequences that hold blocks, likewise
  tokens/s           generated tokens / seconds from the first step to the end of the last request, so the end,
                     where the batch runs empty, counts; median of the repeats, which alternate between the sides
  memory             for the same batch: bytes of the cache that are used at most when SAME_BATCH requests run at a
                     time. Lengths alone decide it, so it is counted without running the model.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from random_llama import VOCAB_SIZE, greedy, llama_config, random_llama, weight_bytes
from report import add_arguments, conditions, markdown_table, plotter, save, save_plot
from workloads import Workload, log_normal_workload

from torch_pagoda import LLM
from torch_pagoda.runtime.cache.cache_specs import bytes_per_block
from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.program import CacheSpec, KVCache, Program
from torch_pagoda.runtime.requests.outputs import Progress
from torch_pagoda.runtime.step_metadata import StepMetadata

BLOCK_SIZE = 16
SAME_BATCH = 8
MAX_NUM_SEQS = 64
SIDES = ("contiguous", "paged")
CLAIMED_THROUGHPUT = {512: 2.28, 1024: 2.39, 2048: 3.31}


class NoModel:
    """A program that computes nothing: every next token is 0. For what does not depend on the tokens."""

    def __init__(self, caches: list[CacheSpec], max_model_len: int) -> None:
        self.caches = caches
        self.vocab_size = VOCAB_SIZE
        self.max_model_len: int | None = max_model_len
        self.restart_length: int | None = None
        self.rope_switch: int | None = None
        self.block_size: int | None = None
        self.device = torch.device("cpu")

    def reserve(self, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, num_drafts: int = 0) -> int:
        return 0

    def bind(self, kv_cache: KVCache) -> None:
        pass

    def __call__(self, input_ids: torch.Tensor, position_ids: torch.Tensor, step: StepMetadata) -> torch.Tensor:
        return torch.zeros(1, 1).expand(len(step.logits_rows), self.vocab_size)


@dataclass
class CacheUse:
    """What the cache held, step by step.

    Attributes:
        block_size: tokens per block.
        num_blocks: in the cache.
        samples: after each saturated step (tokens stored, blocks used, sequences running).
        peak_blocks: most blocks used after any step.
    """

    block_size: int
    num_blocks: int
    samples: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    peak_blocks: int = 0

    def add(self, tokens: int, blocks: int, running: int, waiting: int) -> None:
        """Note the state after a step."""
        self.peak_blocks = max(self.peak_blocks, blocks)
        if waiting and blocks:
            self.samples.append((tokens, blocks, running))

    @property
    def utilization(self) -> float:
        """Mean of tokens stored / slots allocated."""
        return statistics.fmean(tokens / (blocks * self.block_size) for tokens, blocks, _ in self.samples)

    @property
    def cache_utilization(self) -> float:
        """Mean of tokens stored / slots of the whole cache."""
        return statistics.fmean(tokens for tokens, _, _ in self.samples) / (self.num_blocks * self.block_size)

    @property
    def mean_batch(self) -> float:
        return statistics.fmean(running for _, _, running in self.samples)

    @property
    def largest_batch(self) -> int:
        return max(running for _, _, running in self.samples)


@dataclass(frozen=True)
class Run:
    """One pass over a workload."""

    use: CacheUse
    seconds: float
    generated: int
    preemptions: int
    steps: int

    @property
    def tokens_per_second(self) -> float:
        return self.generated / self.seconds


def run(
    program: Program, workload: Workload, *, block_size: int, num_blocks: int, max_num_seqs: int, max_model_len: int
) -> Run:
    """Serve the workload by an engine of its own over the program, with a cache of ``num_blocks`` blocks.

    Raises:
        RuntimeError: a request did not get all of its tokens.
    """
    engine = Engine(
        program,
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        enable_prefix_caching=False,
    )
    engine.generate([[5, 6, 7, 8]], greedy(4))
    before = engine.stats()
    use = CacheUse(block_size, num_blocks)
    batcher, manager = engine.batcher, engine.block_manager

    def look(progress: Progress) -> None:
        tokens = sum(request.num_computed_tokens for request in batcher.running)
        use.add(tokens, manager.num_used_blocks, batcher.num_running, batcher.num_waiting)

    start = time.perf_counter()
    outputs = engine.generate(workload.prompts, [greedy(count) for count in workload.outputs], on_progress=look)
    seconds = time.perf_counter() - start
    if [len(output.outputs[0].token_ids) for output in outputs] != workload.outputs:
        raise RuntimeError("a request did not get all of its tokens")
    after = engine.stats()
    return Run(
        use,
        seconds,
        sum(workload.outputs),
        int(after["preemptions"] - before["preemptions"]),
        int(after["steps"] - before["steps"]),
    )


def same_batch_blocks(caches: list[CacheSpec], length: int, block_size: int, max_model_len: int, seed: int) -> int:
    """Most blocks in use when ``SAME_BATCH`` requests run at a time and the cache has room for all of them."""
    return run(
        NoModel(caches, max_model_len),
        log_normal_workload(8 * SAME_BATCH, length, max_model_len, seed=seed),
        block_size=block_size,
        num_blocks=SAME_BATCH * -(-max_model_len // block_size),
        max_num_seqs=SAME_BATCH,
        max_model_len=max_model_len,
    ).use.peak_blocks


def compare(
    program: Program, length: int, longest: int, reservations: int, requests: int, repeats: int, seed: int
) -> dict[str, dict[str, float]]:
    """Both sides at one length and one size of the cache; each figure by side.

    Args:
        program: of the model.
        length: mean tokens of a request.
        longest: ``max_model_len``.
        reservations: so many times that the cache has room for.
        requests: how many.
        repeats: of the measurement.
        seed: of the requests.

    Raises:
        RuntimeError: no request ever waited.
    """
    workload = log_normal_workload(requests, length, longest, seed=seed)
    block_sizes = {"contiguous": longest, "paged": BLOCK_SIZE}
    runs: dict[str, list[Run]] = {side: [] for side in SIDES}
    for _ in range(repeats):
        for side, block_size in block_sizes.items():
            runs[side].append(
                run(
                    program,
                    workload,
                    block_size=block_size,
                    num_blocks=reservations * longest // block_size,
                    max_num_seqs=MAX_NUM_SEQS,
                    max_model_len=longest,
                )
            )
    figures = {}
    for side, block_size in block_sizes.items():
        use = runs[side][0].use  # the same in every repeat: lengths alone decide it
        if not use.samples:
            raise RuntimeError(f"requests={requests} never wait, so nothing is saturated; give more")
        blocks = same_batch_blocks(program.caches, length, block_size, longest, seed)
        rates = [each.tokens_per_second for each in runs[side]]
        figures[side] = {
            "utilization": use.utilization,
            "cache_utilization": use.cache_utilization,
            "mean_batch": use.mean_batch,
            "largest_batch": use.largest_batch,
            "tokens_per_second": statistics.median(rates),
            "tokens_per_second_min": min(rates),
            "tokens_per_second_max": max(rates),
            "preemptions": runs[side][0].preemptions,
            "steps": runs[side][0].steps,
            "same_batch_bytes": blocks * bytes_per_block(program.caches, block_size),
        }
    return figures


def cache_of_random_llama(layers: int) -> list[CacheSpec]:
    """What the program of :func:`random_llama` keeps, without compiling it."""
    config = llama_config(layers)
    head_dim = config.hidden_size // config.num_attention_heads
    return [CacheSpec(config.num_key_value_heads, head_dim, head_dim, torch.bfloat16)] * layers


def table_row(case: dict[str, Any], weights: int) -> list[object]:
    old, new = case["contiguous"], case["paged"]

    def saved(extra: int) -> str:
        return f"{(new['same_batch_bytes'] + extra) / (old['same_batch_bytes'] + extra) - 1:+.0%}"

    row = [
        case["length"],
        case["reservations"],
        f"{old['utilization']:.1%} → {new['utilization']:.1%}",
        f"{old['cache_utilization']:.1%} → {new['cache_utilization']:.1%}",
        f"{saved(0)} ({saved(weights)})" if weights else saved(0),
        f"{old['largest_batch']} → {new['largest_batch']}",
        f"{old['mean_batch']:.2f} → {new['mean_batch']:.2f}",
        f"{old['steps']} → {new['steps']}",
        new["preemptions"],
    ]
    if weights:
        claimed = CLAIMED_THROUGHPUT.get(case["length"]) if case["reservations"] == 1 else None
        ratio = new["tokens_per_second"] / old["tokens_per_second"]
        row.append(f"{old['tokens_per_second']:.1f} → {new['tokens_per_second']:.1f}")
        row.append(f"{ratio:.2f}×" + (f" ({claimed:.2f}×)" if claimed else ""))
    return row


def tables(result: dict[str, Any]) -> str:
    """All figures as Markdown; without ``weight_bytes`` no model ran, and there are no rates."""
    weights = result.get("weight_bytes", 0)
    columns = [
        "mean length",
        "cache / max_model_len",
        "utilization",
        "of the whole cache",
        f"KV memory for {SAME_BATCH} at a time" + (" (with weights)" if weights else ""),
        "largest batch",
        "mean batch",
        "steps",
        "preemptions",
    ]
    if weights:
        columns += ["tokens/s", "ratio (claimed)"]
    rows = [table_row(case, weights) for case in result["cases"]]
    claims = "claimed: utilization 38 % → 85 %, memory −41 %, largest batch 1 → 3\n"
    return "contiguous → paged\n\n" + markdown_table(columns, rows) + "\n" + claims


def plot(out: Path | None, result: dict[str, Any]) -> None:
    plt = plotter(out)
    if plt is None or out is None:
        return
    cases = result["cases"]
    labels = [f"{case['length']}\n×{case['reservations']}" for case in cases]
    figure, axes = plt.subplots(1, 3, figsize=(12, 4))
    for axis, key, title in zip(
        axes,
        ("utilization", "mean_batch", "tokens_per_second"),
        ("tokens stored / slots allocated", "mean batch", "generated tokens/s"),
        strict=True,
    ):
        for offset, side in zip((-0.2, 0.2), SIDES, strict=True):
            axis.bar([i + offset for i in range(len(cases))], [case[side][key] for case in cases], 0.4, label=side)
        axis.set_xticks(range(len(cases)), labels)
        axis.set_title(title)
        axis.set_xlabel("mean length, × room for so many reservations")
        axis.set_ylim(top=1.25 * axis.get_ylim()[1])  # the legend's place
        axis.legend(loc="upper left", ncols=2)
    save_plot(plt, figure, out / "paged_vs_contiguous.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048], help="mean lengths in tokens")
    parser.add_argument("--reservations", type=int, nargs="+", default=[1, 4], help="that the cache has room for")
    parser.add_argument("--headroom", type=int, default=2, help="max_model_len / mean length")
    parser.add_argument("--requests", type=int, default=12, help="for each reservation of the cache")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--count", action="store_true", help="count, and do not run the model: no rates")
    add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    result: dict[str, Any] = {"headroom": args.headroom, **conditions(args.threads), "cases": []}
    program: Program
    if args.count:
        program = NoModel(cache_of_random_llama(args.layers), args.headroom * max(args.lengths))
        args.repeats = 1
    else:
        model = random_llama(layers=args.layers)
        # Only its program is used: each run has an engine of its own.
        program = LLM(model, num_blocks=1, max_model_len=16, pack_weights=True).program
        result["weight_bytes"] = weight_bytes(model)
    for length in args.lengths:
        for reservations in args.reservations:
            start = time.perf_counter()
            requests = args.requests * reservations
            figures = compare(
                program, length, args.headroom * length, reservations, requests, args.repeats, args.seed
            )
            if args.count:
                for of_side in figures.values():
                    for rate in ("tokens_per_second", "tokens_per_second_min", "tokens_per_second_max"):
                        del of_side[rate]
            case = {"length": length, "reservations": reservations, "requests": requests, **figures}
            case["seconds"] = time.perf_counter() - start
            result["cases"].append(case)
            print(f"length {length}, room for {reservations}: {case['seconds']:.0f} s", flush=True)
    text = tables(result)
    print(text)
    save(args.out, "paged_vs_contiguous", result, text)
    if not args.count:
        plot(args.out, result)


if __name__ == "__main__":
    main()
