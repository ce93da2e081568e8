"""Limits of the operators of mixtures of experts: op-plugin docs npu_moe_gating_top_k, npu_moe_gating_top_k_softmax,
npu_moe_init_routing_v2 and npu_grouped_matmul."""

from __future__ import annotations

import torch

from ....runtime.ops.npu.moe_gating import MAX_CHOSEN_EXPERTS, MAX_GATED_EXPERTS
from ....runtime.ops.npu.moe_routing import MAX_EXPERTS, MAX_EXPERTS_IN_PAIRS
from .call import Call

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
    if dtype not in _HALF or call.target.counted(weight.dtype) is not dtype:
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
