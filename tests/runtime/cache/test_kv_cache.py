from __future__ import annotations

import pytest
import torch

from torch_pagoda.runtime.cache import kv_cache
from torch_pagoda.runtime.cache.cache_specs import bytes_per_block
from torch_pagoda.runtime.cache.kv_cache import (
    allocate_kv_cache,
    available_memory,
    default_num_blocks,
    num_blocks_in,
)
from torch_pagoda.runtime.engine.engine_options import parse_memory
from torch_pagoda.runtime.program import CacheSpec

SPECS = [
    CacheSpec(2, 8, 8, torch.bfloat16),
    CacheSpec(1, 24, 16, torch.float32, sliding_window=4),
]
BLOCK = 16 * (2 * 16 * 2 + 40 * 4)


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        (123, 123),
        ("123", 123),
        ("4GiB", 4 << 30),
        ("4 gib", 4 << 30),
        ("4GB", 4 * 10**9),
        ("0.5g", 1 << 29),
        ("512MiB", 512 << 20),
        (" 1kb ", 1000),
        ("7 B", 7),
    ],
)
def test_sizes_are_read(text: int | str, amount: int) -> None:
    assert parse_memory(text) == amount


@pytest.mark.parametrize("text", ["", "GiB", "4 XiB", "-4GiB", "four", 0, -1, True, 1.5, None, "0"])
def test_what_is_not_a_size_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match=r"kv_cache_memory=.*size; use") as caught:
        parse_memory(text)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_bytes_of_a_block() -> None:
    assert bytes_per_block(SPECS, 16) == BLOCK
    assert num_blocks_in(10 * BLOCK + 5, SPECS, 16) == 10
    with pytest.raises(ValueError, match="kv_cache_memory=100 bytes is too small for a block of 16 tokens"):
        num_blocks_in(100, SPECS, 16)


def test_int8_is_stored_with_scales() -> None:
    specs = [CacheSpec(2, 8, 8, torch.int8), CacheSpec(2, 8, 6, torch.int8, by_token=True)]
    assert bytes_per_block(specs, 16) == 16 * (2 * (8 + 8 + 2 * 4) + 2 * (8 + 6 + 2 * 4))
    by_head, by_token = allocate_kv_cache(specs, num_blocks=3, block_size=16)
    assert [t.dtype for t in by_head] == [torch.int8, torch.int8, torch.float32, torch.float32]
    assert [tuple(t.shape) for t in by_token] == [(3, 16, 2, 8), (3, 16, 2, 6), (3, 16, 2), (3, 16, 2)]
    assert by_head[2].shape == (3, 16, 2) and by_head[2].stride() == (32, 1, 16)  # one head's tokens lie together
    assert all(t.is_contiguous() for t in by_token)
    spec = CacheSpec(2, 8, 6, torch.int8, by_token=True, scales_by_head=True)
    ((*caches, key_scale, value_scale),) = allocate_kv_cache([spec], num_blocks=3, block_size=16)
    assert [tuple(t.shape) for t in caches] == [(3, 16, 2, 8), (3, 16, 2, 6)]
    assert key_scale.shape == value_scale.shape == (3, 2, 16) and key_scale.is_contiguous()
    assert bytes_per_block([spec], 16) == bytes_per_block(specs[1:], 16)


def test_default_is_what_the_sequences_can_use() -> None:
    assert default_num_blocks(SPECS, 16, 4, 100) == 4 * 7
    assert default_num_blocks(SPECS, 16, 4, 100, memory=9 * BLOCK) == 9
    assert default_num_blocks(SPECS, 16, 4, None, memory=9 * BLOCK) == 9
    assert default_num_blocks(SPECS, 16, 10**6, 10**6) * BLOCK <= 4 << 30


def test_default_is_at_most_half_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert available_memory() > 0
    monkeypatch.setattr(kv_cache, "available_memory", lambda: 20 * BLOCK)
    assert default_num_blocks(SPECS, 16, 100, 100) == 10
    monkeypatch.setattr(kv_cache, "available_memory", lambda: BLOCK)
    with pytest.raises(ValueError, match="too small for a block"):
        default_num_blocks(SPECS, 16, 100, 100)


def test_caches_keep_a_heads_tokens_together() -> None:
    cache = allocate_kv_cache(SPECS, num_blocks=3, block_size=16)
    assert [(k.shape, v.shape) for k, v in cache] == [
        ((3, 16, 2, 8), (3, 16, 2, 8)),
        ((3, 16, 1, 24), (3, 16, 1, 16)),
    ]
    assert [k.dtype for k, _ in cache] == [torch.bfloat16, torch.float32]
    assert cache[0][0].stride() == (2 * 16 * 8, 8, 16 * 8, 1)
    with pytest.raises(ValueError, match="num_blocks=0"):
        allocate_kv_cache(SPECS, 0, 16)


def test_too_large_a_cache_is_one_line() -> None:
    with pytest.raises(RuntimeError, match=r"num_blocks=\d+ takes .* GiB on cpu.*lower num_blocks") as caught:
        allocate_kv_cache(SPECS, 1 << 40, 16)
    assert "\n" not in str(caught.value)
