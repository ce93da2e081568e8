"""The chains norm, RoPE, cache write: the single operators in a row give the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import torch_pagoda.runtime.ops.npu  # noqa: F401  registers the operators

npu = torch.ops.npu

BATCH, LENGTH, LATENT, ROPE, BLOCKS, BLOCK = 2, 3, 32, 64, 3, 8
SLOTS = torch.tensor([3, 9, -1, 12, 23, 0])


def turned(x, cos, sin):
    """[-x₂, x₁] rotation by halves, written out by element."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return torch.cat(
        [first * cos[..., :half] - second * sin[..., :half], second * cos[..., half:] + first * sin[..., half:]], -1
    )


def interleaved_to_halves(x):
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def written(cache_shape, values, slots, fill=0.0):
    """[blocks, block size, heads, D] after a write of values [T, heads, D]."""
    cache = torch.full((cache_shape[0] * cache_shape[1], *values.shape[1:]), fill, dtype=values.dtype)
    for value, slot in zip(values, slots.flatten().tolist(), strict=True):
        if slot >= 0:
            cache[slot] = value
    return cache.unflatten(0, cache_shape[:2])


def from_nz(cache, heads, dim):
    """[blocks, heads·D/w, block size, w] as [blocks, block size, heads, D]."""
    return cache.transpose(1, 2).flatten(2).unflatten(2, (heads, dim))


def mla_inputs(dtype):
    kv = torch.randn(BATCH, 1, LENGTH, LATENT + ROPE).to(dtype)
    gamma = torch.randn(LATENT).to(dtype)
    cos, sin = torch.randn(2, BATCH, 1, LENGTH, ROPE).to(dtype)
    latent = F.rms_norm(kv[..., :LATENT].double(), (LATENT,), gamma.double(), 1e-5)
    key = turned(interleaved_to_halves(kv[..., LATENT:].double()), cos.double(), sin.double())
    return (kv, gamma, cos, sin), key, latent


