"""What batching, the KV cache and int8 are worth, one beside the other; and speed against batch size.

    python benchmarks/optimizations.py --out results
    python benchmarks/optimizations.py --requests 4 --output 8 --layers 2 --repeats 1 --batches 1 2    # a quick look

The same greedy requests, all there from the beginning, are served in five ways:

  none               one request after the other; every token recomputes the whole sequence (transformers' forward
                     with sdpa attention and without a cache, logits of the last position only)
  batching           all requests as one left-padded batch, which grows by a column per token; no cache either
  KV cache           one request after the other by the paged engine (``max_num_seqs=1``): each token is computed once
  both               all requests by the paged engine, batched token by token
  both + int8 KV     the same with ``kv_cache_dtype="int8"``

The first two run the module as it is, the others the compiled program with packed weights, so the step from the one
to the other holds what compiling is worth too. ``same tokens`` says which share of the generated tokens is, up to the
first difference in each request, that of "none": in bfloat16 near-ties between tokens fall either way, and int8
rounds. Prefix caching is off. The ways take turns; medians of the repeats.

The second table hands B requests to the engine at once: generated tokens per second, and medians over the requests of
the time to the first token, of the time per token after it and of the whole.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from random_llama import greedy, random_llama, warm_up
from report import add_arguments, conditions, markdown_table, plotter, save, save_plot
from transformers import PreTrainedModel
from workloads import log_normal_lengths, random_prompt

from torch_pagoda import LLM, RequestOutput

Tokens = list[list[int]]
CLAIMED = {"none": 1, "batching": 6, "KV cache": 3, "both": 12, "both + int8 KV": 14}


def left_padded(sequences: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask ``[rows, width]`` int64, padded on the left with 0."""
    width = max(map(len, sequences))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in sequences])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in sequences])
    return ids, mask


@torch.inference_mode()
def recompute_batched(model: PreTrainedModel, prompts: Tokens, count: int) -> Tokens:
    """Greedy tokens of a left-padded batch; each column recomputes all before it."""
    ids, mask = left_padded(prompts)
    width = ids.shape[1]
    for _ in range(count):
        logits = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            use_cache=False,
            logits_to_keep=1,
        ).logits
        ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        mask = torch.cat([mask, torch.ones(len(prompts), 1, dtype=mask.dtype)], dim=1)
    return ids[:, width:].tolist()


@torch.inference_mode()
def recompute_alone(model: PreTrainedModel, prompts: Tokens, count: int) -> Tokens:
    """Greedy tokens of one prompt after the other; each token recomputes all before it."""
    results = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        for _ in range(count):
            logits = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits
            ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        results.append(ids[0, len(prompt) :].tolist())
    return results


def by_engine(llm: LLM, prompts: Tokens, count: int) -> list[RequestOutput]:
    outputs = llm.generate(prompts, greedy(count))
    assert all(len(output.outputs[0].token_ids) == count for output in outputs)
    return outputs


def same_share(tokens: Tokens, expected: Tokens) -> float:
    """Share of the tokens that come before the first difference of their row."""
    same = [
        sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(row, other, strict=True)))
        for row, other in zip(tokens, expected, strict=True)
    ]
    return sum(same) / sum(map(len, expected))


class Engines:
    """Engines over one model; compiled once for each kind of cache."""

    def __init__(self, model: PreTrainedModel, max_model_len: int) -> None:
        self.model, self.max_model_len = model, max_model_len

    def __call__(self, max_num_seqs: int, kv_cache_dtype: str = "auto") -> LLM:
        llm = LLM(
            self.model,
            max_num_seqs=max_num_seqs,
            max_model_len=self.max_model_len,
            kv_cache_dtype=kv_cache_dtype,
            enable_prefix_caching=False,
            pack_weights=True,
        )
        warm_up(llm)
        return llm


def compare_ways(
    model: PreTrainedModel, engines: Engines, prompts: Tokens, count: int, repeats: int
) -> dict[str, dict[str, float]]:
    """Seconds, tokens per second, speed-up and agreement of the five ways."""
    alone, together, int8 = engines(1), engines(len(prompts)), engines(len(prompts), "int8")

    def with_engine(llm: LLM) -> Callable[[], Tokens]:
        return lambda: [list(output.outputs[0].token_ids) for output in by_engine(llm, prompts, count)]

    ways: dict[str, Callable[[], Tokens]] = {
        "none": lambda: recompute_alone(model, prompts, count),
        "batching": lambda: recompute_batched(model, prompts, count),
        "KV cache": with_engine(alone),
        "both": with_engine(together),
        "both + int8 KV": with_engine(int8),
    }
    recompute_alone(model, prompts[:1], 2)
    recompute_batched(model, prompts[:2], 2)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    tokens: dict[str, Tokens] = {}
    for _ in range(repeats):
        for way, serve in ways.items():
            start = time.perf_counter()
            tokens[way] = serve()
            seconds[way].append(time.perf_counter() - start)
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    return {
        way: {
            "seconds": medians[way],
            "tokens_per_second": len(prompts) * count / medians[way],
            "speed_up": medians["none"] / medians[way],
            "claimed": CLAIMED[way],
            "same_tokens": same_share(tokens[way], tokens["none"]),
        }
        for way in ways
    }


