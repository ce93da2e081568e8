"""What this machine can do at most: read weights, multiply, and serve 32 requests if nothing but products took time.

    python benchmarks/limits.py
    python benchmarks/limits.py --shape tinyllama-1.1b --threads 1

read      GB/s of bf16 weights in oneDNN's layout, one row of input, 40 distinct matrices (5632 x 2048); or of a sum
          of as many bytes, where that is faster
GEMM      GFLOP/s of these matrices with 512 rows; where oneDNN does not multiply bf16 (processors with AVX2 and
          nothing newer), its products in float32 or ours in bf16, whichever are faster
ceiling   tokens/s of the 32 requests in ``shapes.py``: the scheduler is run with a model that takes no time but for
          its matrix products, each step's timed at its number of rows. All layers have matrices of their own, so
          that none is in a cache when it is read again. Between the sizes that are timed, time is interpolated.

Figures of other runs are not a measure: machines drift. Whatever is compared with these is measured in the same run.
"""

from __future__ import annotations

import argparse
import bisect
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from shapes import OUTPUT_LENGTHS, PROMPT_LENGTHS, SHAPES, WHOLE_SHAPES, Prompts
from torch import nn
from transformers import AutoModelForCausalLM

from torch_pagoda.runtime.batching import Batcher
from torch_pagoda.runtime.blocks import BlockGroup, BlockManager
from torch_pagoda.runtime.ops.linear.onednn_weight import pack_for_onednn
from torch_pagoda.runtime.ops.linear.packed_linear import (
    own_panel,
    pack_weight,
    packed_linear_cpu,
    packed_linear_reference,
)
from torch_pagoda.runtime.requests.request import Request
from torch_pagoda.runtime.requests.sampling_params import SamplingParams

ROWS = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_MATRIX = (5632, 2048)
_COUNT = 40
_LAST = {"o_proj", "out_proj", "down_proj", "output_linear"}
"""Names of matrices that read what the others of their block made."""

Product = Callable[[torch.Tensor], object]


@dataclass(frozen=True)
class Limits:
    """Of this machine, now.

    Attributes:
        read_gb_per_s: of weights, with one row of input, or of numbers that are summed up: the faster one.
        gemm_gflops: with 512 rows.
        gemm_dtype: of the numbers that are multiplied so fast.
    """

    read_gb_per_s: float
    gemm_gflops: float
    gemm_dtype: str = "bfloat16"


@functools.cache
def dtype_of_products() -> torch.dtype:
    """bf16 where oneDNN or our kernels multiply it; a limit on oneDNN's instructions shows only when it is asked."""
    try:
        weight = pack_weight(torch.zeros(64, 64, dtype=torch.bfloat16))
        packed_linear_cpu(torch.zeros(512, 64, dtype=torch.bfloat16), weight)
    except RuntimeError:
        return torch.float32
    return torch.bfloat16


def packed_products(sizes: Sequence[tuple[int, int]], dtype: torch.dtype) -> list[Product]:
    """Products with distinct random matrices ``[out, in]``: oneDNN's, or ours in bf16 where it has none in that."""
    values: dict[tuple[int, int], torch.Tensor] = {}
    products = []
    for size in sizes:
        if size not in values:
            values[size] = torch.randn(size, dtype=dtype)
        weight = pack_weight(values[size]) if dtype is torch.bfloat16 else pack_for_onednn(values[size])
        product = packed_linear_reference if weight.is_mkldnn else packed_linear_cpu
        products.append(lambda x, weight=weight, product=product: product(x, weight))
    return products


