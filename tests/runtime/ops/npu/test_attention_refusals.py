"""What the attention kernels refuse: calls that a device would reject or, worse, answer wrongly."""

from __future__ import annotations

import pytest
import torch

import torch_pagoda.runtime.ops.npu  # noqa: F401  registers the operators

npu = torch.ops.npu

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 128, 16
CAUSAL = torch.ones(2048, 2048, dtype=torch.int8).triu(1)


def packed(**changes):
    """Two sequences of 3 and 2 queries over 8 and 5 paged keys."""
    arguments = {
        "query": torch.randn(5, HEADS, DIM),
        "key": torch.randn(4, BLOCK, KV_HEADS * DIM),
        "value": torch.randn(4, BLOCK, KV_HEADS * DIM),
        "atten_mask": CAUSAL,
        "actual_seq_lengths": [3, 5],
        "actual_seq_lengths_kv": [8, 5],
        "block_table": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
        "block_size": BLOCK,
        "num_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "input_layout": "TND",
        "sparse_mode": 3,
    }
    return {**arguments, **changes}


def unpaged(**changes):
    keys = torch.randn(13, KV_HEADS, DIM)
    return packed(**{"key": keys, "value": keys, "block_table": None, "actual_seq_lengths_kv": [8, 13], **changes})


def batched(length=3, **changes):
    arguments = {
        "query": torch.randn(2, HEADS, length, DIM),
        "key": torch.randn(2, KV_HEADS, 6, DIM),
        "value": torch.randn(2, KV_HEADS, 6, DIM),
        "num_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "input_layout": "BNSD",
    }
    return {**arguments, **changes}


def assert_refuses(match, arguments, error=ValueError):
    with pytest.raises(error, match=match):
        npu.npu_fused_infer_attention_score(**arguments)


def test_the_cases_here_are_legal_unchanged():
    for arguments in (packed(), unpaged(), batched(), batched(length=1)):
        result, _ = npu.npu_fused_infer_attention_score(**arguments)
        assert result.shape == arguments["query"].shape and result.isfinite().all()


@pytest.mark.parametrize(
    "lengths, match",
    [(None, "need the cumulative"), ([], "need the cumulative"), ([3, 2], "never decrease"), ([3, 4], "ends at 4")],
    ids=str,
)
def test_query_lengths_of_packed_layouts(lengths, match):
    assert_refuses(match, packed(actual_seq_lengths=lengths))


def test_context_lengths_are_per_sequence_only_with_a_block_table():
    assert_refuses("between 0 and 32", packed(actual_seq_lengths_kv=[8, 37]))
    assert_refuses("ends at 8.*13 tokens", unpaged(actual_seq_lengths_kv=[5, 8]))
    assert_refuses("never decrease", unpaged(actual_seq_lengths_kv=[8, 5]))
    assert_refuses("1 entries and actual_seq_lengths 2", unpaged(actual_seq_lengths_kv=[13]))
    assert_refuses("paging needs the lengths of keys", packed(actual_seq_lengths_kv=None))
    assert_refuses("1 entries", packed(actual_seq_lengths_kv=[8]))


def test_length_lists_of_batch_layouts():
    assert_refuses("2 sequences|batch of 2", batched(actual_seq_lengths_kv=[]))
    assert_refuses("between 0 and 6", batched(actual_seq_lengths_kv=[7, 2]))
    assert_refuses("between 0 and 3", batched(actual_seq_lengths=[-1]))
    three = {name: torch.randn(3, heads, 4, DIM) for name, heads in (("query", 4), ("key", 2), ("value", 2))}
    assert_refuses("2 entries for a batch of 3", batched(**three, actual_seq_lengths=[2, 2]))


@pytest.mark.parametrize("sparse_mode", [2, 3, 4])
@pytest.mark.parametrize(
    "mask, match",
    [
        (None, "atten_mask is None"),
        (CAUSAL[:8, :8], r"takes \(2048, 2048\)"),
        (CAUSAL[None].expand(2, -1, -1), r"takes \(2048, 2048\)"),
        (1 - CAUSAL, "not triu"),
        (CAUSAL.float(), "bool, int8 or uint8"),
    ],
    ids=["none", "small", "batched", "tril", "float"],
)
def test_compressed_modes_take_one_mask_only(sparse_mode, mask, match):
    if sparse_mode != 2:  # which packed layouts do not take
        assert_refuses(match, packed(sparse_mode=sparse_mode, atten_mask=mask))
    assert_refuses(match, batched(sparse_mode=sparse_mode, atten_mask=mask))


