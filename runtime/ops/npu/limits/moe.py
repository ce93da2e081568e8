"""Limits of the operators of mixtures of experts: op-plugin docs npu_moe_gating_top_k, npu_moe_gating_top_k_softmax,
npu_moe_init_routing_v2, npu_grouped_matmul and npu_grouped_matmul_swiglu_quant_v2, and CANN's
aclnnMoeGatingTopKSoftmaxV2."""

from __future__ import annotations

import torch

from ..int4 import PER_INT32
from ..numerics import DTYPES_BY_CODE
from .call import Call
from .quantized import INT4_GROUP
from .rules import (
    A2,
    A3,
    A5,
    FLOAT,
    INFERENCE,
    INT8,
    INT32,
    INT64,
    Limits,
    below,
    captured_only,
    dense,
    given,
    lowered,
    on_inference_chip,
    shaped,
    stored_as,
)

_MAX_CHOSEN_EXPERTS = 1024
"""k of npu_moe_gating_top_k_softmax and its second version."""
_LEAST_RENORMED_EXPERTS = 32
"""E of npu_moe_gating_top_k_softmax_v2 where the softmax is over the chosen."""
_MAX_SCORED_EXPERTS = 2048
"""E of npu_moe_gating_top_k, and of its groups filled up to multiples of 32."""
_MAX_EXPERTS, _MAX_EXPERTS_IN_PAIRS = 10240, 5120
"""Of npu_moe_init_routing_v2; the second where it counts in pairs (expert_tokens_num_type 2)."""
_MAX_UNPERMUTED_CHOICES = 512
"""Rows that npu_moe_token_unpermute adds to one token at most."""
_MAX_GROUPS = 1024
"""Of npu_grouped_matmul."""
_A5_GROUPS = (32, 64, 128, 256)
"""Inputs that may share a scale of matrices of 4 bits on 950."""
MAX_INT4_INPUTS = 18432
"""Of K beside int8 rows and matrices of 4 bits."""
_MAX_GATED_OUTPUTS = 10240
"""Of N of npu_grouped_matmul_swiglu_quant_v2, gate and up together."""
_MAX_GATED_INPUTS, _MAX_GATED_INT4_INPUTS = 65535, 19999
"""Of its K, beside matrices of 8 and of 4 bits."""
_GATED_TILE = (16, 32)
"""What divides K and N of its matrices of int8, which it reads in FRACTAL_NZ."""


