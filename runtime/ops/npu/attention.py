"""`npu::npu_fused_infer_attention_score` and its v2.

Source: op-plugin, docs `torch_npu-npu_fused_infer_attention_score.md` and `…_v2.md`; output shapes after torch_npu's
meta functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .attention_caches import scales
from .attention_core import AttentionCall, attend, check_precision, result_dtype
from .attention_layouts import parse_layout
from .attention_masks import NO_LIMIT
from .numerics import DTYPES_BY_CODE, refuse_given
from .registration import Operator


def npu_fused_infer_attention_score(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    pse_shift: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    actual_seq_lengths_kv: Sequence[int] | None = None,
    antiquant_scale: torch.Tensor | None = None,
    antiquant_offset: torch.Tensor | None = None,
    key_antiquant_scale: torch.Tensor | None = None,
    key_antiquant_offset: torch.Tensor | None = None,
    value_antiquant_scale: torch.Tensor | None = None,
    value_antiquant_offset: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = NO_LIMIT,
    next_tokens: int = NO_LIMIT,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,
    block_size: int = 0,
    antiquant_mode: int = 0,
    key_antiquant_mode: int = 0,
    value_antiquant_mode: int = 0,
    softmax_lse_flag: bool = False,
    **others: torch.Tensor | Sequence[int] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``softmax(scale · query keyᵀ + pse_shift, masked pairs left out) value``, and the log-sum-exp.

    Letters as in :mod:`.attention_layouts`; which pairs a mask hides is in
    :func:`.attention_masks.visible_pairs`. With one query per sequence in a layout with a batch axis and without
    ``query_rope``, ``sparse_mode``, ``pre_tokens`` and ``next_tokens`` have no effect.

    Args:
        query: in the first layout that ``input_layout`` names, fp16, bf16 (fp32 and fp64 are computed as they are).
        key, value: the dtype of ``query``, or int8 with scales. Not paged: the layout of ``query``. Paged:
            ``(blocks, block_size, KN·D)``; for BNSD and TND queries also ``(blocks, KN, block_size, D)``; for MLA
            with D = 512 and for int8 also FRACTAL_NZ ``(blocks, KN, D/16, block_size, 16)`` (int8: 32).
        pse_shift: ``(1 or B, N, S, KV_S)``, added to the scaled scores. Not with packed layouts.
        atten_mask: bool, int8 or uint8; 1 hides the pair.
        actual_seq_lengths: packed layouts: cumulative query lengths, the last one T. Else per sequence.
        actual_seq_lengths_kv: packed and not paged: cumulative. Else, so always when paged, per sequence.
        antiquant_scale, antiquant_offset: those of keys and values stacked on a leading dim of 2; the separate
            arguments win over them.
        key_antiquant_scale, …: see :class:`.attention_caches.Scales`. Not with packed layouts.
        block_table: int32 ``[B, blocks]``; turns paging on.
        query_rope, key_rope: rotated parts (MLA), ``[..., 64]``, put behind the head dims of query and key.
        num_heads, num_key_value_heads: N and KN (0: N); KN divides N, N/KN ≤ 64.
        inner_precise: 0 to 3 (0 or 1 with S = 1); no effect here.

    Returns:
        The result, in the dtype of ``query``, and fp32 ``(T, N, 1)`` or ``(B, N, S, 1)``, or ``(0)`` without
        ``softmax_lse_flag``.

    Raises:
        ValueError: what the vendor's documents forbid.
        NotImplementedError: quantized queries or results, int4, left padding, shared prefixes, tree masks.
    """
    refuse_given("npu_fused_infer_attention_score", **others)
    check_precision(inner_precise, input_layout, query)
    if key_antiquant_scale is None and antiquant_scale is not None:
        key_antiquant_scale, value_antiquant_scale = antiquant_scale[:1], antiquant_scale[1:]
        if antiquant_offset is not None:
            key_antiquant_offset, value_antiquant_offset = antiquant_offset[:1], antiquant_offset[1:]
        key_antiquant_mode = value_antiquant_mode = antiquant_mode
    return attend(
        AttentionCall(
            query,
            key,
            value,
            input_layout=input_layout,
            heads=num_heads,
            kv_heads=num_key_value_heads,
            scale=scale,
            query_lengths=("actual_seq_lengths", actual_seq_lengths),
            kv_lengths=("actual_seq_lengths_kv", actual_seq_lengths_kv),
            atten_mask=atten_mask,
            pse_shift=pse_shift,
            sparse_mode=sparse_mode,
            pre_tokens=pre_tokens,
            next_tokens=next_tokens,
            block_table=block_table,
            block_size=block_size,
            query_rope=query_rope,
            key_rope=key_rope,
            key_scales=scales("key_antiquant_scale", key_antiquant_scale, key_antiquant_offset, key_antiquant_mode),
            value_scales=scales(
                "value_antiquant_scale", value_antiquant_scale, value_antiquant_offset, value_antiquant_mode
            ),
            want_lse=softmax_lse_flag,
            fused=True,
        )
    )


