"""The limits of each Ascend operator, as data: the table that every call is held against before it is emitted.

The meta functions of torch_npu accept far more than the kernels run. Where they differ, this table judges. Its facts
come from the operator documents of op-plugin (docs/zh) and the tests beside them; where a document is silent on a
chip that torchair's converters and vllm-ascend use the operator on, the chip is listed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ....runtime.ops.npu.moe_routing import MAX_UNPERMUTED_CHOICES
from ....runtime.ops.npu.rope import INTERLEAVED_DIM, MAX_ROTARY_DIM
from ...graph.npu_target import Product
from .attention_limits import ATTENTION_RULES, CACHE_WRITE_RULES, PROMPT_RULES, RULES_V2
from .call import Call
from .latent.limits import KV_RMSNORM_ROPE_CACHE_RULES, PROLOG_ALIKE, PROLOG_RULES, TRANSPOSE_BATCHMATMUL_RULES
from .moe_limits import chosen_experts, expert_groups, gated_experts, grouped_matmul, rounded_rows, routed_experts
from .quant_limits import (
    norm_by_scales,
    one_quantised_result,
    per_row_int8,
    quant_matmul,
    quantized_by_scales,
    swiglu_of_left_half,
    weight_quant_matmul,
)
from .rope_limits import ROTARY_RULES
from .sparse_limits import INDEXER_RULES, SPARSE_RULES
from .state_limits import chunk_state, delta_shapes, eager_or_captured, float32_decays

Rule = Callable[[Call], str]
"""Says why a call is not legal; "" when it is, as far as the rule goes."""

A2, A3, A5, INFERENCE = Product.A2, Product.A3, Product.A5, Product.INFERENCE
DENSE_INPUTS = (
    *("query", "key", "value", "query_rope", "key_rope", "atten_mask", "pse_shift"),
    *("key_antiquant_scale", "value_antiquant_scale"),
)
HALF = frozenset({torch.float16, torch.bfloat16})
FLOAT = HALF | {torch.float32}
INDEX = frozenset({torch.int32, torch.int64})
INT8 = frozenset({torch.int8})


@dataclass(frozen=True)
class Limits:
    """The limits of one operator.

    Attributes:
        products: chips that run it.
        dtypes: argument → dtypes; arguments that are not named take any.
        alike: groups of arguments that have one dtype.
        ranks: argument → numbers of dims.
        rules: what cannot be said that way.
    """

    products: frozenset[Product]
    dtypes: Mapping[str, frozenset[torch.dtype]] = field(default_factory=dict)
    alike: Sequence[Sequence[str]] = ()
    ranks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    rules: Sequence[Rule] = ()


def multiple(argument: str, dim: int, of: int) -> Rule:
    """Dim ``dim`` of a tensor is a multiple of ``of``."""

    def check(call: Call) -> str:
        size = call.shape(argument)[dim] if call.shape(argument) else None
        return f"dim {dim} of {argument} is {size}, no multiple of {of}" if size is not None and size % of else ""

    return check


def below(argument: str, dim: int, bound: int) -> Rule:
    """Dim ``dim`` of a tensor is below ``bound``."""

    def check(call: Call) -> str:
        size = call.shape(argument)[dim] if call.shape(argument) else None
        return f"dim {dim} of {argument} is {size}; it must be below {bound}" if size and size >= bound else ""

    return check


def sizes(argument: str, dim: int, allowed: Sequence[int]) -> Rule:
    """Dim ``dim`` of a tensor is one of a few sizes."""

    def check(call: Call) -> str:
        size = call.shape(argument)[dim] if call.shape(argument) else None
        if size is None or size in allowed:
            return ""
        return f"dim {dim} of {argument} is {size}; it must be {' or '.join(map(str, allowed))}"

    return check


def given(argument: str, *allowed: Any) -> Rule:
    """An argument that is no tensor has one of a few values."""

    def check(call: Call) -> str:
        found = call[argument]
        return "" if found in allowed else f"{argument} is {found!r}; it must be {' or '.join(map(repr, allowed))}"

    return check


def dense(*arguments: str) -> Rule:
    """Tensors without gaps, which the kernel reads by their sizes alone. In GE graphs every tensor is."""

    def check(call: Call) -> str:
        if call.target.graph_mode == "ge":
            return ""
        for name, tensor in call.tensors().items():
            if name.partition("[")[0] in arguments and not tensor.is_contiguous():
                return f"{name} is not contiguous"
        return ""

    return check


def captured_only(call: Call) -> str:
    """An operator that torchair does not convert, and that is called as it is where graphs are captured."""
    return "torchair has no GE converter for it" if call.target.graph_mode == "ge" else ""


def _weight_is_last_dim(call: Call) -> str:
    x, gamma = call.shape(next(iter(call.arguments))), call.shape("gamma")
    return "" if len(gamma) == 1 and gamma[0] == x[-1] else f"gamma is {gamma}, the input {x}"


def on_inference_chip(rule: Rule) -> Rule:
    """``rule`` on the inference chip alone."""
    return lambda call: rule(call) if call.target.product is INFERENCE else ""


def _even_split(call: Call) -> str:
    shape = call.shape("input") if "input" in call.arguments else call.shape("x")
    size = shape[call["dim"]]
    return f"dim {call['dim']} is {size}; it must be even" if size is None or size % 2 else ""


def _matrix_product(call: Call) -> str:
    x, weight, bias = call.shape("input"), call.shape("weight"), call.shape("bias")
    if x[1] != weight[1]:
        return f"input is {x} and weight {weight}"
    return f"bias is {bias}, weight {weight}" if bias and bias != weight[:1] else ""


LIMITS: dict[str, Limits] = {
    "npu_rms_norm": Limits(
        frozenset({A2, A3, A5, INFERENCE}),
        {"input": FLOAT, "gamma": FLOAT},
        rules=[
            _weight_is_last_dim,
            lambda c: (
                ""
                if c.dtype("gamma") in (c.dtype("input"), torch.float32)
                else f"gamma is {c.dtype('gamma')}; it must have the dtype of the input or be float32"
            ),
            on_inference_chip(
                lambda c: "" if c.dtype("gamma") is c.dtype("input") else "gamma must have the dtype of the input"
            ),
        ],
    ),
    # Of 950 this operator's documents name Ascend 950DT alone. Taken for 950PR as well; to be confirmed on a device.
    "npu_add_rms_norm": Limits(
        frozenset({A2, A3, A5, INFERENCE}),
        {"x1": FLOAT},
        alike=[("x1", "x2", "gamma")],
        rules=[_weight_is_last_dim],
    ),
    "npu_gemma_rms_norm": Limits(
        frozenset({A2, A3, A5}), {"input": FLOAT}, alike=[("input", "gamma")], rules=[_weight_is_last_dim]
    ),
    "npu_add_layer_norm": Limits(
        frozenset({A2, A3, A5}),
        {"x1": FLOAT},
        alike=[("x1", "x2"), ("gamma", "beta")],
        rules=[_weight_is_last_dim],
    ),
    "npu_swiglu": Limits(frozenset({A2, A3, A5}), {"input": FLOAT}, rules=[_even_split, dense("input")]),
    "npu_geglu": Limits(
        frozenset({A2, A3, A5}), {"input": FLOAT}, rules=[_even_split, given("approximate", 0, 1), dense("input")]
    ),
    "npu_clipped_swiglu": Limits(frozenset({A2, A3, A5}), {"x": FLOAT}, rules=[_even_split, dense("x")]),
    "npu_gelu": Limits(
        frozenset({A2, A3, A5, INFERENCE}), {"input": FLOAT}, rules=[given("approximate", "none", "tanh")]
    ),
    # Other chips compute another formula under this name.
    "npu_fast_gelu": Limits(frozenset({A2, A3}), {"input": FLOAT}),
    "npu_rotary_mul": Limits(
        frozenset({A2, A3, A5, INFERENCE}),
        {"input": FLOAT},
        # The eager kernel casts cos and sin to the dtype of the input, the graph engine does not.
        alike=[("input", "r1", "r2")],
        ranks={"input": (4,)},
        rules=[*ROTARY_RULES, below("input", -1, MAX_ROTARY_DIM)],
    ),
    "npu_interleave_rope": Limits(
        frozenset({A2, A3}),
        {"x": HALF},
        alike=[("x", "cos", "sin")],
        ranks={"x": (4,), "cos": (4,), "sin": (4,)},
        rules=[sizes("x", -1, (INTERLEAVED_DIM,)), sizes("cos", 1, (1,)), dense("x", "cos", "sin")],
    ),
    # The document lists float32, float16, int32 and int8 alone. It is older than the kernel, which is aclnnMatmul
    # (GE: MatMul) with a transposed weight: those take bfloat16, and plain linear layers of bf16 models run on them.
    "npu_linear": Limits(
        frozenset({A2, A3, INFERENCE}),
        {"input": FLOAT},
        alike=[("input", "weight")],
        ranks={"input": (2,), "weight": (2,)},
        rules=[_matrix_product],
    ),
    "npu_scatter_pa_kv_cache": Limits(
        frozenset({A2, A3, A5}),
        {"slot_mapping": INDEX},
        alike=[("key", "value", "key_cache", "value_cache")],
        ranks={"key": (3,), "value": (3,), "key_cache": (4,), "value_cache": (4,)},
        rules=[*CACHE_WRITE_RULES, dense("key", "value", "key_cache", "value_cache")],
    ),
    "npu_fused_infer_attention_score": Limits(
        frozenset({A2, A3, A5}),
        {"query": HALF, "block_table": frozenset({torch.int32})},
        alike=[("key", "value")],
        rules=[*ATTENTION_RULES, dense(*DENSE_INPUTS)],
    ),
    "npu_fused_infer_attention_score_v2": Limits(
        frozenset({A2, A3, A5}),
        {"query": HALF, "block_table": frozenset({torch.int32})},
        alike=[("key", "value")],
        rules=[*ATTENTION_RULES, *RULES_V2, dense(*DENSE_INPUTS)],
    ),
    "npu_prompt_flash_attention": Limits(
        frozenset({A2, A3, INFERENCE}),
        {"query": HALF},
        alike=[("query", "key", "value")],
        rules=[*PROMPT_RULES, dense(*DENSE_INPUTS)],
    ),
    "npu_moe_gating_top_k_softmax": Limits(
        frozenset({A2, A3, A5}),
        {"x": FLOAT},
        ranks={"x": (2, 3)},
        rules=[chosen_experts],
    ),
    "npu_moe_gating_top_k": Limits(
        frozenset({A2, A3, A5}), {"x": FLOAT}, alike=[("x", "bias")], ranks={"x": (2,)}, rules=[expert_groups]
    ),
    "npu_moe_init_routing_v2": Limits(
        frozenset({A2, A3, A5, INFERENCE}),
        {"x": FLOAT, "expert_idx": frozenset({torch.int32})},
        ranks={"x": (2,), "expert_idx": (2,)},
        rules=[
            given("drop_pad_mode", 0),
            rounded_rows,
            given("expert_tokens_num_flag", True),
            routed_experts,
            # Whatever is asked for, this chip says where each expert's rows end.
            on_inference_chip(given("expert_tokens_num_type", 0)),
        ],
    ),
    "npu_grouped_matmul": Limits(frozenset({A2, A3, A5, INFERENCE}), rules=[grouped_matmul]),
    "npu_grouped_matmul_swiglu_quant_v2": Limits(
        frozenset({A2, A3, A5}),
        {"x": INT8, "group_list": frozenset({torch.int64})},
        ranks={"x": (2,), "x_scale": (1,), "group_list": (1,)},
        rules=[gated_experts],
    ),
    # op-plugin names A2 alone, the README of CANN's own moe_finalize_routing_v2 (ops-transformer) all of these.
    "npu_moe_finalize_routing": Limits(
        frozenset({A2, A3, A5}),
        {"expanded_permuted_rows": FLOAT, "expanded_src_to_dst_row": frozenset({torch.int32})},
        alike=[("expanded_permuted_rows", "skip1", "skip2", "bias", "scales")],
        rules=[given("drop_pad_mode", 0, 1, 2, 3)],
    ),
    # No document names 950; vllm-ascend runs it there.
    "npu_moe_token_unpermute": Limits(
        frozenset({A2, A3, A5}),
        {"permuted_tokens": FLOAT, "sorted_indices": frozenset({torch.int32})},
        alike=[("permuted_tokens", "probs")],
        ranks={"permuted_tokens": (2,), "sorted_indices": (1,), "probs": (2,)},
        rules=[
            captured_only,
            given("padded_mode", False),
            given("restore_shape", None),
            below("probs", 1, MAX_UNPERMUTED_CHOICES + 1),
            dense("permuted_tokens", "sorted_indices", "probs"),
        ],
    ),
    "npu_transpose_batchmatmul": Limits(
        frozenset({A2, A3}),
        {"input": FLOAT},
        alike=[("input", "weight")],
        ranks={"input": (3,), "weight": (3,)},
        rules=TRANSPOSE_BATCHMATMUL_RULES,
    ),
    "npu_kv_rmsnorm_rope_cache_v2": Limits(
        frozenset({A2, A3}),
        {"kv": HALF, "index": frozenset({torch.int64})},
        alike=[("kv", "gamma", "cos", "sin", "k_cache", "ckv_cache")],
        ranks={"kv": (4,), "gamma": (1,), "cos": (4,), "index": (1,), "k_cache": (4,), "ckv_cache": (4,)},
        rules=[*KV_RMSNORM_ROPE_CACHE_RULES, dense("kv", "cos", "sin", "k_cache", "ckv_cache")],
    ),
    "npu_mla_prolog_v3": Limits(
        frozenset({A2, A3, A5}),
        {"token_x": frozenset({torch.bfloat16}), "cache_index": frozenset({torch.int64})},
        alike=[PROLOG_ALIKE],
        ranks={"token_x": (2,), "weight_dq": (2,), "weight_uk": (3,), "kv_cache": (4,), "kr_cache": (4,)},
        rules=[*PROLOG_RULES, dense("token_x", "rope_sin", "rope_cos", "kv_cache", "kr_cache")],
    ),
    "npu_chunk_gated_delta_rule": Limits(
        frozenset({A2, A3, A5}),
        {"query": frozenset({torch.bfloat16}), "actual_seq_lengths": frozenset({torch.int32})},
        alike=[("query", "key", "value", "beta")],
        ranks={"query": (3,), "value": (3,), "beta": (2,), "initial_state": (4,), "actual_seq_lengths": (1,)},
        rules=[
            eager_or_captured,
            delta_shapes,
            float32_decays,
            chunk_state,
            dense("query", "key", "value", "beta", "initial_state", "g", "actual_seq_lengths"),
        ],
    ),
    "npu_lightning_indexer": Limits(
        frozenset({A2, A3, A5}),
        {"query": HALF},
        alike=[("query", "key")],
        ranks={"query": (3,), "key": (4,), "weights": (2,), "block_table": (2,)},
        rules=[*INDEXER_RULES, dense("query", "key", "weights")],
    ),
    "npu_sparse_flash_attention": Limits(
        frozenset({A2, A3, A5}),
        {"query": HALF, "sparse_indices": frozenset({torch.int32})},
        alike=[("query", "key", "value", "query_rope", "key_rope")],
        ranks={"query": (3,), "query_rope": (3,), "key": (4,), "key_rope": (4,), "sparse_indices": (3,)},
        rules=[*SPARSE_RULES, dense("query", "key", "value", "query_rope", "key_rope", "sparse_indices")],
    ),
    "npu_dynamic_quant": Limits(
        frozenset({A2, A3, A5}), {"input": HALF}, ranks={"input": tuple(range(2, 9))}, rules=[per_row_int8]
    ),
    "npu_quantize": Limits(
        frozenset({A2, A3, INFERENCE}),
        {
            "input": FLOAT,
            "scales": frozenset({torch.float32, torch.bfloat16}),
            "zero_points": frozenset({torch.int8, torch.uint8, torch.int32, torch.bfloat16}),
        },
        ranks={"scales": (1,), "zero_points": (1,)},
        rules=[quantized_by_scales],
    ),
    # The document names no 950; torchair has a branch of its own for it (QuantBatchMatmulV4).
    "npu_quant_matmul": Limits(
        frozenset({A2, A3, A5, INFERENCE}),
        {
            "x1": INT8,
            "x2": frozenset({torch.int8, torch.int32}),
            "scale": frozenset({torch.float32, torch.bfloat16, torch.int64}),
        },
        ranks={"x1": (2,), "x2": (2,), "scale": (1, 2), "pertoken_scale": (1, 2), "bias": (1,)},
        rules=[quant_matmul, dense("x1")],
    ),
    "npu_weight_quant_batchmatmul": Limits(
        frozenset({A2, A3, INFERENCE}),
        {"x": HALF, "weight": frozenset({torch.int8, torch.int32})},
        alike=[("x", "antiquant_scale", "antiquant_offset")],
        ranks={"x": (2,), "weight": (2,)},
        rules=[weight_quant_matmul, given("inner_precise", 0)],
    ),
    "npu_add_rms_norm_dynamic_quant": Limits(
        frozenset({A2, A3, A5}),
        {"x1": HALF},
        alike=[("x1", "x2", "gamma")],
        ranks={"x1": tuple(range(2, 9)), "gamma": (1,)},
        rules=[_weight_is_last_dim, one_quantised_result],
    ),
    "npu_add_rms_norm_quant": Limits(
        frozenset({A2, A3, INFERENCE}),
        {"x1": HALF},
        alike=[("x1", "x2", "gamma")],
        ranks={"x1": tuple(range(1, 9)), "gamma": (1,), "scales1": (1,), "zero_points1": (1,)},
        rules=[_weight_is_last_dim, norm_by_scales],
    ),
    "npu_dequant_swiglu_quant": Limits(
        frozenset({A2, A3}),
        {"x": HALF | {torch.int32}},
        ranks={"x": (2,)},
        rules=[swiglu_of_left_half, dense("x")],
    ),
    # op-plugin names no 950; the README of CANN's own scatter_nd_update (ops-nn) does, and vllm-ascend runs it there.
    "npu_scatter_nd_update_": Limits(
        frozenset({A2, A3, A5, INFERENCE}),
        {"indices": INDEX},
        alike=[("input", "updates")],
        rules=[
            on_inference_chip(
                lambda c: f"input is {torch.int8}, which it does not write" if c.dtype("input") is torch.int8 else ""
            )
        ],
    ),
}
"""Operator → its limits. Lowering emits no ``npu::`` operator that is not in here, and each of them has a converter
in torchair or one of ours, ``compiler.targets.npu.ge.converters``, or a rule that refuses it for graphs of GE."""


def violations(call: Call) -> list[str]:
    """The reasons why ``call`` is not legal on its chip; [] when it is."""
    limits = LIMITS.get(call.name)
    if limits is None:
        return [f"{call.name} is not in the table of limits"]
    found = []
    if call.target.product not in limits.products:
        found.append(f"{call.target.soc} does not run it")
    elif call.target.product is INFERENCE and torch.bfloat16 in map(call.target.counted, _dtypes(call)):
        found.append(f"{call.target.soc} has no bfloat16")
    for name, allowed in limits.dtypes.items():
        dtype = call.dtype(name)
        if dtype is not None and dtype not in allowed:
            found.append(f"{name} is {dtype}; it must be {' or '.join(sorted(map(str, allowed)))}")
    for names in limits.alike:
        dtypes = {name: call.dtype(name) for name in names if call.dtype(name) is not None}
        if len(set(dtypes.values())) > 1:
            found.append("dtypes differ: " + ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items()))
    for name, ranks in limits.ranks.items():
        shape = call.shape(name)
        if call.tensor(name) is not None and len(shape) not in ranks:
            found.append(f"{name} has {len(shape)} dims; it must have {' or '.join(map(str, ranks))}")
    if not found:  # the rules take ranks for granted
        found = [reason for rule in limits.rules if (reason := rule(call))]
    return found


def _dtypes(call: Call) -> list[torch.dtype]:
    return [tensor.dtype for tensor in call.tensors().values()]
