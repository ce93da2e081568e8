"""Cache writers: every token where it belongs, nothing else touched, and readable by the attention operator."""

from __future__ import annotations

import pytest
import torch

import torch_pagoda.runtime.ops.npu  # noqa: F401  registers the operators

npu = torch.ops.npu

BLOCKS, BLOCK, HEADS, DIM = 5, 8, 2, 32
SLOTS = torch.tensor([13, 0, -1, 39, 7])


def caches(dtype, mode, dim=DIM):
    width = 32 if dtype is torch.int8 else 16
    shape = (BLOCKS, BLOCK, HEADS, dim) if mode != "PA_NZ" else (BLOCKS, HEADS * dim // width, BLOCK, width)
    return torch.full(shape, 5, dtype=dtype)


def by_token(cache, mode, dim=DIM):
    """The cache as [blocks, block size, heads, dim]."""
    if mode != "PA_NZ":
        return cache
    return cache.permute(0, 2, 1, 3).reshape(BLOCKS, BLOCK, HEADS, dim)


@pytest.mark.parametrize("mode", ["Norm", None, "PA_NZ"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_scatter_pa_kv_cache(mode, dtype):
    key = torch.randint(-100, 100, (5, HEADS, DIM)).to(dtype)
    value = torch.randint(-100, 100, (5, HEADS, 2 * DIM)).to(dtype)
    key_cache, value_cache = caches(dtype, mode), caches(dtype, mode, 2 * DIM)
    assert torch.ops.npu.npu_scatter_pa_kv_cache(key, value, key_cache, value_cache, SLOTS, cache_mode=mode) is None
    for tokens, cache, dim in ((key, key_cache, DIM), (value, value_cache, 2 * DIM)):
        wanted = torch.full((BLOCKS * BLOCK, HEADS, dim), 5, dtype=dtype)
        for token, slot in zip(tokens, SLOTS.tolist(), strict=True):
            if slot >= 0:
                wanted[slot] = token
        assert torch.equal(by_token(cache, mode, dim).flatten(0, 1), wanted)


def test_scatter_writes_fractal_nz_by_default():
    key = torch.randn(5, HEADS, DIM)
    cache = caches(torch.float32, "PA_NZ")
    npu.npu_scatter_pa_kv_cache(key, key, cache, cache.clone(), SLOTS)
    assert torch.equal(cache[1, :, 5], key[0].reshape(-1, 16))


def test_what_is_scattered_is_what_attention_reads(assert_close):
    length, heads, block, dim = 300, 4, 128, 128
    keys, values = torch.randn(length, HEADS, dim), torch.randn(length, HEADS, dim)
    key_cache, value_cache = (torch.full((BLOCKS, block, HEADS, dim), float("nan")) for _ in range(2))
    table = torch.tensor([[4, 0, 2, 1]], dtype=torch.int32)
    positions = torch.arange(length)
    slots = table[0].long()[positions // block] * block + positions % block
    query = torch.randn(3, heads, dim)
    common = {
        "atten_mask": torch.ones(2048, 2048, dtype=torch.bool).triu(1),
        "actual_seq_lengths": [3],
        "actual_seq_lengths_kv": [length],
        "num_heads": heads,
        "num_key_value_heads": HEADS,
        "input_layout": "TND",
        "sparse_mode": 3,
    }
    for start, end in ((0, 150), (150, 151), (151, length)):
        tokens = keys[start:end], values[start:end]
        npu.npu_scatter_pa_kv_cache(*tokens, key_cache, value_cache, slots[start:end].int(), cache_mode="Norm")
    paged, _ = npu.npu_fused_infer_attention_score(
        query, key_cache.flatten(2), value_cache.flatten(2), block_table=table, block_size=block, **common
    )
    plain, _ = npu.npu_fused_infer_attention_score(query, keys, values, **common)
    assert_close(paged, plain)


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"cache_mode": "PA"}, "cache_mode is 'PA'"),
        ({"slot_mapping": torch.tensor([0, 1, 2, 3, 40])}, "40; the cache has 40 slots"),
        ({"slot_mapping": torch.tensor([0, 1, 2, 3, 1])}, "twice"),
        ({"slot_mapping": torch.tensor([0, 1])}, r"slot_mapping \(2,\)"),
        ({"slot_mapping": torch.arange(5.0)}, "slot_mapping is torch.float32"),
        ({"key": torch.zeros(5, HEADS, DIM).half()}, "dtypes differ: key torch.float16"),
        ({"key": torch.zeros(5, HEADS * DIM)}, "key has 2 dims"),
        ({"key": torch.zeros(5, HEADS, DIM + 1)}, r"must be \(blocks, block size, 2, 33\)"),
        ({"key_cache": torch.zeros(BLOCK, BLOCKS, HEADS, DIM).transpose(0, 1)}, "not contiguous"),
        ({"cache_mode": "PA_NZ"}, r"must be \(blocks, 64/16, block size, 16\)"),
    ],
)
def test_scatter_pa_refusals(changes, match):
    tokens = torch.zeros(5, HEADS, DIM)
    arguments = {
        "key": tokens,
        "value": tokens,
        "key_cache": caches(torch.float32, "Norm"),
        "value_cache": caches(torch.float32, "Norm"),
        "slot_mapping": SLOTS,
        "cache_mode": "Norm",
    }
    npu.npu_scatter_pa_kv_cache(**arguments)
    with pytest.raises(ValueError, match=match):
        npu.npu_scatter_pa_kv_cache(**{**arguments, **changes})
    with pytest.raises(NotImplementedError, match="compress_lens"):
        npu.npu_scatter_pa_kv_cache(**arguments, compress_lens=torch.zeros(1))


