"""npu_mla_prolog_v3 against the layers that it stands for, and as the first half of latent attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import torch_pagoda.runtime.ops.npu  # noqa: F401  registers the operators

npu = torch.ops.npu

HEADS, HIDDEN, COMPRESSED, CONTENT, LATENT, ROPE, BLOCKS, BLOCK = 4, 64, 48, 32, 512, 64, 3, 16
TOKENS = 6
SLOTS = torch.tensor([17, 18, 0, 1, 2, -1])


def weights():
    shapes = [
        (HIDDEN, COMPRESSED),
        (COMPRESSED, HEADS * (CONTENT + ROPE)),
        (HEADS, CONTENT, LATENT),
        (HIDDEN, LATENT + ROPE),
    ]
    drawn = [torch.randn(shape) / shape[-2] ** 0.5 for shape in shapes]
    return [t.bfloat16() for t in (*drawn, torch.rand(COMPRESSED) + 0.5, torch.rand(LATENT) + 0.5)]


def tables():
    angles = torch.arange(TOKENS)[:, None] * 10.0 ** -(torch.arange(ROPE // 2) / 8)
    return angles.sin().repeat(1, 2).bfloat16(), angles.cos().repeat(1, 2).bfloat16()


def caches():
    return [torch.zeros(BLOCKS, BLOCK, 1, dim).bfloat16() for dim in (LATENT, ROPE)]


def turned(x, sin, cos):
    """Neighbors of the last dim as complex numbers, left in halves."""
    pairs = x.double().unflatten(-1, (-1, 2))
    turn = torch.complex(cos.double()[..., : ROPE // 2], sin.double()[..., : ROPE // 2])
    result = torch.view_as_complex(pairs.contiguous()) * turn
    return torch.cat([result.real, result.imag], -1)


def by_layers(x, w, sin, cos, query_scale=1.0, key_scale=1.0, rounded=lambda value: value):
    down_q, up_q, absorb, down_kv, gamma_q, gamma_kv = (t.double() for t in w)
    x = x.double()
    compressed = F.rms_norm(rounded(x @ down_q), (COMPRESSED,), gamma_q, 1e-5) * query_scale
    compressed = rounded(compressed)
    per_head = rounded(compressed @ up_q).unflatten(-1, (HEADS, -1))
    query = torch.einsum("tnd,ndl->tnl", per_head[..., :CONTENT], absorb)
    query_rope = turned(per_head[..., CONTENT:], sin[:, None], cos[:, None])
    latent, rope = rounded(x @ down_kv).split([LATENT, ROPE], -1)
    return (
        query,
        query_rope,
        F.rms_norm(latent, (LATENT,), gamma_kv, 1e-5) * key_scale,
        turned(rope, sin, cos),
        compressed,
    )


@pytest.mark.parametrize("mode", ["PA_BSND", "PA_NZ"])
@pytest.mark.parametrize("leading", [(TOKENS,), (2, 3)])
def test_equals_its_layers(mode, leading, assert_close):
    w, (sin, cos), (kv_cache, kr_cache) = weights(), tables(), caches()
    x = torch.randn(TOKENS, HIDDEN).bfloat16()
    results = torch.ops.npu.npu_mla_prolog_v3(
        x.unflatten(0, leading),
        *w,
        sin.unflatten(0, leading),
        cos.unflatten(0, leading),
        kv_cache,
        kr_cache,
        cache_index=SLOTS.reshape(leading),
        cache_mode=mode,
        query_norm_flag=True,
        qc_qr_scale=1.5,
        kc_scale=0.5,
    )
    query, query_rope, latent, rope, compressed = by_layers(x, w, sin, cos, 1.5, 0.5)
    assert_close(results[0].flatten(0, -3), query.bfloat16())
    assert_close(results[1].flatten(0, -3), query_rope.bfloat16())
    assert_close(results[3].flatten(0, -2), compressed.bfloat16())
    for cache, wanted in ((kv_cache, latent), (kr_cache, rope)):
        dim = wanted.shape[-1]
        if mode == "PA_NZ":
            cache = cache.view(BLOCKS, dim // 16, BLOCK, 16).transpose(1, 2)
        rows = cache.reshape(BLOCKS * BLOCK, dim)
        kept = SLOTS[SLOTS >= 0]
        assert_close(rows[kept], wanted[SLOTS >= 0].bfloat16())
        rows = rows.clone()
        rows[kept] = 0
        assert rows.count_nonzero() == 0


def test_products_are_rounded_before_norms_and_rotations():
    """As the vendor's kernel does: each result is the nearest bfloat16, but where fp32's own rounding decides."""
    w, (sin, cos), (kv_cache, kr_cache) = weights(), tables(), caches()
    x, slots = torch.randn(TOKENS, HIDDEN).bfloat16(), torch.arange(TOKENS)
    found = npu.npu_mla_prolog_v3(x, *w, sin, cos, kv_cache, kr_cache, cache_index=slots, query_norm_flag=True)
    rows = [cache.flatten(0, 2)[:TOKENS] for cache in (kv_cache, kr_cache)]
    expected = by_layers(x, w, sin, cos, rounded=lambda value: value.bfloat16().double())
    for result, wanted in zip((found[0], found[1], *rows, found[3]), expected, strict=True):
        assert (result != wanted.bfloat16()).float().mean() < 0.02


@pytest.mark.parametrize("mode", ["PA_BSND", "PA_NZ"])
def test_attention_over_what_it_wrote(mode, assert_close):
    w, (sin, cos), (kv_cache, kr_cache) = weights(), tables(), caches()
    x = torch.randn(TOKENS, HIDDEN).bfloat16()
    slots = torch.tensor([32, 33, 34, 35, 36, 37])
    query, query_rope, *_ = npu.npu_mla_prolog_v3(
        x, *w, sin, cos, kv_cache, kr_cache, cache_index=slots, cache_mode=mode
    )
    if mode == "PA_NZ":
        kv_cache = kv_cache.view(BLOCKS, 1, LATENT // 16, BLOCK, 16)
        kr_cache = kr_cache.view(BLOCKS, 1, ROPE // 16, BLOCK, 16)
    else:
        kv_cache, kr_cache = kv_cache.flatten(2), kr_cache.flatten(2)
    result, _ = npu.npu_fused_infer_attention_score(
        query,
        kv_cache,
        kv_cache,
        query_rope=query_rope,
        key_rope=kr_cache,
        atten_mask=torch.ones(2048, 2048, dtype=torch.int8).triu(1),
        actual_seq_lengths=[TOKENS],
        actual_seq_lengths_kv=[TOKENS],
        block_table=torch.tensor([[2, 0]], dtype=torch.int32),
        block_size=BLOCK,
        num_heads=HEADS,
        num_key_value_heads=1,
        scale=0.1,
        input_layout="TND",
        sparse_mode=3,
    )
    q, q_rope, latent, rope, _ = by_layers(x, w, sin, cos)
    scores = torch.einsum("tnl,sl->nts", torch.cat([q, q_rope], -1), torch.cat([latent, rope], -1)) * 0.1
    scores = scores.masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), float("-inf"))
    wanted = torch.einsum("nts,sl->tnl", scores.softmax(-1), latent)
    error = (result.double() - wanted).abs().max() / wanted.abs().max()
    assert error < 0.03


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"token_x": torch.zeros(TOKENS, HIDDEN)}, "dtypes differ: token_x torch.float32"),
        ({"weight_dq": torch.zeros(HIDDEN, COMPRESSED + 1).bfloat16()}, "do not fit"),
        ({"rope_cos": torch.zeros(TOKENS, ROPE // 2).bfloat16()}, "do not fit"),
        ({"kr_cache": torch.zeros(BLOCKS, BLOCK, 1, ROPE // 2).bfloat16()}, "do not fit"),
        ({"cache_index": None}, "cache_index is None; it is needed"),
        ({"cache_index": SLOTS.reshape(2, 3)}, r"cache_index \(2, 3\) do not fit"),
    ],
)
def test_refusals(changes, match):
    names = "weight_dq weight_uq_qr weight_uk weight_dkv_kr rmsnorm_gamma_cq rmsnorm_gamma_ckv".split()
    arguments = dict(zip(names, weights(), strict=True)) | {"token_x": torch.zeros(TOKENS, HIDDEN).bfloat16()}
    arguments |= dict(zip(("rope_sin", "rope_cos"), tables(), strict=True))
    arguments |= dict(zip(("kv_cache", "kr_cache"), caches(), strict=True)) | {"cache_index": SLOTS}
    npu.npu_mla_prolog_v3(**arguments)
    with pytest.raises(ValueError, match=match):
        npu.npu_mla_prolog_v3(**{**arguments, **changes})
    for unknown in ({"cache_mode": "PA_BLK_NZ"}, {"weight_quant_mode": 1}, {"quant_scale_ckv": torch.ones(1)}):
        with pytest.raises(NotImplementedError, match=next(iter(unknown))):
            npu.npu_mla_prolog_v3(**{**arguments, **unknown})
