"""Rates at which this machine reads memory and multiplies matrices, and the share of them that a program reaches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..runtime.ops.linear.packed_linear import can_pack, pack_weight, packed_linear

_MATRIX = (5632, 2048)
_ROWS = 512
_READ_BYTES = 1 << 29
"""More than the processor's caches hold."""
_REPEATS = 5


@dataclass(frozen=True)
class MachineLimits:
    """Rates of this machine.

    Attributes:
        read_gb_per_s: GB/s of a sum over numbers in memory.
        gemm_gflops: GFLOP/s of a product with 512 rows.
        dtype: dtype of that product.
    """

    read_gb_per_s: float
    gemm_gflops: float
    dtype: str

    def share_read(self, program: Any, steps_per_s: float) -> float | None:
        """The share of the read rate at which steps read the program's packed weights; None if no weights are packed,
        or if the program has experts, of which a step reads a part."""
        weights = _packed(program)
        if not weights:
            return None
        return sum(nbytes for nbytes, _ in weights) * steps_per_s / self.read_gb_per_s / 1e9

    def share_multiplied(self, program: Any, tokens_per_s: float, logits_per_s: float) -> float | None:
        """The share of the GEMM rate at which the packed weights are multiplied; None as for ``share_read``.

        Args:
            program: the program.
            tokens_per_s: tokens that run through the layers.
            logits_per_s: rows of logits. Only these reach the head, the last of the packed weights.
        """
        weights = _packed(program)
        if not weights:
            return None
        *layers, head = (2 * elements for _, elements in weights)
        return (sum(layers) * tokens_per_s + head * logits_per_s) / self.gemm_gflops / 1e9


def measure_limits() -> MachineLimits:
    """Measure both rates, which takes a second or two."""
    dtype = torch.bfloat16 if can_pack(torch.bfloat16) else torch.float32
    numbers = torch.ones(_READ_BYTES // 4)
    weight, rows = torch.randn(_MATRIX, dtype=dtype), torch.randn(_ROWS, _MATRIX[1], dtype=dtype)
    packed = pack_weight(weight) if dtype is torch.bfloat16 else weight
    read = _median_seconds(numbers.sum)
    multiplied = _median_seconds(lambda: packed_linear(rows, packed, None))
    return MachineLimits(
        _READ_BYTES / read / 1e9,
        2 * _ROWS * _MATRIX[0] * _MATRIX[1] / multiplied / 1e9,
        str(dtype).removeprefix("torch."),
    )


def _median_seconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(_REPEATS + 1):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def _packed(program: Any) -> list[tuple[int, float]]:
    """Bytes and elements of each packed weight of a program for a CPU, in graph order; empty if it has experts."""
    if any(record.name == "recognize_moe" and record.matches for record in program.report.passes):
        return []
    return [
        (tensor.numel() * tensor.element_size(), _elements(tensor, entry))
        for entry, tensor in program.packed_weights()
    ]


def _elements(tensor: torch.Tensor, entry: Any) -> float:
    """Elements of a packed weight; for a quantized one, a few percent more, as its scales count, too."""
    return tensor.numel() if entry.quantization is None else tensor.numel() * 8 / entry.quantization.bits
