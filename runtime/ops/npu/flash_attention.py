"""`npu::npu_prompt_flash_attention` and `npu::npu_incre_flash_attention`: the two halves of the fused one.

Source: op-plugin, docs `torch_npu-npu_prompt_flash_attention.md` and `…-npu_incre_flash_attention.md`.
"""

from __future__ import annotations

import torch

from .attention_core import NO_KERNEL, AttentionCall, attend, result_dtype
from .attention_layouts import parse_layout
from .numerics import stored_like
from .registration import Operator


def npu_prompt_flash_attention(call: AttentionCall) -> torch.Tensor:
    """:func:`.attention.npu_fused_infer_attention_score` of whole prompts: not paged, ``next_tokens`` 0 by default.

    Args:
        input_layout: BSH, BSND, BNSD, BNSD_BSND or TND.

    Returns:
        In the dtype of ``query`` and the shape of ``query`` (BNSD_BSND: transposed; TND: head size of ``value``).
    """
    output, _ = attend(call)
    return output if call.input_layout in ("TND", "BNSD_BSND") else stored_like(output, call.query)


def npu_incre_flash_attention(call: AttentionCall) -> torch.Tensor:
    """:func:`.attention.npu_fused_infer_attention_score` of one query per sequence.

    Args:
        query: S = 1.
        actual_seq_lengths: context lengths, per sequence.
        input_layout: BSH, BSND or BNSD.

    Returns:
        The dtype and shape of ``query``.
    """
    if not parse_layout(call.input_layout, call.query).single(call.query):
        raise ValueError(
            f"query has shape {tuple(call.query.shape)}; npu_incre_flash_attention takes one query a sequence"
        )
    output, _ = attend(call)
    return stored_like(output, call.query)


def _prompt_fake(
    query: torch.Tensor, value: torch.Tensor, quant_scale2: torch.Tensor | None, input_layout: str
) -> torch.Tensor:
    dtype = result_dtype(query, None, quant_scale2 is not None)
    if input_layout == "TND":
        return query.new_empty((query.shape[0], query.shape[1], value.shape[2]), dtype=dtype)
    if input_layout == "BNSD_BSND":
        batch, heads, length, dim = query.shape
        return query.new_empty((batch, length, heads, dim), dtype=dtype)
    return torch.empty_like(query, dtype=dtype)


def _incre_fake(query: torch.Tensor, quant_scale2: torch.Tensor | None) -> torch.Tensor:
    return torch.empty_like(query, dtype=result_dtype(query, None, quant_scale2 is not None))


OPERATORS = tuple(
    Operator(kernel.__name__, kernel, fake, record=AttentionCall, lacks=NO_KERNEL)
    for kernel, fake in ((npu_prompt_flash_attention, _prompt_fake), (npu_incre_flash_attention, _incre_fake))
)
