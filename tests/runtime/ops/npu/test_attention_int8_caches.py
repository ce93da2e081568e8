"""int8 keys and values: (stored + offset) · scale, by every documented mode of the scales."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import torch_pagoda.runtime.ops.npu  # noqa: F401  registers the operators

npu = torch.ops.npu

BATCH, HEADS, KV_HEADS, DIM, LENGTH, BLOCK, BLOCKS = 2, 4, 2, 32, 44, 32, 7
TABLE = torch.tensor([[5, 2], [0, 3]], dtype=torch.int32)


def attention(query, key, value, scale):
    """query [B, N, S, D], key and value [B, KN, L, D], everything visible."""
    return F.scaled_dot_product_attention(
        query.float(), key.float(), value.float(), scale=scale, enable_gqa=True
    ).bfloat16()


def stored():
    return torch.randint(-128, 128, (BATCH, KV_HEADS, LENGTH, DIM), dtype=torch.int8)


def scales_of(mode):
    """A scale and an offset argument and both spread over [B, KN, L, D]."""
    shape, spread = {
        "channel": ((1, KV_HEADS, 1, DIM), lambda t: t),
        "channel flat": ((KV_HEADS * DIM,), lambda t: t.reshape(1, KV_HEADS, 1, DIM)),
        "tensor": ((1,), lambda t: t.reshape(1, 1, 1, 1)),
        "token": ((1, BATCH, LENGTH + 3), lambda t: t[0, :, None, :LENGTH, None]),
        "head": ((KV_HEADS,), lambda t: t.reshape(1, KV_HEADS, 1, 1)),
        "token and head": ((BATCH, KV_HEADS, LENGTH + 3), lambda t: t[:, :, :LENGTH, None]),
    }[mode]
    scale, offset = torch.rand(shape) / 64 + 0.01, torch.randint(-9, 9, shape).float()
    if "token" not in mode:
        scale, offset = scale.bfloat16(), offset.bfloat16()
    return scale, offset, spread(scale).float(), spread(offset).float()


MODES = {"channel": 0, "channel flat": 0, "tensor": 0, "token": 1, "head": 2, "token and head": 3}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("with_offset", [False, True])
def test_separate_scales(mode, with_offset, assert_close):
    query = torch.randn(BATCH, HEADS, 1, DIM).bfloat16()
    keys, values = stored(), stored()
    (k_scale, k_offset, k_wide, k_shift), (v_scale, v_offset, v_wide, v_shift) = scales_of(mode), scales_of(mode)
    offsets = {"dequant_offset_key": k_offset, "dequant_offset_value": v_offset} if with_offset else {}
    result, _ = npu.npu_fused_infer_attention_score_v2(
        query,
        keys,
        values,
        dequant_scale_key=k_scale,
        dequant_scale_value=v_scale,
        key_quant_mode=MODES[mode],
        value_quant_mode=MODES[mode],
        num_query_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        softmax_scale=0.2,
        input_layout="BNSD",
        **offsets,
    )
    key = (keys.float() + (k_shift if with_offset else 0)) * k_wide
    value = (values.float() + (v_shift if with_offset else 0)) * v_wide
    assert_close(result, attention(query, key, value, 0.2))


@pytest.mark.parametrize("mode", ["channel", "token"])
def test_prompts_take_scales_per_channel_and_per_token(mode, assert_close):
    query = torch.randn(BATCH, HEADS, 5, DIM).bfloat16()
    keys, values = stored(), stored()
    (k_scale, _, k_wide, _), (v_scale, _, v_wide, _) = scales_of(mode), scales_of(mode)
    result, _ = npu.npu_fused_infer_attention_score(
        query,
        keys,
        values,
        key_antiquant_scale=k_scale,
        value_antiquant_scale=v_scale,
        key_antiquant_mode=MODES[mode],
        value_antiquant_mode=MODES[mode],
        num_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        scale=0.2,
        input_layout="BNSD",
    )
    assert_close(result, attention(query, keys.float() * k_wide, values.float() * v_wide, 0.2))


@pytest.mark.parametrize("mode", ["channel", "tensor", "token"])
def test_stacked_scales_of_v1(mode, assert_close):
    query = torch.randn(BATCH, HEADS, 1, DIM).bfloat16()
    keys, values = stored(), stored()
    (k_scale, k_offset, k_wide, k_shift), (v_scale, v_offset, v_wide, v_shift) = scales_of(mode), scales_of(mode)
    arguments = {
        "antiquant_scale": torch.cat([k_scale, v_scale]),
        "antiquant_offset": torch.cat([k_offset, v_offset]),
        "num_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "input_layout": "BNSD",
    }
    wanted = attention(query, (keys.float() + k_shift) * k_wide, (values.float() + v_shift) * v_wide, 0.2)
    fused, _ = npu.npu_fused_infer_attention_score(
        query, keys, values, scale=0.2, antiquant_mode=MODES[mode], **arguments
    )
    assert_close(fused, wanted)
    if mode != "token":
        assert_close(npu.npu_incre_flash_attention(query, keys, values, scale_value=0.2, **arguments), wanted)


@pytest.mark.parametrize("layout", ["BNSD", "BSH"])
@pytest.mark.parametrize("mode", [4, 5])
def test_paged_scales(mode, layout, assert_close):
    query = torch.randn(BATCH, HEADS, 1, DIM).bfloat16()
    caches = [torch.randint(-128, 128, (BLOCKS, KV_HEADS, BLOCK, DIM), dtype=torch.int8) for _ in range(2)]
    scales = [torch.rand(BLOCKS, KV_HEADS if mode == 5 else 1, BLOCK) / 64 + 0.01 for _ in range(2)]
    wide = layout == "BSH"
    result, _ = npu.npu_fused_infer_attention_score_v2(
        query.transpose(1, 2).flatten(2) if wide else query,
        *([cache.transpose(1, 2).flatten(2).contiguous() for cache in caches] if wide else caches),
        actual_seq_kvlen=[LENGTH, LENGTH],
        block_table=TABLE,
        block_size=BLOCK,
        dequant_scale_key=scales[0] if mode == 5 else scales[0][:, 0],
        dequant_scale_value=scales[1] if mode == 5 else scales[1][:, 0],
        key_quant_mode=mode,
        value_quant_mode=mode,
        num_query_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        softmax_scale=0.2,
        input_layout=layout,
    )
    key, value = (
        torch.stack([torch.cat(list((cache * scale[..., None])[row.long()]), 1)[:, :LENGTH] for row in TABLE])
        for cache, scale in zip(caches, scales, strict=True)
    )
    result = result.unflatten(2, (HEADS, DIM)).transpose(1, 2) if wide else result
    assert_close(result, attention(query, key, value, 0.2))


@pytest.mark.parametrize(("block", "dim"), [(16, 32), (544, 32), (32, 48)])
def test_sizes_of_paged_int8_caches(block, dim):
    caches = [torch.zeros(2, block, dim, dtype=torch.int8) for _ in range(2)]
    scale = torch.ones(2, 1, block)
    with pytest.raises(ValueError, match="in int8"):
        npu.npu_fused_infer_attention_score(
            torch.zeros(1, 1, dim).bfloat16(),
            *caches,
            actual_seq_lengths_kv=[3],
            block_table=TABLE[:1] * 0,
            block_size=block,
            key_antiquant_scale=scale,
            value_antiquant_scale=scale,
            key_antiquant_mode=5,
            value_antiquant_mode=5,
            input_layout="BSH",
        )


def test_a_fractal_nz_cache_of_int8(assert_close):
    query = torch.randn(BATCH, HEADS, 3, DIM * 2).bfloat16()
    plain = [torch.randint(-128, 128, (BLOCKS, BLOCK, KV_HEADS, DIM * 2), dtype=torch.int8) for _ in range(2)]
    caches = [cache.unflatten(3, (2, 32)).permute(0, 2, 3, 1, 4).contiguous() for cache in plain]
    scales = [(torch.rand(KV_HEADS, 1, DIM * 2) / 64).bfloat16() for _ in range(2)]
    result, _ = npu.npu_fused_infer_attention_score_v2(
        query,
        *caches,
        actual_seq_kvlen=[LENGTH, LENGTH],
        block_table=TABLE,
        block_size=BLOCK,
        dequant_scale_key=scales[0],
        dequant_scale_value=scales[1],
        num_query_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        softmax_scale=0.2,
        input_layout="BNSD",
        inner_precise=1,
    )
    key, value = (
        torch.stack([torch.cat(list(cache[row.long()]))[:LENGTH].transpose(0, 1) for row in TABLE]) * scale.float()
        for cache, scale in zip(plain, scales, strict=True)
    )
    assert_close(result, attention(query, key, value, 0.2))
