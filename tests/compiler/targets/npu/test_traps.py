"""Traps of torch_npu and torchair that lowering is designed around, as the real packages have them.

A test that fails after an update of torch-npu means that the trap is gone or has changed; what avoids it should then
be looked at again. By number:

1.  npu_rotary_mul loses its rotary_mode on A2 and A3.
2.  Some operators that are functional by their schemas write into their arguments on the device.
3.  Operators that write in place become functional twins where torch_npu is there, not auto_functionalized_v2.
4.  A KV cache is copied whole in every step unless it is a graph input that is written once, then read, never viewed.
7.  Host lists of lengths are baked in unless they are dynamic; no operator reads them from a tensor.
8.  Operators that CANN has lack a converter.
9.  Some converters fail.
10. Some operators have no fake kernel, others' ask the device.
11. Defining an operator of torch_npu and then importing it aborts the process.
12. torchair fuses operators after our passes, unless told not to.
13. Defaults of arguments are not what one would expect.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lowered_models import lowered, served
from torch._functorch.aot_autograd import aot_module_simplified
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedOperatorException

from torch_pagoda.compiler.targets.npu.ge.ge_route import GeGraphs
from torch_pagoda.npu_tools.offline.conversion import ConversionError, convert
from torch_pagoda.npu_tools.offline.ge_graph import GeGraph
from torch_pagoda.npu_tools.offline.run import run_python

from ge_graphs import ge_graph_of, traced

pytestmark = pytest.mark.torchair

A2, A3, A5 = "Ascend910B3", "Ascend910_9391", "Ascend950PR_9599"
npu, aten = torch.ops.npu, torch.ops.aten


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16)


def write(rows: Any, key_cache: Any, value_cache: Any, slots: Any) -> None:
    npu.npu_scatter_pa_kv_cache.default(rows, rows, key_cache, value_cache, slots, cache_mode="Norm")


def step_graph(step: Callable[..., Any], *caches: torch.Tensor) -> GeGraph:
    """``step`` over three rows, the caches and three slots."""
    return ge_graph_of(step, half(3, 2, 128), *caches, torch.arange(3, dtype=torch.int32))


@pytest.mark.parametrize("soc", [A2, A3])
def test_trap_1_interleaved_rotary_mul_turns_half(soc: str) -> None:
    (node,) = rotated(soc).computing()
    assert node.type == "RotaryMul" and not node.attributes


def test_trap_1_interleaved_rotary_mul_is_right_on_950() -> None:
    (node,) = rotated(A5).computing()
    assert (node.type, node.attributes) == ("RotaryPositionEmbedding", {"mode": 1})


def test_trap_1_a_rotation_matrix_keeps_the_mode() -> None:
    (node,) = rotated(A2, half(128, 128)).computing()
    assert (node.type, node.attributes) == ("RotaryPositionEmbedding", {"mode": 1})
    assert node.inputs["rotate"] == "rotate:0"


def test_trap_1_interleave_rope_has_no_mode_to_lose() -> None:
    def step(x, cos, sin):
        return npu.npu_interleave_rope.default(x, cos, sin)

    graph = ge_graph_of(step, half(1, 2, 4, 64), half(1, 1, 4, 64), half(1, 1, 4, 64), soc=A2)
    assert [node.type for node in graph.computing()] == ["InterleaveRope"]


def rotated(soc: str, *rotate: torch.Tensor) -> GeGraph:
    def with_matrix(x, cos, sin, rotate):
        return npu.npu_rotary_mul.default(x, cos, sin, "interleave", rotate)

    def without(x, cos, sin):
        return npu.npu_rotary_mul.default(x, cos, sin, "interleave")

    table = half(1, 4, 1, 128)
    step = with_matrix if rotate else without
    return ge_graph_of(step, half(1, 4, 2, 128), table, table.clone(), *rotate, soc=soc)


def rotated_at_once(own_converters: bool) -> GeGraph:
    def step(q, k, cos, sin):
        rotated = npu.npu_apply_rotary_pos_emb.default(q, k, cos, sin, "BSND")
        return rotated[0], rotated[1]

    inputs = half(1, 4, 2, 128), half(1, 4, 2, 128), half(1, 4, 1, 128), half(1, 4, 1, 128)
    return ge_graph_of(step, *inputs, own_converters=own_converters)


def test_trap_2_apply_rotary_pos_emb_copies_query_and_key_first() -> None:
    """Ours does not: lowering gives the operator none that something else reads."""
    graph = rotated_at_once(own_converters=False)
    assert [node.type for node in graph.computing()] == ["TensorMove", "TensorMove", "ApplyRotaryPosEmb"]
    assert len(graph.cache_copies("q", "k")) == 2
    assert [node.type for node in rotated_at_once(own_converters=True).computing()] == ["ApplyRotaryPosEmb"]


def test_trap_2_others_graphs_keep_the_copies_behind_ours() -> None:
    traced = lowered("llama")[1]
    route = GeGraphs(traced)
    served(traced, route)
    assert route.graphs and not route.dropped
    assert rotated_at_once(own_converters=False).count("TensorMove") == 2


@pytest.mark.parametrize(
    "name", ["npu_kv_rmsnorm_rope_cache", "npu_mla_prolog", "npu_mla_prolog_v2", "npu_rope_quant_kvcache"]
)
def test_trap_2_writers_that_do_not_say_so(name: str) -> None:
    schema = getattr(npu, name).default._schema
    assert not schema.is_mutable and any("cache" in argument.name for argument in schema.arguments)


@pytest.mark.parametrize("name", ["npu_kv_rmsnorm_rope_cache_v2", "npu_mla_prolog_v3", "npu_scatter_pa_kv_cache"])
def test_trap_2_later_versions_declare_their_writes(name: str) -> None:
    written = [argument.name for argument in getattr(npu, name).default._schema.arguments if argument.is_write]
    assert len(written) == 2 and all("cache" in argument for argument in written)


def write_then_read(rows, key_cache, value_cache, slots):
    write(rows, key_cache, value_cache, slots)
    return key_cache + 1, value_cache + 1


def test_trap_3_in_place_writes_become_functional_twins() -> None:
    graphs = []

    def keep(module, example_inputs):
        graphs.append(module.graph)
        return module

    inputs = [half(3, 2, 128), half(4, 16, 2, 128), half(4, 16, 2, 128), torch.arange(3, dtype=torch.int32)]
    aot_module_simplified(traced(write_then_read), inputs, keep, keep_inference_input_mutations=True)
    called = [str(node.target) for node in graphs[0].nodes if node.op == "call_function"]
    assert "npu.npu_scatter_pa_kv_cache_functional.default" in called
    assert called.count("aten.copy_.default") == 2


def test_trap_3_twin_and_copy_convert_to_what_the_write_does() -> None:
    def twin(rows, key_cache, value_cache, slots):
        written = npu.npu_scatter_pa_kv_cache_functional.default(
            rows, rows, key_cache, value_cache, slots, cache_mode="Norm"
        )
        aten.copy_.default(key_cache, written[0])
        aten.copy_.default(value_cache, written[1])
        return written[0] + 1, written[1] + 1

    caches = half(4, 16, 2, 128), half(4, 16, 2, 128)
    one, other = (
        [(node.name, node.type, node.inputs, node.attributes) for node in step_graph(step, *caches)]
        for step in (write_then_read, twin)
    )
    assert one == other


def test_trap_4_write_then_read_copies_nothing() -> None:
    graph = step_graph(write_then_read, half(4, 16, 2, 128), half(4, 16, 2, 128))
    assert graph.cache_copies("key_cache", "value_cache") == []
    (writer,) = graph.of_type("ScatterPaKvCache")
    assert (writer.inputs["key_cache"], writer.inputs["value_cache"]) == ("key_cache:0", "value_cache:0")


def test_trap_4_write_without_read_copies_nothing() -> None:
    def step(rows, key_cache, value_cache, slots):
        write(rows, key_cache, value_cache, slots)
        return rows + 1

    graph = step_graph(step, half(4, 16, 2, 128), half(4, 16, 2, 128))
    assert graph.count("TensorMove") == 0 and graph.outputs == ("Add:0",)


def test_trap_4_read_before_write_copies_both_caches() -> None:
    def step(rows, key_cache, value_cache, slots):
        before = key_cache + 1, value_cache + 1
        write(rows, key_cache, value_cache, slots)
        return before

    graph = step_graph(step, half(4, 16, 2, 128), half(4, 16, 2, 128))
    assert len(graph.cache_copies("key_cache")) == len(graph.cache_copies("value_cache")) == 1


def test_trap_4_two_writes_copy_both_caches_twice() -> None:
    def step(rows, key_cache, value_cache, slots):
        write(rows, key_cache, value_cache, slots)
        write(rows, key_cache, value_cache, slots)
        return key_cache + 1, value_cache + 1

    graph = step_graph(step, half(4, 16, 2, 128), half(4, 16, 2, 128))
    assert len(graph.cache_copies("key_cache")) == len(graph.cache_copies("value_cache")) == 2


def test_trap_4_a_viewed_cache_is_copied() -> None:
    def step(rows, key_cache, value_cache, slots):
        key_cache, value_cache = key_cache.view(4, 16, 2, 128), value_cache.view(4, 16, 2, 128)
        write(rows, key_cache, value_cache, slots)
        return key_cache + 1, value_cache + 1

    graph = step_graph(step, half(4, 16, 256), half(4, 16, 256))
    assert len(graph.cache_copies("key_cache")) == len(graph.cache_copies("value_cache")) == 1


def test_trap_4_a_stacked_cache_is_copied_and_written_back_whole() -> None:
    def step(rows, cache, slots):
        write(rows, aten.select.int(cache, 0, 0), aten.select.int(cache, 0, 1), slots)
        return cache + 1

    graph = step_graph(step, half(2, 4, 16, 2, 128))
    assert len(graph.cache_copies("cache")) == 2
    assert graph.count("ScatterElements") == 2


def attend(query, keys, values, table, mask, query_ends, kv_lens):
    return npu.npu_fused_infer_attention_score.default(
        query,
        keys,
        values,
        atten_mask=mask,
        actual_seq_lengths=query_ends,
        actual_seq_lengths_kv=kv_lens,
        block_table=table,
        num_heads=4,
        num_key_value_heads=2,
        scale=0.1,
        input_layout="TND",
        sparse_mode=3,
        block_size=16,
    )[0]


def attention_inputs() -> list[Any]:
    mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
    table = torch.zeros(2, 2, dtype=torch.int32)
    return [half(8, 4, 128), half(4, 16, 256), half(4, 16, 256), table, mask, [1, 8], [1, 1]]


def test_trap_7_dynamic_lists_are_one_host_input_each() -> None:
    """Ones and equal values too, which torch would otherwise take for constants and for one number."""
    graph = ge_graph_of(attend, *attention_inputs())
    (node,) = graph.of_type("FusedInferAttentionScore")
    assert node.inputs["actual_seq_lengths"] == "query_ends[0:2]:0"
    assert node.inputs["actual_seq_lengths_kv"] == "kv_lens[0:2]:0"
    assert graph["kv_lens[0:2]"].host and graph["kv_lens[0:2]"].attributes["dtype"] == "int64"
    assert graph.count("Pack") == 0


def test_trap_7_static_lists_are_baked_in() -> None:
    graph = ge_graph_of(attend, *attention_inputs(), dynamic=False)
    (node,) = graph.of_type("FusedInferAttentionScore")
    baked = [graph.source(node, slot) for slot in ("actual_seq_lengths", "actual_seq_lengths_kv")]
    assert [const.attributes["value"] for const in baked] == [[1, 8], [1, 1]]


def test_trap_7_lengths_cannot_be_read_from_a_tensor() -> None:
    def step(x, length):
        return x + aten._local_scalar_dense.default(length)

    with pytest.raises(ConversionError, match=r"aten\._local_scalar_dense\.default") as failed:
        ge_graph_of(step, half(3), torch.tensor(2))
    assert failed.value.node == "_local_scalar_dense_default"


def gemma(x, gamma):
    return npu.npu_gemma_rms_norm.default(x, gamma, 1e-5)[0]


def add_layer_norm(a, b, gamma, beta):
    normed = npu.npu_add_layer_norm.default(a, b, gamma, beta, 1e-5, True)
    return normed[0], normed[3]


def gelu_mul(x):
    return npu.npu_gelu_mul.default(x)


def silu(x):
    return npu.npu_silu.default(x)


@pytest.mark.parametrize(
    ("step", "inputs"),
    [
        (gemma, [half(3, 128), half(128)]),
        (add_layer_norm, [half(3, 128), half(3, 128), half(128), half(128)]),
        (gelu_mul, [half(3, 128)]),
        (silu, [half(3, 128)]),
    ],
)
def test_trap_8_operators_without_a_converter(step: Callable[..., Any], inputs: list[torch.Tensor]) -> None:
    no_converter = pytest.raises(ConversionError, match="torchair has no converter for this operator")
    with no_converter as failed:
        ge_graph_of(step, *inputs, own_converters=False)
    assert failed.value.node in failed.value.operator.replace(".", "_")


def test_trap_8_our_converter_of_gemma_rms_norm() -> None:
    (node,) = ge_graph_of(gemma, half(3, 128), half(128)).computing()
    assert (node.type, node.attributes) == ("GemmaRmsNorm", {"epsilon": 1e-5})
    assert node.inputs == {"x": "x:0", "gamma": "gamma:0"}


def test_trap_8_our_converter_of_add_layer_norm() -> None:
    graph = ge_graph_of(add_layer_norm, half(3, 128), half(3, 128), half(128), half(128))
    (node,) = graph.computing()
    assert (node.type, node.attributes) == ("AddLayerNorm", {"epsilon": 1e-5, "additional_output": True})
    assert node.inputs == {"x1": "a:0", "x2": "b:0", "gamma": "gamma:0", "beta": "beta:0"}
    assert graph.outputs == ("AddLayerNorm:0", "AddLayerNorm:3")


def test_trap_8_aten_silu_converts() -> None:
    assert [n.type for n in ge_graph_of(lambda x: aten.silu.default(x), half(3, 128)).computing()] == ["Swish"]


def gate(x):
    return npu.npu_moe_gating_top_k_softmax_v2.default(x, k=2)[0]


def fused_matmul(x, y):
    return npu.npu_fused_matmul.default(x, y, fused_op_type="relu")


def scatter_one(key, slots, cache):
    npu.npu_scatter_pa_cache.value(key, slots, key_cache=cache)
    return cache + 1


@pytest.mark.parametrize(
    ("step", "inputs"),
    [
        (gate, [half(3, 16)]),
        (fused_matmul, [half(3, 16), half(16, 8)]),
        (scatter_one, [half(3, 2, 128), torch.arange(3, dtype=torch.int32), half(4, 16, 2, 128)]),
    ],
)
def test_trap_9_broken_converters(step: Callable[..., Any], inputs: list[torch.Tensor]) -> None:
    with pytest.raises(ConversionError) as failed:
        ge_graph_of(step, *inputs, soc=A2, own_converters=False)
    assert failed.value.reason and failed.value.operator.startswith("npu.npu_")


def test_trap_10_no_fake_kernel() -> None:
    with FakeTensorMode(), pytest.raises(UnsupportedOperatorException):
        npu.npu_top_k_top_p_sample.default(torch.zeros(2, 8), torch.zeros(2, dtype=torch.int32), torch.zeros(2))


def test_trap_10_a_fake_kernel_that_asks_the_device() -> None:
    def step(q):
        return npu.npu_fusion_attention.default(q, q, q, 4, "BNSD")[0]

    with FakeTensorMode(), pytest.raises(RuntimeError):
        step(torch.zeros(1, 4, 8, 128))
    assert ge_graph_of(step, half(1, 4, 8, 128)).count("FlashAttentionScore") == 1


def test_trap_11_defining_before_importing_aborts() -> None:
    script = (
        "import torch; library = torch.library.Library('npu', 'FRAGMENT'); "
        "library.define('npu_silu(Tensor self) -> Tensor'); import torch_npu"
    )
    assert run_python(["-c", script]) == 128 + signal.SIGABRT


def add_norm(a, b, gamma):
    normed = npu.npu_add_rms_norm.default(a, b, gamma)
    return normed[0].float(), normed[2]


def test_trap_12_torchair_fuses_after_our_passes() -> None:
    inputs = half(3, 128), half(3, 128), half(128)
    fused = ge_graph_of(add_norm, *inputs, fusions=True)
    assert [node.type for node in fused.computing()] == ["AddRmsNormCast"]
    kept = convert(traced(add_norm), inputs)
    assert [node.type for node in kept.computing()] == ["AddRmsNorm", "Cast"]


@pytest.mark.parametrize(
    ("operator", "argument", "default"),
    [
        ("npu_fused_infer_attention_score", "scale", 1.0),
        ("npu_fused_infer_attention_score", "num_key_value_heads", 0),
        ("npu_fused_infer_attention_score", "input_layout", "BSH"),
        ("npu_fused_infer_attention_score_v2", "softmax_scale", 1.0),
        ("npu_scatter_pa_kv_cache", "cache_mode", "PA_NZ"),
        ("npu_dequant_swiglu_quant", "activate_left", False),
        ("npu_geglu", "activate_left", False),
    ],
)
def test_trap_13_defaults_that_must_not_be_relied_on(operator: str, argument: str, default: Any) -> None:
    arguments = getattr(npu, operator).default._schema.arguments
    assert next(a.default_value for a in arguments if a.name == argument) == default
