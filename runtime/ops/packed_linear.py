"""`pagoda::packed_linear`: linear layers over one input, whose weights may be laid out for oneDNN as one matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from .registration import register_operator

_SCHEMA = "packed_linear(Tensor input, Tensor[] weights, Tensor[] biases) -> Tensor"


def packed_linear_reference(
    input: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] = ()
) -> torch.Tensor:
    """``cat([input @ w.T + b for w, b in zip(weights, biases)], -1)``.

    Args:
        input: ``[..., in]``, bf16 or fp32.
        weights: ``[out_i, in]`` in the dtype of ``input``. Packed, the first is what :func:`pack_weights` made of
            all of them, and the others are not read.
        biases: as many, ``[out_i]`` each, or none. Packed, the first holds all of them.

    Returns:
        ``[..., sum(out_i)]``, contiguous.
    """
    if weights[0].is_mkldnn:
        bias = biases[0] if biases else None
        return torch.ops.mkldnn._linear_pointwise(input, weights[0], bias, "none", [], "")
    parts = [F.linear(input, w, biases[i] if biases else None) for i, w in enumerate(weights)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _fake(input: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> torch.Tensor:
    return input.new_empty((*input.shape[:-1], sum(w.shape[0] for w in weights)))


packed_linear = register_operator(_SCHEMA, fake=_fake, reference=packed_linear_reference, cpu=packed_linear_reference)


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this machine's oneDNN has packed products in ``dtype``: bf16 where the CPU has instructions for it."""
    if not torch.backends.mkldnn.is_available() or dtype is not torch.bfloat16:
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_weights(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """``[out_i, in]`` weights, one above the other, in oneDNN's blocked layout: an opaque tensor of as many bytes."""
    whole = weights[0].detach() if len(weights) == 1 else torch.cat([w.detach() for w in weights])
    return torch.ops.mkldnn._reorder_linear_weight(whole, None)
