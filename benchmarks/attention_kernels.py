"""Attention kernels on this machine: pagoda::paged_attention against torch's scaled_dot_product_attention.

Decoding is limited by memory: its figure is GB/s of keys and values read, beside a plain read of as many bytes.
Prefill is limited by arithmetic: its figure is GFLOP/s, counted over the causal half only. torch runs what a
paged engine without our kernel would run: keys and values gathered from the cache, repeated for GQA, and a mask;
and, for whole prompts, its best case, is_causal on contiguous keys. The column int8 is pagoda::paged_attention over
int8 caches with scales; its GB/s count them.

Every figure is the best of the repetitions: other programs on the machine can only make one slower.

    python benchmarks/attention_kernels.py [--dtype bfloat16] [--threads 2] [--repeats 21]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from torch_pagoda.runtime.memory import advise_huge_pages
from torch_pagoda.runtime.ops.attention.int8_rows import quantize_rows
from torch_pagoda.runtime.ops.attention.paged_attention import paged_attention


@dataclass(frozen=True)
class Shape:
    """Heads of one model and (new tokens, context) of each sequence in the step."""

    name: str
    heads: int
    kv_heads: int
    dim: int
    sequences: tuple[tuple[int, int], ...]

    @property
    def multiply_adds(self) -> float:
        keys = sum(n * (context - n) + n * (n + 1) / 2 for n, context in self.sequences)
        return 2 * keys * self.heads * self.dim

    @property
    def is_decode(self) -> bool:
        return all(n == 1 for n, _ in self.sequences)


SHAPES = [
    Shape("decode 32 x 400, llama 32/4x64", 32, 4, 64, ((1, 400),) * 32),
    Shape("decode 8 x 16k, llama 32/4x64", 32, 4, 64, ((1, 16384),) * 8),
    Shape("decode 1 x 64k, llama 32/4x64", 32, 4, 64, ((1, 65536),)),
    Shape("decode 1 x 64k, qwen3 16/8x128", 16, 8, 128, ((1, 65536),)),
    Shape("decode 4 x 16k, MHA 8/8x128", 8, 8, 128, ((1, 16384),) * 4),
    Shape("prefill 1024, llama 32/4x64", 32, 4, 64, ((1024, 1024),)),
    Shape("prefill 1024, qwen3 16/8x128", 16, 8, 128, ((1024, 1024),)),
    Shape("prefill 4 x 256, llama 32/4x64", 32, 4, 64, ((256, 256),) * 4),
    Shape("chunk 256 at 4096, llama 32/4x64", 32, 4, 64, ((256, 4096),)),
]
BLOCK_SIZE = 32


class Step:
    """One flat step over a paged cache, its blocks in random order."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        self.shape = shape
        counts = [-(-context // BLOCK_SIZE) for _, context in shape.sequences]
        order = torch.randperm(sum(counts)).to(torch.int32)
        self.block_table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        slots: list[torch.Tensor] = []
        for s, ((tokens, context), blocks) in enumerate(zip(shape.sequences, order.split(counts), strict=True)):
            self.block_table[s, : len(blocks)] = blocks
            positions = torch.arange(context - tokens, context)
            slots.append(blocks[positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE)
        self.slot_mapping = torch.cat(slots)
        lengths = torch.tensor([n for n, _ in shape.sequences])
        self.query_start_loc = torch.cat([torch.zeros(1), lengths.cumsum(0)]).to(torch.int32)
        self.seq_lens = torch.tensor([context for _, context in shape.sequences], dtype=torch.int32)
        tokens = len(self.slot_mapping)
        self.query, self.key, self.value = (
            torch.randn(1, tokens, heads, shape.dim).to(dtype).transpose(1, 2)
            for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
        )
        self.caches = [self._cache(sum(counts), dtype) for _ in range(2)]

    def _cache(self, num_blocks: int, dtype: torch.dtype) -> torch.Tensor:
        cache = torch.empty(num_blocks, self.shape.kv_heads, BLOCK_SIZE, self.shape.dim, dtype=dtype)
        advise_huge_pages(cache)
        return cache.normal_().transpose(1, 2)

    def quantize(self) -> None:
        """Make the caches that ``ours_in_int8`` reads."""
        self.int8_caches, self.scales = [], []
        for cache in self.caches:
            stored, scale = quantize_rows(cache.transpose(1, 2))
            advise_huge_pages(stored)
            self.int8_caches.append(stored.transpose(1, 2))
            self.scales.append(scale.transpose(1, 2))

    def ours_in_int8(self) -> torch.Tensor:
        return self._attend(self.int8_caches, self.scales)

    def ours(self) -> torch.Tensor:
        return self._attend(self.caches, (None, None))

    def _attend(self, caches: Sequence[torch.Tensor], scales: Sequence[torch.Tensor | None]) -> torch.Tensor:
        return paged_attention(
            self.query,
            self.key,
            self.value,
            *caches,
            self.slot_mapping,
            self.block_table,
            self.query_start_loc,
            self.seq_lens,
            sinks=None,
            alibi_slopes=None,
            scale=self.shape.dim**-0.5,
            sliding_window=0,
            chunk=0,
            softcap=0.0,
            key_scale=scales[0],
            value_scale=scales[1],
        )

    def torch_on_pages(self) -> list[torch.Tensor]:
        """Gather, repeat and mask, one sequence after the other."""
        for cache, new in zip(self.caches, (self.key, self.value), strict=True):
            slots = self.slot_mapping
            cache[slots // BLOCK_SIZE, slots % BLOCK_SIZE] = new[0].transpose(0, 1)
        results, start = [], 0
        for s, (tokens, context) in enumerate(self.shape.sequences):
            blocks = self.block_table[s, : -(-context // BLOCK_SIZE)].long()
            keys, values = (
                cache[blocks]
                .flatten(0, 1)[:context]
                .transpose(0, 1)[None]
                .repeat_interleave(self.shape.heads // self.shape.kv_heads, dim=1)
                for cache in self.caches
            )
            mask = torch.ones(tokens, context, dtype=torch.bool).tril(context - tokens)
            query = self.query[:, :, start : start + tokens]
            results.append(scaled_dot_product_attention(query, keys, values, mask))
            start += tokens
        return results

    def torch_is_causal(self) -> torch.Tensor:
        """torch's best case, for one whole prompt: contiguous keys, repeated beforehand, no mask tensor."""
        return scaled_dot_product_attention(self.query, self._repeated[0], self._repeated[1], is_causal=True)

    def prepare_is_causal(self) -> bool:
        repeats = self.shape.heads // self.shape.kv_heads
        self._repeated = [t.repeat_interleave(repeats, dim=1) for t in (self.key, self.value)]
        return len(self.shape.sequences) == 1 and not self.shape.is_decode and self.query.shape[2] == self.seq_lens[0]


def best_seconds(function: Callable[[], object], repeats: int) -> float:
    function()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=21)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)

    with torch.inference_mode():
        tiny = Step(Shape("tiny", 8, 2, 64, ((1, 1),)), dtype)
        calls = best_seconds(lambda: [tiny.ours() for _ in range(200)], options.repeats) / 200
        plain = torch.empty(1 << 28, dtype=torch.uint8)
        advise_huge_pages(plain)
        words = plain.fill_(1).view(torch.int64)
        read = plain.numel() / best_seconds(lambda: words.sum(), options.repeats) / 1e9
        print(f"{options.dtype}, {options.threads} threads; torch reads memory at {read:.1f} GB/s; ", end="")
        print(f"a call on one token costs {calls * 1e6:.0f} us")
        print(f"{'':34} {'pagoda':>26} {'int8':>26} {'faster':>7} {'torch, paged':>13} {'faster':>7}", end="")
        print(f" {'is_causal':>13} {'faster':>7}")
        for shape in SHAPES:
            step = Step(shape, dtype)
            ours = best_seconds(step.ours, options.repeats)
            step.quantize()
            int8 = best_seconds(step.ours_in_int8, options.repeats)
            paged = best_seconds(step.torch_on_pages, max(1, options.repeats // 3))
            line = f"{shape.name:34}"
            for seconds, row_bytes in ((ours, shape.dim * dtype.itemsize), (int8, shape.dim + 4)):
                if shape.is_decode:
                    read_bytes = sum(c for _, c in shape.sequences) * shape.kv_heads * 2 * row_bytes
                    rate = f"{read_bytes / seconds / 1e9:6.1f} GB/s"
                else:
                    rate = f"{2 * shape.multiply_adds / seconds / 1e9:4.0f} GFLOP/s"
                line += f" {seconds * 1e3:9.2f} ms {rate:>13}"
            line += f" {ours / int8:6.1f}x {paged * 1e3:10.2f} ms {paged / ours:6.1f}x"
            if step.prepare_is_causal():
                causal = best_seconds(step.torch_is_causal, max(1, options.repeats // 3))
                line += f" {causal * 1e3:10.2f} ms {causal / ours:6.1f}x"
            print(line, flush=True)


if __name__ == "__main__":
    main()