def _expert_groups(call: Call) -> str:
    experts, groups = call.shape("x")[-1], call["group_count"]
    if experts is None or experts > _MAX_SCORED_EXPERTS or groups < 1 or experts % groups:
        return f"{experts} experts in {groups} groups; at most {_MAX_SCORED_EXPERTS}, in equal groups"
    size = experts // groups
    if size <= 2:
        return f"groups of {size} experts; more than 2"
    if not 0 < call["k_group"] <= groups:
        return f"k_group is {call['k_group']}, of {groups} groups"
    if -(-size // 32) * 32 * groups > _MAX_SCORED_EXPERTS:
        return f"{groups} groups of {size} experts, filled up to multiples of 32, are more than {_MAX_SCORED_EXPERTS}"
    if call["renorm"] != 0 or call["norm_type"] not in (0, 1) or call["group_select_mode"] not in (0, 1):
        return "renorm must be 0, norm_type and group_select_mode 0 or 1"
    return (
        "" if 0 < call["k"] <= size * call["k_group"] else f"k is {call['k']}, of {call['k_group']} groups of {size}"
    )


def _chosen_experts(call: Call) -> str:
    experts, k = call.shape("x")[-1], call["k"]
    if 0 < k <= _MAX_CHOSEN_EXPERTS and (experts is None or k <= experts):
        return ""
    return f"k is {k}, of {experts} experts; at most {_MAX_CHOSEN_EXPERTS}"


def _renormed_experts(call: Call) -> str:
    """What the kernel of the second version makes of softmaxes over the chosen (ops-transformer,
    ``moe_gating_top_k_softmax_v2``: its tiling for ``renorm`` divides by the multiple of 32 that the experts hold,
    and the kernel takes the softmax of float16 in float16)."""
    experts = call.shape("x")[-1]
    if call["renorm"] != 1:
        return ""
    if call.dtype("x") is torch.float16:
        return "x is torch.float16, in which the softmax over the chosen would be taken; torch.float32 or bfloat16"
    least = _LEAST_RENORMED_EXPERTS
    return f"{experts} experts; at least {least} with renorm 1" if experts and experts < least else ""


def _routed_experts(call: Call) -> str:
    most = _MAX_EXPERTS_IN_PAIRS if call["expert_tokens_num_type"] == 2 else _MAX_EXPERTS
    return "" if 0 < call["expert_num"] <= most else f"{call['expert_num']} experts; at most {most}"


def _grouped_matmul(call: Call) -> str:
    """One tensor of rows, one of matrices [E, K, N], groups of rows given by a tensor of int64."""
    if call["group_type"] != 0 or call["split_item"] not in (2, 3) or call["group_list_type"] not in (0, 1):
        return "group_type must be 0, split_item 2 or 3, group_list_type 0 or 1"
    x, weight, groups = (call.tensor(name) for name in ("x[0]", "weight[0]", "group_list"))
    if x is None or weight is None or (call.is_reference and weight.is_floating_point()):
        return ""  # the reference takes more forms of these, and refuses by itself
    if groups is None or groups.dtype is not torch.int64 or groups.dim() != 1:
        return "group_list must be a tensor of int64"
    if len(call["weight"]) != 1 or weight.dim() != 3 or x.dim() != 2 or weight.shape[1] != x.shape[1]:
        return f"rows {tuple(x.shape)} and matrices {tuple(weight.shape)}"
    inputs, outputs = int(weight.shape[1]), int(weight.shape[2]) * (PER_INT32 if weight.dtype is torch.int32 else 1)
    if call.target.product is INFERENCE and outputs % 16:
        return f"matrices of {outputs} outputs; a multiple of 16 on this chip"
    if max(inputs, outputs) >= 65536:
        return f"matrices of {(inputs, outputs)}; inner sizes below 65536"
    if groups.shape[0] > _MAX_GROUPS:
        return f"{groups.shape[0]} groups; at most {_MAX_GROUPS}"
    return _grouped_dtypes(call, x, weight, (weight.shape[0], outputs))


def _gated_experts(call: Call) -> str:
    """npu_grouped_matmul_swiglu_quant_v2: rows of int8 by int8, which A2 and A3 read in FRACTAL_NZ and 950 in rows,
    or by 4 bits, which 950 does not take. The GE converter hands on the int32 that hold these as they are."""
    modes = {"dequant_dtype": 6, "quant_mode": 0, "quant_dtype": 1}
    for name, only in modes.items():
        if call[name] != only:
            return f"{name} is {call[name]}; it must be {only}"
    given = [name for name in ("smooth_scale", "bias", "x_dtype", "weight_dtype") if call[name] is not None]
    if given:
        return f"{given[0]} is given"
    lists = ("weight", "weight_scale", "weight_assist_matrix")
    weight, scale, assist = (call.tensor(f"{name}[0]") for name in lists)
    if weight is None or scale is None or weight.dim() != 3 or call["group_list_type"] not in (0, 1):
        return "weight must be [E, K, N], group_list_type 0 or 1"
    several = [name for name in lists if call[name] is not None and len(call[name]) != 1]
    if several:
        return f"{several[0]} holds {len(call[several[0]])} tensors; it must hold one"
    if weight.dtype not in (torch.int8, torch.int32):
        return f"weight is {weight.dtype}; torch.int8, or eight of 4 bits in torch.int32"
    packed = weight.dtype is torch.int32
    (rows, width), (experts, inputs, outputs) = call.shape("x"), map(int, weight.shape)
    outputs *= PER_INT32 if packed else 1
    if width != inputs or call.shape("x_scale") != (rows,) or call.shape("group_list") != (experts,):
        return f"x is {(rows, width)}, x_scale {call.shape('x_scale')} and weight {tuple(weight.shape)}"
    of_rows = call.tensor("x_scale")
    if of_rows is None or of_rows.dtype is not torch.float32:
        return "x_scale must be torch.float32"
    most = _MAX_GATED_INT4_INPUTS if packed else _MAX_GATED_INPUTS
    if experts > _MAX_GROUPS or inputs > most or outputs > _MAX_GATED_OUTPUTS or outputs % 2:
        return (
            f"{experts} matrices of {(inputs, outputs)}; at most {_MAX_GROUPS} of {most} inputs and "
            f"{_MAX_GATED_OUTPUTS} outputs"
        )
    if call["dequant_mode"] != (1 if packed and scale.dim() == 3 else 0):
        return f"dequant_mode is {call['dequant_mode']}; 1 where groups of 4 bits have scales, else 0"
    in_groups = call["dequant_mode"] == 1
    sizes = (experts, *([inputs // INT4_GROUP] if in_groups else []), outputs)
    dtypes = (torch.int64,) if packed else (torch.float32, torch.float16, torch.bfloat16)
    if scale.dtype not in dtypes or tuple(scale.shape) != sizes or (in_groups and inputs % INT4_GROUP):
        return f"weight_scale is {scale.dtype} {tuple(scale.shape)}; {' or '.join(map(str, dtypes))} {sizes}"
    if packed:
        return _gated_int4(call, weight, assist, (experts, outputs))
    if assist is not None:
        return "weight_assist_matrix is for matrices of 4 bits"
    tiles = tuple(zip((inputs, outputs), _GATED_TILE, strict=True))
    # A reference kernel reads rows, as 950 does.
    in_tiles = not call.is_reference and call.target.product is not A5
    if in_tiles and any(size % tile for size, tile in tiles):
        return f"matrices of {(inputs, outputs)}, no multiples of {_GATED_TILE}: they must be in FRACTAL_NZ"
    return ""


def _gated_int4(call: Call, weight: torch.Tensor, assist: torch.Tensor | None, sizes: tuple[int, int]) -> str:
    if call.target.product is A5:
        return "this chip takes no matrices of 4 bits"
    if call.target.graph_mode == "ge":
        return "torchair's converter does not turn int32 into 4 bits"
    if not weight.is_contiguous():
        return "matrices of 4 bits that are not contiguous"
    if assist is None or assist.dtype is not torch.float32 or tuple(assist.shape) != sizes:
        return f"weight_assist_matrix is not a torch.float32 {sizes}, which matrices of 4 bits need"
    return ""


def _grouped_dtypes(call: Call, x: torch.Tensor, weight: torch.Tensor, sizes: tuple[int, int]) -> str:
    """Which dtypes of rows and matrices go together, and what goes with them."""
    bias, dtype = call.tensor("bias[0]"), call.target.counted(x.dtype)
    wanted = torch.float32 if dtype is torch.bfloat16 else dtype
    reason = ""
    if x.dtype is torch.int8:
        reason, wanted = _int8_rows(call), torch.float32 if weight.dtype is torch.int32 else torch.int32
    elif call.is_half(x.dtype) and weight.dtype in (torch.int8, torch.int32):
        reason = _rounded_matrices(call)
    elif not call.is_half(x.dtype) or call.target.counted(weight.dtype) is not dtype:
        return f"rows of {dtype} and matrices of {weight.dtype}; both float16 or both bfloat16"
    if reason:
        return reason
    if bias is not None and bias.dtype is not wanted:
        return f"a bias of {bias.dtype}; {wanted} beside {x.dtype if x.dtype is torch.int8 else dtype}"
    return "" if bias is None or bias.shape == sizes else f"bias is {tuple(bias.shape)}; {sizes}"


def _int8_rows(call: Call) -> str:
    """Rows of int8 with a scale for each, and matrices of int8 or 4 bits with one for each output."""
    x, weight, scale, rows = (call.tensor(f"{name}[0]") for name in ("x", "weight", "scale", "per_token_scale"))
    assert x is not None and weight is not None
    if call.target.product is INFERENCE:
        return "this chip multiplies no int8 in groups"
    if weight.dtype not in (torch.int8, torch.int32):
        return f"rows of torch.int8 and matrices of {weight.dtype}"
    code = call["output_dtype"]
    result = None if code is None else DTYPES_BY_CODE.get(code)
    if not call.is_half(result) and not call.is_reference:
        return f"output_dtype is {code}, {'int8' if result is None else result}; bfloat16 (15) or float16 (5)"
    if scale is None or rows is None:
        return "scale and per_token_scale are needed"
    if rows.dtype is not torch.float32 or rows.shape != x.shape[:1]:
        return f"per_token_scale is {rows.dtype} {tuple(rows.shape)}; torch.float32 for each row"
    if weight.dtype is torch.int32:
        return _int8_rows_by_4_bits(call)
    wanted = torch.bfloat16 if result is torch.bfloat16 else torch.float32
    if scale.dtype is not wanted or scale.shape != (weight.shape[0], weight.shape[2]):
        return f"scale is {scale.dtype} {tuple(scale.shape)}; {wanted} {(weight.shape[0], weight.shape[2])}"
    return ""


def _int8_rows_by_4_bits(call: Call) -> str:
    """Matrices of 4 bits beside rows of int8: CANN's aclnnGroupedMatmulV5 for A2 and A3, the table of op-plugin's
    document for 950. Scales for all inputs of an output are what vllm-ascend gives it; those of groups of 256 are in
    CANN's document alone."""
    weight, scale, bias = (call.tensor(f"{name}[0]") for name in ("weight", "scale", "bias"))
    assert weight is not None and scale is not None
    experts, inputs, packed = map(int, weight.shape)
    if not weight.is_contiguous():
        return "matrices of 4 bits that are not contiguous"
    if inputs > MAX_INT4_INPUTS:
        return f"{inputs} inputs; at most {MAX_INT4_INPUTS} beside matrices of 4 bits"
    if call["group_list_type"] != 1 and not call.is_reference:
        return "group_list_type must be 1 beside matrices of 4 bits"
    groups = int(scale.shape[1]) if scale.dim() == 3 else 1
    if groups > 1 and call.target.product is A5:
        return "this chip takes no scales of groups beside rows of int8"
    if groups > 1 and inputs != groups * INT4_GROUP:
        return f"{groups} groups of {inputs} inputs; beside rows of int8 {INT4_GROUP} share a scale"
    sizes = (experts, groups, packed * PER_INT32)
    if scale.dtype is not torch.int64 or tuple(scale.shape) != sizes:
        return f"scale is {scale.dtype} {tuple(scale.shape)}; torch.int64 {sizes} beside matrices of 4 bits"
    if bias is None or tuple(bias.shape) != (experts, packed * PER_INT32):
        return "bias is not the sums of the weights, which matrices of 4 bits need"
    return ""


def _rounded_matrices(call: Call) -> str:
    """Matrices of 8 or 4 bits beside rows of floats: scales and offsets for outputs; for groups of 4 bits alone."""
    x, weight, scale, offset = (
        call.tensor(f"{name}[0]") for name in ("x", "weight", "antiquant_scale", "antiquant_offset")
    )
    assert x is not None and weight is not None
    product = call.target.product
    packed = weight.dtype is torch.int32
    if product is INFERENCE:
        return "this chip reads no rounded matrices in groups"
    if packed and not weight.is_contiguous():
        return "matrices of 4 bits that are not contiguous"
    if scale is None or offset is None:
        return "antiquant_scale and antiquant_offset are needed"
    experts, inputs, outputs = map(int, weight.shape)
    outputs *= PER_INT32 if packed else 1
    if scale.dtype is not x.dtype or offset.dtype is not x.dtype:
        return f"antiquant_scale is {scale.dtype} and antiquant_offset {offset.dtype}; both {x.dtype}"
    groups = int(scale.shape[1]) if scale.dim() == 3 else 0
    sizes: tuple[int, ...] = (experts, groups, outputs) if groups else (experts, outputs)
    if tuple(scale.shape) != sizes or tuple(offset.shape) != sizes:
        return f"antiquant_scale is {tuple(scale.shape)} and antiquant_offset {tuple(offset.shape)}; {sizes}"
    if groups and not packed:
        return "matrices of torch.int8 have scales for outputs alone, not for groups"
    if groups and inputs % groups:
        return f"{groups} groups do not divide {inputs} inputs"
    if groups and product is A5:
        if call.target.graph_mode == "ge":
            return "no GE graph of this chip takes scales of groups"
        if inputs // groups not in _A5_GROUPS:
            return f"groups of {inputs // groups}; this chip takes {', '.join(map(str, _A5_GROUPS))}"
    if call["output_dtype"] is not None and DTYPES_BY_CODE.get(call["output_dtype"]) is not x.dtype:
        return f"output_dtype is {call['output_dtype']}; that of the rows, {x.dtype}, or None"
    return ""


def _rounded_rows(call: Call) -> str:
    """npu_moe_init_routing_v2: rows as they are, or in int8 with a scale for each."""
    if call["quant_mode"] not in (-1, 1):
        return f"quant_mode is {call['quant_mode']}; -1 or 1"
    if call["quant_mode"] == 1:
        if call.target.product is INFERENCE:
            return "this chip rounds no rows"
        if call["scale"] is not None or call["offset"] is not None:
            return "scale and offset are not given with quant_mode 1"
    return ""


def _pairs_of_arguments(call: Call) -> str:
    """Those of npu_moe_finalize_routing that go together."""
    if call["skip1"] is None and call["skip2"] is not None:
        return "skip2 is given without skip1; pass it as skip1"
    if call["bias"] is not None and call["export_for_source_row"] is None:
        return "bias is given without export_for_source_row; pass the experts of each token"
    return ""


LIMITS = {
    "npu_moe_gating_top_k_softmax": Limits(
        frozenset({A2, A3, A5}), {"x": FLOAT}, ranks={"x": (2, 3)}, rules=[_chosen_experts]
    ),
    "npu_moe_gating_top_k_softmax_v2": Limits(
        frozenset({A2, A3, A5}),
        {"x": FLOAT},
        ranks={"x": (2, 3)},
        rules=[_chosen_experts, given("renorm", 0, 1), _renormed_experts],
    ),
    "npu_moe_gating_top_k": Limits(
        frozenset({A2, A3, A5}),
        {"x": FLOAT},
        alike=[("x", "bias")],
        ranks={"x": (2,)},
        rules=[_expert_groups, shaped("x [T, E], bias [E]")],
    ),
    "npu_moe_init_routing_v2": Limits(
        frozenset({A2, A3, A5, INFERENCE}),
        {"x": FLOAT, "expert_idx": INT32},
        ranks={"x": (2,), "expert_idx": (2,)},
        rules=[
            lowered(given("drop_pad_mode", 0)),
            lowered(_rounded_rows),
            lowered(given("expert_tokens_num_flag", True)),
            _routed_experts,
            # Whatever is asked for, this chip says where each expert's rows end.
            on_inference_chip(given("expert_tokens_num_type", 0)),
            given("expert_tokens_num_type", 0, 1, 2),
            given("row_idx_type", 0, 1),
            shaped("x [T, H], expert_idx [T, K], scale [T]"),
            stored_as("scale", torch.float32),
        ],
    ),
    "npu_grouped_matmul": Limits(frozenset({A2, A3, A5, INFERENCE}), rules=[_grouped_matmul]),
    "npu_grouped_matmul_swiglu_quant_v2": Limits(
        frozenset({A2, A3, A5}),
        {"x": INT8, "group_list": INT64},
        ranks={"x": (2,), "x_scale": (1,), "group_list": (1,)},
        rules=[_gated_experts],
    ),
    # op-plugin names A2 alone, the README of CANN's own moe_finalize_routing_v2 (ops-transformer) all of these.
    "npu_moe_finalize_routing": Limits(
        frozenset({A2, A3, A5}),
        {"expanded_permuted_rows": FLOAT, "expanded_src_to_dst_row": INT32},
        alike=[("expanded_permuted_rows", "skip1", "skip2", "bias", "scales")],
        rules=[given("drop_pad_mode", 0, 1, 2, 3), _pairs_of_arguments],
    ),
    # No document names 950; vllm-ascend runs it there.
    "npu_moe_token_unpermute": Limits(
        frozenset({A2, A3, A5}),
        {"permuted_tokens": FLOAT, "sorted_indices": INT32},
        alike=[("permuted_tokens", "probs")],
        ranks={"permuted_tokens": (2,), "sorted_indices": (1,), "probs": (2,)},
        rules=[
            lowered(captured_only),
            lowered(given("padded_mode", False)),
            lowered(given("restore_shape", None)),
            below("probs", 1, _MAX_UNPERMUTED_CHOICES + 1),
            shaped("probs [T, K], permuted_tokens [T*K, H], sorted_indices [T*K]"),
            dense("permuted_tokens", "sorted_indices", "probs"),
        ],
    ),
}
