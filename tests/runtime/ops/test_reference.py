"""The references against torch's own attention and against the formulas written out."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from torch_pagoda.runtime.ops import attention_reference, paged_attention_reference


def qkv(heads=4, kv_heads=2, queries=9, keys=9, dim=8, value_dim=6, dtype=torch.float64):
    return (
        torch.randn(2, heads, queries, dim, dtype=dtype),
        torch.randn(2, kv_heads, keys, dim, dtype=dtype),
        torch.randn(2, kv_heads, keys, value_dim, dtype=dtype),
    )


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("queries, keys", [(9, 9), (1, 7), (5, 12), (12, 5)])
@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float"])
def test_equals_sdpa(heads, kv_heads, queries, keys, mask):
    query, key, value = qkv(heads, kv_heads, queries, keys)
    attn_mask = None
    if mask == "bool":
        attn_mask = torch.rand(2, 1, queries, keys) > 0.4
        attn_mask[..., 0] = True
    elif mask == "float":
        attn_mask = torch.randn(heads, queries, keys, dtype=torch.float64)
        attn_mask[..., 2:4] = -torch.inf
    expected = scaled_dot_product_attention(
        query, key, value, attn_mask, is_causal=mask == "causal", scale=0.3, enable_gqa=True
    )
    actual = attention_reference(query, key, value, attn_mask, None, None, 0.3, mask == "causal", 0, 0, 0.0)
    torch.testing.assert_close(actual, expected)
    assert actual.transpose(1, 2).is_contiguous()


def test_window_chunk_softcap_alibi_and_sinks_follow_their_formulas():
    query, key, value = qkv(kv_heads=4)
    slopes, sinks = torch.rand(4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    scores = torch.zeros(2, 4, 9, 9, dtype=torch.float64)
    for i in range(9):
        for j in range(9):
            score = 0.5 * (query[:, :, i] * key[:, :, j]).sum(-1)
            score = 1.5 * torch.tanh(score / 1.5) + slopes * (j - i)
            seen = j <= i and i - j < 3 and i // 4 == j // 4
            scores[:, :, i, j] = score if seen else -torch.inf
    with_sink = torch.cat([scores, sinks[None, :, None, None].expand(2, 4, 9, 1)], dim=-1)
    expected = torch.softmax(with_sink, dim=-1)[..., :-1] @ value
    actual = attention_reference(query, key, value, None, sinks, slopes, 0.5, True, 3, 4, 1.5)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("hidden", [False, -torch.inf, torch.finfo(torch.float32).min])
def test_rows_that_see_nothing_are_zero(hidden):
    query, key, value = qkv(dtype=torch.float32)
    mask = torch.ones(1, 1, 9, 9, dtype=torch.bool) if hidden is False else torch.zeros(1, 1, 9, 9)
    mask[:, :, 4] = hidden
    result = attention_reference(query, key, value, mask, None, None, 1.0, False, 0, 0, 0.0)
    assert (result[:, :, 4] == 0).all() and (result[:, :, 5] != 0).all()


def test_paged_equals_dense(paged_case):
    """Whole prompts in one step: the paged reference is the dense causal one, sequence by sequence."""
    case = paged_case([(7, 7), (33, 33), (1, 1)], window=6, softcap=4.0, sinks=True, alibi=True, padding=3)
    query, key, value, *_, sinks, slopes, scale, window, chunk, softcap, _, _ = case.arguments
    result = paged_attention_reference(*case.arguments)
    for start, end in [(0, 7), (7, 40), (40, 41)]:
        dense = attention_reference(
            query[:, :, start:end],
            key[:, :, start:end],
            value[:, :, start:end],
            None,
            sinks,
            slopes,
            scale,
            True,
            window,
            chunk,
            softcap,
        )
        torch.testing.assert_close(result[:, :, start:end], dense)
    assert (result[:, :, 41:] == 0).all()


def test_paged_in_chunks_equals_paged_at_once(paged_case):
    whole = paged_case([(21, 21)], padding=0)
    expected = paged_attention_reference(*whole.copy())
    arguments = whole.copy()
    pieces = []
    for start, end in [(0, 4), (4, 5), (5, 21)]:
        step = list(arguments)
        for i in range(3):
            step[i] = arguments[i][:, :, start:end]
        step[5] = arguments[5][start:end]
        step[7] = torch.tensor([0, end - start], dtype=torch.int32)
        step[8] = torch.tensor([end], dtype=torch.int32)
        pieces.append(paged_attention_reference(*step))
    torch.testing.assert_close(torch.cat(pieces, dim=2), expected)
