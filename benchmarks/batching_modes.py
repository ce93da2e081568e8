"""Static, padded and continuous batching beside one another: steps, padding, time to the last token, tokens/s.

    python benchmarks/batching_modes.py --out results
    python benchmarks/batching_modes.py --count                      # what lengths alone decide; seconds, and exact
    python benchmarks/batching_modes.py --requests 8 --repeats 1     # a quick look

  static      the first ``--batch`` requests of the queue run to the end of the longest before the next ones begin
  padded      requests of like length do so, as many as fit when each is padded to the longest (``PaddedBatches``)
  continuous  a request begins when another ends, at any step

The same greedy requests go through one engine in each of the three ways: prompts of 16 to 512 tokens, answers of 8 to
256, both uniform in the logarithm, so that most are short and a few are long. The engine is the same but for who runs
together. It packs tokens into flat steps and computes no padding in any mode, so the times leave out what padding
costs elsewhere; that is counted instead. Requests are all there from the beginning, or one comes every so many steps.

  steps            that the model runs
  tokens per step  generated in each, on average
  padding          share of the rows that a rectangular batch, as a server without flat steps runs it, computes for
                   nothing: each batch has as many rows as its longest prompt and longest answer make for everybody
  to the last token  from a request's arrival to its end, mean and 99th percentile (nearest rank): in steps, and in
                   seconds
  tokens/s         generated, from the first step to the end of the last request; median of the repeats, taking turns

Steps, tokens per step, padding and steps to the last token depend on the lengths alone: they are the same on every
machine, however busy, and are counted with a program that computes nothing.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from paged_vs_contiguous import NoModel
from random_llama import greedy
from report import add_arguments, conditions, markdown_table, save
from workloads import Workload

from torch_pagoda import LLM
from torch_pagoda.runtime.batching import Batches, PaddedBatches, StaticBatches
from torch_pagoda.runtime.batching.waiting import WaitingQueue
from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.program import CacheSpec, Program
from torch_pagoda.runtime.requests.request import Request

MODEL = Path(__file__).resolve().parents[1] / "examples" / "tiny-pydoc"
MODES: dict[str, Callable[[], Batches | None]] = {
    "static": StaticBatches,
    "padded": PaddedBatches,
    "continuous": lambda: None,
}
BLOCK_SIZE = 16


class RecordedBatches:
    """Batches formed by another, with the lengths (prompt, answer) of everybody in each written down."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self.formed: list[list[tuple[int, int]]] = []

    def form(self, waiting: WaitingQueue, max_num_seqs: int, now: float) -> list[Request]:
        batch = self._batches.form(waiting, max_num_seqs, now)
        if batch:
            self.formed.append([(request.num_prompt_tokens, request.max_tokens) for request in batch])
        return batch


@dataclass(frozen=True)
class Counts:
    """What the lengths alone decide.

    Attributes:
        steps: that the model ran.
        computed: tokens that went through the model, none of them padding.
        rectangular: rows that the same batches have as rectangles; ``computed`` where none are formed.
        generated: tokens.
        mean_last, p99_last: steps from a request's arrival to its last token.
    """

    steps: int
    computed: int
    rectangular: int
    generated: int
    mean_last: float
    p99_last: float

    @property
    def tokens_per_step(self) -> float:
        return self.generated / self.steps

    @property
    def padding(self) -> float:
        return 1 - self.computed / self.rectangular


@dataclass(frozen=True)
class Times:
    """Seconds of one pass: of all of it, and of each request from its arrival to its last token."""

    whole: float
    last_tokens: list[float]


def mixed_workload(
    count: int, prompts: tuple[int, int], answers: tuple[int, int], vocab_size: int, seed: int
) -> Workload:
    """Requests whose lengths are uniform in the logarithm between two limits, both included."""
    generator = torch.Generator().manual_seed(seed)

    def lengths(least: int, most: int) -> list[int]:
        logs = torch.rand(count, generator=generator, dtype=torch.float64) * math.log(most / least)
        return (least * logs.exp()).round().long().tolist()

    prompt_lengths, answer_lengths = lengths(*prompts), lengths(*answers)
    ids = [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in prompt_lengths]
    return Workload(ids, answer_lengths)


