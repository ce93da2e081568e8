"""`npu::npu_prompt_flash_attention` and `npu::npu_incre_flash_attention`: the two halves of the fused one.

Source: op-plugin, docs `torch_npu-npu_prompt_flash_attention.md` and `…-npu_incre_flash_attention.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .attention_caches import scales
from .attention_core import AttentionCall, attend, check_precision, result_dtype
from .attention_layouts import parse_layout
from .attention_masks import NO_LIMIT
from .numerics import refuse_given, stored_like
from .registration import Operator


def npu_prompt_flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    atten_mask: torch.Tensor | None = None,
    pse_shift: torch.Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    num_heads: int = 1,
    scale_value: float = 1.0,
    pre_tokens: int = NO_LIMIT,
    next_tokens: int = 0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    actual_seq_lengths_kv: Sequence[int] | None = None,
    sparse_mode: int = 0,
    **others: torch.Tensor | None,
) -> torch.Tensor:
    """:func:`.attention.npu_fused_infer_attention_score` of whole prompts: not paged, ``next_tokens`` 0 by default.

    Args:
        input_layout: BSH, BSND, BNSD, BNSD_BSND or TND.

    Returns:
        In the dtype of ``query`` and the shape of ``query`` (BNSD_BSND: transposed; TND: head size of ``value``).
    """
    refuse_given("npu_prompt_flash_attention", **others)
    if input_layout not in ("BSH", "BSND", "BNSD", "BNSD_BSND", "TND"):
        raise ValueError(f"input_layout is {input_layout!r}; it must be BSH, BSND, BNSD, BNSD_BSND or TND")
    output, _ = attend(
        AttentionCall(
            query,
            key,
            value,
            input_layout=input_layout,
            heads=num_heads,
            kv_heads=num_key_value_heads,
            scale=scale_value,
            query_lengths=("actual_seq_lengths", actual_seq_lengths),
            kv_lengths=("actual_seq_lengths_kv", actual_seq_lengths_kv),
            atten_mask=atten_mask,
            pse_shift=pse_shift,
            sparse_mode=sparse_mode,
            pre_tokens=pre_tokens,
            next_tokens=next_tokens,
        )
    )
    return output if input_layout in ("TND", "BNSD_BSND") else stored_like(output, query)


def npu_incre_flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    atten_mask: torch.Tensor | None = None,
    pse_shift: torch.Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    antiquant_scale: torch.Tensor | None = None,
    antiquant_offset: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_heads: int = 1,
    scale_value: float = 1.0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    block_size: int = 0,
    inner_precise: int = 1,
    **others: torch.Tensor | None,
) -> torch.Tensor:
    """:func:`.attention.npu_fused_infer_attention_score` of one query per sequence.

    Args:
        query: S = 1.
        actual_seq_lengths: context lengths, per sequence.
        input_layout: BSH, BSND or BNSD.

    Returns:
        The dtype and shape of ``query``.
    """
    refuse_given("npu_incre_flash_attention", **others)
    if input_layout not in ("BSH", "BSND", "BNSD"):
        raise ValueError(f"input_layout is {input_layout!r}; it must be BSH, BSND or BNSD")
    if not parse_layout(input_layout, query).single(query):
        raise ValueError(
            f"query has shape {tuple(query.shape)}; npu_incre_flash_attention takes one query a sequence"
        )
    check_precision(inner_precise, input_layout, query)
    key_scale, value_scale = (None, None) if antiquant_scale is None else antiquant_scale.split(1)
    key_offset, value_offset = (None, None) if antiquant_offset is None else antiquant_offset.split(1)
    output, _ = attend(
        AttentionCall(
            query,
            key,
            value,
            input_layout=input_layout,
            heads=num_heads,
            kv_heads=num_key_value_heads,
            scale=scale_value,
            query_lengths=("query", None),
            kv_lengths=("actual_seq_lengths", actual_seq_lengths),
            atten_mask=atten_mask,
            pse_shift=pse_shift,
            block_table=block_table,
            block_size=block_size,
            key_scales=scales("antiquant_scale", key_scale, key_offset, 0),
            value_scales=scales("antiquant_scale", value_scale, value_offset, 0),
        )
    )
    return stored_like(output, query)


def _prompt_fake(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    quant_scale2: torch.Tensor | None = None,
    input_layout: str = "BSH",
    **_: Any,
) -> torch.Tensor:
    dtype = result_dtype(query, None, quant_scale2 is not None)
    if input_layout == "TND":
        return query.new_empty((query.shape[0], query.shape[1], value.shape[2]), dtype=dtype)
    if input_layout == "BNSD_BSND":
        batch, heads, length, dim = query.shape
        return query.new_empty((batch, length, heads, dim), dtype=dtype)
    return torch.empty_like(query, dtype=dtype)


def _incre_fake(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, quant_scale2: torch.Tensor | None = None, **_: Any
) -> torch.Tensor:
    return torch.empty_like(query, dtype=result_dtype(query, None, quant_scale2 is not None))


OPERATORS = (
    Operator("npu_prompt_flash_attention", npu_prompt_flash_attention, _prompt_fake),
    Operator("npu_incre_flash_attention", npu_incre_flash_attention, _incre_fake),
)
