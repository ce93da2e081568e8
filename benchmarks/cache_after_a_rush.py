"""What the KV cache takes after a rush: all that it ever needed, up to the last block in use, or what is in use.

    python benchmarks/cache_after_a_rush.py --out results

Requests whose length is log-normal come at once and run to their end, ``--batch`` at a time. After them ``--lull``
others come one by one, each when the one before has ended. While the last ones of the rush and those of the lull run
there is little to do, and the cache could give memory back. At the moments when so many of the rush are left, and in
the middle of the last request of the lull, this counts, in blocks:

  in use       blocks that hold keys and values
  kept         what a cache that gives nothing back has touched
  cut          what is left if the cache is cut after the last block in use, and nothing is moved
  elastic      the size of the cache with ``min_kv_cache_memory``, which shrinks step by step as the load falls and
               moves what lies beyond its new end to the front
  moved        blocks that it has moved until then

Lengths alone decide all of it; no model runs. Prefix caching is off.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from paged_vs_contiguous import NoModel
from random_llama import greedy
from report import markdown_table, save
from workloads import Workload, log_normal_workload

from torch_pagoda.runtime.blocks.pool import NULL_BLOCK
from torch_pagoda.runtime.cache.cache_specs import bytes_per_block
from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.program import CacheSpec

BLOCK_SIZE = 16
LULL = "the lull"


def end_of_blocks_in_use(engine: Engine) -> int:
    """One more than the highest id of a block in use; 0 where none is."""
    manager = engine.block_manager
    held = [
        block
        for name in manager.sequences
        for table in manager.tables(name)
        for block in table
        if block != NULL_BLOCK
    ]
    return max(held, default=-1) + 1


def serve(
    rush: Workload, lull: Workload, lefts: Sequence[int], *, batch: int, longest: int, least: int | None
) -> dict[str, dict[str, Any]]:
    """Serve both; figures when no more than each of ``lefts`` of the rush are left, first moment, and of the lull.

    Args:
        rush: all of it is there from the beginning.
        lull: comes after it, one by one.
        lefts: numbers of requests, larger ones first.
        batch: most requests that run at a time; the cache has room for as many of the longest.
        longest: ``max_model_len``.
        least: blocks that the cache may shrink to; None: it keeps its size.
    """
    caches = [CacheSpec(1, 1, 1, torch.float32)]
    engine = Engine(
        NoModel(caches, longest),
        block_size=BLOCK_SIZE,
        num_blocks=batch * -(-longest // BLOCK_SIZE),
        min_kv_cache_memory=None if least is None else least * bytes_per_block(caches, BLOCK_SIZE),
        max_num_seqs=batch,
        max_model_len=longest,
        enable_prefix_caching=False,
        preemption="recompute",
    )
    found: dict[str, dict[str, Any]] = {}
    touched = 0

    def step() -> dict[str, Any]:
        nonlocal touched
        engine.step()
        end = end_of_blocks_in_use(engine)
        touched = max(touched, end)
        stats = engine.stats()
        in_use, size, moved = stats["blocks_used"], stats["blocks_total"], stats["blocks_moved"]
        return {"in_use": in_use, "kept": touched, "cut": end, "size": size, "moved": moved, "steps": stats["steps"]}

    for prompt, answer in zip(rush.prompts, rush.outputs, strict=True):
        engine.submit(prompt, greedy(answer))
    while engine.has_unfinished():
        figures = step()
        for count in lefts:
            if engine.batcher.num_unfinished <= count:
                found.setdefault(str(count), figures)
    for prompt, answer in zip(lull.prompts, lull.outputs, strict=True):
        engine.submit(prompt, greedy(answer))
        for i in range(answer):
            figures = step()
            if i == answer // 2:
                found[LULL] = figures
        while engine.has_unfinished():
            step()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32, help="most requests that run at the same time")
    parser.add_argument("--length", type=int, default=512, help="mean tokens of a request, prompt and answer")
    parser.add_argument(
        "--left", type=int, nargs="+", default=[16, 8, 4, 1], help="moments to look at, largest first"
    )
    parser.add_argument("--lull", type=int, default=8, help="requests that come one by one afterwards")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="DIR", help="write results as JSON and Markdown here")
    args = parser.parse_args()
    longest = 4 * args.length
    rush = log_normal_workload(args.requests, args.length, longest, seed=args.seed)
    lull = log_normal_workload(args.lull, args.length, longest, seed=args.seed + 1)
    blocks = args.batch * -(-longest // BLOCK_SIZE)
    fixed = serve(rush, lull, args.left, batch=args.batch, longest=longest, least=None)
    elastic = serve(rush, lull, args.left, batch=args.batch, longest=longest, least=blocks // 16)
    rows = []
    for moment, still in fixed.items():
        shrunk = elastic[moment]
        name = moment if moment == LULL else f"{moment} of the rush are left"
        rows.append([name, still["in_use"], still["kept"], still["cut"], shrunk["size"], shrunk["moved"]])
    text = markdown_table(["", "in use", "kept", "cut", "elastic", "moved"], rows)
    print(text)
    result = {"requests": args.requests, "batch": args.batch, "length": args.length, "blocks": blocks}
    save(args.out, "cache_after_a_rush", result | {"fixed": fixed, "elastic": elastic}, text)


if __name__ == "__main__":
    main()
