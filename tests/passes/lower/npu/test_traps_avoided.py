"""Lowering steps into none of the traps that test_traps.py of targets/npu shows of the real packages; by number."""

from __future__ import annotations

import functools

import pytest
import torch
from npu_calls import npu_calls

from torch_pagoda.compiler.options import CompileOptions
from torch_pagoda.compiler.pipeline import run_pipeline
from torch_pagoda.compiler.report import CompileReport
from torch_pagoda.passes.graph.fx_nodes import callee
from torch_pagoda.passes.lower.npu.call import Call
from torch_pagoda.runtime.npu_target import NpuTarget
from torch_pagoda.runtime.ops.npu.limits import LIMITS, violations
from torch_pagoda.runtime.step_metadata import StepMetadata

from legal_models import build_legal_model
from shared_graphs import capture

# Write into their arguments without saying so, or hand them out.
SILENT_WRITERS = (
    "npu_kv_rmsnorm_rope_cache npu_mla_prolog npu_mla_prolog_v2 npu_rope_quant_kvcache npu_dequant_rope_quant_kvcache"
).split()
# No converter in torchair, none of ours, and none that works.
UNCONVERTED = (
    "npu_rms_norm_quant npu_swiglu_quant npu_gelu_mul npu_silu npu_mrope "
    "npu_moe_token_permute npu_top_k_top_p npu_gather_pa_kv_cache npu_scatter_pa_cache "
    "npu_advance_step_flashattn npu_format_cast npu_fusion_attention_v2 npu_fusion_attention_v3 "
    "npu_grouped_matmul_swiglu_quant npu_fused_matmul "
    "npu_scatter_list_"
).split()
# Fakes that are missing, or ask a device.
WITHOUT_FAKE = (
    "npu_convert_weight_to_int4pack npu_top_k_top_p_sample npu_moe_init_routing_quant npu_fusion_attention "
    "npu_swiglu_mx_quant_with_dual_axis"
).split()
MODELS = ("llama", "gpt_oss", "cohere", "gpt2", "gemma3_text")


@functools.cache
def lowered(model_type):
    model = build_legal_model(model_type, dtype=torch.bfloat16)
    options = CompileOptions(codegen="none", target="npu", verify="off")
    return run_pipeline(capture(model), options, None, CompileReport(model_type))


