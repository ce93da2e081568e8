"""Linear layers with rounded weights on this machine: pagoda's kernel against what torch has.

Each kernel multiplies with 40 distinct matrices (5632 x 2048, or ``--shape``) in turn, more than caches hold. A
figure is the median time of a round, as GB/s of stored weights with one row and as GFLOP/s with many. The kernels
take turns.

  bf16            the product with plain bf16 weights, laid out once, by oneDNN or, without bf16 instructions, ours
  int8, oneDNN    ``onednn.qlinear_pointwise`` on inputs that are rounded before it (per token, by torch's operators),
                  its result multiplied with their scales: the pieces that inductor makes such a layer of
  int8wo, torch   ``_weight_int8pack_mm``: inputs stay bf16
  int4wo, torch   ``_weight_int4pack_mm_for_cpu``, groups of 128
  int8, int8wo, int4, int4wo    pagoda's, with inputs rounded to 8 or (wo) 16 bits
  awq, act-order, g32           of int4wo: with zeros as AWQ stores them, with GPTQ's order of inputs, in groups of 32
  mxfp4, nvfp4                  floats of 4 bits (e2m1) in groups of 32 and 16, with inputs rounded to 16 bits
  fp8, fp8 rows                 floats of 8 bits (e4m3) with scales for blocks of 128 and for rows; inputs stay bf16

    python benchmarks/quantized_kernels.py [--threads 2] [--rounds 5] [--rows 1 4 16 64 512] [--shape 2048 5632]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from report import markdown_table

from torch_pagoda.runtime.ops.linear.packed_linear import pack_weight, packed_linear_cpu
from torch_pagoda.runtime.ops.linear.quantized_linear import quantized_linear_cpu
from torch_pagoda.runtime.ops.linear.quantized_weight import (
    Quantization,
    pack_stored,
    quantize_weight,
    round_weight,
    scheme_of,
)
from torch_pagoda.runtime.ops.linear.stored_weight import StoredWeight
from torch_pagoda.runtime.ops.linear.weight_format import SCALE_DTYPES, WeightFormat

COUNT = 40

Kernel = Callable[[torch.Tensor], object]


def in_bf16(weight: torch.Tensor) -> tuple[Kernel, int]:
    packed = pack_weight(weight)
    return lambda x: packed_linear_cpu(x, packed), 2 * weight.numel()


def by_onednn(weight: torch.Tensor) -> tuple[Kernel, int]:
    whole, scales = round_weight(weight, Quantization(8, 0, 8))
    packed = torch.ops.onednn.qlinear_prepack(whole, None)
    zeros = torch.zeros(weight.shape[0], dtype=torch.int32)
    scales = scales[:, 0].contiguous()

    def run(x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(-1, keepdim=True).float() / 127
        # Unsigned: without AMX, oneDNN multiplies signed inputs with weights in this layout by its reference loop.
        rounded = ((x / scale).round() + 128).to(torch.uint8)
        given = (rounded, 1.0, 128, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], "")
        return (torch.ops.onednn.qlinear_pointwise(*given) * scale).to(x.dtype)

    return run, weight.numel()


def by_torch_int8(weight: torch.Tensor) -> tuple[Kernel, int]:
    whole, scales = round_weight(weight, Quantization(8, 0, 16))
    columns = scales[:, 0].bfloat16()
    return lambda x: torch.ops.aten._weight_int8pack_mm(x, whole, columns), weight.numel()


def by_torch_int4(weight: torch.Tensor) -> tuple[Kernel, int]:
    whole, scales = round_weight(weight, Quantization(4, 128, 16))
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu((whole + 8).int(), 1)
    both = torch.stack([scales, torch.zeros_like(scales)], -1).transpose(0, 1).contiguous().bfloat16()
    return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, 128, both), weight.numel() // 2


def by_pagoda(bits: int, group_size: int, input_bits: int) -> Callable[[torch.Tensor], tuple[Kernel, int]]:
    def make(weight: torch.Tensor) -> tuple[Kernel, int]:
        packed = quantize_weight(weight, Quantization(bits, group_size, input_bits))
        given = (packed, None, weight.shape[0], bits, group_size, input_bits)
        return lambda x: quantized_linear_cpu(x, *given), packed.numel()

    return make


def by_stored(spelled: str) -> Callable[[torch.Tensor], tuple[Kernel, int]]:
    """pagoda's over random codes in a format of quantized checkpoints."""

    def make(weight: torch.Tensor) -> tuple[Kernel, int]:
        form, (outputs, inputs) = WeightFormat.parse(spelled), weight.shape
        groups = form.num_groups(inputs)
        codes = torch.randint(0, 256, (outputs, inputs // form.per_byte), dtype=torch.uint8)
        if form.code == "e4m3":
            codes[codes & 127 == 127] = 0  # NaN
        zeros = torch.randint(0, 16, (outputs, groups), dtype=torch.uint8) if form.zeros else None
        order = torch.randperm(inputs).to(torch.int32) if form.ordered else None
        scales = torch.full((outputs, groups), 0.01, dtype=SCALE_DTYPES[form.scale])
        packed = pack_stored(StoredWeight(form, codes, scales, zeros, order, dtype=weight.dtype))
        given = (packed, None, outputs, *scheme_of(form).arguments(order))
        return lambda x: quantized_linear_cpu(x, *given), packed.numel()

    return make


KERNELS = {
    "bf16": in_bf16,
    "int8, oneDNN": by_onednn,
    "int8": by_pagoda(8, 256, 8),
    "int8wo, torch": by_torch_int8,
    "int8wo": by_pagoda(8, 256, 16),
    "int4": by_pagoda(4, 128, 8),
    "int4wo, torch": by_torch_int4,
    "int4wo": by_pagoda(4, 128, 16),
    "awq": by_stored("int4/g128/f16+z"),
    "act-order": by_stored("int4/g128/f16+z+order"),
    "g32": by_stored("int4/g32/f16"),
    "mxfp4": by_stored("e2m1/g32/bf16"),
    "nvfp4": by_stored("e2m1/g16/f32"),
    "fp8": by_stored("e4m3/g128/f32"),
    "fp8 rows": by_stored("e4m3/row/bf16"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 512])
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--shape", type=int, nargs=2, default=(5632, 2048), help="outputs and inputs")
    args = parser.parse_args()
    outputs, inputs = args.shape
    torch.set_num_threads(args.threads)
    weights = [torch.randn(outputs, inputs).bfloat16() * 0.02 for _ in range(4)]
    made = {name: [KERNELS[name](weights[i % 4]) for i in range(COUNT)] for name in args.kernels}
    times: dict[tuple[str, int], list[float]] = {}
    for rows in args.rows:
        x = torch.randn(rows, inputs).bfloat16()
        for turn in range(args.rounds + 1):
            for name, kernels in made.items():
                begin = time.perf_counter()
                for kernel, _ in kernels:
                    kernel(x)
                if turn:
                    times.setdefault((name, rows), []).append(time.perf_counter() - begin)
    print(f"{args.threads} threads; 1 row in GB/s of stored weights, more in GFLOP/s\n")
    lines = []
    for name, kernels in made.items():
        figures = []
        for rows in args.rows:
            seconds = statistics.median(times[name, rows]) / COUNT
            figures.append(
                kernels[0][1] / seconds / 1e9 if rows == 1 else 2 * rows * outputs * inputs / seconds / 1e9
            )
        lines.append((name, *figures))
    print(markdown_table(("kernel", *map(str, args.rows)), lines))


if __name__ == "__main__":
    main()
