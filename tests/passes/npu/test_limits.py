"""The table of limits: what it refuses and why, and that no draw of shapes makes lowering break it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_pagoda.passes import PASSES
from torch_pagoda.passes.lower.npu.call import Call
from torch_pagoda.passes.lower.npu.limits import LIMITS, violations
from torch_pagoda.passes.lower.npu.paged_attention import lower_npu_paged_attention
from torch_pagoda.passes.lower.npu.target import NpuTarget, Product

from npu_graphs import AttentionGraph, assert_legal

npu = torch.ops.npu
TARGET = NpuTarget()
HALF, FLOAT = torch.bfloat16, torch.float32


def empty(*sizes, dtype=HALF):
    return torch.empty(*sizes, dtype=dtype, device="meta")


MASK = empty(2048, 2048, dtype=torch.int8)


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


LATENT = {"query_rope": empty(7, 4, 64), "key_rope": empty(9, 128, 64)}


@pytest.mark.parametrize(
    "call",
    [
        fia(),
        fia(4, 4, 64),
        fia(4, 4, 192, 128),
        fia(4, 2, 64, layout="BSH"),
        fia(4, 2, 64, layout="BSH", tokens=1, block_size=16),
        fia(4, 2, 96, layout="BNSD", block_size=256),
        fia(block_size=1024),
        fia(sparse_mode=4, pre_tokens=7, next_tokens=0),
        fia(second=True, learnable_sink=empty(4)),
        fia(4, 1, 512, **LATENT),
        fia(64, 1, 512, query_rope=empty(7, 64, 64), key_rope=empty(9, 128, 64)),
    ],
    ids=lambda c: f"{c['input_layout']}-{tuple(c['query'].shape)}",
)
def test_legal_attention(call):
    assert violations(call) == []


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (fia(4, 2, 64), "heads of 64 dims are not for GQA"),
        (fia(4, 2, 96), "heads of (96, 96, 96) dims"),
        (fia(4, 4, 192), "heads of 192 dims are not for GQA or paging"),
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
        (fia(layout="BSH", tokens=1, block_size=528), "up to 512"),
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
    assert lower_npu_paged_attention(graph.traced).matches == 1
    assert_legal(graph.traced)
    if dtype is torch.bfloat16 and dim == 128 and value_dim in (None, 128) and not softcap and soc != "Ascend310P3":
        assert any("infer_attention" in str(n.target) for n in graph.traced.graph.nodes)
