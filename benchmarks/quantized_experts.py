"""Experts with stored weights on this machine: ``pagoda::quantized_moe`` against ``pagoda::moe`` in bf16.

Each way is called with routings that differ from call to call, over more experts than caches hold. A figure is the
median time of a call and, in brackets, the time of bf16 over it. The ways take turns.

    python benchmarks/quantized_experts.py [--shape gpt-oss-20b qwen3-30b-a3b] [--rows 1 4 8 32 512] [--threads 2]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from report import markdown_table

from torch_pagoda.runtime.ops.linear.quantized_weight import pack_stored, scheme_of
from torch_pagoda.runtime.ops.linear.stored_weight import StoredWeight
from torch_pagoda.runtime.ops.linear.weight_format import WeightFormat
from torch_pagoda.runtime.ops.moe.moe import moe_cpu
from torch_pagoda.runtime.ops.moe.quantized_moe import quantized_moe_cpu, scheme_numbers

CALLS = 8  # of a round, each with a routing of its own


@dataclass(frozen=True)
class Shape:
    """One layer's experts.

    Attributes:
        experts: of the layer.
        chosen: of a token.
        hidden: features of the model.
        inner: features of an expert.
    """

    experts: int
    chosen: int
    hidden: int
    inner: int


SHAPES = {
    "gpt-oss-20b": Shape(32, 4, 2880, 2880),
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768),
}
FORMATS = {
    "int8": "int8/row/f32",
    "int4 g128": "int4/g128/f16+z",
    "mxfp4": "e2m1/g32/bf16",
    "fp8": "e4m3/g128/f32",
}

SCALES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}

Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
FORMULA = (None, None, "silu", 1.0, 0.0, "halves", False, False)


def in_bf16(shape: Shape) -> Call:
    """Plain weights."""
    up = torch.randn(shape.experts, 2 * shape.inner, shape.hidden, dtype=torch.bfloat16) * 0.02
    down = torch.randn(shape.experts, shape.hidden, shape.inner, dtype=torch.bfloat16) * 0.02
    return lambda x, weights, ids: moe_cpu(x, weights, ids, up, down, *FORMULA)


def stored(shape: Shape, spelled: str) -> Call:
    """Random codes in a format; experts share four draws of them, each in memory of its own."""
    form = WeightFormat.parse(spelled)

    def packed(outputs: int, inputs: int) -> torch.Tensor:
        draws = []
        for _ in range(4):
            codes = torch.randint(0, 256, (outputs, inputs // form.per_byte), dtype=torch.uint8)
            groups = form.num_groups(inputs)
            zeros = torch.randint(0, 16, (outputs, groups), dtype=torch.uint8) if form.zeros else None
            scales = torch.full((outputs, groups), 0.01, dtype=SCALES[form.scale])
            draws.append(pack_stored(StoredWeight(form, codes, scales, zeros, None, dtype=torch.bfloat16)))
        return torch.stack([draws[i % 4] for i in range(shape.experts)])

    scheme = scheme_numbers(scheme_of(form))
    up, down = packed(2 * shape.inner, shape.hidden), packed(shape.hidden, shape.inner)
    more = (2 * shape.inner, shape.hidden, scheme, scheme)
    return lambda x, weights, ids: quantized_moe_cpu(x, weights, ids, up, down, *FORMULA, *more)


def compare(shape: Shape, rows: list[int], rounds: int) -> list[list[str]]:
    """A line for each way."""
    ways = {"bf16": in_bf16(shape), **{name: stored(shape, spelled) for name, spelled in FORMATS.items()}}
    times: dict[tuple[str, int], list[float]] = {}
    for count in rows:
        x = torch.randn(count, shape.hidden, dtype=torch.bfloat16)
        chosen = [torch.randn(count, shape.experts).softmax(-1).topk(shape.chosen) for _ in range(CALLS)]
        for turn in range(rounds + 1):
            for name, call in ways.items():
                begin = time.perf_counter()
                for weights, ids in chosen:
                    call(x, weights, ids)
                if turn:
                    times.setdefault((name, count), []).append((time.perf_counter() - begin) / CALLS)
    medians = {key: statistics.median(each) for key, each in times.items()}
    return [
        [name, *(f"{medians[name, n] * 1e3:.3g} ms ({medians['bf16', n] / medians[name, n]:.2f})" for n in rows)]
        for name in ways
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 32, 512])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for name in args.shape:
        lines = compare(SHAPES[name], args.rows, args.rounds)
        print(f"{name}, {args.threads} threads\n")
        print(markdown_table(["weights", *(f"{n} tokens" for n in args.rows)], lines))


if __name__ == "__main__":
    main()
