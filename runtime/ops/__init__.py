"""The `pagoda::` operators: importing this package registers them (schema, fake, reference, CPU kernel).

In graphs they are ``torch.ops.pagoda.attention`` and so on, the overloads that the modules hold under their names.
The documentation is the reference's: ``rms_norm.rms_norm_reference`` tells of ``rms_norm.rms_norm``, and, as an
operator with state, ``selective_scan.scan`` of ``selective_scan.selective_scan``.
"""

from __future__ import annotations

from . import collectives, elementwise, embedding, gated_activation
from .attention import attention, lightning_indexer, paged_attention, rope
from .linear import invariant_linear, packed_linear, quantized_linear
from .moe import moe, quantized_moe
from .norm import gated_rms_norm, layer_norm, rms_norm, split_rms_norm
from .reference import attention_reference, paged_attention_reference
from .registration import OPERATORS
from .state import causal_conv1d, linear_recurrence, selective_scan

__all__ = [
    "OPERATORS",
    "attention",
    "attention_reference",
    "causal_conv1d",
    "collectives",
    "elementwise",
    "embedding",
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
    "split_rms_norm",
]