def seconds_of(
    products: Sequence[Product], widths: Sequence[int], rows: int, repeats: int, dtype: torch.dtype
) -> float:
    """Median time of all products one after the other, on ``rows`` rows each."""
    inputs = {width: torch.randn(rows, width, dtype=dtype) for width in set(widths)}
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        for product, width in zip(products, widths, strict=True):
            product(inputs[width])
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def machine_limits(repeats: int = 5) -> Limits:
    """What is read and multiplied at most."""
    elements = _COUNT * _MATRIX[0] * _MATRIX[1]
    widths = [_MATRIX[1]] * _COUNT
    numbers = torch.ones(elements // 2)  # of fp32: as many bytes
    read = 2 * elements / seconds_of([lambda _, numbers=numbers: numbers.sum()], [1], 1, repeats, torch.float32)
    del numbers
    gemm: dict[torch.dtype, float] = {}
    for dtype in {dtype_of_products(), torch.float32 if own_panel() else dtype_of_products()}:
        products = packed_products([_MATRIX] * _COUNT, dtype)
        read = max(read, dtype.itemsize * elements / seconds_of(products, widths, 1, repeats, dtype))
        gemm[dtype] = 2 * elements * 512 / seconds_of(products, widths, 512, repeats, dtype)
    fastest = max(gemm, key=gemm.__getitem__)
    return Limits(read / 1e9, gemm[fastest] / 1e9, str(fastest).removeprefix("torch."))


@functools.cache
def layer_matrices(shape: str) -> tuple[tuple[int, int], ...]:
    """``[out, in]`` of the matrices of all decoder layers in order, those of one input merged."""
    with torch.device("meta"):
        layers = AutoModelForCausalLM.from_config(WHOLE_SHAPES[shape]()).model.layers
    found = []
    for module in layers.modules():
        linears = {name: linear.weight for name, linear in module.named_children() if isinstance(linear, nn.Linear)}
        of_input = [weight for name, weight in linears.items() if name not in _LAST]
        if of_input:
            found.append((sum(weight.shape[0] for weight in of_input), of_input[0].shape[1]))
        found += [(weight.shape[0], weight.shape[1]) for name, weight in linears.items() if name in _LAST]
    return tuple(found)


class StepTimes:
    """Seconds of a step's products, timed at ``ROWS`` sizes of all layers and of the head."""

    def __init__(self, shape: str, repeats: int = 3) -> None:
        config = WHOLE_SHAPES[shape]()
        layers = layer_matrices(shape)
        dtype = dtype_of_products()
        products, widths = packed_products(layers, dtype), [size[1] for size in layers]
        self.layers = [seconds_of(products, widths, rows, repeats, dtype) for rows in ROWS]
        del products
        # As many heads as no cache holds.
        head = (config.vocab_size, config.hidden_size)
        count = max(1, round(1e9 / (2 * head[0] * head[1])))
        products = packed_products([head] * count, dtype)
        few = [rows for rows in ROWS if rows <= 64]
        self.head = [seconds_of(products, [head[1]] * count, rows, repeats, dtype) / count for rows in few]

    def __call__(self, tokens: int, asked: int) -> float:
        """Of a step with so many tokens, of which so many are asked for logits."""
        return _between(self.layers, tokens) + _between(self.head, asked)


def _between(times: Sequence[float], rows: int) -> float:
    """The time of ``rows`` rows, times[i] being that of ``ROWS[i]``; beyond the last in proportion."""
    most = ROWS[len(times) - 1]
    if rows >= most:
        return times[-1] * rows / most
    after = bisect.bisect_left(ROWS, rows)
    if ROWS[after] == rows:
        return times[after]
    share = (rows - ROWS[after - 1]) / (ROWS[after] - ROWS[after - 1])
    return times[after - 1] + share * (times[after] - times[after - 1])


def steps_of_workload(max_num_batched_tokens: int = 2048, max_num_seqs: int = 32) -> Iterator[tuple[int, int]]:
    """Tokens and asked rows of each step in which the scheduler serves the 32 requests."""
    blocks = BlockManager([BlockGroup(num_blocks=4096)], 16, enable_prefix_caching=False)
    batcher = Batcher(blocks, max_num_seqs, max_num_batched_tokens, 2048)
    for i, (prompt, output) in enumerate(zip(Prompts()(PROMPT_LENGTHS), OUTPUT_LENGTHS, strict=True)):
        batcher.add(Request(str(i), prompt, SamplingParams(max_tokens=output, ignore_eos=True)))
    while batcher.has_unfinished():
        schedule = batcher.schedule()
        asked = [item.request for item in schedule.requests if item.is_last_chunk]
        yield schedule.num_tokens, len(asked)
        for item in schedule.requests:
            batcher.advance(item.request, item.num_tokens)
        for request in asked:
            request.output_token_ids.append(0)
            if request.num_output_tokens == request.params.max_tokens:
                batcher.finish(request, "length")


def ceiling(shape: str) -> float:
    """Generated tokens per second of the 32 requests if nothing but matrix products took time."""
    times = StepTimes(shape)
    return sum(OUTPUT_LENGTHS) / sum(times(*step) for step in steps_of_workload())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=WHOLE_SHAPES, action="append", help=f"default: {', '.join(SHAPES)}")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    limits = machine_limits()
    gemm = f"GEMM {limits.gemm_gflops:.0f} GFLOP/s in {limits.gemm_dtype}"
    print(f"read {limits.read_gb_per_s:.1f} GB/s, {gemm}, {args.threads} threads")
    ceilings = {}
    for shape in args.shape or SHAPES:
        ceilings[shape] = ceiling(shape)
        print(f"{shape}: 32 requests at most {ceilings[shape]:.1f} generated tokens/s")
    if args.json:
        args.json.write_text(json.dumps({**asdict(limits), "ceilings": ceilings}, indent=2) + "\n")


if __name__ == "__main__":
    main()