def test_full_masks():
    assert_refuses("sparse_mode is 1 and atten_mask is None", batched(sparse_mode=1))
    assert_refuses("take no full mask", packed(sparse_mode=0, atten_mask=torch.zeros(1, 5, 16, dtype=torch.bool)))
    assert_refuses("must cover 3 queries and 6 keys", batched(atten_mask=torch.zeros(1, 3, 5, dtype=torch.bool)))
    assert_refuses("must cover 3 queries and 6 keys", batched(atten_mask=torch.zeros(2, 2, 3, 6, dtype=torch.bool)))
    assert_refuses("must cover", batched(atten_mask=torch.zeros(6, dtype=torch.bool)))
    assert_refuses("bool, int8 or uint8", batched(atten_mask=torch.zeros(1, 3, 6)))


@pytest.mark.parametrize(
    "sparse_mode, error", [(5, ValueError), (8, ValueError), (-1, ValueError), (9, NotImplementedError)]
)
def test_other_sparse_modes(sparse_mode, error):
    assert_refuses(f"sparse_mode is {sparse_mode}", batched(sparse_mode=sparse_mode), error)


def test_what_one_query_of_a_batch_layout_ignores():
    for sparse_mode in (2, 3, 4):
        assert_refuses("invalid for one query per sequence", batched(1, sparse_mode=sparse_mode, atten_mask=CAUSAL))
    assert_refuses("documented to ignore them", batched(1, pre_tokens=3))
    assert_refuses("S = 1 ignores it", batched(1, actual_seq_lengths=[0, 1]))
    assert_refuses("must cover 1 queries", batched(1, atten_mask=CAUSAL))
    npu.npu_fused_infer_attention_score(**batched(1, pre_tokens=5, actual_seq_lengths=[1]))


def test_paged_caches():
    assert_refuses("block_size is 0", packed(block_size=0))
    assert_refuses("block_size is 32", packed(block_size=32))
    assert_refuses("int32", packed(block_table=torch.tensor([[0, 1], [2, 3]])))
    assert_refuses("one row for each of the 2", packed(block_table=torch.zeros(3, 2, dtype=torch.int32)))
    by_token = torch.randn(4, BLOCK, KV_HEADS, DIM)
    assert_refuses("the cache has blocks of 2", packed(key=by_token, value=by_token))
    by_head = by_token.transpose(1, 2).contiguous()
    npu.npu_fused_infer_attention_score(**packed(key=by_head, value=by_head))
    rows = {"query": torch.randn(2, 1, HEADS * DIM), "input_layout": "BSH", "actual_seq_lengths": None}
    assert_refuses("queries, not BSH", packed(key=by_head, value=by_head, **rows))
    nz = by_token.unflatten(3, (-1, 16)).permute(0, 2, 3, 1, 4).contiguous()
    assert_refuses("FRACTAL_NZ is for int8 and for MLA", packed(key=nz, value=nz))


@pytest.mark.parametrize("block", [-1, 4])
def test_blocks_outside_the_cache(block):
    table = torch.tensor([[0, 1], [block, 3]], dtype=torch.int32)
    assert_refuses("the cache has 4 blocks", packed(block_table=table))
    # Entries behind the context are not read.
    table = torch.tensor([[0, block], [2, block]], dtype=torch.int32)
    npu.npu_fused_infer_attention_score(**packed(block_table=table))


def test_heads():
    assert_refuses("4 heads over 3 KV heads", packed(num_key_value_heads=3))
    assert_refuses("at most 64", packed(query=torch.randn(5, 128, DIM), num_heads=128, num_key_value_heads=1))
    assert_refuses("with 8 heads", packed(num_heads=8))
    assert_refuses("0 heads over", packed(num_heads=0))


