"""What each Ascend operator takes, as data: the table that every call is held against before it is emitted.

The meta functions of torch_npu accept far more than the kernels run. Where they differ, this table judges. Its facts
come from the operator documents of op-plugin (docs/zh) and the tests beside them; where a document is silent on a
chip that torchair's converters and vllm-ascend use the operator on, the chip is listed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ...traced import TracedGraph
from .attention_limits import ATTENTION_RULES, CACHE_WRITE_RULES, PROMPT_RULES, RULES_V2
from .call import Call
from .latent_limits import (
    KV_RMSNORM_ROPE_CACHE_RULES,
    PROLOG_ALIKE,
    PROLOG_RULES,
    TRANSPOSE_BATCHMATMUL_RULES,
)
from .target import NpuTarget, Product

Rule = Callable[[Call], str]
"""Says why a call is not legal; "" when it is, as far as the rule goes."""

A2, A3, A5, INFERENCE = Product.A2, Product.A3, Product.A5, Product.INFERENCE
HALF = frozenset({torch.float16, torch.bfloat16})
FLOAT = HALF | {torch.float32}
INDEX = frozenset({torch.int32, torch.int64})


@dataclass(frozen=True)
class Limits:
    """What one operator takes.

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


def _weight_is_last_dim(call: Call) -> str:
    x, gamma = call.shape(next(iter(call.arguments))), call.shape("gamma")
    return "" if len(gamma) == 1 and gamma[0] == x[-1] else f"gamma is {gamma}, the input {x}"


def _rotary_layout(call: Call) -> str:
    """x [B, S, N, D] with cos and sin [B or 1, S, 1, D]; D even."""
    x, cos, sin = call.shape("input"), call.shape("r1"), call.shape("r2")
    if cos != sin or len(cos) != 4 or cos[2] != 1:
        return f"r1 is {cos} and r2 {sin}; both must be [B or 1, S, 1, D]"
    if cos[3] != x[3] or x[3] is None or x[3] % 2:
        return f"r1 has {cos[3]} entries, a head {x[3]} dims; they must agree and be even"
    batch, _, heads, _ = x
    if cos[0] not in (1, batch):
        return f"r1 has batch {cos[0]}, the input {batch}"
    if heads is None or heads >= 1000 or (batch is not None and batch >= 1000):
        return f"batch {batch} and heads {heads} must be below 1000"
    return ""


def _rotary_mode(call: Call) -> str:
    mode, rotate, product = call["rotary_mode"], call["rotate"], call.target.product
    if mode == "half":
        return ""
    if mode != "interleave":
        return f"rotary_mode is {mode!r}; it must be 'half' or 'interleave'"
    if product is A5:
        return "" if rotate is None else "rotate is not for this chip, which knows the mode itself"
    # Without the matrix torchair emits RotaryMul on these chips, which has no mode and rotates halves.
    if rotate is None:
        return "without rotate the graph engine ignores rotary_mode='interleave' on this chip"
    dim = call.shape("input")[-1]
    return "" if call.shape("rotate") == (dim, dim) else f"rotate is {call.shape('rotate')}; it must be {(dim, dim)}"


def _even_split(call: Call) -> str:
    shape = call.shape("input") if "input" in call.arguments else call.shape("x")
    size = shape[call["dim"]]
    return f"dim {call['dim']} is {size}; it must be even" if size is None or size % 2 else ""


def _matrix_product(call: Call) -> str:
    x, weight, bias = call.shape("input"), call.shape("weight"), call.shape("bias")
    if x[1] != weight[1]:
        return f"input is {x} and weight {weight}"
    return f"bias is {bias}, weight {weight}" if bias and bias != weight[:1] else ""


