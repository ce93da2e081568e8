"""`pagoda::attention`: dense softmax attention (GQA) with masks, windows, softcap, sinks and ALiBi."""

from __future__ import annotations

import struct

import torch

from .native import DTYPE_CODES, kernel_function
from .reference import attention_reference
from .registration import check_per_head, register_operator

_SCHEMA = (
    "attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? sinks, "
    "Tensor? alibi_slopes, float scale, bool is_causal, int sliding_window, int chunk, float softcap) "
    "-> Tensor"
)
# Field for field the struct AttentionArguments of csrc/attention.cpp; packing all at once is several times
# faster than filling a ctypes.Structure.
_ARGUMENTS = struct.Struct("=40q2d")


def _attention_fake(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object) -> torch.Tensor:
    batch, heads, tokens = query.shape[:3]
    return query.new_empty((batch, tokens, heads, value.shape[3])).transpose(1, 2)


def attention_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    scale: float,
    is_causal: bool,
    sliding_window: int,
    chunk: int,
    softcap: float,
) -> torch.Tensor:
    batch, heads, queries, dim = query.shape
    key_batch, kv_heads, keys, key_dim = key.shape
    value_dim = value.shape[3]
    if key_batch != batch or key_dim != dim or not kv_heads or heads % kv_heads:
        raise ValueError(
            f"key of shape {tuple(key.shape)} does not fit query of shape {tuple(query.shape)}; "
            "batch and head size must agree and key heads must divide query heads"
        )
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(f"value of shape {tuple(value.shape)} does not fit key of shape {tuple(key.shape)}")
    check_per_head("sinks", sinks, heads)
    check_per_head("alibi_slopes", alibi_slopes, heads)
    if key.dtype != query.dtype or value.dtype != query.dtype:
        raise ValueError(f"query, key and value have dtypes {query.dtype}, {key.dtype}, {value.dtype}; make them one")
    kernel = kernel_function("pagoda_attention")
    if kernel is None or query.dtype not in DTYPE_CODES:
        return attention_reference(
            query,
            key,
            value,
            attn_mask,
            sinks,
            alibi_slopes,
            scale,
            is_causal,
            sliding_window,
            chunk,
            softcap,
        )
    if attn_mask is not None:
        try:
            attn_mask = attn_mask.expand(batch, heads, queries, keys)
        except RuntimeError:
            raise ValueError(
                f"attn_mask of shape {tuple(attn_mask.shape)} does not broadcast to {(batch, heads, queries, keys)}"
            ) from None
        if attn_mask.dtype not in DTYPE_CODES:
            attn_mask = attn_mask.float()
    result = query.new_empty((batch, queries, heads, value_dim))
    if result.numel():
        kernel(
            _ARGUMENTS.pack(
                query.data_ptr(),
                key.data_ptr(),
                value.data_ptr(),
                0 if attn_mask is None else attn_mask.data_ptr(),
                0 if sinks is None else sinks.data_ptr(),
                0 if alibi_slopes is None else alibi_slopes.data_ptr(),
                result.data_ptr(),
                DTYPE_CODES[query.dtype],
                0 if attn_mask is None else DTYPE_CODES[attn_mask.dtype],
                0 if sinks is None else DTYPE_CODES[sinks.dtype],
                0 if alibi_slopes is None else DTYPE_CODES[alibi_slopes.dtype],
                batch,
                heads,
                kv_heads,
                queries,
                keys,
                dim,
                value_dim,
                *query.stride(),
                *key.stride(),
                *value.stride(),
                *((0, 0, 0, 0) if attn_mask is None else attn_mask.stride()),
                0 if sinks is None else sinks.stride(0),
                0 if alibi_slopes is None else alibi_slopes.stride(0),
                is_causal,
                sliding_window,
                chunk,
                torch.get_num_threads(),
                scale,
                softcap,
            )
        )
    return result.transpose(1, 2)


_overload = register_operator(_SCHEMA, fake=_attention_fake, reference=attention_reference, cpu=attention_cpu)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    *,
    scale: float,
    is_causal: bool = False,
    sliding_window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Softmax attention of every query over the keys that it sees, in the flash style: no Tq × Tk buffer.

    Score of query i and key j: ``s = scale · q·k``; ``s = softcap · tanh(s / softcap)``; plus
    ``alibi_slopes[h] · (j - i)``; plus the mask; then softmax in fp32, with one extra logit per head if there
    are sinks (Xiao et al. 2023, as in gpt-oss: it takes weight and has no value).

    Args:
        query: ``[B, H, Tq, D]`` fp32, bf16 or fp16 (fp64 runs the reference). Any strides, in all arguments.
        key: ``[B, Hk, Tk, D]`` with H a multiple of Hk; query head h reads KV head ``h // (H // Hk)``.
        value: ``[B, Hk, Tk, Dv]``.
        attn_mask: broadcastable to ``[B, H, Tq, Tk]``; bool (True: attend) or float (added). The lowest
            finite value of a float mask's dtype counts as -inf.
        sinks: ``[H]``, or None.
        alibi_slopes: ``[H]`` fp32, or None (Press et al. 2021).
        scale: factor of the raw scores.
        is_causal: j <= i, counted from the top left, as torch's ``scaled_dot_product_attention`` does.
        sliding_window: i - j < sliding_window; 0 turns it off.
        chunk: ``i // chunk == j // chunk``; 0 turns it off.
        softcap: in units of the scaled score; 0 turns it off.

    Returns:
        ``[B, H, Tq, Dv]`` in query's dtype, stored as ``[B, Tq, H, Dv]``. Rows that see no key are zero.

    Raises:
        RuntimeError: grad mode is on and an input requires grad.
        ValueError: shapes or dtypes that do not fit.
    """
    return _overload(
        query, key, value, attn_mask, sinks, alibi_slopes, scale, is_causal, sliding_window, chunk, softcap
    )
