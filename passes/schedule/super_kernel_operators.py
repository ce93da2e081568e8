"""The operators that the graph engine fuses into super kernels on A2 and A3, as data.

The graph engine fuses kernels that their compiler marks (https://gitcode.com/cann/ge,
``compiler/graph/passes/feature/super_kernel_pass.cc``: attribute ``supportSuperKernel``), and cuts a scope at all
others. The compiler marks kernels written in Ascend C, but for three (https://gitcode.com/cann/asc-devkit,
``superkernel_black_op_list``), and none of the older ones in TBE. An operator is in Ascend C for A2 and A3 where its
definition has both chips and its kernel is not for 950 alone: ``op_host/*_def.cpp`` and ``op_kernel`` of
https://gitcode.com/cann/ops-nn and https://gitcode.com/cann/ops-transformer, read in August 2026 and November 2025.
What no source shows to be fused is not in the table.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from ...runtime.npu_target import Product
from ..graph.data_movement import COPIES, RESHAPES, UNIT_DIMS
from ..graph.fx_nodes import callee

SUPER_KERNEL_PRODUCTS = (Product.A2, Product.A3)
"""Chips that super kernels are documented for (torchair's repository, ``super_kernel_scope.md`` and
``superkernel.md``)."""
SUPER_KERNEL_CHIPS = " and ".join(f"{product.value}*" for product in SUPER_KERNEL_PRODUCTS)
"""Their names, for a message."""

FUSED: Mapping[str, str] = {
    "npu.npu_linear": "MatMul",  # the graph engine makes MatMulV3 of it
    "npu.npu_quant_matmul": "QuantBatchMatmulV3",
    "npu.npu_weight_quant_batchmatmul": "WeightQuantBatchMatmulV2",
    "npu.npu_transpose_batchmatmul": "TransposeBatchMatMul",
    "npu.npu_grouped_matmul": "GroupedMatmul",
    "npu.npu_grouped_matmul_swiglu_quant_v2": "GroupedMatmulSwigluQuantV2",
    "npu.npu_rms_norm": "RmsNorm",
    "npu.npu_add_rms_norm": "AddRmsNorm",
    "npu.npu_add_rms_norm_dynamic_quant": "AddRmsNormDynamicQuant",
    "aten.native_layer_norm": "LayerNormV4",
    "npu.npu_swiglu": "SwiGlu",
    "npu.npu_geglu": "GeGluV2",
    "npu.npu_clipped_swiglu": "ClippedSwiglu",
    "npu.npu_dequant_swiglu_quant": "DequantSwigluQuant",
    "npu.npu_dynamic_quant": "DynamicQuant",
    "npu.npu_interleave_rope": "InterleaveRope",
    "npu.npu_moe_gating_top_k": "MoeGatingTopK",
    "npu.npu_moe_gating_top_k_softmax": "MoeGatingTopKSoftmax",
    "npu.npu_moe_gating_top_k_softmax_v2": "MoeGatingTopKSoftmaxV2",
    "npu.npu_moe_finalize_routing": "MoeFinalizeRoutingV2",
    # AOTAutograd makes the second form of each, which writes nothing in place.
    **dict.fromkeys(("npu.npu_scatter_nd_update_", "npu.npu_scatter_nd_update"), "ScatterNdUpdate"),
    **dict.fromkeys(("npu.npu_mla_prolog_v3", "npu.npu_mla_prolog_v3_functional"), "MlaPrologV3"),
    **dict.fromkeys(
        ("npu.npu_kv_rmsnorm_rope_cache_v2", "npu.npu_kv_rmsnorm_rope_cache_v2_functional"), "KvRmsNormRopeCache"
    ),
}
"""Lowered operator → the kernel that torchair makes of it, which is fused."""

_ATTENTION = "its tiling is looked up on the device, and only newer CANN lets a super kernel wait for that"
CUTS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "npu.npu_fused_infer_attention_score",
            "npu.npu_fused_infer_attention_score_v2",
            "air.npu_fused_infer_attention_score",
            "air.npu_fused_infer_attention_score_v2",
        ),
        _ATTENTION,
    ),
    "npu.npu_moe_init_routing_v2": "its kernel has not been adapted to super kernels",
}
"""Lowered operator → why it is in no super kernel; ``UNKNOWN`` for all others that are not fused."""
_RENAMES = RESHAPES | UNIT_DIMS | COPIES
UNKNOWN = "no source says that its kernel for A2 and A3 is in Ascend C"


def why_not_fused(operator: str) -> str:
    """The reason why an operator, ``npu.npu_rotary_mul`` for instance, is in no super kernel; "" where it is."""
    return "" if operator in FUSED else CUTS.get(operator, UNKNOWN)


def is_copied(node: fx.Node) -> bool:
    """True for a view that the graph engine copies, by a kernel that is not fused: its tensors have no gaps."""
    return bool(getattr(node.target, "is_view", False)) and callee(node) not in _RENAMES