@pytest.mark.parametrize("mode", ["PA", "PA_BNSD", "PA_NZ", "Norm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_kv_rmsnorm_rope_cache(mode, dtype, assert_close):
    inputs, key, latent = mla_inputs(dtype)
    if mode == "Norm":
        caches = [torch.zeros(BATCH, 1, 6, dim).to(dtype) for dim in (ROPE, LATENT)]
        index = torch.tensor([[5, -1, 0], [2, 1, 3]])
    else:
        caches = [torch.zeros(BLOCKS, BLOCK, 1, dim).to(dtype) for dim in (ROPE, LATENT)]
        index = SLOTS
    k_rope, c_kv = npu.npu_kv_rmsnorm_rope_cache_v2(*inputs, index, *caches, cache_mode=mode, is_output_kv=True)
    assert_close(k_rope, key.to(dtype))
    assert_close(c_kv, latent.to(dtype))
    for cache, value in zip(caches, (k_rope, c_kv), strict=True):
        dim = value.shape[-1]
        if mode == "Norm":
            wanted = torch.stack(
                [written((1, 6), v.transpose(0, 1), i)[0] for v, i in zip(value, index, strict=True)]
            )
            assert torch.equal(cache, wanted.transpose(1, 2))
            continue
        read = from_nz(cache.view(BLOCKS, dim // 16, BLOCK, 16), 1, dim) if mode == "PA_NZ" else cache
        assert torch.equal(read, written((BLOCKS, BLOCK), value.reshape(-1, 1, dim), index))


def test_kv_int8_caches_multiply_by_the_scale():
    inputs, key, latent = mla_inputs(torch.bfloat16)
    caches = [torch.zeros(BLOCKS, BLOCK, 1, dim, dtype=torch.int8) for dim in (ROPE, LATENT)]
    scales = torch.rand(ROPE) * 60, torch.rand(LATENT) * 60
    npu.npu_kv_rmsnorm_rope_cache_v2(
        *inputs, SLOTS, *caches, k_rope_scale=scales[0], c_kv_scale=scales[1], cache_mode="PA_NZ"
    )
    for cache, value, scale in zip(caches, (key, latent), scales, strict=True):
        dim = value.shape[-1]
        wanted = (value * scale.double()).round().clamp(-128, 127).reshape(-1, 1, dim)
        read = from_nz(cache.view(BLOCKS, dim // 32, BLOCK, 32), 1, dim)
        wanted = written((BLOCKS, BLOCK), wanted, SLOTS)
        # A value that lies on the middle between two integers may fall either way.
        assert (read.double() - wanted).abs().max() <= 1 and (read.double() == wanted).double().mean() > 0.99


def test_kv_with_separate_values(assert_close):
    kv, v = torch.randn(BATCH, 1, LENGTH, 96).half(), torch.randn(BATCH, 1, LENGTH, 16).half()
    gamma = torch.randn(96).half()
    cos, sin = torch.randn(2, BATCH, 1, LENGTH, ROPE).half()
    caches = [torch.zeros(BLOCKS, BLOCK, 1, dim).half() for dim in (96, 16)]
    k, returned = npu.npu_kv_rmsnorm_rope_cache_v2(
        kv, gamma, cos, sin, SLOTS, *caches, v=v, cache_mode="PA", is_output_kv=True
    )
    normed = F.rms_norm(kv.double(), (96,), gamma.double(), 1e-5)
    rotated = turned(interleaved_to_halves(normed[..., :ROPE]), cos.double(), sin.double())
    assert_close(k, torch.cat([rotated, normed[..., ROPE:]], -1).half())
    assert torch.equal(returned, v)
    assert torch.equal(caches[0], written((BLOCKS, BLOCK), k.reshape(-1, 1, 96), SLOTS))
    assert torch.equal(caches[1], written((BLOCKS, BLOCK), v.reshape(-1, 1, 16), SLOTS))


HEADS, DIM = (4, 2, 2), 32


def qkv_inputs(dtype):
    tokens = BATCH * LENGTH
    qkv, gammas = torch.randn(tokens, 8 * DIM).to(dtype), torch.randn(2, DIM).to(dtype)
    cos, sin = torch.randn(2, tokens, DIM).to(dtype)
    parts = qkv.double().unflatten(1, (8, DIM)).split(HEADS, 1)
    query, key = (
        turned(F.rms_norm(part, (DIM,), gamma.double(), 1e-6), cos.double()[:, None], sin.double()[:, None])
        for part, gamma in zip(parts, gammas, strict=False)
    )
    return (qkv, *gammas, cos, sin, SLOTS), query, key, parts[2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_qkv_rms_norm_rope_cache(dtype, assert_close):
    inputs, query, key, value = qkv_inputs(dtype)
    q_out = torch.zeros(6, 4 * DIM).to(dtype)
    caches = [torch.zeros(BLOCKS, 2 * DIM // 16, BLOCK, 16).to(dtype) for _ in range(2)]
    results = npu.npu_qkv_rms_norm_rope_cache(*inputs, q_out, *caches, [2, 3, 8, DIM], HEADS, is_output_qkv=True)
    for result, part in zip(results, (query, key, value), strict=True):
        assert_close(result, part.flatten(1).to(dtype))
    assert torch.equal(q_out, results[0])
    for cache, result in zip(caches, results[1:], strict=True):
        wanted = written((BLOCKS, BLOCK), result.unflatten(1, (2, DIM)), SLOTS)
        assert torch.equal(from_nz(cache, 2, DIM), wanted)


def test_qkv_int8_caches_divide_by_the_scale():
    inputs, _, key, value = qkv_inputs(torch.float16)
    caches = [torch.zeros(BLOCKS, 2 * DIM // 32, BLOCK, 32, dtype=torch.int8) for _ in range(2)]
    scales = torch.rand(2, 2, DIM) / 40 + 0.01
    returned = npu.npu_qkv_rms_norm_rope_cache(
        *inputs, torch.zeros(6, 4 * DIM).half(), *caches, [2, 3, 8, DIM], HEADS, k_scale=scales[0], v_scale=scales[1]
    )
    assert [result.shape for result in returned] == [()] * 3
    for cache, part, scale in zip(caches, (key, value), scales, strict=True):
        wanted = written((BLOCKS, BLOCK), (part / scale.double()).round().clamp(-128, 127), SLOTS)
        read = from_nz(cache, 2, DIM).double()
        assert (read - wanted).abs().max() <= 1 and (read == wanted).double().mean() > 0.99


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"kv": torch.zeros(BATCH, 1, LENGTH, 95).bfloat16()}, r"do not fit .* kv \[B, 1, S, C\+R\]"),
        ({"cos": torch.zeros(BATCH, 1, 1, ROPE).bfloat16()}, r"cos \(2, 1, 1, 64\), sin .* do not fit"),
        ({"k_cache": torch.zeros(BLOCKS, BLOCK, 1, ROPE)}, "k_cache has dtype torch.float32"),
        ({"ckv_cache": torch.zeros(BLOCKS, BLOCK, 1, LATENT, dtype=torch.int8)}, "its scale is missing"),
        ({"c_kv_scale": torch.ones(LATENT)}, "its scale is given"),
        ({"index": torch.tensor([0, 1, 2, 3, 4, 24])}, "24; the cache has 24 slots"),
        ({"cache_mode": "Norm"}, r"k_cache has shape \(3, 8, 1, 64\)"),
    ],
)
def test_kv_refusals(changes, match):
    (kv, gamma, cos, sin), _, _ = mla_inputs(torch.bfloat16)
    arguments = {"kv": kv, "gamma": gamma, "cos": cos, "sin": sin, "index": SLOTS, "cache_mode": "PA"}
    arguments |= {
        f"{n}_cache": torch.zeros(BLOCKS, BLOCK, 1, d).bfloat16() for n, d in (("k", ROPE), ("ckv", LATENT))
    }
    npu.npu_kv_rmsnorm_rope_cache_v2(**arguments)
    with pytest.raises(ValueError, match=match):
        npu.npu_kv_rmsnorm_rope_cache_v2(**{**arguments, **changes})
    modes = [{"cache_mode": mode} for mode in ("PA_BLK_NZ", "BNSD")]
    for unknown in (*modes, {"k_rope_offset": torch.ones(ROPE)}, {"k_cache_dtype": 1}):
        with pytest.raises(NotImplementedError, match=next(iter(unknown))):
            npu.npu_kv_rmsnorm_rope_cache_v2(**{**arguments, **unknown})


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"qkv_size": [2, 3, 8, 16]}, "qkv has shape"),
        ({"head_nums": [4, 2, 3]}, "qkv has shape"),
        ({"cos": torch.zeros(3, DIM).half()}, "cos has shape"),
        ({"q_gamma": torch.zeros(16).half()}, "q_gamma"),
        ({"k_cache": torch.zeros(BLOCKS, 4, BLOCK, 16, dtype=torch.int8)}, "its scale is missing"),
        ({"k_cache": torch.zeros(BLOCKS, BLOCK, 2, DIM).half()}, "must be"),
    ],
)
def test_qkv_refusals(changes, match):
    (qkv, q_gamma, k_gamma, cos, sin, index), *_ = qkv_inputs(torch.float16)
    cache = torch.zeros(BLOCKS, 4, BLOCK, 16).half()
    arguments = {"qkv": qkv, "q_gamma": q_gamma, "k_gamma": k_gamma, "cos": cos, "sin": sin, "index": index}
    arguments |= {"q_out": torch.zeros(6, 4 * DIM).half(), "k_cache": cache, "v_cache": cache.clone()}
    arguments |= {"qkv_size": [2, 3, 8, DIM], "head_nums": list(HEADS)}
    npu.npu_qkv_rms_norm_rope_cache(**arguments)
    with pytest.raises(ValueError, match=match):
        npu.npu_qkv_rms_norm_rope_cache(**{**arguments, **changes})
    for unknown in ({"cache_mode": "PA"}, {"v_offset": torch.ones(DIM)}):
        with pytest.raises(NotImplementedError, match=next(iter(unknown))):
            npu.npu_qkv_rms_norm_rope_cache(**{**arguments, **unknown})