def _expert_groups(call: Call) -> str:
    experts, groups = call.shape("x")[-1], call["group_count"]
    if experts is None or experts > 2048 or experts % groups:
        return f"{experts} experts in {groups} groups; at most 2048, in equal groups"
    size = experts // groups
    if size <= 2 and groups > 1:
        return f"groups of {size} experts; more than 2"
    if -(-size // 32) * 32 * groups > 2048:
        return f"{groups} groups of {size} experts, filled up to multiples of 32, are more than 2048"
    if call["renorm"] != 0 or call["norm_type"] not in (0, 1) or call["group_select_mode"] not in (0, 1):
        return "renorm must be 0, norm_type and group_select_mode 0 or 1"
    return (
        "" if 0 < call["k"] <= size * call["k_group"] else f"k is {call['k']}, of {call['k_group']} groups of {size}"
    )


def _grouped_matmul(call: Call) -> str:
    """One tensor of rows, one of matrices [E, K, N], groups of rows given by a tensor of int64."""
    if call["group_type"] != 0 or call["split_item"] not in (2, 3) or call["group_list_type"] not in (0, 1):
        return "group_type must be 0, split_item 2 or 3, group_list_type 0 or 1"
    tensors = call.tensors()
    x, weight, groups = tensors["x[0]"], tensors["weight[0]"], tensors.get("group_list")
    dtype = call.target.counted(x.dtype)
    if dtype not in HALF or call.target.counted(weight.dtype) is not dtype:
        return f"rows of {dtype} and matrices of {weight.dtype}; both float16 or both bfloat16"
    if groups is None or groups.dtype is not torch.int64:
        return "group_list must be a tensor of int64"
    if weight.dim() != 3 or x.dim() != 2 or weight.shape[1] != x.shape[1]:
        return f"rows {tuple(x.shape)} and matrices {tuple(weight.shape)}"
    if max(int(weight.shape[1]), int(weight.shape[2])) >= 65536:
        return f"matrices of {tuple(weight.shape[1:])}; inner sizes below 65536"
    bias = tensors.get("bias[0]")
    if bias is not None:
        wanted = torch.float32 if dtype is torch.bfloat16 else torch.float16
        if bias.dtype is not wanted:
            return f"a bias of {bias.dtype}; {wanted} beside {dtype}"
    return ""


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
        ],
    ),
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
        rules=[_rotary_layout, _rotary_mode, below("input", -1, 896)],
    ),
    "npu_interleave_rope": Limits(
        frozenset({A2, A3}),
        {"x": HALF},
        alike=[("x", "cos", "sin")],
        ranks={"x": (4,), "cos": (4,), "sin": (4,)},
        rules=[sizes("x", -1, (64,)), sizes("cos", 1, (1,))],
    ),
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
        alike=[("query", "key", "value")],
        rules=[*ATTENTION_RULES, dense("query", "key", "value")],
    ),
    "npu_fused_infer_attention_score_v2": Limits(
        frozenset({A2, A3, A5}),
        {"query": HALF, "block_table": frozenset({torch.int32})},
        alike=[("query", "key", "value")],
        rules=[*ATTENTION_RULES, *RULES_V2, dense("query", "key", "value")],
    ),
    "npu_prompt_flash_attention": Limits(
        frozenset({A2, A3, INFERENCE}),
        {"query": HALF},
        alike=[("query", "key", "value")],
        rules=[*PROMPT_RULES, dense("query", "key", "value")],
    ),
    "npu_moe_gating_top_k_softmax": Limits(
        frozenset({A2, A3, A5}),
        {"x": FLOAT},
        ranks={"x": (2, 3)},
        rules=[lambda c: "" if 0 < c["k"] <= 1024 else f"k is {c['k']}; at most 1024"],
    ),
    "npu_moe_gating_top_k": Limits(
        frozenset({A2, A3, A5}), {"x": FLOAT}, alike=[("x", "bias")], ranks={"x": (2,)}, rules=[_expert_groups]
    ),
    "npu_moe_init_routing_v2": Limits(
        frozenset({A2, A3, A5, INFERENCE}),
        {"x": FLOAT, "expert_idx": frozenset({torch.int32})},
        ranks={"x": (2,), "expert_idx": (2,)},
        rules=[
            given("drop_pad_mode", 0),
            given("quant_mode", -1),
            given("expert_tokens_num_flag", True),
            lambda c: "" if 0 < c["expert_num"] <= 10240 else f"{c['expert_num']} experts",
        ],
    ),
    "npu_grouped_matmul": Limits(frozenset({A2, A3, A5, INFERENCE}), rules=[_grouped_matmul]),
    # Documented for A2, whose cores A3 has two dies of.
    "npu_moe_finalize_routing": Limits(
        frozenset({A2, A3}),
        {"expanded_permuted_rows": FLOAT, "expanded_src_to_dst_row": frozenset({torch.int32})},
        alike=[("expanded_permuted_rows", "skip1", "skip2", "bias", "scales")],
        rules=[given("drop_pad_mode", 0, 1, 2, 3)],
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
    "npu_scatter_nd_update_": Limits(
        frozenset({A2, A3, INFERENCE}), {"indices": INDEX}, alike=[("input", "updates")]
    ),
}
"""Operator → its limits. Lowering emits no ``npu::`` operator that is not in here, and each of them has a converter
in torchair or one of ours, ``compiler.targets.npu.converters``."""


def violations(call: Call) -> list[str]:
    """Why ``call`` is not legal on its chip; [] when it is."""
    limits = LIMITS.get(call.name)
    if limits is None:
        return [f"{call.name} is not in the table of limits"]
    found = []
    if call.target.product not in limits.products:
        found.append(f"{call.target.soc} does not run it")
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


def npu_calls(traced: TracedGraph, target: NpuTarget) -> Iterator[tuple[fx.Node, Call]]:
    """Every call of an ``npu::`` operator in a graph."""
    for node in traced.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "npu":
            yield node, Call.of(node, target)


def illegal_calls(traced: TracedGraph, target: NpuTarget) -> list[str]:
    """The ``npu::`` calls of a graph that break a limit, each with its reasons."""
    return [
        f"{node.name} ({call.name}): {'; '.join(reasons)}"
        for node, call in npu_calls(traced, target)
        if (reasons := violations(call))
    ]