def test_layouts():
    assert_refuses("input_layout is 'SBH'", batched(input_layout="SBH"))
    assert_refuses("takes 3 dims", batched(input_layout="BSH"))
    assert_refuses("batch of 2", batched(key=torch.randn(3, KV_HEADS, 6, DIM)))
    assert_refuses("one length", batched(value=torch.randn(2, KV_HEADS, 7, DIM)))
    assert_refuses("they have one layout", batched(key=torch.randn(2, 6, KV_HEADS * DIM)))
    assert_refuses("do not divide", batched(query=torch.randn(2, 3, 66), input_layout="BSH"))
    with pytest.raises(NotImplementedError, match="NSD"):
        npu.npu_fused_infer_attention_score(**batched(input_layout="NSD"))
    with pytest.raises(ValueError, match="it must be 'BSH' or 'BSND' or 'BNSD'"):
        npu.npu_incre_flash_attention(torch.randn(2, 4, 16), *[torch.randn(2, 2, 16)] * 2, input_layout="TND")
    with pytest.raises(ValueError, match="one query a sequence"):
        npu.npu_incre_flash_attention(torch.randn(2, 4, 16), *[torch.randn(2, 4, 16)] * 2)
    with pytest.raises(ValueError, match="or 'BNSD_BSND' or 'TND'"):
        npu.npu_prompt_flash_attention(torch.randn(2, 4, 16), *[torch.randn(2, 4, 16)] * 2, input_layout="NTD")


def test_dtypes():
    assert_refuses(
        "dtypes differ: key torch.float16, value", packed(key=torch.randn(4, BLOCK, KV_HEADS * DIM).half())
    )
    assert_refuses(
        "no key of torch.int32", packed(key=torch.zeros(4, BLOCK, 4, dtype=torch.int32)), NotImplementedError
    )
    quantized = torch.zeros(5, HEADS, DIM, dtype=torch.int8)
    assert_refuses("no query of torch.int8", packed(query=quantized), NotImplementedError)


def int8(**changes):
    kv = torch.zeros(2, KV_HEADS, 6, DIM, dtype=torch.int8)
    ones = torch.ones(1)
    return batched(
        **{"length": 1, "key": kv, "value": kv, "key_antiquant_scale": ones, "value_antiquant_scale": ones, **changes}
    )


def test_int8_caches():
    npu.npu_fused_infer_attention_score(**int8())
    assert_refuses("need their scales", int8(key_antiquant_scale=None, value_antiquant_scale=None))
    scale = torch.ones(1)
    assert_refuses("are for int8 keys and values", batched(key_antiquant_scale=scale, value_antiquant_scale=scale))
    assert_refuses("antiquant modes", int8(key_antiquant_mode=1))
    assert_refuses("which mode 0 does not take", int8(key_antiquant_scale=torch.ones(3)))
    assert_refuses("take antiquant modes 0 and 1", int8(length=2, key_antiquant_mode=2, value_antiquant_mode=2))
    zeros = torch.zeros(13, KV_HEADS, DIM, dtype=torch.int8)
    scales = {"key_antiquant_scale": torch.ones(1), "value_antiquant_scale": torch.ones(1)}
    assert_refuses("not taken in input_layout 'TND'", unpaged(key=zeros, value=zeros, **scales))
    cache = torch.zeros(4, KV_HEADS, 2 * BLOCK, DIM, dtype=torch.int8)
    table = {"block_table": packed()["block_table"], "block_size": 2 * BLOCK, "actual_seq_lengths_kv": [8, 5]}
    npu.npu_fused_infer_attention_score(**int8(key=cache, value=cache, **table))
    assert_refuses("only FRACTAL_NZ caches", int8(length=2, key=cache, value=cache, **table))


def test_rope_parts():
    rope = torch.randn(5, HEADS, 64)
    assert_refuses("come together or not at all", packed(query_rope=rope))
    assert_refuses(
        r"query_rope \(4, 4, 64\) do not fit",
        packed(query_rope=rope[:4], key_rope=torch.randn(4, BLOCK, KV_HEADS * 64)),
    )
    assert_refuses("page both in one format", packed(query_rope=rope, key_rope=torch.randn(4, KV_HEADS, BLOCK, 64)))


def sinks(**changes):
    arguments = packed(learnable_sink=torch.zeros(HEADS).bfloat16(), **changes)
    for old, new in (
        ("actual_seq_lengths", "actual_seq_qlen"),
        ("actual_seq_lengths_kv", "actual_seq_kvlen"),
        ("num_heads", "num_query_heads"),
    ):
        arguments[new] = arguments.pop(old)
    return arguments


