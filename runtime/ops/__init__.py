"""The `pagoda::` operators: importing this package registers them (schema, fake, reference, CPU kernel).

In graphs they are ``torch.ops.pagoda.attention`` and so on, the overloads that the modules hold under their names.
The documentation is the reference's (``rms_norm.rms_norm`` and ``rms_norm.rms_norm_reference``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import (
    attention,
    causal_conv1d,
    elementwise,
    gated_activation,
    gated_rms_norm,
    invariant_linear,
    layer_norm,
    lightning_indexer,
    linear_recurrence,
    moe,
    packed_linear,
    paged_attention,
    quantized_linear,
    quantized_moe,
    rms_norm,
    rope,
    selective_scan,
)
from .reference import attention_reference, paged_attention_reference

CPU_FUNCTIONS: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    attention.attention: attention.attention_cpu,
    paged_attention.paged_attention: paged_attention.paged_attention_cpu,
    elementwise.elementwise: elementwise.elementwise_cpu,
    invariant_linear.invariant_linear: invariant_linear.invariant_linear_cpu,
    packed_linear.packed_linear: packed_linear.packed_linear_cpu,
    quantized_linear.quantized_linear: quantized_linear.quantized_linear_cpu,
    quantized_moe.quantized_moe: quantized_moe.quantized_moe_cpu,
    moe.moe: moe.moe_cpu,
    moe.moe_gating: moe.moe_gating_reference,
    rms_norm.rms_norm: rms_norm.rms_norm_cpu,
    rms_norm.add_rms_norm: rms_norm.add_rms_norm_cpu,
    gated_rms_norm.gated_rms_norm: gated_rms_norm.gated_rms_norm_cpu,
    layer_norm.layer_norm: layer_norm.layer_norm_cpu,
    layer_norm.add_layer_norm: layer_norm.add_layer_norm_cpu,
    rope.rope: rope.rope_cpu,
    gated_activation.gated_activation: gated_activation.gated_activation_cpu,
    gated_activation.activation: gated_activation.activation_cpu,
    causal_conv1d.causal_conv1d: causal_conv1d.causal_conv1d_cpu,
    causal_conv1d.causal_conv1d_seq: causal_conv1d.causal_conv1d_seq_cpu,
    lightning_indexer.lightning_indexer: lightning_indexer.lightning_indexer_reference,
    lightning_indexer.lightning_indexer_seq: lightning_indexer.lightning_indexer_seq_reference,
    linear_recurrence.linear_recurrence: linear_recurrence.linear_recurrence_cpu,
    linear_recurrence.linear_recurrence_seq: linear_recurrence.linear_recurrence_seq_cpu,
    selective_scan.selective_scan: selective_scan.selective_scan_cpu,
    selective_scan.selective_scan_seq: selective_scan.selective_scan_seq_cpu,
}
"""What each overload runs for CPU tensors, to be called without the dispatcher, which costs more than a small
kernel. The arguments are the schema's, positional and all of them. Nothing is guarded: the tensors must be on the
CPU, and an input that requires grad is not refused; the result is simply cut from the autograd graph."""

__all__ = [
    "CPU_FUNCTIONS",
    "attention",
    "attention_reference",
    "causal_conv1d",
    "elementwise",
    "gated_activation",
    "gated_rms_norm",
    "invariant_linear",
    "layer_norm",
    "lightning_indexer",
    "linear_recurrence",
    "moe",
    "packed_linear",
    "paged_attention",
    "paged_attention_reference",
    "quantized_linear",
    "quantized_moe",
    "rms_norm",
    "rope",
    "selective_scan",
]
