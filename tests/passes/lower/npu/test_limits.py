"""The table of limits: what it refuses and why, and that no draw of shapes makes lowering break it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_pagoda.passes import PASSES
from torch_pagoda.passes.graph.traced import UnsupportedModel
from torch_pagoda.passes.lower.npu.attention.paged_attention import lower_npu_paged_attention
from torch_pagoda.passes.lower.npu.call import Call
from torch_pagoda.runtime.npu_target import NpuTarget, Product
from torch_pagoda.runtime.ops.npu.limits import LIMITS, violations

from npu_graphs import AttentionGraph, assert_legal

npu = torch.ops.npu
TARGET, INFERENCE, CAPTURED = NpuTarget(), NpuTarget("Ascend310P3"), NpuTarget(graph_mode="aclgraph")
HALF, FLOAT = torch.bfloat16, torch.float32


def empty(*sizes, dtype=HALF):
    return torch.empty(*sizes, dtype=dtype, device="meta")


MASK = empty(2048, 2048, dtype=torch.int8)
INTERLEAVED = empty(1, 5, 1, 64), empty(1, 5, 1, 64), "interleave", empty(64, 64)
F16 = torch.float16


def fia(
    heads=4, kv_heads=2, dim=128, value_dim=None, *, layout="TND", tokens=7, block_size=128, second=False, **changes
):
    """A legal paged call, with changes; None as a value leaves the argument out."""
    value_dim = value_dim or dim
    query = {
        "TND": (tokens, heads, dim),
        "BSH": (3, tokens, heads * dim),
        "BNSD": (3, heads, tokens, dim),
        "BSND": (3, tokens, heads, dim),
    }.get(layout, (tokens, heads, dim))
    arguments = {
        "query": empty(*query),
        "key": empty(9, block_size, kv_heads * dim),
        "value": empty(9, block_size, kv_heads * value_dim),
        "atten_mask": MASK,
        "block_table": empty(3, 5, dtype=torch.int32),
        "actual_seq_qlen" if second else "actual_seq_lengths": [3, 5, 7],
        "actual_seq_kvlen" if second else "actual_seq_lengths_kv": [3, 5, 7],
        "num_query_heads" if second else "num_heads": heads,
        "num_key_value_heads": kv_heads,
        "input_layout": layout,
        "sparse_mode": 3,
        "block_size": block_size,
        **changes,
    }
    operator = npu.npu_fused_infer_attention_score_v2 if second else npu.npu_fused_infer_attention_score
    return Call.make(
        operator.default, changes.pop("target", TARGET), **{k: v for k, v in arguments.items() if k != "target"}
    )


def unpaged(**changes):
    return fia(key=empty(7, 2, 128), value=empty(7, 2, 128), **{"block_table": None, **changes})


def decoding(blocks=5, block_size=128, dim=128, **changes):
    """One query each of three sequences over that many blocks."""
    plain = {"atten_mask": None, "sparse_mode": 0, "actual_seq_lengths": None, **changes}
    table = empty(3, blocks, dtype=torch.int32)
    return fia(4, 2, dim, layout="BSH", tokens=1, block_size=block_size, block_table=table, **plain)


OLD = NpuTarget(cann="8.5.0")


def rope(layout, kv_heads):
    query = {"BNSD": (3, 4, 7, 64), "TND": (7, 4, 64)}[layout]
    return {"query_rope": empty(*query), "key_rope": empty(9, 128, kv_heads * 64)}


K16 = empty(9, 128, 512, dtype=F16)
LATENT = {"query_rope": empty(7, 4, 64), "key_rope": empty(9, 128, 64)}


@pytest.mark.parametrize(
    "call",
    [
        fia(),
        fia(4, 4, 64),
        fia(4, 4, 192, 128),
        fia(4, 2, 64, layout="BSH"),
        fia(4, 2, 64),
        fia(4, 2, 64, block_size=16),
        *(fia(4, kv_heads, dim) for dim in (64, 80, 96, 192, 256) for kv_heads in (1, 4)),
        fia(4, 2, 512, layout="BSH"),
        fia(4, 2, 512, layout="BNSD"),
        fia(4, 2, 64, second=True, learnable_sink=empty(4)),
        fia(4, 2, 96, layout="BNSD", block_size=256),
        fia(block_size=1024),
        fia(sparse_mode=4, pre_tokens=7, next_tokens=0),
        fia(second=True, learnable_sink=empty(4)),
        fia(4, 1, 512, **LATENT),
        fia(tokens=70000),  # tokens of one layout are not a batch of another
        fia(block_table=empty(4096, 5, dtype=torch.int32)),
        unpaged(actual_seq_lengths=[1] * 4096, actual_seq_lengths_kv=[1] * 4096),
        fia(layout="BSH", query=empty(65536, 7, 512)),
        decoding(2048),
        decoding(block_size=16, dim=64),
        fia(layout="BSH", block_table=empty(3, 2049, dtype=torch.int32)),  # several queries may look further back
        fia(4, 2, 128, layout="BNSD", **rope("BNSD", 2)),
        fia(4, 4, 128, second=True),
        fia(4, 4, 128, query=empty(7, 4, 128, dtype=F16), key=K16, value=K16, inner_precise=1),
        fia(4, 1, 512, layout="TND_NTD", **LATENT),
        fia(64, 1, 512, query_rope=empty(7, 64, 64), key_rope=empty(9, 128, 64)),
    ],
    ids=lambda c: f"{c['input_layout']}-{tuple(c['query'].shape)}",
)
def test_legal_attention(call):
    assert violations(call) == []


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (fia(4, 2, 64, target=OLD), "heads of (64, 64, 64) dims; TND takes 128, 192 with values of 128 and, without"),
        (fia(4, 2, 96, target=OLD), "heads of (96, 96, 96) dims"),
        (fia(4, 2, 256, target=OLD), "and TND more from CANN 9.0 on"),
        (fia(4, 2, 512, layout="BSH", target=OLD), "from CANN 9.0 on"),
        (fia(4, 4, 272), "any up to 256"),
        (fia(4, 4, 192, 64), "192 with values of 128"),
        (fia(4, 2, 96, block_size=256), "blocks of 256; multiples of 16 up to 128"),
        (fia(4, 2, 96, layout="TND_NTD"), "TND_NTD takes 128"),
        (fia(4, 2, 120), "multiples of 16"),
        (fia(4, 2, 528, layout="BSH"), "at most 512"),
        (fia(4, 2, 128, 64, layout="BSH"), "values of 64 dims beside keys of 128"),
        (fia(6, 4), "6 heads over 4 KV heads"),
        (fia(130, 2), "130 heads over 2"),
        (fia(320, 32), "320 heads"),
        (fia(4, 2, 512), "heads of 512 dims need query_rope"),
        (fia(6, 1, 512, query_rope=empty(7, 6, 64), key_rope=empty(9, 128, 64)), "power of two"),
        (fia(4, 2, 512, **LATENT), "one KV head"),
        (fia(4, 1, 512, query_rope=empty(7, 4, 64)), "come together"),
        (fia(4, 1, 512, query_rope=empty(7, 4, 32), key_rope=empty(9, 128, 32)), "must have 64"),
        (fia(4, 4, 64, query_rope=empty(7, 4, 64), key_rope=empty(9, 128, 64)), "with rope"),
        (fia(block_size=8), "blocks of 8"),
        (fia(block_size=1040), "blocks of 1040"),
        (fia(layout="BSH", block_size=64), "128, 256, 384 or 512"),
        (decoding(block_size=528), "up to 512"),
        (decoding(sparse_mode=3, atten_mask=MASK), "sparse_mode is 3, which is invalid for one query per sequence"),
        (decoding(sparse_mode=4, atten_mask=MASK, pre_tokens=7), "sparse_mode is 4, which is invalid"),
        (decoding(pre_tokens=7), "pre_tokens is given, which is invalid for one query per sequence in BSH"),
        (decoding(actual_seq_lengths=[1, 1, 1]), "actual_seq_lengths is given, which is invalid for one query"),
        (fia(512, 512, 128), "more than 65535"),
        (fia(layout="BSH", block_size=128, key=empty(9, 2, 128, 128), value=empty(9, 2, 128, 128)), "not BSH"),
        (fia(key=empty(9, 64, 256)), "the cache has blocks of 64"),
        (fia(actual_seq_lengths_kv=None), "lengths"),
        (fia(actual_seq_lengths=None), "lengths"),
        (fia(atten_mask=None), "needs a mask"),
        (fia(atten_mask=empty(7, 7, dtype=torch.int8)), "reads (2048, 2048)"),
        (fia(atten_mask=empty(2048, 2048)), "must be bool, int8 or uint8"),
        (fia(sparse_mode=1, atten_mask=empty(1, 7, 7, dtype=torch.bool)), "a mask of its own is not for TND"),
        (fia(sparse_mode=5), "sparse_mode is 5"),
        (fia(inner_precise=4), "inner_precise"),
        (fia(layout="SBH"), "input_layout is 'SBH'"),
        (fia(query=empty(7, 512)), "query has 2 dims"),
        (fia(query=empty(7, 8, 128)), "with 4 heads"),
        (fia(query=empty(7, 4, 128, dtype=FLOAT)), "query is torch.float32"),
        (fia(key=empty(9, 128, 256, dtype=torch.float16)), "dtypes differ"),
        (fia(block_table=empty(3, 5, dtype=torch.int64)), "block_table is torch.int64"),
        (fia(second=True, learnable_sink=empty(4, dtype=torch.float16)), "torch.bfloat16"),
        (fia(second=True, learnable_sink=empty(5)), "learnable_sink is (5,)"),
        (fia(4, 2, 64, second=True, layout="BSH", learnable_sink=empty(4)), "sinks are for TND"),
        (fia(4, 4, 192, 192, second=True, learnable_sink=empty(4)), "192"),
        (fia(target=NpuTarget("Ascend310P3")), "Ascend310P3 does not run it"),
        (fia(block_table=empty(4097, 5, dtype=torch.int32)), "4097 sequences; at most 4096 in TND"),
        (unpaged(actual_seq_lengths=[1] * 4097, actual_seq_lengths_kv=[1] * 4097), "4097 sequences; at most 4096"),
        (fia(layout="BSH", query=empty(65537, 7, 512)), "65537 sequences; at most 65536 in BSH"),
        (decoding(2049), "262272 keys before one query; at most 262144 in BSH"),
        (fia(4, 2, 64, layout="BNSD", **rope("BNSD", 2)), "with rope; 128 or 512"),
        (fia(4, 1, 512, layout="NTD_TND", query=empty(4, 7, 512), **LATENT), "512 dims are not for NTD_TND"),
        (fia(4, 1, 512, softmax_lse_flag=True, **LATENT), "without the log-sum-exp"),
        (fia(4, 2, 128, layout="TND_NTD", **rope("TND", 2)), "128 dims is not for TND_NTD"),
        (fia(4, 4, inner_precise=1), "inner_precise is 1 in TND; 0"),
        (fia(second=True, inner_precise=2), "inner_precise is 2 in TND; 0"),
        (fia(4, 4, 128, second=True, sparse_mode=2), "sparse_mode is 2 in TND"),
        (fia(sparse_mode=2), "sparse_mode is 2 in TND"),
        (fia(4, 4, key=empty(9, 4, 128, 128), value=empty(9, 4, 128, 128)), "a cache of 4 dims in TND"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_illegal_attention(call, reason):
    assert reason in "; ".join(violations(call))


@pytest.mark.parametrize(
    ("operator", "arguments", "reason"),
    [
        (npu.npu_rms_norm, (empty(5, 32), empty(16)), "gamma is (16,)"),
        (npu.npu_rms_norm, (empty(5, 32), empty(32, dtype=torch.float16)), "gamma is torch.float16"),
        (npu.npu_add_rms_norm, (empty(5, 32), empty(5, 32), empty(32, dtype=FLOAT)), "dtypes differ"),
        (npu.npu_swiglu, (empty(5, 33),), "it must be even"),
        (npu.npu_geglu, (empty(5, 32), -1, 2), "approximate is 2"),
        (npu.npu_gelu, (empty(5, 32),), ""),
        (npu.npu_rotary_mul, (empty(1, 5, 4, 63), empty(1, 5, 1, 63), empty(1, 5, 1, 63)), "be even"),
        (npu.npu_rotary_mul, (empty(1, 5, 4, 896), empty(1, 5, 1, 896), empty(1, 5, 1, 896)), "below 896"),
        (npu.npu_rotary_mul, (empty(1, 5, 1000, 64), empty(1, 5, 1, 64), empty(1, 5, 1, 64)), "below 1000"),
        (npu.npu_rotary_mul, (empty(5, 4, 64), empty(5, 1, 64), empty(5, 1, 64)), "input has 3 dims"),
        (npu.npu_rotary_mul, (empty(1, 5, 4, 64), *[empty(1, 5, 1, 64)] * 2, "interleave"), "ignores rotary_mode"),
        (npu.npu_rotary_mul, (empty(1, 5, 4, 64), *[empty(1, 5, 1, 64, dtype=FLOAT)] * 2), "dtypes differ"),
        (npu.npu_interleave_rope, (empty(5, 4, 1, 32), *[empty(5, 1, 1, 32)] * 2), "it must be 64"),
        (npu.npu_rotary_mul, (empty(1, 5, 4, 64), *[empty(1, 6, 1, 64)] * 2), "r1 has 6 tokens, the input 5"),
        (npu.npu_rotary_mul, (empty(50, 5, 20, 64), *[empty(1, 5, 1, 64)] * 2), ""),
        (npu.npu_rotary_mul, (empty(49, 5, 20, 64), *INTERLEAVED), ""),
        (npu.npu_rotary_mul, (empty(50, 5, 20, 64), *INTERLEAVED), "batch 50 times heads 20 must be below 1000"),
        (npu.npu_rotary_mul, (empty(3, 5, 4, 64), *[empty(3, 5, 1, 64)] * 2), ""),
        (
            npu.npu_rotary_mul,
            (empty(3, 5, 4, 64), *[empty(3, 5, 1, 64)] * 2, *INTERLEAVED[2:]),
            "one table serves the whole batch",
        ),
        (npu.npu_linear, (empty(5, 32), empty(8, 32)), ""),
        (npu.npu_moe_gating_top_k_softmax, (empty(5, 8), None, 8), ""),
        (npu.npu_moe_gating_top_k_softmax, (empty(5, 8), None, 9), "k is 9, of 8 experts"),
        (npu.npu_moe_gating_top_k_softmax, (empty(5, 1100), None, 1025), "at most 1024"),
        (npu.npu_moe_gating_top_k, (empty(5, 3), 1), ""),
        (npu.npu_moe_gating_top_k, (empty(5, 2), 1), "groups of 2 experts; more than 2"),
        (npu.npu_linear, (empty(5, 4, 32), empty(8, 32)), "input has 3 dims"),
        (npu.npu_linear, (empty(5, 32), empty(8, 16)), "weight (8, 16)"),
    ],
    ids=lambda x: str(x) if isinstance(x, str) else "",
)
def test_other_operators(operator, arguments, reason):
    found = violations(Call.make(operator.default, TARGET, *arguments))
    assert reason in "; ".join(found) and bool(found) == bool(reason)


def test_writes_to_the_cache_name_their_layout():
    tensors = empty(7, 2, 128), empty(7, 2, 128), empty(9, 128, 2, 128), empty(9, 128, 2, 128)
    slots = empty(7, dtype=torch.int64)
    write = npu.npu_scatter_pa_kv_cache.default
    assert violations(Call.make(write, TARGET, *tensors, slots, cache_mode="Norm")) == []
    # The default is the other layout.
    assert "NZ" in Call.make(write, TARGET, *tensors, slots)["cache_mode"]
    assert "say 'Norm' or 'PA_NZ'" in violations(Call.make(write, TARGET, *tensors, slots, cache_mode=None))[0]
    assert (
        "dtypes differ"
        in violations(
            Call.make(write, TARGET, empty(7, 2, 128, dtype=FLOAT), *tensors[1:], slots, cache_mode="Norm")
        )[0]
    )


def test_gaps_matter_where_calls_are_captured_as_they_are():
    gapped = torch.empty(5, 64, dtype=HALF)[:, ::2]
    assert violations(Call.make(npu.npu_swiglu.default, TARGET, gapped)) == []
    captured = NpuTarget(graph_mode="aclgraph")
    assert violations(Call.make(npu.npu_swiglu.default, captured, gapped)) == ["input is not contiguous"]


def keyword_call(operator, *arguments, target=TARGET, **keywords):
    return violations(Call.make(operator.default, target, *arguments, **keywords))


def test_groups_of_experts():
    assert keyword_call(npu.npu_moe_gating_top_k, empty(5, 16), 4, k_group=4, group_count=4) == []
    assert (
        "k_group is 5, of 4 groups"
        in keyword_call(npu.npu_moe_gating_top_k, empty(5, 16), 4, k_group=5, group_count=4)[0]
    )


@pytest.mark.parametrize(("kind", "most"), [(1, 10240), (2, 5120)])
def test_experts_that_are_counted(kind, most):
    def found(experts):
        return keyword_call(
            npu.npu_moe_init_routing_v2,
            empty(5, 8),
            empty(5, 2, dtype=torch.int32),
            expert_num=experts,
            expert_tokens_num_flag=True,
            expert_tokens_num_type=kind,
        )

    assert found(most) == []
    assert found(most + 1) == [f"{most + 1} experts; at most {most}"]


@pytest.mark.parametrize("argument", ["query_rope", "key_rope", "atten_mask"])
def test_everything_that_the_attention_reads_is_dense(argument):
    def turned(tensor):
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)

    given = {**LATENT, "atten_mask": MASK}
    assert violations(fia(4, 1, 512, target=CAPTURED, **given)) == []
    given[argument] = turned(given[argument])
    assert violations(fia(4, 1, 512, target=CAPTURED, **given)) == [f"{argument} is not contiguous"]
    assert violations(fia(4, 1, 512, **given)) == []  # graphs hold dense tensors alone


def test_pairs_to_halves_reads_dense_tensors():
    heads_first = empty(2, 5, 4, 64).transpose(1, 2)
    tables = [empty(2, 1, 5, 64)] * 2
    assert keyword_call(npu.npu_interleave_rope, heads_first, *tables) == []
    assert keyword_call(npu.npu_interleave_rope, heads_first, *tables, target=CAPTURED) == ["x is not contiguous"]
    assert keyword_call(npu.npu_interleave_rope, heads_first.contiguous(), *tables, target=CAPTURED) == []


def prompt(heads=4, kv_heads=0, dim=64, *, layout="BNSD", batch=2, tokens=7, dtype=HALF, target=TARGET, **changes):
    """A prompt without a mask, with changes."""

    def tensor(n):
        return {
            "BNSD": empty(batch, n, tokens, dim, dtype=dtype),
            "BSND": empty(batch, tokens, n, dim, dtype=dtype),
            "BSH": empty(batch, tokens, n * dim, dtype=dtype),
        }[layout]

    keys = tensor(kv_heads or heads)
    given = {"num_heads": heads, "num_key_value_heads": kv_heads, "input_layout": layout, **changes}
    return keyword_call(npu.npu_prompt_flash_attention, tensor(heads), keys, keys, target=target, **given)


CAUSAL = {"sparse_mode": 2, "atten_mask": MASK}


@pytest.mark.parametrize(
    ("legal", "illegal", "reason"),
    [
        ({"heads": 256, "kv_heads": 4}, {"heads": 257, "kv_heads": 257}, "257 heads over 257"),
        ({"heads": 64, "kv_heads": 1}, {"heads": 65, "kv_heads": 1}, "at most 64 to one"),
        ({"dim": 512}, {"dim": 528}, "heads of 528 dims; at most 512"),
        ({"heads": 256, "dim": 256}, {"heads": 256, "dim": 256, "layout": "BSND"}, "row of the query has 65536"),
        ({"batch": 65536}, {"batch": 65537}, "65537 sequences; at most 65536"),
        ({"batch": 128, "dim": 72}, {"batch": 129, "dim": 72}, "129 sequences; at most 128"),
        (CAUSAL, {"sparse_mode": 2}, "needs a mask"),
        (CAUSAL, {**CAUSAL, "sparse_mode": 5}, "sparse_mode is 5"),
    ],
)
def test_prompts(legal, illegal, reason):
    assert prompt(**legal) == []
    assert reason in "; ".join(prompt(**illegal))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"next_tokens": 2147483647}, ""),
        ({"dtype": HALF}, "has no bfloat16"),
        ({"kv_heads": 2}, "no GQA on this chip"),
        ({"kv_heads": 4}, "must be left at 0"),
        (CAUSAL, "sparse_mode is 2; 0 on this chip"),
        ({"next_tokens": 5}, "without a band"),
        ({"actual_seq_lengths": [7, 7]}, "lengths of sequences"),
        ({"batch": 129}, "129 sequences; at most 128"),
        ({"tokens": 65536}, "65536 tokens"),
    ],
    ids=str,
)
def test_prompts_on_the_inference_chip(changes, reason):
    found = prompt(**{"dtype": F16, "target": INFERENCE, **changes})
    assert reason in "; ".join(found) and bool(found) == bool(reason)


def f16(*sizes):
    return empty(*sizes, dtype=F16)


@pytest.mark.parametrize(
    ("operator", "legal", "illegal", "reason"),
    [
        (npu.npu_rms_norm, (f16(5, 32), f16(32)), (empty(5, 32), empty(32)), "has no bfloat16"),
        (npu.npu_rms_norm, (f16(5, 32), f16(32)), (f16(5, 32), empty(32, dtype=FLOAT)), "dtype of the input"),
        (npu.npu_add_rms_norm, (f16(5, 32),) * 2 + (f16(32),), (empty(5, 32),) * 2 + (empty(32),), "no bfloat16"),
        (npu.npu_gelu, (f16(5, 32),), (empty(5, 32),), "has no bfloat16"),
        (npu.npu_linear, (f16(5, 32), f16(8, 32)), (empty(5, 32), empty(8, 32)), "has no bfloat16"),
        (
            npu.npu_rotary_mul,
            (f16(1, 5, 4, 128), *[f16(1, 5, 1, 128)] * 2),
            (f16(1, 5, 4, 64), *[f16(1, 5, 1, 64)] * 2),
            "heads of 64 dims; 128 on this chip",
        ),
        (
            npu.npu_rotary_mul,
            (f16(8, 5, 128, 128), *[f16(1, 5, 1, 128)] * 2),
            (f16(9, 5, 128, 128), *[f16(1, 5, 1, 128)] * 2),
            "spread over 1152 heads; at most 1024",
        ),
        (
            npu.npu_rotary_mul,
            (f16(9, 5, 128, 128), *[f16(9, 5, 1, 128)] * 2),
            (f16(1, 5, 4, 128), *[f16(1, 5, 1, 128)] * 2, "interleave", f16(128, 128)),
            "rotary_mode must be 'half'",
        ),
        (
            npu.npu_scatter_nd_update_,
            (f16(5, 32), empty(3, 1, dtype=torch.int64), f16(3, 32)),
            (empty(5, 32, dtype=torch.int8), empty(3, 1, dtype=torch.int64), empty(3, 32, dtype=torch.int8)),
            "input is torch.int8",
        ),
    ],
)
def test_other_operators_of_the_inference_chip(operator, legal, illegal, reason):
    assert keyword_call(operator, *legal, target=INFERENCE) == []
    assert reason in "; ".join(keyword_call(operator, *illegal, target=INFERENCE))


def test_the_inference_chip_counts_where_experts_end():
    def found(kind):
        return keyword_call(
            npu.npu_moe_init_routing_v2,
            f16(5, 8),
            empty(5, 2, dtype=torch.int32),
            expert_num=4,
            expert_tokens_num_flag=True,
            expert_tokens_num_type=kind,
            target=INFERENCE,
        )

    assert found(0) == [] and found(1) == ["expert_tokens_num_type is 1; it must be 0"]


def test_an_operator_that_the_table_does_not_know_is_refused():
    assert "npu_silu" not in LIMITS
    assert violations(Call.make(npu.npu_silu.default, TARGET, empty(5))) == ["npu_silu is not in the table of limits"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"soc": "A100"}, "soc='A100' is not a known Ascend chip"),
        ({"graph_mode": "eager"}, "graph_mode='eager' is not one of"),
        ({"block_size": 0}, "block_size=0 is below 1"),
    ],
)
def test_targets_that_there_are_not(arguments, message):
    with pytest.raises(ValueError, match=message):
        NpuTarget(**arguments)


def test_chips_by_name():
    names = ("Ascend910B3", "Ascend910_9382", "Ascend950PR", "Ascend310P3")
    assert [NpuTarget(name).product for name in names] == [Product.A2, Product.A3, Product.A5, Product.INFERENCE]


def test_every_lowering_is_for_the_npu_alone():
    assert {p.target for p in PASSES if p.name.startswith("lower_npu")} == {"npu"}


@settings(max_examples=60, deadline=None)
@given(
    kv_heads=st.sampled_from([1, 2, 3, 8]),
    group=st.integers(1, 8),
    dim=st.sampled_from([16, 40, 64, 80, 96, 112, 128, 160, 192, 256]),
    value_dim=st.sampled_from([None, None, 64, 128]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    sinks=st.booleans(),
    window=st.sampled_from([0, 5, 512]),
    softcap=st.sampled_from([0.0, 0.0, 30.0]),
    block_size=st.sampled_from([16, 48, 128, 512, 1024]),
    soc=st.sampled_from(["Ascend910B3", "Ascend910_9382", "Ascend950PR", "Ascend310P3"]),
    mode=st.sampled_from(["ge", "aclgraph"]),
)
def test_no_draw_of_shapes_breaks_a_limit(
    kv_heads, group, dim, value_dim, dtype, sinks, window, softcap, block_size, soc, mode
):
    graph = AttentionGraph(
        kv_heads * group,
        kv_heads,
        dim,
        value_dim,
        dtype=dtype,
        sinks=sinks,
        sliding_window=window,
        softcap=softcap,
        target=NpuTarget(soc, block_size, mode),
    )
    if soc == "Ascend310P3" and dtype is torch.bfloat16:
        with pytest.raises(UnsupportedModel, match="has no bfloat16; give dtype='float16'"):
            lower_npu_paged_attention(graph.traced)
        return
    assert lower_npu_paged_attention(graph.traced).matches == 1
    assert_legal(graph.traced)
    if dtype is torch.bfloat16 and dim == 128 and value_dim in (None, 128) and not softcap and soc != "Ascend310P3":
        assert any("infer_attention" in str(n.target) for n in graph.traced.graph.nodes)