@pytest.mark.parametrize(
    "changes, match, error",
    [
        ({"learnable_sink": torch.zeros(3).bfloat16()}, r"learnable_sink is \(3,\)", ValueError),
        ({"learnable_sink": torch.zeros(HEADS).half()}, r"\(4,\) torch.float16; \(4,\) torch.bfloat16", ValueError),
        ({"return_softmax_lse": True}, "log-sum-exp", NotImplementedError),
        ({"value": torch.randn(4, BLOCK, KV_HEADS * 192)}, "at most 128", ValueError),
    ],
)
def test_sinks(changes, match, error):
    npu.npu_fused_infer_attention_score_v2(**sinks())
    with pytest.raises(error, match=match):
        npu.npu_fused_infer_attention_score_v2(**{**sinks(), **changes})


def test_sinks_need_a_packed_layout():
    with pytest.raises(ValueError, match="sinks are for TND and NTD_TND, not BNSD"):
        npu.npu_fused_infer_attention_score_v2(
            *[torch.randn(1, 2, 3, 16)] * 3,
            num_query_heads=2,
            input_layout="BNSD",
            learnable_sink=torch.zeros(2).bfloat16(),
        )


def test_pse_shift_and_precision():
    assert_refuses("not taken in input_layout 'TND'", packed(pse_shift=torch.zeros(1, HEADS, 5, 16)))
    assert_refuses("must be .1 or 2, 4, at least 3, at least 6", batched(pse_shift=torch.zeros(1, HEADS, 3, 5)))
    assert_refuses("must be .1 or 2, 4", batched(pse_shift=torch.zeros(1, 2, 3, 6)))
    assert_refuses("inner_precise is 2; 0 to 1", batched(1, inner_precise=2))
    assert_refuses("inner_precise is 4; 0 to 3", batched(inner_precise=4))


@pytest.mark.parametrize(
    "name",
    [
        "dequant_scale1",
        "quant_scale1",
        "quant_scale2",
        "query_padding_size",
        "key_shared_prefix",
        "key_rope_antiquant_scale",
    ],
)
def test_what_has_no_kernel_is_named(name):
    assert_refuses(f"does not implement {name}", batched(**{name: torch.ones(1)}), NotImplementedError)


@pytest.mark.parametrize("name", ["quant_scale_out", "dequant_scale_query", "quant_scale_p"])
def test_what_v2_has_no_kernel_for_is_named(name):
    with pytest.raises(NotImplementedError, match=f"does not implement {name}"):
        npu.npu_fused_infer_attention_score_v2(*[torch.randn(1, 2, 3, 16)] * 3, **{name: torch.ones(1)})
    with pytest.raises(NotImplementedError, match="query_quant_mode"):
        npu.npu_fused_infer_attention_score_v2(*[torch.randn(1, 2, 3, 16)] * 3, query_quant_mode=3)


def latent(**changes):
    """Two queries of 512 dims and their rotated part over 20 paged keys of one head."""
    cache = torch.randn(2, BLOCK, 512)
    return packed(
        **{
            "query": torch.randn(2, HEADS, 512),
            "key": cache,
            "value": cache,
            "query_rope": torch.randn(2, HEADS, 64),
            "key_rope": torch.randn(2, BLOCK, 64),
            "num_key_value_heads": 1,
            "actual_seq_lengths": [2],
            "actual_seq_lengths_kv": [20],
            "block_table": torch.tensor([[1, 0]], dtype=torch.int32),
            **changes,
        }
    )


def tokens(dim, *, heads=HEADS, kv_heads=KV_HEADS, layout="TND", queries=3, key_dim=None, value_dim=None, **changes):
    """One sequence without paging, with heads of that size."""
    key_dim, value_dim = key_dim or dim, value_dim or dim
    sizes = {
        "TND": lambda n, count, d: (count, n, d),
        "NTD": lambda n, count, d: (n, count, d),
        "BNSD": lambda n, count, d: (1, n, count, d),
        "BSH": lambda n, count, d: (1, count, n * d),
    }[layout.partition("_")[0]]
    arguments = {
        "query": torch.zeros(sizes(heads, queries, dim)),
        "key": torch.zeros(sizes(kv_heads, 5, key_dim)),
        "value": torch.zeros(sizes(kv_heads, 5, value_dim)),
        "num_heads": heads,
        "num_key_value_heads": kv_heads,
        "input_layout": layout,
        **({"actual_seq_lengths": [queries], "actual_seq_lengths_kv": [5]} if "T" in layout else {}),
    }
    return {**arguments, **changes}


