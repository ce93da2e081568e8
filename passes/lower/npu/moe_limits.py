"""Limits of the operators of mixtures of experts: op-plugin docs npu_moe_gating_top_k, npu_moe_gating_top_k_softmax,
npu_moe_init_routing_v2 and npu_grouped_matmul."""

from __future__ import annotations

import torch

from ....runtime.ops.npu.moe_gating import MAX_CHOSEN_EXPERTS, MAX_GATED_EXPERTS
from ....runtime.ops.npu.moe_routing import MAX_EXPERTS, MAX_EXPERTS_IN_PAIRS
from ....runtime.ops.npu.numerics import DTYPES_BY_CODE
from ...graph.npu_target import Product
from .call import Call

MAX_GROUPS = 1024
"""Of npu_grouped_matmul."""
_HALF = frozenset({torch.float16, torch.bfloat16})


def expert_groups(call: Call) -> str:
    experts, groups = call.shape("x")[-1], call["group_count"]
    if experts is None or experts > MAX_GATED_EXPERTS or experts % groups:
        return f"{experts} experts in {groups} groups; at most {MAX_GATED_EXPERTS}, in equal groups"
    size = experts // groups
    if size <= 2:
        return f"groups of {size} experts; more than 2"
    if not 0 < call["k_group"] <= groups:
        return f"k_group is {call['k_group']}, of {groups} groups"
    if -(-size // 32) * 32 * groups > MAX_GATED_EXPERTS:
        return f"{groups} groups of {size} experts, filled up to multiples of 32, are more than {MAX_GATED_EXPERTS}"
    if call["renorm"] != 0 or call["norm_type"] not in (0, 1) or call["group_select_mode"] not in (0, 1):
        return "renorm must be 0, norm_type and group_select_mode 0 or 1"
    return (
        "" if 0 < call["k"] <= size * call["k_group"] else f"k is {call['k']}, of {call['k_group']} groups of {size}"
    )


def chosen_experts(call: Call) -> str:
    experts, k = call.shape("x")[-1], call["k"]
    if 0 < k <= MAX_CHOSEN_EXPERTS and (experts is None or k <= experts):
        return ""
    return f"k is {k}, of {experts} experts; at most {MAX_CHOSEN_EXPERTS}"


def routed_experts(call: Call) -> str:
    most = MAX_EXPERTS_IN_PAIRS if call["expert_tokens_num_type"] == 2 else MAX_EXPERTS
    return "" if 0 < call["expert_num"] <= most else f"{call['expert_num']} experts; at most {most}"


def grouped_matmul(call: Call) -> str:
    """One tensor of rows, one of matrices [E, K, N], groups of rows given by a tensor of int64."""
    if call["group_type"] != 0 or call["split_item"] not in (2, 3) or call["group_list_type"] not in (0, 1):
        return "group_type must be 0, split_item 2 or 3, group_list_type 0 or 1"
    tensors = call.tensors()
    x, weight, groups = tensors["x[0]"], tensors["weight[0]"], tensors.get("group_list")
    dtype = call.target.counted(x.dtype)
    is_int8 = x.dtype is torch.int8
    if is_int8 and (reason := _int8_rows(call)):
        return reason
    if not is_int8 and (dtype not in _HALF or call.target.counted(weight.dtype) is not dtype):
        return f"rows of {dtype} and matrices of {weight.dtype}; both float16 or both bfloat16"
    if groups is None or groups.dtype is not torch.int64:
        return "group_list must be a tensor of int64"
    if weight.dim() != 3 or x.dim() != 2 or weight.shape[1] != x.shape[1]:
        return f"rows {tuple(x.shape)} and matrices {tuple(weight.shape)}"
    if max(int(weight.shape[1]), int(weight.shape[2])) >= 65536:
        return f"matrices of {tuple(weight.shape[1:])}; inner sizes below 65536"
    if groups.shape[0] > MAX_GROUPS:
        return f"{groups.shape[0]} groups; at most {MAX_GROUPS}"
    bias = tensors.get("bias[0]")
    if bias is not None:
        wanted = torch.int32 if is_int8 else torch.float32 if dtype is torch.bfloat16 else torch.float16
        if bias.dtype is not wanted:
            return f"a bias of {bias.dtype}; {wanted} beside {x.dtype if is_int8 else dtype}"
    return ""


def _int8_rows(call: Call) -> str:
    """Rows and matrices of int8 with a scale for each output and one for each row."""
    tensors = call.tensors()
    x, weight, scale, rows = (tensors.get(name) for name in ("x[0]", "weight[0]", "scale[0]", "per_token_scale[0]"))
    assert x is not None and weight is not None
    if call.target.product is Product.INFERENCE:
        return "this chip multiplies no int8 in groups"
    if weight.dtype is not torch.int8:
        return f"rows of torch.int8 and matrices of {weight.dtype}"
    code = call["output_dtype"]
    result = None if code is None else DTYPES_BY_CODE.get(code)
    counted = None if result is None else call.target.counted(result)
    if counted not in _HALF:
        return f"output_dtype is {code}, {'int8' if result is None else result}; bfloat16 (15) or float16 (5)"
    if scale is None or rows is None:
        return "scale and per_token_scale are needed"
    wanted = torch.bfloat16 if result is torch.bfloat16 else torch.float32
    if scale.dtype is not wanted or scale.shape != (weight.shape[0], weight.shape[2]):
        return f"scale is {scale.dtype} {tuple(scale.shape)}; {wanted} {(weight.shape[0], weight.shape[2])}"
    if rows.dtype is not torch.float32 or rows.shape != x.shape[:1]:
        return f"per_token_scale is {rows.dtype} {tuple(rows.shape)}; torch.float32 for each row"
    return ""


def rounded_rows(call: Call) -> str:
    """npu_moe_init_routing_v2: rows as they are, or in int8 with a scale for each."""
    if call["quant_mode"] not in (-1, 1):
        return f"quant_mode is {call['quant_mode']}; -1 or 1"
    if call["quant_mode"] == 1:
        if call.target.product is Product.INFERENCE:
            return "this chip rounds no rows"
        if call["scale"] is not None or call["offset"] is not None:
            return "scale and offset are not given with quant_mode 1"
    return ""