def sweep(engines: Engines, prompts: Tokens, batches: list[int], count: int, repeats: int) -> list[dict[str, Any]]:
    """Throughput and latency of B requests at a time, for both kinds of cache."""
    rows: list[dict[str, Any]] = []
    for kind in ("auto", "int8"):
        # One program serves all sizes: an engine with room for the largest batch gets B requests.
        llm = engines(max(batches), kind)
        for batch in batches:
            runs = []
            for _ in range(repeats):
                start = time.perf_counter()
                outputs = by_engine(llm, prompts[:batch], count)
                runs.append((time.perf_counter() - start, outputs))
            metrics = [output.metrics for _, outputs in runs for output in outputs]
            rows.append(
                {
                    "kv_cache_dtype": kind,
                    "batch": batch,
                    "tokens_per_second": batch * count / statistics.median(seconds for seconds, _ in runs),
                    "ttft_ms": 1e3 * statistics.median(m.ttft or 0.0 for m in metrics),
                    "tpot_ms": 1e3 * statistics.median(m.tpot or 0.0 for m in metrics),
                    "latency_ms": 1e3 * statistics.median(m.e2e_latency or 0.0 for m in metrics),
                }
            )
    return rows


def tables(result: dict[str, Any]) -> str:
    """All figures as Markdown."""
    ways = [
        [
            way,
            row["seconds"],
            row["tokens_per_second"],
            f"{row['speed_up']:.2f}×",
            f"{row['claimed']}×",
            f"{row['same_tokens']:.1%}",
        ]
        for way, row in result["ways"].items()
    ]
    first = markdown_table(["", "seconds", "tokens/s", "speed-up", "claimed", "same tokens"], ways)
    keys = ["kv_cache_dtype", "batch", "tokens_per_second", "ttft_ms", "tpot_ms", "latency_ms"]
    names = ["KV cache", "batch", "tokens/s", "TTFT (ms)", "per token (ms)", "whole (ms)"]
    second = markdown_table(names, [[row[key] for key in keys] for row in result["batches"]])
    return f"{first}\n{second}"


def plot(out: Path | None, result: dict[str, Any]) -> None:
    plt = plotter(out)
    if plt is None or out is None:
        return
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4))
    ways = result["ways"]
    for offset, key, label in ((-0.2, "speed_up", "measured"), (0.2, "claimed", "claimed")):
        left.bar([i + offset for i in range(len(ways))], [row[key] for row in ways.values()], 0.4, label=label)
    left.set_xticks(range(len(ways)), list(ways), rotation=30, ha="right")
    left.set_title("speed-up")
    left.legend()
    for kind in ("auto", "int8"):
        rows = [row for row in result["batches"] if row["kv_cache_dtype"] == kind]
        batches = [row["batch"] for row in rows]
        label = "int8 KV" if kind == "int8" else "KV as computed"
        middle.plot(batches, [row["tokens_per_second"] for row in rows], "o-", label=label)
        right.plot(batches, [row["tpot_ms"] for row in rows], "o-", label=label)
    for axis, title in ((middle, "generated tokens/s"), (right, "ms per token of a request")):
        axis.set_xscale("log", base=2)
        axis.set_xticks(batches, [str(batch) for batch in batches])
        axis.set_xlabel("batch size")
        axis.set_title(title)
        axis.set_ylim(bottom=0)
        axis.legend()
    save_plot(plt, figure, out / "optimizations.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=16, help="of the comparison")
    parser.add_argument("--prompt", type=int, default=128, help="mean length, log-normal, at most twice as long")
    parser.add_argument("--output", type=int, default=64, help="tokens that each request generates")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12)
    add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    generator = torch.Generator().manual_seed(args.seed)
    count = max(args.requests, *args.batches)
    lengths = log_normal_lengths(count, args.prompt, 0.5, 2 * args.prompt, generator)
    prompts = [random_prompt(length, generator) for length in lengths]
    model = random_llama(getattr(torch, args.dtype), args.layers)
    engines = Engines(model, 2 * args.prompt + args.output)
    start = time.perf_counter()
    result: dict[str, Any] = {"dtype": args.dtype, **conditions(args.threads)}
    result["ways"] = compare_ways(model, engines, prompts[: args.requests], args.output, args.repeats)
    print(f"ways: {time.perf_counter() - start:.0f} s", flush=True)
    result["batches"] = sweep(engines, prompts, args.batches, args.output, args.repeats)
    text = tables(result)
    print(text)
    print(f"{time.perf_counter() - start:.0f} s")
    save(args.out, "optimizations", result, text)
    plot(args.out, result)


if __name__ == "__main__":
    main()