def paged_batch(block_size, queries, blocks=2):
    cache = torch.zeros(2, block_size, KV_HEADS * DIM)
    return batched(
        queries,
        key=cache,
        value=cache,
        block_table=torch.zeros(2, blocks, dtype=torch.int32),
        block_size=block_size,
        actual_seq_lengths_kv=[5, 5],
    )


def with_rope(arguments, dim=64):
    extra = {name: arguments[name][..., :1].expand(*arguments[name].shape[:-1], dim) for name in ("query", "key")}
    return {**arguments, "query_rope": extra["query"].contiguous(), "key_rope": extra["key"].contiguous()}


@pytest.mark.parametrize(
    ("legal", "illegal", "match"),
    [
        (tokens(512 - 16, layout="BNSD"), tokens(512 + 16, layout="BNSD"), "multiples of 16, at most 512"),
        (tokens(48, layout="BSH"), tokens(40, layout="BSH"), "multiples of 16"),
        (tokens(256), tokens(272), r"heads of \(272, 272, 272\) dims; TND takes 128.* any up to 256"),
        (tokens(192, value_dim=128), tokens(192, value_dim=64), "192 with values of 128"),
        (tokens(64, layout="BNSD"), tokens(64, layout="BNSD", key_dim=48), "64 dims in query, 48 in key"),
        (tokens(128), tokens(128, key_dim=64), "128 dims in query, 64 in key"),
        (with_rope(tokens(128)), with_rope(tokens(128), 32), "query_rope has 32 dims"),
        (with_rope(tokens(128)), with_rope(tokens(64, heads=2)), "with rope; 128 or 512"),
        (with_rope(tokens(128)), with_rope(tokens(128, layout="TND_NTD")), "is not for TND_NTD"),
        (latent(), latent(softmax_lse_flag=True), "without the log-sum-exp"),
        (latent(), latent(query_rope=None, key_rope=None), "need query_rope"),
        (latent(), latent(sparse_mode=2), "sparse_mode 2"),
        (paged_batch(16, 1), paged_batch(16, 3), "128, 256, 384 or 512 for several tokens"),
        (paged_batch(512, 1), paged_batch(1024, 1), "multiples of 16 up to 512"),
        (tokens(128, layout="BNSD_BSND", queries=1), tokens(128, layout="BNSD_NBSD", queries=1), "1 queries a"),
        (tokens(128, layout="BNSD_NBSD", queries=16), tokens(128, layout="BNSD_NBSD", queries=17), "17 queries"),
        (paged_batch(128, 1, 2048), paged_batch(128, 1, 2049), "262272 keys before one query; at most 262144"),
        (
            tokens(128, actual_seq_lengths=[0] * 4095 + [3], actual_seq_lengths_kv=[0] * 4095 + [5]),
            tokens(128, actual_seq_lengths=[0] * 4096 + [3], actual_seq_lengths_kv=[0] * 4096 + [5]),
            "4097 sequences; at most 4096 in TND",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_sizes_that_the_documents_forbid(legal, illegal, match):
    npu.npu_fused_infer_attention_score(**legal)
    with pytest.raises(ValueError, match=match):
        torch.ops.npu.npu_fused_infer_attention_score(**illegal)
    if "softmax_lse_flag" not in illegal:
        names = {"actual_seq_lengths": "actual_seq_qlen", "actual_seq_lengths_kv": "actual_seq_kvlen"}
        names["num_heads"] = "num_query_heads"
        with pytest.raises(ValueError, match=match):
            npu.npu_fused_infer_attention_score_v2(
                **{names.get(name, name): given for name, given in illegal.items()}
            )


@pytest.mark.parametrize("kernel", [npu.npu_prompt_flash_attention, npu.npu_incre_flash_attention])
def test_heads_of_query_and_key_are_of_one_size(kernel):
    arguments = batched(length=1, key=torch.randn(2, KV_HEADS, 6, DIM // 2))
    with pytest.raises(ValueError, match="128 dims in query, 64 in key"):
        kernel(**arguments)