def npu_fused_infer_attention_score_v2(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
    pse_shift: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    block_table: torch.Tensor | None = None,
    dequant_scale_key: torch.Tensor | None = None,
    dequant_offset_key: torch.Tensor | None = None,
    dequant_scale_value: torch.Tensor | None = None,
    dequant_offset_value: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_scale: float = 1.0,
    pre_tokens: int = NO_LIMIT,
    next_tokens: int = NO_LIMIT,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    block_size: int = 0,
    query_quant_mode: int = 0,
    key_quant_mode: int = 0,
    value_quant_mode: int = 0,
    inner_precise: int = 0,
    return_softmax_lse: bool = False,
    **others: torch.Tensor | int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`npu_fused_infer_attention_score` under new argument names, with learnable sinks.

    Args:
        learnable_sink: bf16 ``[N]`` (the dtype of an fp32 or fp64 query is taken too): one more logit per head in the
            denominator of the softmax, with no value. Only TND and NTD_TND, head size of ``value`` ≤ 128.
    """
    if query_quant_mode:
        others["query_quant_mode"] = query_quant_mode
    refuse_given("npu_fused_infer_attention_score_v2", **others)
    check_precision(inner_precise, input_layout, query)
    return attend(
        AttentionCall(
            query,
            key,
            value,
            input_layout=input_layout,
            heads=num_query_heads,
            kv_heads=num_key_value_heads,
            scale=softmax_scale,
            query_lengths=("actual_seq_qlen", actual_seq_qlen),
            kv_lengths=("actual_seq_kvlen", actual_seq_kvlen),
            atten_mask=atten_mask,
            pse_shift=pse_shift,
            sparse_mode=sparse_mode,
            pre_tokens=pre_tokens,
            next_tokens=next_tokens,
            block_table=block_table,
            block_size=block_size,
            query_rope=query_rope,
            key_rope=key_rope,
            key_scales=scales("dequant_scale_key", dequant_scale_key, dequant_offset_key, key_quant_mode),
            value_scales=scales("dequant_scale_value", dequant_scale_value, dequant_offset_value, value_quant_mode),
            sinks=learnable_sink,
            want_lse=return_softmax_lse,
            fused=True,
        )
    )


def _fused_fake(
    query: torch.Tensor,
    value: torch.Tensor,
    block_table: torch.Tensor | None,
    input_layout: str,
    heads: int,
    kv_heads: int,
    dtype: torch.dtype,
    want_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    layout = parse_layout(input_layout, query)
    kv_heads = kv_heads or heads
    if block_table is not None and value.dim() == 5:
        value_dim = value.shape[2] * value.shape[4]
    elif value.dim() == 3 and (block_table is not None or layout.inputs == "BSH"):
        value_dim = value.shape[2] // kv_heads
    else:
        value_dim = value.shape[-1]
    if value.dtype is torch.int32:
        value_dim = value_dim * 8
    output = query.new_empty(layout.output_shape(query, heads, value_dim), dtype=dtype)
    return output, query.new_empty(layout.lse_shape(query, heads) if want_lse else [0], dtype=torch.float32)


def _fused_infer_fake(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    quant_scale2: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    query_rope: torch.Tensor | None = None,
    num_heads: int = 1,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    softmax_lse_flag: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = result_dtype(query, query_rope, quant_scale2 is not None)
    return _fused_fake(
        query, value, block_table, input_layout, num_heads, num_key_value_heads, dtype, softmax_lse_flag
    )


def _fused_infer_v2_fake(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    quant_scale_out: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    query_rope: torch.Tensor | None = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    input_layout: str = "BSH",
    return_softmax_lse: bool = False,
    out_dtype: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = result_dtype(query, query_rope, quant_scale_out is not None)
    if out_dtype is not None and (quant_scale_out is not None or query.dtype is torch.int8):
        dtype = DTYPES_BY_CODE[out_dtype]
    return _fused_fake(
        query, value, block_table, input_layout, num_query_heads, num_key_value_heads, dtype, return_softmax_lse
    )


OPERATORS = (
    Operator("npu_fused_infer_attention_score", npu_fused_infer_attention_score, _fused_infer_fake),
    Operator("npu_fused_infer_attention_score_v2", npu_fused_infer_attention_score_v2, _fused_infer_v2_fake),
)
