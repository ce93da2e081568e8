"""Weights of attention that sum to one, however large the scores are."""

from __future__ import annotations

import pytest
import torch

import torch_pagoda.runtime.ops.npu  # noqa: F401  registers the operators

npu = torch.ops.npu

HEADS, DIM = 4, 128
CAUSAL = torch.ones(2048, 2048, dtype=torch.int8).triu(1)


def softmax_in_double(query, key, value, scale, sinks=None):
    """[B, N, S, D]: the softmax in fp64 of the scores that fp32 gives, and its log-sum-exp."""
    scores = ((query @ key.mT) * scale).double()
    logits = scores
    if sinks is not None:
        logits = torch.cat([scores, sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    return (logits.softmax(-1)[..., : scores.shape[-1]] @ value.double()), logits.logsumexp(-1, keepdim=True)


def scores_of(deviation, queries, keys, seed=0):
    """Queries, keys and positive values with scores of that standard deviation at scale 1."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(1, HEADS, queries, DIM, generator=generator) * deviation / DIM**0.5
    key = torch.randn(1, HEADS, keys, DIM, generator=generator)
    value = 1 + torch.rand(1, HEADS, keys, DIM, generator=generator)
    return query, key, value


@pytest.mark.parametrize("deviation", [8, 32, 128, 512])
@pytest.mark.parametrize("queries", [1, 40])
def test_large_scores_lose_nothing(deviation, queries):
    query, key, value = scores_of(deviation, queries, 300)
    found, lse = npu.npu_fused_infer_attention_score(
        query, key, value, num_heads=HEADS, scale=1.0, input_layout="BNSD", softmax_lse_flag=True
    )
    expected, expected_lse = softmax_in_double(query, key, value, 1.0)
    torch.testing.assert_close(found.double(), expected, rtol=3e-6, atol=0)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=3e-7, atol=1e-6)


@pytest.mark.parametrize("scale", [1.0, 1e4 / 64, -1e4 / 64, 1e6])
def test_equal_values_come_back_as_they_are(scale):
    query, key = torch.ones(1, 1, 1, 64), torch.ones(1, 1, 2048, 64)
    found, _ = npu.npu_fused_infer_attention_score(
        query, key, key, num_heads=1, scale=scale, input_layout="BNSD", softmax_lse_flag=False
    )
    torch.testing.assert_close(found, query, rtol=1e-6, atol=0)


@pytest.mark.parametrize("height", [-100.0, 0.0, 900.0])
def test_a_sink_takes_its_part_of_the_sum(height):
    query, key, value = scores_of(256, 7, 7)
    sinks = torch.full((HEADS,), height)
    tokens = [tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value)]
    found, _ = npu.npu_fused_infer_attention_score_v2(
        *tokens,
        num_query_heads=HEADS,
        softmax_scale=1.0,
        input_layout="TND",
        actual_seq_qlen=[7],
        actual_seq_kvlen=[7],
        learnable_sink=sinks,
    )
    expected, _ = softmax_in_double(query, key, value, 1.0, sinks)
    torch.testing.assert_close(found.double(), expected[0].transpose(0, 1), rtol=3e-6, atol=1e-30)


def test_queries_that_see_no_key_give_nothing():
    """Five queries over two keys, aligned at the end: the first three are before every key."""
    query, key, value = scores_of(64, 5, 2)
    found, lse = npu.npu_fused_infer_attention_score(
        query,
        key,
        value,
        num_heads=HEADS,
        scale=1.0,
        input_layout="BNSD",
        sparse_mode=3,
        atten_mask=CAUSAL,
        softmax_lse_flag=True,
    )
    assert (found[:, :, :3] == 0).all() and (lse[:, :, :3] == float("-inf")).all()
    torch.testing.assert_close(found[:, :, 3], value[:, :, 0], rtol=1e-6, atol=0)
    assert lse[:, :, 3:].isfinite().all()
