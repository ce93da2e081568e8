"""The C++ kernel of pagoda::attention against its reference."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from torch_pagoda.runtime.ops import attention_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
kernel = torch.ops.pagoda.attention.default


def qkv(dtype, heads, kv_heads, queries, keys, dim, value_dim=None, batch=2):
    return (
        torch.randn(batch, heads, queries, dim).to(dtype),
        torch.randn(batch, kv_heads, keys, dim).to(dtype),
        torch.randn(batch, kv_heads, keys, value_dim or dim).to(dtype),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "heads, kv_heads, queries, keys, dim, value_dim",
    [
        (1, 1, 1, 1, 16, 16),
        (8, 2, 33, 33, 64, 64),
        (6, 6, 70, 130, 80, 96),
        (4, 1, 17, 300, 256, 128),
        (71, 1, 3, 9, 64, 64),
        (12, 4, 40, 65, 96, 32),
        (4, 2, 20, 20, 5, 7),
        (2, 2, 1, 129, 192, 128),
        (3, 3, 5, 64, 2, 2),
    ],
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_shapes(assert_close, dtype, heads, kv_heads, queries, keys, dim, value_dim, is_causal):
    query, key, value = qkv(dtype, heads, kv_heads, queries, keys, dim, value_dim)
    arguments = (query, key, value, None, None, None, dim**-0.5, is_causal, 0, 0, 0.0)
    result = kernel(*arguments)
    assert_close(result, attention_reference(*arguments))
    assert result.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"window": 7},
        {"chunk": 8},
        {"window": 11, "chunk": 64},
        {"softcap": 3.0},
        {"sinks": True},
        {"alibi": True},
        {"window": 70, "softcap": 2.0, "sinks": True, "alibi": True},
        {"scale": -0.2},
    ],
    ids=str,
)
def test_options(assert_close, dtype, is_causal, options):
    query, key, value = qkv(dtype, 4, 2, 150, 150, 32)
    arguments = (
        query,
        key,
        value,
        None,
        torch.randn(4).to(dtype) if options.get("sinks") else None,
        torch.rand(4) if options.get("alibi") else None,
        options.get("scale", 0.2),
        is_causal,
        options.get("window", 0),
        options.get("chunk", 0),
        options.get("softcap", 0.0),
    )
    assert_close(kernel(*arguments), attention_reference(*arguments))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 4, 90, 100), (2, 1, 90, 100), (1, 1, 1, 100), (90, 100), (4, 90, 1)])
@pytest.mark.parametrize("mask", ["bool", "infinity", "lowest", "bias", "fp32"])
def test_masks(assert_close, dtype, shape, mask):
    query, key, value = qkv(dtype, 4, 2, 90, 100, 16)
    hidden = torch.rand(shape) > 0.5
    attn_mask = ~hidden
    if mask != "bool":
        mask_dtype = torch.float32 if mask == "fp32" else dtype
        lowest = -torch.inf if mask == "infinity" else torch.finfo(mask_dtype).min
        attn_mask = torch.randn(shape) if mask in ("bias", "fp32") else torch.zeros(shape)
        attn_mask = attn_mask.to(mask_dtype).masked_fill(hidden, lowest)
    arguments = (query, key, value, attn_mask, None, None, 0.25, False, 0, 0, 0.0)
    assert_close(kernel(*arguments), attention_reference(*arguments))


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32, torch.float64])
def test_causal_mask_skips_what_it_hides(assert_close, mask_dtype):
    """A mask tensor that says causal gives what is_causal gives; rows it hides entirely are zero."""
    query, key, value = qkv(torch.float32, 4, 2, 200, 200, 16)
    seen = torch.ones(200, 200, dtype=torch.bool).tril()
    seen[:3] = False
    mask = seen
    if mask_dtype != torch.bool:
        mask = torch.zeros(200, 200, dtype=mask_dtype).masked_fill(~seen, torch.finfo(mask_dtype).min)
    result = kernel(query, key, value, mask, None, None, 0.25, False, 0, 0, 0.0)
    assert (result[:, :, :3] == 0).all()
    causal = kernel(query, key, value, None, None, None, 0.25, True, 0, 0, 0.0)
    assert_close(result[:, :, 3:], causal[:, :, 3:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_strides(assert_close, dtype):
    query, key, value = qkv(dtype, 4, 2, 30, 70, 24, 40)
    arguments = [query, key, value, torch.randn(30, 70), torch.randn(8)[::2], torch.rand(8)[::2]]
    arguments += [0.2, True, 0, 0, 0.0]
    expected = attention_reference(*arguments)
    strided = [
        query.transpose(2, 3).contiguous().transpose(2, 3),
        key.transpose(1, 2).contiguous().transpose(1, 2),
        value.transpose(1, 3).contiguous().transpose(1, 3),
        arguments[3].T.contiguous().T,
    ]
    assert_close(kernel(*strided, *arguments[4:]), expected)
    expanded = [query, key[:, :1].expand(-1, 2, -1, -1), value[:1].expand(2, -1, -1, -1)]
    assert_close(kernel(*expanded, *arguments[3:]), attention_reference(*expanded, *arguments[3:]))


@pytest.mark.parametrize("shape", [(0, 3, 3), (1, 0, 3), (1, 3, 0)])
def test_empty(shape):
    batch, queries, keys = shape
    query, key, value = qkv(torch.float32, 2, 1, queries, keys, 8, 4, batch)
    result = kernel(query, key, value, None, None, None, 1.0, False, 0, 0, 0.0)
    assert result.shape == (batch, 2, queries, 4) and (result == 0).all()


def test_fp64_runs_the_reference():
    query, key, value = (t.double() for t in qkv(torch.float32, 2, 1, 5, 5, 8))
    arguments = (query, key, value, None, None, None, 1.0, True, 0, 0, 0.0)
    assert torch.equal(kernel(*arguments), attention_reference(*arguments))


def test_fp32_is_as_accurate_as_sdpa():
    query, key, value = qkv(torch.float32, 8, 8, 64, 2000, 128, batch=1)
    exact = scaled_dot_product_attention(query.double(), key.double(), value.double())
    ours = (kernel(query, key, value, None, None, None, 128**-0.5, False, 0, 0, 0.0) - exact).abs().max()
    torchs = (scaled_dot_product_attention(query, key, value) - exact).abs().max()
    assert ours < 2 * torchs and ours < 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_scores_and_far_masks_stay_finite(assert_close, dtype):
    query, key, value = qkv(dtype, 2, 2, 20, 80, 32)
    arguments = (query * 30, key * 30, value, None, None, None, 1.0, True, 0, 0, 0.0)
    assert_close(kernel(*arguments), attention_reference(*arguments))


@pytest.mark.parametrize("keys", [1, 3, 40, 64, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nan_reaches_its_rows_and_no_others(dtype, keys):
    query, key, value = qkv(dtype, 2, 1, 6, keys, 16)
    query[0, 1, 2] = torch.nan
    result = kernel(query, key, value, None, None, None, 1.0, False, 0, 0, 0.0)
    assert result[0, 1, 2].isnan().all()
    result[0, 1, 2] = 0
    assert result.isfinite().all()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"key": torch.zeros(2, 3, 5, 8)}, "key of shape"),
        ({"key": torch.zeros(2, 2, 5, 9)}, "key of shape"),
        ({"value": torch.zeros(2, 2, 6, 8)}, "value of shape"),
        ({"value": torch.zeros(2, 2, 5, 8, dtype=torch.float16)}, "dtypes"),
        ({"sinks": torch.zeros(3)}, "sinks has shape"),
        ({"alibi_slopes": torch.zeros(4, dtype=torch.int64)}, "alibi_slopes has shape"),
        ({"attn_mask": torch.zeros(3, 3)}, "attn_mask of shape"),
    ],
)
def test_bad_arguments_are_named(change, message):
    arguments = {
        "query": torch.zeros(2, 4, 5, 8),
        "key": torch.zeros(2, 2, 5, 8),
        "value": torch.zeros(2, 2, 5, 8),
        "attn_mask": None,
        "sinks": None,
        "alibi_slopes": None,
    } | change
    with pytest.raises(ValueError, match=message):
        kernel(*arguments.values(), 1.0, True, 0, 0, 0.0)
