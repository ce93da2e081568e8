"""Latent attention on Ascend: which spellings are recognized, which operators stand for them, and their numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from latent_graphs import COMPRESSED, CONTENT, ROTARY, VALUE, LatentGraph

from torch_pagoda.compiler.weights.merged_weights import link_merged_weights
from torch_pagoda.passes import PASSES
from torch_pagoda.passes.graph.attention_node import PAGED_ATTENTION
from torch_pagoda.passes.graph.fx_nodes import shape, value
from torch_pagoda.passes.graph.record import NoMatch
from torch_pagoda.passes.lower.npu.attention.paged_attention import lower_npu_paged_attention
from torch_pagoda.passes.lower.npu.call import Call
from torch_pagoda.passes.lower.npu.latent.attention import LATENT, absorb_latent_attention
from torch_pagoda.passes.lower.npu.latent.layout import LayoutTracer, Rows
from torch_pagoda.passes.lower.npu.rope import lower_npu_rope
from torch_pagoda.passes.rewrite.group_rope import group_rope
from torch_pagoda.runtime.npu_target import NpuTarget
from torch_pagoda.runtime.ops.npu.limits import violations

from npu_graphs import assert_legal, operators, refusals

aten, pagoda = torch.ops.aten, torch.ops.pagoda

FIA = "npu.npu_fused_infer_attention_score"
PROLOG = "npu.npu_mla_prolog_v3"
KV_NORM = "npu.npu_kv_rmsnorm_rope_cache_v2"
PRODUCT = "npu.npu_transpose_batchmatmul"
WRITE = "npu.npu_scatter_pa_kv_cache"
STEPS = [[30, 1, 17], [1, 9, 0], [1, 1, 3]]
AS_FLOAT16 = NpuTarget(block_size=16, float32_as=torch.float16)


def absorbed(**kwargs):
    graph = LatentGraph(**kwargs)
    record = absorb_latent_attention(graph.traced)
    names = operators(graph.traced)
    assert record.matches == 1, record.rejections
    assert absorb_latent_attention(graph.traced).matches == 0  # nothing is left to do
    assert operators(graph.traced) == names
    graph.traced.graph.lint()
    link_merged_weights(graph.traced)
    assert_legal(graph.traced)
    return graph, record


def left_alone(**kwargs):
    graph = LatentGraph(**kwargs)
    before = str(graph.traced.graph), dict(graph.traced.constants), list(graph.traced.caches)
    record = absorb_latent_attention(graph.traced)
    assert record.matches == 0
    assert (str(graph.traced.graph), dict(graph.traced.constants), list(graph.traced.caches)) == before
    return graph, record


def assert_same_numbers(graph, **kwargs):
    expected = LatentGraph(**kwargs)
    link_merged_weights(expected.traced)
    for found, right in zip(graph.run(STEPS), expected.run(STEPS), strict=True):
        assert found.shape == right.shape
        assert (found - right).abs().max() < 2e-5 * right.abs().max()


def npu_operators(graph):
    return [name for name in operators(graph.traced) if name.startswith("npu.")]


def node_of(graph, name):
    (node,) = [n for n in graph.traced.graph.nodes if name.removeprefix("npu.") in str(n.target)]
    return node


@pytest.mark.parametrize("mode", ["interleaved_to_half", "interleaved"])
@pytest.mark.parametrize(
    ("spelling", "query"),
    [("copies", "compressed whole"), ("cat", "compressed whole"), ("tokens first", "compressed parts")],
)
def test_one_operator_up_to_the_attention(spelling, query, mode):
    kwargs = {"spelling": spelling, "query": query, "mode": mode}
    graph, record = absorbed(**kwargs)
    assert npu_operators(graph) == [PROLOG, FIA, PRODUCT]
    assert not refusals(record)
    assert not [n for n in operators(graph.traced) if n.startswith("pagoda.") or n == "aten.linear"]
    assert_same_numbers(graph, **kwargs)


def test_products_need_not_be_merged():
    graph, _ = absorbed(merged=False)
    assert npu_operators(graph) == [PROLOG, FIA, PRODUCT]
    assert_same_numbers(graph, merged=False)


@pytest.mark.parametrize("mode", ["interleaved_to_half", "interleaved"])
@pytest.mark.parametrize(
    "kwargs", [{"query": "plain whole"}, {"query": "plain parts"}, {"target": AS_FLOAT16}], ids=str
)
def test_norm_rotation_and_write_in_one_operator(mode, kwargs):
    graph, record = absorbed(mode=mode, **kwargs)
    assert npu_operators(graph) == [KV_NORM, PRODUCT, FIA, PRODUCT]
    assert PROLOG in refusals(record) and KV_NORM not in refusals(record)
    (rotation,) = [n for n in graph.traced.graph.nodes if n.target is pagoda.rope.default]
    assert rotation.args[3] == "interleaved_to_half"  # queries and keys alike, whatever the model does
    given = node_of(graph, KV_NORM)
    assert [str(size) for size in shape(given.args[0])[:2]] == ["1", "1"]  # one sequence, of all tokens
    assert (given.kwargs["cache_mode"], given.kwargs["is_output_kv"]) == ("PA_BNSD", False)
    assert given.kwargs["epsilon"] == 1e-6
    assert_same_numbers(graph, mode=mode, **kwargs)


@pytest.mark.parametrize("query", ["compressed whole", "compressed parts", "plain whole"])
def test_halves_are_rotated_by_themselves(query):
    kwargs = {"mode": "half", "query": query}
    graph, record = absorbed(**kwargs)
    assert npu_operators(graph) == [WRITE, PRODUCT, FIA, PRODUCT]
    for route in (PROLOG, KV_NORM):
        assert f"{route}: it rotates halves, the operator pairs" in refusals(record)
    assert sum(n.target is pagoda.rope.default for n in graph.traced.graph.nodes) == 2
    lower_npu_rope(graph.traced)
    assert_legal(graph.traced)
    assert_same_numbers(graph, **kwargs)


def test_rotations_of_queries_and_keys_in_one_operator_come_apart():
    graph = LatentGraph(query="plain parts")
    assert group_rope(graph.traced).matches == 1
    assert absorb_latent_attention(graph.traced).matches == 1
    assert npu_operators(graph) == [KV_NORM, PRODUCT, FIA, PRODUCT]
    link_merged_weights(graph.traced)
    assert_same_numbers(graph, query="plain parts")


def test_what_all_heads_share_need_not_be_rotated():
    def unrotated(graph):
        graph.shared = graph.before

    kwargs = {"change": unrotated}
    graph, record = absorbed(**kwargs)
    assert npu_operators(graph) == [WRITE, PRODUCT, FIA, PRODUCT]
    assert "what all heads share is not rotated as a whole" in refusals(record)
    assert_same_numbers(graph, **kwargs)


def test_the_kernel_reads_one_latent_per_token():
    graph, _ = absorbed()
    found = node_of(graph, FIA)
    assert found.args[1] is found.args[2]
    assert [tuple(shape(n))[1:] for n in (found.args[0], found.args[1])] == [(2, 512), (16, 512)]
    assert [tuple(shape(found.kwargs[n]))[1:] for n in ("query_rope", "key_rope")] == [(2, 64), (16, 64)]
    plain = {name: given for name, given in found.kwargs.items() if isinstance(given, int | float | str)}
    assert plain == {
        "num_heads": 2,
        "num_key_value_heads": 1,
        "scale": 0.1,
        "input_layout": "TND",
        "sparse_mode": 3,
        "pre_tokens": 2147483647,
        "next_tokens": 2147483647,
        "block_size": 16,
        "inner_precise": 0,
    }
    assert found.kwargs["actual_seq_lengths"].name == "query_ends"  # cumulative
    assert found.kwargs["actual_seq_lengths_kv"].name == "kv_lens"  # of each sequence
    mask = graph.traced.constants[found.kwargs["atten_mask"].name]
    assert torch.equal(mask, torch.ones(2048, 2048, dtype=torch.int8).triu(1))


def test_caches_hold_latents_and_are_whole_inputs_written_once():
    for kwargs in ({}, {"query": "plain whole"}, {"mode": "half"}):
        graph, _ = absorbed(**kwargs)
        (spec,) = graph.traced.caches
        assert (spec.num_kv_heads, spec.key_dim, spec.value_dim, spec.by_token) == (1, 512, 64, True)
        nodes = list(graph.traced.graph.nodes)
        for name, dim in (("key_cache_0", 512), ("value_cache_0", 64)):
            cache = graph.traced.placeholder(name)
            assert tuple(shape(cache))[1:] == (16, 1, dim) and value(cache).is_contiguous()
            writes = [n for n in cache.users if "reshape" not in str(n.target)]
            assert len(writes) == 1 and min(nodes.index(n) for n in cache.users) == nodes.index(writes[0])


def test_a_window_is_a_band():
    graph, _ = absorbed(sliding_window=8)
    found = node_of(graph, FIA).kwargs
    assert (found["sparse_mode"], found["pre_tokens"], found["next_tokens"]) == (4, 7, 0)
    assert graph.traced.caches[0].sliding_window == 8
    assert_same_numbers(graph, sliding_window=8)


def test_so_many_heads_that_a_turned_row_is_too_long_come_first():
    kwargs = {"heads": 128, "hidden": 64, "content": 16, "query": "plain whole"}
    graph, _ = absorbed(**kwargs)
    assert node_of(graph, FIA).kwargs["input_layout"] == "TND_NTD"
    products = [n.kwargs["perm_x1"] for n in graph.traced.graph.nodes if "transpose_batchmatmul" in str(n.target)]
    assert products == [[1, 0, 2], [0, 1, 2]]
    assert_same_numbers(graph, **kwargs)


def test_chips_without_the_batched_product_turn_and_multiply():
    target = NpuTarget("Ascend950PR", block_size=16, float32_as=torch.bfloat16)
    for query, names in (("compressed whole", [PROLOG, FIA]), ("plain whole", [WRITE, FIA])):
        graph, record = absorbed(target=target, query=query)
        assert npu_operators(graph) == names
        assert f"{PRODUCT}: Ascend950PR does not run it" in refusals(record)
        assert_same_numbers(graph, query=query)


@pytest.mark.parametrize("kwargs", [{}, {"query": "plain whole"}, {"mode": "half"}, {"merged": False}], ids=str)
def test_captured_calls_get_dense_activations(kwargs):
    target = NpuTarget(graph_mode="aclgraph", block_size=16, float32_as=torch.bfloat16)
    graph, _ = absorbed(target=target, **kwargs)
    lower_npu_rope(graph.traced)
    assert_legal(graph.traced)
    assert_same_numbers(graph, **kwargs)


def test_the_number_of_tokens_stays_open():
    graph = LatentGraph()
    tokens = str(shape(graph.traced.output.args[0][0])[1])
    assert absorb_latent_attention(graph.traced).matches == 1
    assert str(shape(graph.traced.output.args[0][0])[1]) == tokens
    results = graph.run([[5], [1], [11]])
    assert [tuple(r.shape) for r in results] == [(1, n, 2, VALUE) for n in (5, 1, 11)]


def test_weights_are_views_of_the_parameters():
    graph, _ = absorbed()
    constants = graph.traced.constants
    down, up = constants["down_keys"], constants["up_keys"]
    given = node_of(graph, PROLOG).args
    by_node = [constants[n.name] for n in given[1:5]]
    assert [tuple(w.shape) for w in by_node] == [(1024, 1536), (1536, 2 * 192), (2, 128, 512), (1024, 576)]
    assert by_node[3].data_ptr() == down.data_ptr() and torch.equal(by_node[3], down.t())
    assert torch.equal(by_node[2], up.view(2, 256, 512)[:, :128])
    values = constants[node_of(graph, PRODUCT).args[1].name]
    assert torch.equal(values, up.view(2, 256, 512)[:, 128:].transpose(1, 2))
    memory = {w.untyped_storage().data_ptr() for w in (*by_node, values)}
    assert memory <= {constants[n].untyped_storage().data_ptr() for n in constants if "_of_" not in n}
    down.mul_(2)
    assert torch.equal(by_node[3], down.t())


def test_merged_weights_that_nothing_reads_merged_stay_where_they_are():
    graph = LatentGraph()
    (name,) = graph.traced.notes.merged
    places = {n: graph.traced.constants[n].data_ptr() for n in graph.traced.notes.merged[name]}
    assert len(places) == 2
    absorb_latent_attention(graph.traced)
    assert graph.traced.notes.merged == {}
    assert name not in [node.name for node in graph.traced.placeholders]
    link_merged_weights(graph.traced)
    assert places == {n: graph.traced.constants[n].data_ptr() for n in places}


def test_merged_weights_that_something_else_reads_stay_merged():
    graph, _ = absorbed(query="plain whole")
    assert len(graph.traced.notes.merged) == 1
    (whole,) = [n for n in graph.traced.graph.nodes if n.target is aten.linear.default]
    assert tuple(shape(whole))[2] == 576 + 2 * 192


def two_products(graph):
    """Keys and values by products of their own."""
    graph.key = graph.heads_first(graph.linear("keys", graph.latent, graph.heads * graph.content), graph.heads)
    graph.value = graph.heads_first(graph.linear("values", graph.latent, graph.heads * VALUE), graph.heads)


def test_two_products_that_were_merged():
    graph, _ = absorbed(change=two_products)
    assert npu_operators(graph) == [PROLOG, FIA, PRODUCT]
    constants = graph.traced.constants
    key_weight = constants[node_of(graph, PROLOG).args[3].name]
    assert torch.equal(key_weight, constants["keys"].view(2, 128, 512))
    assert_same_numbers(graph, change=two_products)
    left_alone(change=two_products, merged=False)


def other_order(graph):
    """Values before keys in each head."""
    per_head = graph.heads_first(graph.both, graph.heads)
    graph.value, graph.key = graph.cut(per_head, 0, VALUE), graph.cut(per_head, VALUE, VALUE + graph.content)


def heads_inside(graph):
    """All heads of one dim together."""
    sizes = [1, -1, graph.content + VALUE, graph.heads]
    rows = graph.traced.call(aten.reshape.default, graph.both, sizes)
    per_head = graph.traced.call(aten.permute.default, rows, [0, 3, 1, 2])
    graph.key, graph.value = graph.cut(per_head, 0, 128), graph.cut(per_head, 128, 256)


def keys_of_all_heads_first(graph):
    size = graph.heads * graph.content
    graph.key = graph.heads_first(graph.cut(graph.both, 0, size), graph.heads)
    graph.value = graph.heads_first(graph.cut(graph.both, size, size + graph.heads * VALUE), graph.heads)


@pytest.mark.parametrize("change", [other_order, heads_inside, keys_of_all_heads_first])
def test_any_regular_order_of_what_the_product_yields(change):
    graph, _ = absorbed(change=change)
    assert npu_operators(graph) == [PROLOG, FIA, PRODUCT]
    assert_same_numbers(graph, change=change)


def rotated_part_first(graph):
    """[shared, own] in keys and queries."""
    parts = graph.cut(graph.query, graph.content, 192), graph.cut(graph.query, 0, graph.content)
    graph.query = graph.traced.call(aten.cat.default, list(parts), -1)
    graph.spelling = "cat"
    joined = graph.joined
    graph.joined = lambda content, shared: joined(shared, content)


def test_the_shared_part_may_come_first():
    graph, record = absorbed(change=rotated_part_first)
    assert npu_operators(graph) == [KV_NORM, PRODUCT, FIA, PRODUCT]
    assert "queries and keys are not rotated alike" in refusals(record)
    assert_same_numbers(graph, change=rotated_part_first)


def bias(graph):
    graph.both = graph.linear("with_bias", graph.latent, graph.heads * (graph.content + VALUE), bias=True)
    other_order(graph)


def computed_weight(graph):
    weight = graph.traced.call(aten.mul.Tensor, graph.both.args[1], 2.0)
    graph.both = graph.traced.call(aten.linear.default, graph.latent, weight)
    other_order(graph)


def irregular(graph):
    parts = graph.cut(graph.key, 1, graph.content), graph.cut(graph.key, 0, 1)
    graph.key = graph.traced.call(aten.cat.default, list(parts), -1)


def torn(graph):
    graph.key = graph.cut(graph.key, 0, graph.content)
    parts = graph.cut(graph.key, 0, 64), graph.cut(graph.key, 64, 128)
    graph.joined = lambda content, shared: graph.traced.call(aten.cat.default, [parts[0], shared, parts[1]], -1)


def rearranged(graph):
    parts = graph.cut(graph.shared, 32, 64), graph.cut(graph.shared, 0, 32)
    graph.shared = graph.traced.call(aten.cat.default, list(parts), -1)


def three_parts(graph):
    parts = [graph.rotated(graph.before), graph.traced.call(aten.neg.default, graph.shared)]
    graph.shared = graph.traced.call(
        aten.cat.default, [graph.cut(part, 32 * i, 32 * i + 32) for i, part in enumerate(parts)], -1
    )


def tokens_mixed(graph):
    first = graph.traced.call(aten.slice.Tensor, graph.shared, 2, 0, 1)
    tokens = graph.traced.call(aten.sym_size.int, graph.shared, 2)
    graph.shared = graph.traced.call(aten.expand.default, first, [1, 1, tokens, graph.rotary])


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"change": bias}, "its product adds a bias"),
        ({"change": computed_weight}, "the weight of its product is not a parameter"),
        ({"change": irregular}, "keys or values lie in no regular order"),
        ({"change": torn}, "the dims of a key that come from the latent do not lie together"),
        ({"change": rearranged}, "the part of the keys that all heads share is rearranged"),
        ({"change": three_parts}, "its keys are made of 2 tensors besides the product of its values"),
        ({"change": tokens_mixed}, "it mixes tokens"),
        ({"spelling": "half written"}, "not all of it is written"),
        ({"latent": 256}, "heads of (256, 256, 256) dims with rope"),
        ({"rotary": 32}, "query_rope has 32 dims; it must have 64"),
        ({"heads": 3}, "a power of two of at most 128 heads"),
        ({"target": NpuTarget("Ascend310P3", float32_as=torch.float16)}, "Ascend310P3 does not run it"),
        ({"target": NpuTarget(block_size=16)}, "query is torch.float32"),
        ({"softcap": 3.0}, "it knows no soft cap"),
        ({"chunk": 8}, "it knows no chunks"),
        ({"sinks": torch.zeros(2)}, "it knows no sinks"),
        ({"slopes": torch.ones(2)}, "it knows no ALiBi"),
        ({"calls": 2}, "its cache is read by another attention too"),
        ({"cache_dtype": torch.int8}, "it reads an int8 latent only with int8 queries"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_near_misses_are_left_to_the_expanded_form_with_a_reason(kwargs, reason):
    graph, record = left_alone(**kwargs)
    assert record.rejections and all(reason in r.reason for r in record.rejections)
    if "latent" in kwargs:
        later = lower_npu_paged_attention(graph.traced)
        assert f"{LATENT}: {reason}" in refusals(later)
        assert npu_operators(graph) == [WRITE, FIA]


def own_rotations(graph):
    rows = graph.linear("rotated_keys", graph.hidden, graph.heads * ROTARY)
    graph.shared = graph.rotated(graph.heads_first(rows, graph.heads))
    graph.expanded = lambda shared: shared


def other_values(graph):
    graph.value = graph.traced.call(aten.mul.Tensor, graph.value, 2.0)


@pytest.mark.parametrize("change", [own_rotations, other_values])
def test_ordinary_attention_is_no_near_miss(change):
    _, record = left_alone(change=change)
    assert not record.rejections


def scaled_latent(graph):
    graph.latent = graph.traced.call(aten.mul.Tensor, graph.latent, 2.0)
    graph.both = graph.linear("scaled", graph.latent, graph.heads * (graph.content + VALUE))
    other_order(graph)


def offset_norm(graph):
    graph.latent = graph.norm("gemma", graph.latent.args[0], offset=1.0)
    graph.both = graph.linear("scaled", graph.latent, graph.heads * (graph.content + VALUE))
    other_order(graph)


def apart(graph):
    graph.before = graph.heads_first(graph.linear("other", graph.hidden, ROTARY), 1)
    graph.shared = graph.rotated(graph.before)


def other_tables(graph):
    graph.cos = graph.traced.call(aten.mul.Tensor, graph.cos, 0.5)
    graph.shared = graph.rotated(graph.before)


def turned_heads(graph):
    """Queries with the rotated part first, put in order behind the product."""
    rows = graph.traced.call(aten.reshape.default, graph.linear("mixed", graph.hidden, 2 * 192), [1, -1, 2, 192])
    rows = graph.traced.call(aten.transpose.int, rows, 1, 2)
    parts = graph.cut(rows, 64, 192), graph.rotated(graph.cut(rows, 0, 64))
    graph.query = graph.traced.call(aten.cat.default, list(parts), -1)


def other_hidden_states(graph):
    source = graph.traced.call(aten.neg.default, graph.hidden)
    source = graph.norm("normed", graph.linear("negated", source, COMPRESSED))
    graph.query = graph.rotated(graph.heads_first(graph.linear("other", source, 2 * 192), 2), CONTENT)


def query_with_bias(graph):
    graph.query = graph.rotated(
        graph.heads_first(
            graph.linear("biased", graph.query.args[0].args[0][0].args[0].args[0].args[0], 384, True), 2
        ),
        CONTENT,
    )


@pytest.mark.parametrize(
    ("kwargs", "names", "reason"),
    [
        ({"change": scaled_latent}, [WRITE], "the latent is not the result of an RMS norm"),
        ({"change": offset_norm}, [WRITE], "the scale of the norm of the latent is missing or stored less 1.0"),
        ({"change": apart, "merged": False}, [WRITE], "does not lie behind the latent in one tensor"),
        ({"change": other_tables}, [KV_NORM], "queries and keys are not rotated alike"),
        ({"change": turned_heads}, [KV_NORM], "heads of queries are not 128 dims and 64 rotated ones"),
        ({"change": other_hidden_states}, [KV_NORM], "not compressed from the same hidden states"),
        ({"change": query_with_bias}, [KV_NORM], "its product adds a bias"),
        ({"query": "plain whole"}, [KV_NORM], "what queries are made from is not the result of an RMS norm"),
        ({"hidden": 512}, [KV_NORM], "hidden size: 512; it must be 1024 or 2048"),
        ({"content": 64}, [KV_NORM], "dims of a head without the rotated ones: 64; it must be 128 or 192"),
        ({"target": AS_FLOAT16}, [KV_NORM], "token_x is torch.float16; it must be torch.bfloat16"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_near_misses_of_what_stands_before_the_attention(kwargs, names, reason):
    graph, record = absorbed(**kwargs)
    assert npu_operators(graph) == [*names, PRODUCT, FIA, PRODUCT]
    assert f"{PROLOG}: " in refusals(record) and reason in refusals(record)
    # Weights for routes that were tried first are not left behind.
    assert all(
        n.users for n in graph.traced.placeholders if n.name.startswith(("transposed_", "keys_of_", "values_of_"))
    )
    assert_same_numbers(graph, **kwargs)


def test_without_a_target_nothing_happens():
    graph = LatentGraph()
    graph.traced.npu = None
    assert absorb_latent_attention(graph.traced).matches == 0


def test_origins_of_what_is_no_movement_are_itself():
    graph = LatentGraph(merged=False)
    found = LayoutTracer().origins(graph.both)
    assert found.sources == (graph.both,)
    assert torch.equal(found.column.flatten(), torch.arange(512))
    source, columns = LayoutTracer().origins(graph.value).columns()
    assert source is graph.both and torch.equal(columns[0, 1], torch.arange(384, 512))
    whole = next(n for n in graph.traced.graph.nodes if n.target is PAGED_ATTENTION).args[1]
    with pytest.raises(NoMatch, match="several tensors"):
        LayoutTracer().origins(whole).columns()


def test_rows_of_columns():
    rows = torch.arange(3)[:, None] * 10 + torch.arange(4) * 2 + 5
    assert Rows.of(rows) == Rows(5, 10, 2, 3, 4)
    assert Rows.of(rows).last == 31
    assert Rows.of(rows.flip(1)) is None
    rows[2, 3] += 1
    assert Rows.of(rows) is None


def legal_calls() -> dict[str, tuple[list[Any], dict[str, Any]]]:
    def t(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    slots = t(7, dtype=torch.int64)
    prolog = [t(7, 7168), t(7168, 1536), t(1536, 128 * 192), t(128, 128, 512), t(7168, 576), t(1536), t(512)]
    return {
        "npu_transpose_batchmatmul": (
            [t(7, 16, 128), t(16, 128, 512)],
            {"perm_x1": [1, 0, 2], "perm_x2": [0, 1, 2], "perm_y": [1, 0, 2]},
        ),
        "npu_kv_rmsnorm_rope_cache_v2": (
            [t(1, 1, 7, 576), t(512), t(1, 1, 7, 64), t(1, 1, 7, 64), slots, t(9, 128, 1, 64), t(9, 128, 1, 512)],
            {"cache_mode": "PA_BNSD"},
        ),
        "npu_mla_prolog_v3": (
            [*prolog, t(7, 64), t(7, 64), t(9, 128, 1, 512), t(9, 128, 1, 64)],
            {"cache_index": slots},
        ),
    }


def reasons(name: str, place: int | str | None = None, given: Any = None, soc: str = "Ascend910B3") -> str:
    args, kwargs = legal_calls()[name]
    if isinstance(place, int):
        args[place] = given
    elif place is not None:
        kwargs[place] = given
    overload = getattr(torch.ops.npu, name).default
    return "; ".join(violations(Call.make(overload, NpuTarget(soc), *args, **kwargs)))


@pytest.mark.parametrize("name", legal_calls())
def test_calls_within_the_limits(name):
    assert reasons(name) == ""
    assert reasons(name, soc="Ascend910_9382") == ""
    assert "does not run it" in reasons(name, soc="Ascend310P3")
    assert ("does not run it" in reasons(name, soc="Ascend950PR")) == (name != "npu_mla_prolog_v3")


BF16 = {"dtype": torch.bfloat16, "device": "meta"}


@pytest.mark.parametrize(
    ("name", "place", "given", "reason"),
    [
        ("npu_transpose_batchmatmul", 1, torch.empty(16, 128, 512, device="meta"), "dtypes differ"),
        ("npu_transpose_batchmatmul", 1, torch.empty(16, 128, 520, **BF16), "multiples of 16"),
        ("npu_transpose_batchmatmul", 1, torch.empty(16, 64, 512, **BF16), "and weight"),
        ("npu_transpose_batchmatmul", 1, torch.empty(16, 128, 65536, **BF16), "at most 65535"),
        ("npu_transpose_batchmatmul", 0, torch.empty(7, 16, **BF16), "has 2 dims"),
        ("npu_transpose_batchmatmul", "perm_x1", [0, 1, 2], "turned by [0, 1, 2]"),
        ("npu_transpose_batchmatmul", "perm_x1", [2, 0, 1], "perm_x1 is [2, 0, 1]"),
        ("npu_transpose_batchmatmul", "perm_x2", [0, 2, 1], "perm_x2 must be"),
        ("npu_transpose_batchmatmul", "perm_y", [0, 1, 2], "perm_y"),
        ("npu_transpose_batchmatmul", "batch_split_factor", 2, "must be 1"),
        ("npu_transpose_batchmatmul", "scale", torch.empty(4, **BF16), "must be left out"),
        ("npu_kv_rmsnorm_rope_cache_v2", 0, torch.empty(1, 1, 7, 640, **BF16), "kv is (1, 1, 7, 640)"),
        ("npu_kv_rmsnorm_rope_cache_v2", 1, torch.empty(448, **BF16), "gamma (448,)"),
        ("npu_kv_rmsnorm_rope_cache_v2", 1, torch.empty(512, device="meta"), "dtypes differ"),
        ("npu_kv_rmsnorm_rope_cache_v2", 2, torch.empty(1, 1, 1, 64, **BF16), "cos is (1, 1, 1, 64)"),
        ("npu_kv_rmsnorm_rope_cache_v2", 4, torch.empty(7, dtype=torch.int32, device="meta"), "index is torch.int32"),
        ("npu_kv_rmsnorm_rope_cache_v2", 5, torch.empty(9, 128, 1, 512, **BF16), "caches are"),
        ("npu_kv_rmsnorm_rope_cache_v2", "cache_mode", "PA_NZ", "cache_mode is 'PA_NZ'"),
        ("npu_kv_rmsnorm_rope_cache_v2", "v", torch.empty(1, 1, 7, 128, **BF16), "v must be left out"),
        ("npu_mla_prolog_v3", 0, torch.empty(7, 7168, dtype=torch.float16, device="meta"), "dtypes differ"),
        ("npu_mla_prolog_v3", 0, torch.empty(7, 5120, **BF16), "token_x is (7, 5120)"),
        ("npu_mla_prolog_v3", 1, torch.empty(7000, 1536, **BF16), "hidden size: 7000"),
        ("npu_mla_prolog_v3", 1, torch.empty(7168, 768, **BF16), "compressed queries: 768"),
        ("npu_mla_prolog_v3", 2, torch.empty(1536, 128 * 128, **BF16), "weight_uq_qr is"),
        ("npu_mla_prolog_v3", 3, torch.empty(96, 128, 512, **BF16), "heads: 96"),
        ("npu_mla_prolog_v3", 3, torch.empty(128, 64, 512, **BF16), "without the rotated ones: 64"),
        ("npu_mla_prolog_v3", 3, torch.empty(128, 128, 256, **BF16), "latent: 256"),
        ("npu_mla_prolog_v3", 4, torch.empty(7168, 512, **BF16), "weight_dkv_kr is"),
        ("npu_mla_prolog_v3", 5, torch.empty(512, **BF16), "rmsnorm_gamma_cq is"),
        ("npu_mla_prolog_v3", 7, torch.empty(7, 32, **BF16), "rope_sin is"),
        ("npu_mla_prolog_v3", 9, torch.empty(9, 100, 1, 512, **BF16), "caches are"),
        ("npu_mla_prolog_v3", "cache_index", None, "with cache_index"),
        ("npu_mla_prolog_v3", "cache_mode", "PA_NZ", "cache_mode is 'PA_NZ'"),
        ("npu_mla_prolog_v3", "weight_quant_mode", 1, "weight_quant_mode is 1"),
    ],
)
def test_calls_beyond_the_limits(name, place, given, reason):
    assert reason in reasons(name, place, given)


# Route → how to get it, and what the real torchair makes of what stands around the attention, splits left out.
CONVERTED = {
    PROLOG: ({}, ["MlaPrologV3"]),
    KV_NORM: ({"query": "plain whole"}, ["InterleaveRope", "KvRmsNormRopeCache", "MatMul", "TransposeBatchMatMul"]),
    WRITE: (
        {"mode": "half", "query": "plain whole"},
        ["MatMul", "RmsNorm", "RotaryMul", "RotaryMul", "ScatterPaKvCache", "TransposeBatchMatMul"],
    ),
}


@pytest.mark.torchair
@pytest.mark.parametrize("route", CONVERTED)
def test_every_route_converts_without_copies(route):
    from torch_pagoda.npu_tools.offline.conversion import convert

    kwargs, names = CONVERTED[route]
    graph = LatentGraph(dtype=torch.bfloat16, target=NpuTarget(), **kwargs)
    for entry in PASSES:
        if entry.target == "npu":
            entry.apply(graph.traced)
    graph.traced.recompile()
    converted = convert(graph.traced.module, [value(n) for n in graph.traced.placeholders])
    assert converted.cache_copies() == []
    found = [n.type for n in converted.computing() if n.type not in ("SplitV", "StridedSliceV2")]
    assert sorted(found) == sorted([*names, "FusedInferAttentionScore", "TransposeBatchMatMul"])
    (attention,) = converted.of_type("FusedInferAttentionScore")
    expected = {"input_layout": "TND", "num_heads": 2, "num_key_value_heads": 1, "sparse_mode": 3, "block_size": 128}
    assert {name: attention.attributes[name] for name in expected} == expected
    assert attention.attributes["scale"] == pytest.approx(0.1)
    written = converted.source(attention, "key0")  # the cache itself, behind the write
    assert written is converted.source(attention, "value0") is converted.source(attention, "key_rope")
    assert written.in_place