def rows_as_rectangle(batch: Sequence[tuple[int, int]]) -> int:
    """Rows that a padded batch computes: everybody's prompt and answer are as long as the longest of each.

    The last token of an answer is not computed, so an answer of ``n`` tokens is ``n - 1`` rows.
    """
    prompts, answers = zip(*batch, strict=True)
    return len(batch) * (max(prompts) + max(answers) - 1)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of them do not exceed (nearest rank)."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def serve(
    program: Program, workload: Workload, batches: Batches | None, *, every: int, batch: int
) -> tuple[Counts, Times]:
    """Serve the workload by an engine of its own over the program, which has room for ``batch`` of the longest.

    Args:
        program: the model, or :class:`NoModel`.
        workload: the requests, in the order in which they come.
        batches: how batches are formed; None: continuous batching.
        every: steps between one request and the next; 0: all are there from the beginning.
        batch: most requests that run at the same time.

    Raises:
        RuntimeError: a request did not get all of its tokens, or was preempted.
    """
    longest = max(len(prompt) + answer for prompt, answer in zip(workload.prompts, workload.outputs, strict=True))
    recorded = None if batches is None else RecordedBatches(batches)
    engine = Engine(
        program,
        block_size=BLOCK_SIZE,
        num_blocks=batch * -(-longest // BLOCK_SIZE) + batch,
        max_num_seqs=batch,
        max_model_len=longest,
        enable_prefix_caching=False,
        batches=recorded,
    )
    coming = list(zip(workload.prompts, workload.outputs, strict=True))
    arrived: dict[str, int] = {}
    last_steps: list[float] = []
    last_seconds: list[float] = []
    generated = step = 0
    begin = time.perf_counter()
    while coming or engine.has_unfinished():
        # Where nobody is left, the next one comes at once.
        while coming and (len(arrived) * every <= step or not engine.has_unfinished()):
            prompt, answer = coming.pop(0)
            arrived[engine.submit(prompt, greedy(answer))] = step
        step += 1
        for output in engine.step():
            if output.finished:
                last_steps.append(step - arrived[output.request_id])
                last_seconds.append(output.metrics.e2e_latency or 0.0)
                generated += len(output.outputs[0].token_ids)
    whole = time.perf_counter() - begin
    stats = engine.stats()
    if generated != sum(workload.outputs) or stats["preemptions"]:
        raise RuntimeError(f"{generated} of {sum(workload.outputs)} tokens, {stats['preemptions']} preemptions")
    computed = int(stats["computed_tokens"])
    rectangular = computed if recorded is None else sum(map(rows_as_rectangle, recorded.formed))
    mean, p99 = statistics.fmean(last_steps), percentile(last_steps, 0.99)
    return Counts(int(stats["steps"]), computed, rectangular, generated, mean, p99), Times(whole, last_seconds)


def count_modes(workload: Workload, every: int, batch: int, vocab_size: int) -> dict[str, Counts]:
    """The counts of each mode, without a model."""
    longest = max(map(len, workload.prompts)) + max(workload.outputs)
    program = NoModel([CacheSpec(1, 1, 1, torch.float32)], longest)
    program.vocab_size = vocab_size
    return {mode: serve(program, workload, make(), every=every, batch=batch)[0] for mode, make in MODES.items()}


def time_modes(program: Program, workload: Workload, every: int, batch: int, repeats: int) -> dict[str, Any]:
    """Tokens per second, mean and 99th percentile of the seconds to the last token; medians of the repeats."""
    passes: dict[str, list[Times]] = {mode: [] for mode in MODES}
    for _ in range(repeats):
        for mode, make in MODES.items():
            passes[mode].append(serve(program, workload, make(), every=every, batch=batch)[1])
    return {
        mode: {
            "tokens_per_second": sum(workload.outputs) / statistics.median(times.whole for times in found),
            "mean_last_seconds": statistics.median(statistics.fmean(times.last_tokens) for times in found),
            "p99_last_seconds": statistics.median(percentile(times.last_tokens, 0.99) for times in found),
        }
        for mode, found in passes.items()
    }


def tables(result: dict[str, Any]) -> str:
    """All figures as Markdown, a table for each way of arriving."""
    columns = ["", "steps", "tokens per step", "padding", "last token, mean (steps)", "p99 (steps)"]
    timed = ["tokens/s", "last token, mean (s)", "p99 (s)"]
    lines = []
    for case in result["cases"]:
        every = case["every"]
        comes = f"one request every {every} steps" if every else "all requests at once"
        rows = []
        for mode, counts in case["counts"].items():
            row = [mode, counts["steps"], counts["tokens_per_step"], f"{counts['padding']:.0%}"]
            row += [counts["mean_last"], counts["p99_last"]]
            if times := case.get("times"):
                row += times[mode].values()
            rows.append(row)
        shown = columns + timed if "times" in case else columns
        lines.append(f"{result['requests']} requests, {result['batch']} at a time, {comes}\n")
        lines.append(markdown_table(shown, rows))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(MODEL), help="checkpoint folder or hub id")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--batch", type=int, default=16, help="most requests that run at the same time")
    parser.add_argument("--prompts", type=int, nargs=2, default=[16, 512], metavar=("LEAST", "MOST"))
    parser.add_argument("--answers", type=int, nargs=2, default=[8, 256], metavar=("LEAST", "MOST"))
    parser.add_argument("--every", type=int, nargs="+", default=[0, 8], help="steps between arrivals; 0: all at once")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--count", action="store_true", help="count, and do not run the model")
    add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    llm = None if args.count else LLM(args.model, dtype=args.dtype, num_blocks=1, max_model_len=16)
    vocab_size = 1024 if llm is None else min(1024, llm.program.vocab_size)
    workload = mixed_workload(args.requests, tuple(args.prompts), tuple(args.answers), vocab_size, args.seed)
    result: dict[str, Any] = {
        "requests": args.requests,
        "batch": args.batch,
        "prompt_tokens": sum(map(len, workload.prompts)),
        "answer_tokens": sum(workload.outputs),
        "seed": args.seed,
        "cases": [],
    }
    if llm is not None:
        result |= {"model": Path(args.model).name, "dtype": args.dtype, **conditions(args.threads)}
    for every in args.every:
        case: dict[str, Any] = {"every": every, "counts": {}}
        for mode, counts in count_modes(workload, every, args.batch, vocab_size).items():
            figures = {"tokens_per_step": counts.tokens_per_step, "padding": counts.padding}
            case["counts"][mode] = asdict(counts) | figures
        if llm is not None:
            case["times"] = time_modes(llm.program, workload, every, args.batch, args.repeats)
        result["cases"].append(case)
    text = tables(result)
    print(text)
    save(args.out, "batching_modes", result, text)


if __name__ == "__main__":
    main()
