"""Microseconds of one `all_reduce` of ranks on this host: shared memory and torch.distributed's gloo, taking turns.

    python benchmarks/tensor_parallel.py                     # 2 ranks; 4 KB, 64 KB and 8 MB of float32
    python benchmarks/tensor_parallel.py --ranks 4 --bytes 4096 65536 --rounds 9

"shared" is a call from Python; "replayed" is the same call as recorded steps make it. Each rank has one thread. Turns
are of some 0.2 s; a figure is the median of all turns of rank 0, and the range beside it holds half of them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median, quantiles

import torch
import torch.distributed as dist
from report import add_arguments, conditions, markdown_table, save

from torch_pagoda.runtime.ops.native import noting_calls
from torch_pagoda.runtime.ops.replay import Replay
from torch_pagoda.runtime.parallel.shared_group import SharedGroup

SIDES = ("shared", "replayed", "gloo")
TURN = 0.2
"""Seconds that one side is measured at a time."""


def run_rank(rank: int, size: int, folder: Path, sizes: list[int], rounds: int) -> dict[str, list[float]]:
    """Measure all sides; seconds of a call in each turn, by size and side."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    group = SharedGroup.create(folder, size) if rank == 0 else None
    dist.barrier()
    group = group or SharedGroup.join(folder, rank)
    group.meet()
    found: dict[str, list[float]] = {}
    for count in sizes:
        x = torch.randn(count // 4)
        with noting_calls() as noted:
            replayed = group.all_reduce(x)  # noted calls write there
        every = (partial(group.all_reduce, x), Replay(noted).run, partial(dist.all_reduce, x))
        calls: dict[str, Callable[[], object]] = dict(zip(SIDES, every, strict=True))
        for turn in range(rounds + 1):
            for side in SIDES[turn % 3 :] + SIDES[: turn % 3]:
                x.normal_()
                seconds = _one_turn(calls[side], group)
                if turn:  # the first one warms up
                    found.setdefault(f"{count} {side}", []).append(seconds)
        del replayed
    group.close()
    dist.destroy_process_group()
    return found


def _one_turn(call: Callable[[], object], group: SharedGroup) -> float:
    """Seconds of a call; every rank makes the same number, which rank 0 chooses."""
    began = time.perf_counter()
    for _ in range(3):
        call()
    each = (time.perf_counter() - began) / 3
    count = torch.tensor([max(3.0, min(20_000.0, TURN / each))])
    repeats = int(group.all_gather(count)[0])
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - began) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bytes", type=int, nargs="+", default=[4 << 10, 64 << 10, 8 << 20])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank >= 0:
        print(json.dumps(run_rank(given.rank, given.ranks, given.folder, given.bytes, given.rounds)))
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *sys.argv[1:], "--folder", folder, "--rank"]
        processes = [
            subprocess.Popen([*command, str(r)], stdout=subprocess.PIPE, text=True) for r in range(given.ranks)
        ]
        said = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit("a rank failed")
    found = json.loads(said[0])
    rows = []
    for count in given.bytes:
        turns = {side: found[f"{count} {side}"] for side in SIDES}
        cells = [f"{_us(median(t))} ({_us(quantiles(t)[0])} to {_us(quantiles(t)[2])})" for t in turns.values()]
        rows.append([f"{count:,} bytes", *cells, f"{median(turns['gloo']) / median(turns['shared']):.1f}"])
    table = markdown_table([f"µs, {given.ranks} ranks", *SIDES, "gloo / shared"], rows)
    print(table)
    save(given.out, "tensor_parallel", {"conditions": conditions(1), "seconds": found}, table)


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f}" if seconds > 1e-5 else f"{seconds * 1e6:.1f}"


if __name__ == "__main__":
    main()
