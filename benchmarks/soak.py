"""A long run of everything at once on the shipped tiny model, checked as it goes; exit status 1 on any violation.

    python benchmarks/soak.py --requests 100000              # or --minutes 60; with both, whatever ends first
    python benchmarks/soak.py --requests 500 --check-every 100
    python benchmarks/soak.py --one-step-ahead               # as an NPU is served

Requests: random tokens, half of them behind one of a few shared prefixes; random lengths, priorities, clients and
sampling (greedy, seeded, penalties, log-probabilities, stop strings), n up to 3; some have a deadline, some are
cancelled at a random moment. The load goes up and down. The cache is so small that running requests are preempted, by
recomputation and by swapping in turn, and it shrinks when there is little to do; between steps it is defragmented at
random moments.

Failures, at random: the model raises once (nobody may notice), it raises whenever a certain token is in the step, or
gives NaN after another (those requests alone must end in an error), or Ctrl-C hits in a step (it reaches the caller,
and nothing else may happen).

Checked after each ``--check-every`` requests, and at the end when nothing is left to do:

- ``batcher.check()``; used + cached + free = total blocks; nobody holds blocks who is not there any more;
- every request ends once, for a reason that it was given, with as many completions and tokens as it asked for;
- of the greedy ones a sample agrees token for token with transformers' unbatched forward in float32;
- no more ``Completion`` objects than unfinished sequences, and of ``Request`` only those more whose deadlines are
  still noted, of which there is a bound;
- at the end no block is used, on the device or on the host, and the memory of the process has not grown: the slope of
  its resident size against finished requests, the first fifth left out, is below ``--most-growth``.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from report import add_arguments, conditions, markdown_table, plotter, save, save_plot
from soak_requests import EOS, MAX_MODEL_LEN, Asked, FailingProgram, Interrupt, Requests, wrong_with
from transformers import AutoModelForCausalLM

from torch_pagoda import LLM, RequestOutput
from torch_pagoda.runtime.batching.batcher import QueueFull
from torch_pagoda.runtime.cache.cache_specs import bytes_per_block
from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.engine.submission import Completion
from torch_pagoda.runtime.program import Program
from torch_pagoda.runtime.requests.detokenizer import Tokenizer
from torch_pagoda.runtime.requests.request import Request

MODEL = Path(__file__).resolve().parent.parent / "examples" / "tiny-pydoc"
MAX_NUM_SEQS = 24
MAX_QUEUE = 96
NUM_BLOCKS = 40
NEAR_TIE = 1e-4
"""Tokens whose float32 logits differ by less may fall either way."""
SLOPE_NEEDS = 20_000
"""Requests without which the growth of memory says nothing: caches and arenas still fill."""


def resident_mib() -> float:
    """What of this process lies in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def slope(points: list[tuple[float, float]]) -> float:
    """Of the least-squares line through the points."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def growth(points: list[tuple[float, float]]) -> float:
    """MiB per 10,000 requests, from points (requests, MiB) of which the first fifth is left out."""
    late = points[len(points) // 5 :]
    return 10_000 * slope(late) if len(late) > 1 else 0.0


class Oracle:
    """transformers' forward of one sequence at a time, in float32 and without a cache."""

    def __init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
        self.num_compared = 0
        self.num_ties = 0

    @torch.inference_mode()
    def difference(self, prompt: list[int], output: list[int]) -> str | None:
        """Where greedy decoding from the prompt is not the output.

        Given the tokens before, each one must be the likeliest: by induction that is the unbatched run.
        """
        self.num_compared += 1
        ids = torch.tensor([prompt + output[:-1]])
        logits = self.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :]
        best = logits.max(-1).values
        for place, token in enumerate(output):
            missing = float(best[place] - logits[place, token])
            if missing > NEAR_TIE:
                return f"token {place} is {token}, {missing:.3g} below the likeliest"
            self.num_ties += missing > 0
        return None


