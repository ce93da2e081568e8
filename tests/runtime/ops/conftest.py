from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def seeded(two_threads: None) -> None:
    torch.manual_seed(0)
    random.seed(0)


@pytest.fixture
def assert_close() -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Largest difference relative to the largest expected value, within the tolerance of the dtype."""

    def check(actual: torch.Tensor, expected: torch.Tensor) -> None:
        assert actual.shape == expected.shape and actual.dtype == expected.dtype
        if not expected.numel():
            return
        assert actual.isfinite().all()
        error = (actual.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=0.05)
        assert error < TOLERANCE[actual.dtype], f"relative error {error:.3g}"

    return check


@pytest.fixture
def assert_rounded_alike() -> Callable[..., None]:
    """Equal but for the last digit: in fp32 within 2e-6; in half precision neighbors, and few of them."""

    def check(actual: torch.Tensor, expected: torch.Tensor, few: float = 0.01) -> None:
        assert actual.shape == expected.shape and actual.dtype == expected.dtype
        assert actual.stride() == expected.stride()
        size = expected.float().abs().max().clamp(min=1.0).item() if expected.numel() else 1.0
        epsilon = 1e-6 if actual.dtype == torch.float32 else torch.finfo(actual.dtype).eps
        torch.testing.assert_close(actual.float(), expected.float(), rtol=2 * epsilon, atol=2e-6 * size)
        if actual.dtype != torch.float32:
            assert (actual != expected).sum() <= 2 + few * expected.numel()

    return check


@dataclass
class PagedCase:
    """Arguments of one paged_attention call over caches full of noise, blocks scattered at random.

    ``sequences`` are pairs (new tokens, context length).
    """

    sequences: list[tuple[int, int]]
    heads: int = 8
    kv_heads: int = 2
    dim: int = 32
    value_dim: int | None = None
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    padding: int = 2
    cache_by_heads: bool = True
    arguments: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        value_dim = self.dim if self.value_dim is None else self.value_dim
        counts = [-(-context // self.block_size) for _, context in self.sequences]
        num_blocks = sum(counts) + 3
        blocks = random.sample(range(num_blocks), num_blocks)
        # Entries past a sequence's length are not block ids: nobody may look at them.
        table = torch.full((len(counts), max(counts, default=0) + 1), -1, dtype=torch.int32)
        slots: list[int] = []
        starts = [0]
        for s, (tokens, context) in enumerate(self.sequences):
            table[s, : counts[s]] = torch.tensor([blocks.pop() for _ in range(counts[s])], dtype=torch.int32)
            for position in range(context - tokens, context):
                block = int(table[s, position // self.block_size])
                slots.append(block * self.block_size + position % self.block_size)
            starts.append(len(slots))
        total = len(slots) + self.padding

        def tokens_of(heads: int, dim: int) -> torch.Tensor:
            return torch.randn(1, total, heads, dim).to(self.dtype).transpose(1, 2)

        def cache_of(dim: int) -> torch.Tensor:
            dtype = self.cache_dtype or self.dtype
            if dtype is torch.int8:
                noise = torch.randint(-127, 128, (num_blocks, self.kv_heads, self.block_size, dim))
            else:
                noise = torch.randn(num_blocks, self.kv_heads, self.block_size, dim)
            noise = noise.to(dtype).transpose(1, 2)
            return noise if self.cache_by_heads else noise.contiguous()

        self.arguments = [
            tokens_of(self.heads, self.dim),
            tokens_of(self.kv_heads, self.dim),
            tokens_of(self.kv_heads, value_dim),
            cache_of(self.dim),
            cache_of(value_dim),
            torch.tensor(slots + [-1] * self.padding, dtype=torch.int64),
            table,
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor([context for _, context in self.sequences], dtype=torch.int32),
            torch.randn(self.heads) if self.sinks else None,
            torch.rand(self.heads) if self.alibi else None,
            self.dim**-0.5,
            self.window,
            self.chunk,
            self.softcap,
            *self._scales(num_blocks),
        ]

    def _scales(self, num_blocks: int) -> list[torch.Tensor | None]:
        if self.cache_dtype is not torch.int8:
            return [None, None]
        scales = [torch.rand(num_blocks, self.kv_heads, self.block_size) / 60 for _ in range(2)]
        return [s.transpose(1, 2) if self.cache_by_heads else s.transpose(1, 2).contiguous() for s in scales]

    def copy(self) -> list[Any]:
        return [
            a.clone(memory_format=torch.preserve_format) if isinstance(a, torch.Tensor) else a for a in self.arguments
        ]


@pytest.fixture
def paged_case() -> type[PagedCase]:
    return PagedCase