def empty(*sizes):
    return torch.empty(*sizes, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize("soc", ["Ascend910B3", "Ascend910_9382"])
def test_trap_1_a_mode_that_would_be_lost_is_illegal_without_its_matrix(soc):
    x, table = empty(1, 5, 4, 64), empty(1, 5, 1, 64)
    operator = torch.ops.npu.npu_rotary_mul.default
    assert violations(Call.make(operator, NpuTarget(soc), x, table, table, "interleave"))
    assert not violations(Call.make(operator, NpuTarget(soc), x, table, table, "interleave", empty(64, 64)))
    rotations = [call for _, call in npu_calls(lowered("cohere"), NpuTarget()) if call.name == "npu_rotary_mul"]
    assert rotations and all(c["rotary_mode"] == "interleave" and c["rotate"] is not None for c in rotations)


@pytest.mark.parametrize("name", SILENT_WRITERS)
def test_trap_2_silent_writers_are_not_in_the_table(name):
    assert name not in LIMITS


@pytest.mark.parametrize("model_type", MODELS)
def test_trap_4_caches_are_whole_inputs_with_one_writer_and_later_readers(model_type):
    traced = lowered(model_type)
    order = {node: i for i, node in enumerate(traced.graph.nodes)}
    for index in range(len(traced.caches)):
        for kind in ("key", "value"):
            cache = traced.placeholder(f"{kind}_cache_{index}")
            writers = [n for n in cache.users if "scatter" in str(n.target)]
            assert len(writers) == 1
            assert all(order[n] > order[writers[0]] for n in cache.users if n not in writers)


@pytest.mark.parametrize("model_type", MODELS)
def test_trap_5_queries_are_counted_on_and_keys_are_not(model_type):
    for _, call in npu_calls(lowered(model_type), NpuTarget()):
        if "infer_attention" in call.name:
            assert call["input_layout"] == "TND"
            assert call["query_lengths"].name == "query_ends"
            assert call["kv_lengths"].name == "kv_lens"
    tensor = torch.tensor
    step = StepMetadata(
        tensor([3, 4, 5]), tensor([[0], [1]]), tensor([0, 2, 3]).int(), tensor([9, 4]).int(), tensor([1]), tensor([0])
    )
    assert (step.query_ends, step.query_lens, step.kv_lens) == ([2, 3], [2, 1], [9, 4])


def test_trap_6_one_is_masked_out_and_the_size_is_fixed():
    traced = lowered("gpt_oss")
    masks = {call["atten_mask"].name for _, call in npu_calls(traced, NpuTarget()) if "attention" in call.name}
    assert masks == {"npu_causal_mask"}  # one for all layers
    mask = traced.constants["npu_causal_mask"]
    assert mask.shape == (2048, 2048)
    assert mask[0, 1] == 1 and mask[1, 0] == 0 and mask[5, 5] == 0


@pytest.mark.parametrize("model_type", MODELS)
def test_trap_7_lengths_are_inputs_and_nothing_is_read_off_a_tensor(model_type):
    traced = lowered(model_type)
    assert not [n for n in traced.graph.nodes if callee(n) in ("_local_scalar_dense", "item", "tolist")]
    assert {"query_ends", "kv_lens"} <= set(traced.step_inputs)
    assert all(isinstance(traced.placeholder(n).meta["example_value"], list) for n in ("query_ends", "kv_lens"))


@pytest.mark.parametrize("name", UNCONVERTED)
def test_trap_8_and_9_what_does_not_convert_is_not_in_the_table(name):
    assert name not in LIMITS


def test_trap_8_what_is_called_where_graphs_are_captured_alone_is_refused_in_ge_graphs():
    arguments = empty(8, 32), torch.empty(8, dtype=torch.int32, device="meta"), empty(4, 2)
    operator = torch.ops.npu.npu_moe_token_unpermute.default
    assert violations(Call.make(operator, NpuTarget(), *arguments)) == ["torchair has no GE converter for it"]
    assert not violations(Call.make(operator, NpuTarget(graph_mode="aclgraph"), *arguments))


@pytest.mark.parametrize("name", WITHOUT_FAKE)
def test_trap_10_what_cannot_be_traced_is_not_in_the_table(name):
    assert name not in LIMITS


@pytest.mark.parametrize("model_type", MODELS)
def test_trap_13_what_has_a_treacherous_default_is_always_said(model_type):
    said = {
        "npu_fused_infer_attention_score": {"inner_precise", "scale", "num_heads", "num_key_value_heads"},
        "npu_fused_infer_attention_score_v2": {"inner_precise", "softmax_scale", "num_query_heads"}
        | {"num_key_value_heads"},
        "npu_scatter_pa_kv_cache": {"cache_mode"},
        "npu_gelu": {"approximate"},
        "npu_clipped_swiglu": {"interleaved", "bias", "alpha", "limit"},
        "npu_moe_init_routing_v2": {"expert_num", "expert_tokens_num_flag", "active_expert_range", "row_idx_type"},
        "npu_grouped_matmul": {"split_item", "group_type", "group_list_type"},
        "npu_moe_finalize_routing": {"drop_pad_mode", "k"},
    }
    seen = 0
    for node, call in npu_calls(lowered(model_type), NpuTarget()):
        assert said.get(call.name, set()) <= set(node.kwargs), call.name
        if call.name == "npu_geglu":
            assert len(node.args) == 4  # the gate is on the left
        if call.name in ("npu_rms_norm", "npu_add_rms_norm", "npu_gemma_rms_norm"):
            assert isinstance(node.args[-1], float)
        if call.name == "npu_add_layer_norm":
            assert node.args[5] is True
        seen += call.name in said
    assert seen


def test_trap_9_a_converter_that_raises_is_not_reached():
    half = torch.bfloat16
    tensors = [torch.empty(9, 2, 16, dtype=half, device="meta") for _ in range(3)]
    options = {
        "beta": torch.empty(9, 2, dtype=half, device="meta"),
        "initial_state": torch.empty(3, 2, 16, 16, dtype=half, device="meta"),
        "actual_seq_lengths": torch.empty(3, dtype=torch.int32, device="meta"),
        "g": torch.empty(9, 2, device="meta"),
    }
    operator = torch.ops.npu.npu_chunk_gated_delta_rule.default
    assert violations(Call.make(operator, NpuTarget(), *tensors, **options)) == [
        "torchair's GE converter for it raises"
    ]
    captured = NpuTarget(graph_mode="aclgraph")
    assert not violations(Call.make(operator, captured, *tensors, **options))
    halved = {**options, "g": options["g"].to(half)}
    assert violations(Call.make(operator, captured, *tensors, **halved)) == [
        "g is torch.bfloat16; it must be float32"
    ]
    wide = {**options, "initial_state": options["initial_state"].float()}
    assert "initial_state is torch.float32" in violations(Call.make(operator, captured, *tensors, **wide))[0]
    a5 = NpuTarget("Ascend950PR", graph_mode="aclgraph")  # the vendor has not released it there
    assert violations(Call.make(operator, a5, *tensors, **options)) == ["Ascend950PR does not run it"]