@dataclass
class Soak:
    """The run.

    Attributes:
        engine: over a ``FailingProgram``.
        rng: draws everything but the failures.
        oracle: for a sample of the greedy requests.
        sampled: which share of them.
        violations: what went wrong, at most a few of each kind.
        counts: what happened how often.
        memory: (finished requests, MiB) at each check.
        most_objects: requests that were in memory at a check.
        num_finished: requests that ended.
        pool_sizes: of the cache in blocks, as it grew and shrank.
    """

    engine: Engine
    rng: random.Random
    oracle: Oracle
    sampled: float
    pending: dict[str, Asked] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    memory: list[tuple[float, float]] = field(default_factory=list)
    most_objects: int = 0
    pool_sizes: set[int] = field(default_factory=set)
    num_finished: int = 0
    _load: int = MAX_NUM_SEQS

    def __post_init__(self) -> None:
        self._requests = Requests(self.rng)

    def violate(self, message: str) -> None:
        """Note a violation; of many the first ones are kept."""
        self.counts["violations"] += 1
        if len(self.violations) < 50:
            self.violations.append(message)
            print(f"VIOLATION {message}", flush=True)

    def run(self, requests: int | None, minutes: float | None, check_every: int) -> None:
        """Submit so many requests, or so long, and go on until all have ended."""
        start = time.perf_counter()
        next_check = check_every
        while True:
            seconds = time.perf_counter() - start
            full = requests is not None and self.counts["submitted"] >= requests
            late = minutes is not None and seconds >= 60 * minutes
            if (full or late) and not self.engine.has_unfinished():
                return
            completed = self.turn(
                0 if late else MAX_QUEUE if requests is None else requests - self.counts["submitted"]
            )
            # What an interrupted step left behind is put in order with the next one.
            if completed and self.num_finished >= next_check:
                next_check += check_every
                self.check()
                rate = self.num_finished / (time.perf_counter() - start)
                print(f"{self.num_finished} requests, {rate:.0f}/s, {self.memory[-1][1]:.1f} MiB", flush=True)

    def turn(self, most: int) -> bool:
        """Some submissions, at most so many, cancels and moves, then a step; returns whether it was completed."""
        rng, engine = self.rng, self.engine
        if rng.random() < 0.01:
            self._load = rng.choice((1, 8, MAX_NUM_SEQS, 2 * MAX_NUM_SEQS, MAX_QUEUE + 2 * MAX_NUM_SEQS))
        while most > 0 and len(self.pending) < self._load and self._submit():
            most -= 1
        if self.pending and rng.random() < 0.03:
            name = rng.choice(list(self.pending))
            if engine.cancel(name):
                self.pending[name].cancelled = True
                self.counts["cancelled"] += 1
        if rng.random() < 0.01:
            self.counts["blocks moved to the front"] += engine.block_manager.defragment()
        self.pool_sizes.add(engine.block_manager.num_blocks)
        try:
            outputs = engine.step()
        except Interrupt:
            return False
        for output in outputs:
            if output.finished:
                self._take(output)
        return True

    def _submit(self) -> bool:
        asked, options = self._requests.draw()
        try:
            name = self.engine.submit(asked.prompt, asked.params, **options)
        except QueueFull:
            self.counts["refused, the queue was full"] += 1
            return False
        self.counts["submitted"] += 1
        self.pending[name] = asked
        return True

    def _take(self, output: RequestOutput) -> None:
        self.num_finished += 1
        asked = self.pending.pop(output.request_id, None)
        if asked is None:
            self.violate(f"request {output.request_id} ended twice or was never asked")
            return
        for completion in output.outputs:
            self.counts[f"ended with {completion.finish_reason}"] += 1
        self.counts["preempted"] += output.metrics.num_preemptions
        problem = wrong_with(output, asked)
        if problem is None and asked.params.is_greedy and self.rng.random() < self.sampled:
            tokens = output.outputs[0].token_ids  # of cancelled ones what there is
            problem = self.oracle.difference(asked.prompt, tokens) if tokens else None
        if problem is not None:
            self.violate(f"request {output.request_id}: {problem}")

    def check(self) -> None:
        """Everything that must hold between steps."""
        batcher, stats = self.engine.batcher, self.engine.stats()
        try:
            batcher.check()
        except RuntimeError as error:
            self.violate(f"after {self.num_finished} requests: {error}")
        if stats["blocks_used"] + stats["blocks_cached"] + stats["blocks_free"] != stats["blocks_total"]:
            self.violate(f"after {self.num_finished} requests: used + cached + free is not total in {stats}")
        if (owners := self.engine.block_manager.leaks([*self.pending_sequences()])) != []:
            self.violate(f"after {self.num_finished} requests: blocks are held for {owners}")
        gc.collect()
        alive = Counter(type(each) for each in gc.get_objects() if type(each) in (Request, Completion))
        unfinished = sum(asked.params.n for asked in self.pending.values())
        # The batcher's heap of deadlines forgets those who ended when it has become twice too long.
        for kind, most in ((Completion, unfinished), (Request, 3 * unfinished + 64)):
            if alive[kind] > most:
                self.violate(
                    f"after {self.num_finished} requests: {alive[kind]} {kind.__name__}s, {unfinished} unfinished"
                )
        self.most_objects = max(self.most_objects, alive[Request])
        self.memory.append((self.num_finished, resident_mib()))
        # Both ways of preemption get their share.
        self.engine.batcher.planner.preemption = self.rng.choice(("recompute", "swap"))

    def pending_sequences(self) -> Iterator[str]:
        """Ids of the sequences that may hold blocks."""
        for request in (*self.engine.batcher.running, *self.engine.batcher.waiting):
            name = request.request_id.split("\0")[0]
            if name in self.pending:
                yield request.request_id

    def check_end(self, most_growth: float) -> float:
        """Everything that must hold when nothing is left to do; returns the growth in MiB per 10,000 requests."""
        self.check()
        stats = self.engine.stats()
        for name in ("blocks_used", "host_blocks_used", "running", "queue_length"):
            if stats[name]:
                self.violate(f"at the end {name} is {stats[name]}")
        if self.pending:
            self.violate(f"{len(self.pending)} requests never ended, {list(self.pending)[:5]} among them")
        grown = growth(self.memory)
        if grown > most_growth and self.num_finished >= SLOPE_NEEDS:
            self.violate(f"memory grows by {grown:.2f} MiB per 10,000 requests, --most-growth={most_growth}")
        for what in ("preemptions", "swaps", "evictions"):
            if not stats[what] and self.num_finished >= SLOPE_NEEDS:
                self.violate(f"there were no {what}: the run does not test them")
        if len(self.pool_sizes) < 2 and self.num_finished >= SLOPE_NEEDS:
            self.violate("the cache never changed its size: the run does not test that")
        return grown


