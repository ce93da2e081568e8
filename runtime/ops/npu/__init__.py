"""Runnable CPU semantics of `npu::` operators; importing this package registers them.

They are those that lowering and schedules emit, and nine more for graphs of other makers: npu_incre_flash_attention,
scatter_update_, npu_add_rms_norm_cast, npu_gelu_mul, npu_silu, npu_moe_compute_expert_tokens,
npu_qkv_rms_norm_rope_cache, npu_quantize and npu_recurrent_gated_delta_rule.

With torch_npu in the process, or importable, it is imported first and only CPU kernels are added. Without it the
operators are defined from their vendor schemas, with fakes, so that a lowered graph traces and runs anywhere.
torch_npu must not be imported after that: it aborts the process when its operators are defined already.

The kernels follow op-plugin's documents and golden tests: fp16 and bf16 are computed in fp32 and rounded once at the
end, fp32 and fp64 stay what they are, quantization rounds half to even. They refuse with ``ValueError`` what the
documents forbid, and with ``NotImplementedError`` what has no CPU kernel.
"""

from __future__ import annotations

from . import (
    activation,
    attention,
    flash_attention,
    gated_delta_rule,
    grouped_matmul,
    grouped_swiglu_quant,
    kv_cache,
    linear,
    mla_prolog,
    moe_gating,
    moe_routing,
    norm,
    norm_rope_cache,
    prefetch,
    quant_matmul,
    quantize,
    rope,
    sparse_attention,
    swiglu_quant,
    weight_quant_matmul,
)
from .registration import register

OPERATORS = (
    *attention.OPERATORS,
    *flash_attention.OPERATORS,
    *kv_cache.OPERATORS,
    *norm.OPERATORS,
    *linear.OPERATORS,
    *activation.OPERATORS,
    *rope.OPERATORS,
    *moe_gating.OPERATORS,
    *moe_routing.OPERATORS,
    *grouped_matmul.OPERATORS,
    *grouped_swiglu_quant.OPERATORS,
    *norm_rope_cache.OPERATORS,
    *mla_prolog.OPERATORS,
    *quantize.OPERATORS,
    *quant_matmul.OPERATORS,
    *swiglu_quant.OPERATORS,
    *weight_quant_matmul.OPERATORS,
    *gated_delta_rule.OPERATORS,
    *sparse_attention.OPERATORS,
    *prefetch.OPERATORS,
)

register(OPERATORS)
