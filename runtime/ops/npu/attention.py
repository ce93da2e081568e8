"""`npu::npu_fused_infer_attention_score` and its v2.

Source: op-plugin, docs `torch_npu-npu_fused_infer_attention_score.md` and `…_v2.md`; output shapes after torch_npu's
meta functions.
"""

from __future__ import annotations

import torch

from .attention_core import NO_KERNEL, AttentionCall, attend, result_dtype
from .attention_layouts import parse_layout
from .numerics import DTYPES_BY_CODE
from .registration import Operator


def fused_infer_attention_score(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """``softmax(scale · query keyᵀ + pse_shift, masked pairs left out) value``, and the log-sum-exp.

    Letters as in :mod:`.attention_layouts`; which pairs a mask hides is in
    :func:`.attention_masks.visible_pairs`. With one query per sequence in a layout with a batch axis and without
    ``query_rope``, ``sparse_mode``, ``pre_tokens`` and ``next_tokens`` have no effect.

    Args, as the first version names them:
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
        learnable_sink: of v2, bf16 ``[N]`` (the dtype of an fp32 or fp64 query is taken too): one more logit per head
            in the denominator of the softmax, with no value. Only TND and NTD_TND, head size of ``value`` ≤ 128.

    Returns:
        The result, in the dtype of ``query``, and fp32 ``(T, N, 1)`` or ``(B, N, S, 1)``, or ``(0)`` without
        ``softmax_lse_flag``.

    Raises:
        ValueError: what the vendor's documents forbid.
        NotImplementedError: quantized queries or results, int4, left padding, shared prefixes, tree masks.
    """
    return attend(call)


def _fused_fake(
    query: torch.Tensor,
    value: torch.Tensor,
    quant_scale: torch.Tensor | None,
    block_table: torch.Tensor | None,
    query_rope: torch.Tensor | None,
    heads: int,
    kv_heads: int,
    input_layout: str,
    want_lse: bool,
    out_dtype: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = result_dtype(query, query_rope, quant_scale is not None)
    if out_dtype is not None and (quant_scale is not None or query.dtype is torch.int8):
        dtype = DTYPES_BY_CODE[out_dtype]
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


OPERATORS = tuple(
    Operator(name, fused_infer_attention_score, _fused_fake, record=AttentionCall, lacks=NO_KERNEL)
    for name in ("npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2")
)