def make_engine(program: Program, tokenizer: Tokenizer | None, *, one_step_ahead: bool = False) -> Engine:
    """An engine with everything on and little room."""
    return Engine(
        program,
        tokenizer,
        num_blocks=NUM_BLOCKS,
        block_size=16,
        min_kv_cache_memory=NUM_BLOCKS // 4 * bytes_per_block(program.caches, 16),
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=512,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=[EOS],
        policy="priority",
        preemption="auto",
        swap_space=NUM_BLOCKS // 2 * bytes_per_block(program.caches, 16),
        max_queue=MAX_QUEUE,
        async_scheduling=one_step_ahead,
    )


def tables(result: dict[str, Any]) -> str:
    """All figures as Markdown."""
    rows = [["requests", result["requests"]], ["minutes", result["minutes"]]]
    rows += [["requests/s", result["requests_per_second"]]]
    rows += [
        [f"RSS at {int(count)} requests (MiB)", mib] for count, mib in (result["memory"][0], result["memory"][-1])
    ]
    rows += [["RSS growth (MiB per 10,000 requests)", f"{result['growth']:+.3f}"]]
    rows += [["greedy requests compared with an unbatched run", result["compared"]]]
    rows += [["tokens that a near-tie decided", result["near_ties"]]]
    rows += [["most Request objects at a check", result["most_objects"]]]
    rows += [["blocks of the cache, least and most", f"{result['pool_sizes'][0]} – {result['pool_sizes'][-1]}"]]
    rows += [[name, count] for name, count in (*result["counts"].items(), *result["faults"].items())]
    names = ("preemptions", "swaps", "evictions", "copies_on_write", "blocks_moved", "steps")
    rows += [[name, result["stats"][name]] for name in (*names, "prefix_hit_rate")]
    rows += [["violations", result["counts"].get("violations", 0)]]
    return markdown_table(["", "figure"], rows)


def plot(out: Path | None, result: dict[str, Any]) -> None:
    plt = plotter(out)
    if plt is None or out is None:
        return
    figure, axis = plt.subplots(figsize=(7, 4))
    axis.plot([count for count, _ in result["memory"]], [mib for _, mib in result["memory"]])
    axis.set_xlabel("finished requests")
    axis.set_title("resident memory (MiB)")
    axis.set_ylim(bottom=0)
    save_plot(plt, figure, out / "soak.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=None, help="stop submitting after so long")
    parser.add_argument("--requests", type=int, default=None, help="or after so many; 100000 if neither is given")
    parser.add_argument("--one-step-ahead", action="store_true", help="async_scheduling=True, the NPU's default")
    parser.add_argument("--check-every", type=int, default=1000, help="finished requests")
    parser.add_argument("--fault-rate", type=float, default=0.003, help="steps that fail once, and interrupted ones")
    parser.add_argument("--compare", type=float, default=0.02, help="share of greedy requests to run unbatched too")
    parser.add_argument("--most-growth", type=float, default=2.0, help="MiB per 10,000 requests")
    add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.getLogger("torch_pagoda").setLevel(logging.ERROR)  # it warns of every injected failure
    if args.requests is None and args.minutes is None:
        args.requests = 100_000
    llm = LLM(MODEL, dtype="float32", max_model_len=MAX_MODEL_LEN, num_blocks=NUM_BLOCKS, max_num_seqs=MAX_NUM_SEQS)
    failing = FailingProgram(llm.program, random.Random(args.seed + 1), args.fault_rate)
    engine = make_engine(cast(Program, failing), llm.engine.tokenizer, one_step_ahead=args.one_step_ahead)
    soak = Soak(engine, random.Random(args.seed), Oracle(), args.compare)
    start = time.perf_counter()
    soak.run(args.requests, args.minutes, args.check_every)
    minutes = (time.perf_counter() - start) / 60
    grown = soak.check_end(args.most_growth)
    result = {
        **conditions(args.threads),
        "requests": soak.num_finished,
        "minutes": minutes,
        "requests_per_second": soak.num_finished / minutes / 60,
        "growth": grown,
        "compared": soak.oracle.num_compared,
        "near_ties": soak.oracle.num_ties,
        "most_objects": soak.most_objects,
        "pool_sizes": sorted(soak.pool_sizes),
        "counts": dict(sorted(soak.counts.items())),
        "faults": dict(sorted(failing.counts.items())),
        "stats": engine.stats(),
        "violations": soak.violations,
        "memory": soak.memory,
    }
    text = tables(result)
    print(text)
    save(args.out, "soak", result, text)
    plot(args.out, result)
    sys.exit(1 if soak.violations else 0)


if __name__ == "__main__":
    main()