def test_scatter_nd_update():
    x, updates = torch.zeros(3, 4, 2), torch.randn(2, 2)
    returned = npu.npu_scatter_nd_update_(x, torch.tensor([[2, 1], [0, 3]]), updates)
    assert returned is x and torch.equal(x[2, 1], updates[0]) and torch.equal(x[0, 3], updates[1])
    assert x.count_nonzero() == 4
    for indices, update, match in (
        (torch.tensor([[3]]), torch.zeros(1, 4, 2), "outside a dim of size 3"),
        (torch.tensor([[-1]]), torch.zeros(1, 4, 2), "outside a dim of size 3"),
        (torch.tensor([1]), torch.zeros(4, 2), "updates has shape"),
        (torch.tensor([[1]]), torch.zeros(2, 4, 2), "updates has shape"),
        (torch.tensor([[1]]), torch.zeros(1, 4, 2).half(), "dtypes differ"),
    ):
        with pytest.raises(ValueError, match=match):
            npu.npu_scatter_nd_update_(x, indices, update)


def test_scatter_update_writes_from_an_offset_on():
    x, updates = torch.zeros(2, 6, 3), torch.randn(2, 2, 3)
    assert npu.scatter_update_(x, torch.tensor([4, 1]), updates, -2) is x
    assert torch.equal(x[0, 4:6], updates[0]) and torch.equal(x[1, 1:3], updates[1]) and x.count_nonzero() == 12
    x = torch.zeros(3, 6)
    npu.scatter_update_(x, torch.tensor([[2, 0], [0, 5]]), torch.tensor([[7.0], [8.0]]), 1)
    assert x[2, 0] == 7 and x[0, 5] == 8 and x.count_nonzero() == 2
    for indices, update, axis, match in (
        (torch.tensor([5, 0]), torch.zeros(2, 2), 1, "outside input"),
        (torch.tensor([-1]), torch.zeros(1, 2), 1, "outside input"),
        (torch.tensor([[3, 0]]), torch.zeros(1, 2), 1, "outside input"),
        (torch.tensor([0]), torch.zeros(1, 2), 0, "must not be the first"),
        (torch.tensor([0]), torch.zeros(2), 1, "rank and dtype"),
        (torch.tensor([0, 1]), torch.zeros(1, 2), 1, "indices has shape"),
    ):
        with pytest.raises(ValueError, match=match):
            npu.scatter_update_(x, indices, update, axis)


def test_keys_and_values_have_as_many_heads():
    caches = torch.zeros(2, 4, 2, 16), torch.zeros(2, 4, 1, 16)
    slots = torch.tensor([0, 5])
    with pytest.raises(ValueError, match=r"do not fit key \[T, N, D\], value \[T, N, E\]"):
        torch.ops.npu.npu_scatter_pa_kv_cache(
            torch.ones(2, 2, 16), torch.ones(2, 1, 16), *caches, slots, cache_mode="Norm"
        )
    assert not caches[0].any() and not caches[1].any()
