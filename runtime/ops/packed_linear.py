"""`pagoda::packed_linear`: a linear layer whose weight may be laid out for oneDNN."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from .registration import register_operator

_SCHEMA = "packed_linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor"


def packed_linear_reference(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``input @ weight.T + bias``.

    Args:
        input: ``[..., in]``, bf16 or fp32.
        weight: ``[out, in]`` in the dtype of ``input``, or what :func:`pack_weight` made of it.
        bias: ``[out]`` or None.

    Returns:
        ``[..., out]``, contiguous.
    """
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")
    return F.linear(input, weight, bias)


def _fake(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


packed_linear = register_operator(_SCHEMA, fake=_fake, reference=packed_linear_reference, cpu=packed_linear_reference)


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this machine's oneDNN has packed products in ``dtype``: bf16 where the CPU has instructions for it."""
    if not torch.backends.mkldnn.is_available() or dtype is not torch.bfloat16:
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """An ``[out, in]`` weight in oneDNN's blocked layout: an opaque tensor of as many bytes."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)
