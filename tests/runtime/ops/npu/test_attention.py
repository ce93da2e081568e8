"""npu_fused_infer_attention_score and its relatives against torch's own attention with an explicit mask."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import torch_pagoda.runtime.ops.npu  # noqa: F401

npu = torch.ops.npu

HEADS, KV_HEADS, DIM, VALUE_DIM, BLOCK = 8, 2, 128, 128, 16
CAUSAL = torch.ones(2048, 2048, dtype=torch.int8).triu(1)
BATCH_LAYOUTS = ["BSH", "BSND", "BNSD", "BNSD_BSND", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD", "BSH_BNSD", "BSND_BNSD"]
PACKED_LAYOUTS = ["TND", "NTD", "TND_NTD", "NTD_TND"]


def expected(query, key, value, visible, scale=None, bias=None):
    """One sequence, tokens first: query [S, N, D], key and value [L, KN, D], visible a function of (i, j)."""
    queries, keys = len(query), len(key)
    mask = torch.tensor([[bool(visible(i, j)) for j in range(keys)] for i in range(queries)]).reshape(queries, keys)
    mask = mask[None] if bias is None else torch.zeros(bias.shape).masked_fill(~mask, float("-inf")) + bias
    q, k, v = (tensor.float().transpose(0, 1)[None] for tensor in (query, key, value))
    result = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale or DIM**-0.5, enable_gqa=True)
    return result[0].transpose(0, 1).nan_to_num(0)


def everything(i, j):
    return True


def causal(query, key):
    return lambda i, j: j <= i + len(key) - len(query)


def band(query, key, before, after):
    return lambda i, j: -before <= j - (i + len(key) - len(query)) <= after


def laid_out(tensors, name):
    """A list of [S, N, D] of one length in the layout ``name``, or of any lengths for TND and NTD."""
    if name in ("TND", "NTD"):
        packed = torch.cat(tensors)
        return packed if name == "TND" else packed.transpose(0, 1).contiguous()
    batch = torch.stack(tensors)
    return {
        "BSH": lambda: batch.flatten(2),
        "BSND": lambda: batch,
        "BNSD": lambda: batch.transpose(1, 2).contiguous(),
        "NBSD": lambda: batch.permute(2, 0, 1, 3).contiguous(),
    }[name]()


def random_sequences(query_lengths, kv_lengths, dtype=torch.float32, dim=DIM):
    queries = [torch.randn(n, HEADS, dim).to(dtype) for n in query_lengths]
    keys = [torch.randn(n, KV_HEADS, dim).to(dtype) for n in kv_lengths]
    values = [torch.randn(n, KV_HEADS, VALUE_DIM).to(dtype) for n in kv_lengths]
    return queries, keys, values


def paged(sequences, form):
    """Caches that hold ``sequences`` ([L, KN, D]) in blocks of a shuffled order, and the block table."""
    heads, dim = sequences[0].shape[1:]
    width = max(math.ceil(len(s) / BLOCK) for s in sequences) + 1
    total = len(sequences) * width + 2
    order = torch.randperm(total, generator=torch.Generator().manual_seed(3))[: len(sequences) * width]
    table = order.reshape(len(sequences), width).int()
    cache = torch.full((total, BLOCK, heads, dim), float("nan")).to(sequences[0].dtype)
    for row, sequence in zip(table.tolist(), sequences, strict=True):
        for position, token in enumerate(sequence):
            cache[row[position // BLOCK], position % BLOCK] = token
    if form == "BnBsH":
        return cache.flatten(2), table
    if form == "BnNBsD":
        return cache.transpose(1, 2).contiguous(), table
    return cache.unflatten(3, (-1, 16)).permute(0, 2, 3, 1, 4).contiguous(), table


@pytest.mark.parametrize("name", BATCH_LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_batch_layouts(name, dtype, assert_close):
    inputs, _, output = name.partition("_")
    queries, keys, values = random_sequences([5, 5, 5], [7, 7, 7], dtype)
    query, key, value = (laid_out(tensors, inputs) for tensors in (queries, keys, values))
    result, lse = torch.ops.npu.npu_fused_infer_attention_score(
        query, key, value, num_heads=HEADS, num_key_value_heads=KV_HEADS, scale=DIM**-0.5, input_layout=name
    )
    wanted = [expected(q, k, v, everything).to(dtype) for q, k, v in zip(queries, keys, values, strict=True)]
    assert_close(result, laid_out(wanted, output or inputs))
    assert result.is_contiguous() and lse.shape == (0,)


@pytest.mark.parametrize("name", PACKED_LAYOUTS)
def test_packed_layouts_take_cumulative_lengths(name, assert_close):
    inputs, _, output = name.partition("_")
    queries, keys, values = random_sequences([3, 1, 4], [5, 2, 4])
    query, key, value = (laid_out(tensors, inputs) for tensors in (queries, keys, values))
    result, lse = npu.npu_fused_infer_attention_score(
        query,
        key,
        value,
        actual_seq_lengths=[3, 4, 8],
        actual_seq_lengths_kv=[5, 7, 11],
        num_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        scale=DIM**-0.5,
        input_layout=name,
        softmax_lse_flag=True,
    )
    wanted = [expected(q, k, v, everything) for q, k, v in zip(queries, keys, values, strict=True)]
    assert_close(result, laid_out(wanted, output or inputs))
    assert lse.shape == (8, HEADS, 1) and lse.dtype is torch.float32


@pytest.mark.parametrize("form", ["BnBsH", "BnNBsD"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_packed_queries_over_a_paged_cache(form, dtype, assert_close):
    queries, keys, values = random_sequences([5, 1, 8, 1], [20, 9, 8, 1], dtype)
    (key_cache, table), (value_cache, _) = paged(keys, form), paged(values, form)
    result, _ = npu.npu_fused_infer_attention_score(
        torch.cat(queries),
        key_cache,
        value_cache,
        atten_mask=CAUSAL,
        actual_seq_lengths=[5, 6, 14, 15],
        actual_seq_lengths_kv=[20, 9, 8, 1],
        block_table=table,
        block_size=BLOCK,
        num_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        scale=DIM**-0.5,
        input_layout="TND",
        sparse_mode=3,
    )
    wanted = [expected(q, k, v, causal(q, k)) for q, k, v in zip(queries, keys, values, strict=True)]
    assert_close(result, torch.cat(wanted).to(dtype))


@pytest.mark.parametrize("name", ["BSH", "BSND", "BNSD", "BSND_NBSD"])
def test_decode_over_a_paged_cache(name, assert_close):
    inputs, _, output = name.partition("_")
    queries, keys, values = random_sequences([1, 1, 1], [20, 9, 1])
    (key_cache, table), (value_cache, _) = paged(keys, "BnBsH"), paged(values, "BnBsH")
    result, _ = npu.npu_fused_infer_attention_score_v2(
        laid_out(queries, inputs),
        key_cache,
        value_cache,
        actual_seq_kvlen=[20, 9, 1],
        block_table=table,
        block_size=BLOCK,
        num_query_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        softmax_scale=0.3,
        input_layout=name,
    )
    wanted = [expected(q, k, v, everything, scale=0.3) for q, k, v in zip(queries, keys, values, strict=True)]
    assert_close(result, laid_out(wanted, output or inputs))


@pytest.mark.parametrize("pre_tokens, next_tokens", [(0, 0), (3, 0), (2, 1), (100, 0), (-1, 4)])
def test_band_is_anchored_at_the_last_key(pre_tokens, next_tokens, assert_close):
    queries, keys, values = random_sequences([6, 1, 4], [11, 9, 4])
    result, _ = npu.npu_fused_infer_attention_score(
        torch.cat(queries),
        torch.cat(keys),
        torch.cat(values),
        atten_mask=CAUSAL.bool(),
        actual_seq_lengths=[6, 7, 11],
        actual_seq_lengths_kv=[11, 20, 24],
        pre_tokens=pre_tokens,
        next_tokens=next_tokens,
        num_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        scale=DIM**-0.5,
        input_layout="TND",
        sparse_mode=4,
    )
    wanted = [
        expected(q, k, v, band(q, k, pre_tokens, next_tokens)) for q, k, v in zip(queries, keys, values, strict=True)
    ]
    assert_close(result, torch.cat(wanted))


@pytest.mark.parametrize("sparse_mode", [2, 3])
def test_causal_modes_differ_in_their_anchor(sparse_mode, assert_close):
    queries, keys, values = random_sequences([3], [5])
    result, _ = npu.npu_fused_infer_attention_score(
        laid_out(queries, "BNSD"),
        laid_out(keys, "BNSD"),
        laid_out(values, "BNSD"),
        atten_mask=CAUSAL[None, None].to(torch.uint8),
        num_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        scale=DIM**-0.5,
        input_layout="BNSD",
        sparse_mode=sparse_mode,
    )
    shift = 2 if sparse_mode == 3 else 0
    wanted = expected(queries[0], keys[0], values[0], lambda i, j: j <= i + shift)
    assert_close(result, laid_out([wanted], "BNSD"))


@pytest.mark.parametrize("sparse_mode", [0, 1])
@pytest.mark.parametrize("shape", ["B1SL", "11SL", "1SL", "SL"])
def test_full_masks_hide_where_they_are_one(sparse_mode, shape, assert_close):
    queries, keys, values = random_sequences([4, 4], [6, 6])
    mask = torch.rand(2, 1, 5, 8) > 0.6
    if shape != "B1SL":
        mask = mask[:1].expand(2, -1, -1, -1)
    given = {"B1SL": mask, "11SL": mask[:1], "1SL": mask[0], "SL": mask[0, 0]}[shape].to(torch.int8)
    result, _ = npu.npu_fused_infer_attention_score(
        laid_out(queries, "BSND"),
        laid_out(keys, "BSND"),
        laid_out(values, "BSND"),
        atten_mask=given,
        pre_tokens=1,
        next_tokens=2,
        num_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        scale=DIM**-0.5,
        input_layout="BSND",
        sparse_mode=sparse_mode,
    )
    wanted = []
    for batch, (q, k, v) in enumerate(zip(queries, keys, values, strict=True)):

        def visible(i, j, hidden=mask[batch, 0]):
            return not hidden[i, j] and (sparse_mode == 1 or i - 1 <= j <= i + 2)

        wanted.append(expected(q, k, v, visible))
    assert_close(result, torch.stack(wanted))


def test_the_mask_of_one_query_may_have_a_row_per_sequence(assert_close):
    queries, keys, values = random_sequences([1, 1, 1], [6, 6, 6])
    mask = torch.rand(3, 6) > 0.5
    result, _ = npu.npu_fused_infer_attention_score(
        laid_out(queries, "BSH"),
        laid_out(keys, "BSH"),
        laid_out(values, "BSH"),
        atten_mask=mask,
        num_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        scale=DIM**-0.5,
    )
    wanted = [
        expected(q, k, v, lambda i, j, hidden=row: not hidden[j])
        for q, k, v, row in zip(queries, keys, values, mask, strict=True)
    ]
    assert_close(result, laid_out(wanted, "BSH"))


def test_lengths_shorten_the_sequences_of_a_batch(assert_close):
    queries, keys, values = random_sequences([4, 4], [6, 6])
    result, lse = npu.npu_fused_infer_attention_score(
        laid_out(queries, "BNSD"),
        laid_out(keys, "BNSD"),
        laid_out(values, "BNSD"),
        actual_seq_lengths=[2, 4, 9],
        actual_seq_lengths_kv=[5],
        num_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        scale=DIM**-0.5,
        input_layout="BNSD",
        softmax_lse_flag=True,
    )
    wanted = [expected(q, k[:5], v[:5], everything) for q, k, v in zip(queries, keys, values, strict=True)]
    wanted[0][2:] = 0
    assert_close(result, laid_out(wanted, "BNSD"))
    scores = torch.einsum("snd,lnd->nsl", queries[1], keys[1][:5].repeat_interleave(4, 1)) * DIM**-0.5
    assert_close(lse[1], scores.logsumexp(-1, keepdim=True))
    assert lse.shape == (2, HEADS, 4, 1)


def test_queries_without_keys_give_zero():
    queries, keys, values = random_sequences([4, 2], [2, 0])
    result, lse = npu.npu_fused_infer_attention_score(
        torch.cat(queries),
        torch.cat(keys),
        torch.cat(values),
        atten_mask=CAUSAL,
        actual_seq_lengths=[4, 6],
        actual_seq_lengths_kv=[2, 2],
        num_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        input_layout="TND",
        sparse_mode=3,
        softmax_lse_flag=True,
    )
    assert (result[[0, 1, 4, 5]] == 0).all() and (result[2:4] != 0).all()
    assert lse[[0, 1, 4, 5]].isneginf().all() and lse[2:4].isfinite().all()


def test_positions_are_biased_by_pse_shift(assert_close):
    queries, keys, values = random_sequences([4, 4], [6, 6])
    pse = torch.randn(2, HEADS, 4, 8)
    result, _ = npu.npu_fused_infer_attention_score(
        laid_out(queries, "BNSD"),
        laid_out(keys, "BNSD"),
        laid_out(values, "BNSD"),
        pse_shift=pse,
        num_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        scale=0.5,
        input_layout="BNSD",
    )
    wanted = [
        expected(q, k, v, everything, scale=0.5, bias=p[..., :6])
        for q, k, v, p in zip(queries, keys, values, pse, strict=True)
    ]
    assert_close(result, laid_out(wanted, "BNSD"))


@pytest.mark.parametrize("name", ["TND", "NTD_TND"])
def test_learnable_sinks_take_part_of_the_weight(name, assert_close):
    queries, keys, values = random_sequences([3, 2], [5, 2])
    sinks = torch.randn(HEADS).bfloat16()
    inputs = name.partition("_")[0]
    result, _ = npu.npu_fused_infer_attention_score_v2(
        laid_out(queries, inputs),
        laid_out(keys, inputs),
        laid_out(values, inputs),
        atten_mask=CAUSAL,
        actual_seq_qlen=[3, 5],
        actual_seq_kvlen=[5, 7],
        learnable_sink=sinks,
        num_query_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        softmax_scale=DIM**-0.5,
        input_layout=name,
        sparse_mode=3,
    )
    wanted = []
    for q, k, v in zip(queries, keys, values, strict=True):
        # A key of zeros whose logit is replaced by the sink, with a value of zeros.
        mask = torch.ones(len(q), len(k) + 1, dtype=torch.bool).tril(len(k) - len(q))
        bias = torch.zeros(HEADS, len(q), len(k) + 1).masked_fill(~mask, float("-inf"))
        bias[..., -1] = sinks.float()[:, None]
        padded = [torch.cat([t, torch.zeros(1, KV_HEADS, t.shape[-1])]) for t in (k, v)]
        wanted.append(expected(q, *padded, everything, bias=bias))
    assert_close(result, torch.cat(wanted))


@pytest.mark.parametrize("paging", ["none", "BnBsH", "NZ"])
def test_multi_head_latent_attention(paging, assert_close):
    latent, rotated, query_lengths, kv_lengths = 512, 64, [3, 1], [11, 9]
    queries = [torch.randn(n, HEADS, latent + rotated).bfloat16() for n in query_lengths]
    keys = [torch.randn(n, 1, latent + rotated).bfloat16() / 8 for n in kv_lengths]
    query, rope = torch.cat(queries).split([latent, rotated], -1)
    parts = {"actual_seq_lengths_kv": kv_lengths}
    if paging == "none":
        key, key_rope = torch.cat(keys).split([latent, rotated], -1)
        parts["actual_seq_lengths_kv"] = [11, 20]
    else:
        key, parts["block_table"] = paged([k[..., :latent] for k in keys], paging)
        key_rope, _ = paged([k[..., latent:] for k in keys], paging)
        parts["block_size"] = BLOCK
    result, _ = npu.npu_fused_infer_attention_score(
        query,
        key,
        key,
        query_rope=rope,
        key_rope=key_rope,
        atten_mask=CAUSAL,
        actual_seq_lengths=[3, 4],
        num_heads=HEADS,
        num_key_value_heads=1,
        scale=0.07,
        input_layout="TND",
        sparse_mode=3,
        **parts,
    )
    wanted = [expected(q, k, k[..., :latent], causal(q, k), scale=0.07) for q, k in zip(queries, keys, strict=True)]
    assert_close(result, torch.cat(wanted).bfloat16())


def test_decode_steps_equal_one_prefill(assert_close):
    queries, keys, values = random_sequences([12], [12])
    (key_cache, table), (value_cache, _) = paged(keys, "BnBsH"), paged(values, "BnBsH")

    def run(query, context):
        return npu.npu_fused_infer_attention_score(
            query,
            key_cache,
            value_cache,
            atten_mask=CAUSAL,
            actual_seq_lengths=[len(query)],
            actual_seq_lengths_kv=[context],
            block_table=table,
            block_size=BLOCK,
            num_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            pre_tokens=4,
            next_tokens=0,
            input_layout="TND",
            sparse_mode=4,
        )[0]

    steps = [run(queries[0][:5], 5), *(run(queries[0][i : i + 1], i + 1) for i in range(5, 12))]
    assert_close(torch.cat(steps), run(queries[0], 12))


def test_fp64_stays_fp64():
    queries, keys, values = random_sequences([3], [3], torch.float64)
    result, _ = npu.npu_fused_infer_attention_score(
        *(laid_out(t, "BSND") for t in (queries, keys, values)),
        num_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        input_layout="BSND",
    )
    q, k, v = queries[0], keys[0].repeat_interleave(4, 1), values[0].repeat_interleave(4, 1)
    wanted = torch.einsum("nsl,lnd->snd", torch.einsum("snd,lnd->nsl", q, k).softmax(-1), v)
    assert torch.allclose(result[0], wanted, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", ["BSH", "BSND", "BNSD", "BNSD_BSND"])
def test_prompt_flash_attention(name, assert_close):
    inputs, _, output = name.partition("_")
    queries, keys, values = random_sequences([5, 5], [5, 5])
    arguments = [laid_out(tensors, inputs) for tensors in (queries, keys, values)]
    options = dict(num_heads=HEADS, num_key_value_heads=KV_HEADS, scale_value=DIM**-0.5, input_layout=name)
    result = npu.npu_prompt_flash_attention(*arguments, **options)
    wanted = [expected(q, k, v, everything) for q, k, v in zip(queries, keys, values, strict=True)]
    assert_close(result, laid_out(wanted, output or inputs))
    # next_tokens is 0 by default, which a full mask brings to bear.
    result = npu.npu_prompt_flash_attention(*arguments, atten_mask=torch.zeros(1, 5, 5, dtype=torch.bool), **options)
    wanted = [expected(q, k, v, lambda i, j: j <= i) for q, k, v in zip(queries, keys, values, strict=True)]
    assert_close(result, laid_out(wanted, output or inputs))


@pytest.mark.parametrize("paging", [False, True])
def test_incremental_flash_attention(paging, assert_close):
    queries, keys, values = random_sequences([1, 1], [9, 9])
    parts = {}
    key, value = laid_out(keys, "BNSD"), laid_out(values, "BNSD")
    if paging:
        (key, table), (value, _) = paged(keys, "BnNBsD"), paged(values, "BnNBsD")
        parts = {"block_table": table, "block_size": BLOCK}
    result = npu.npu_incre_flash_attention(
        laid_out(queries, "BNSD"),
        key,
        value,
        actual_seq_lengths=[4, 9],
        num_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        scale_value=DIM**-0.5,
        input_layout="BNSD",
        **parts,
    )
    wanted = [
        expected(q, k[:length], v[:length], everything)
        for q, k, v, length in zip(queries, keys, values, [4, 9], strict=True)
    ]
    assert_close(result, laid_out(wanted, "BNSD"))
