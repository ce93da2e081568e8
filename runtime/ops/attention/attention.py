"""`pagoda::attention`: dense softmax attention (GQA) with masks, windows, softcap, sinks and ALiBi."""

from __future__ import annotations

import struct
from typing import Any

import torch

from ..arguments import AttentionArguments
from ..native import DTYPE_CODES, kernel_function
from ..reference import attention_reference
from ..registration import Facts, check_per_head, register_operator
from .relative_bias import check_relative_bias
from .selected_keys import check_selected

_SCHEMA = (
    "attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? sinks, "
    "Tensor? alibi_slopes, float scale, bool is_causal, int sliding_window, int chunk, float softcap, "
    "Tensor? selected=None, Tensor? relative_bias=None) -> Tensor"
)
# Field for field the struct AttentionArguments of csrc/attention.cpp; packing all at once is several times
# faster than filling a ctypes.Structure.
_ARGUMENTS = struct.Struct("=40q2d")
_Call = AttentionArguments[torch.Tensor]


def _attention_fake(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object) -> torch.Tensor:
    batch, heads, tokens = query.shape[:3]
    return query.new_empty((batch, tokens, heads, value.shape[3])).transpose(1, 2)


def attention_cpu(*arguments: Any) -> torch.Tensor:
    """:func:`attention_reference` by the C++ kernel, for CPU tensors; else the reference.

    Args:
        arguments: as the reference.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    call: _Call = AttentionArguments(*arguments)
    sizes = _checked_sizes(call)
    kernel = kernel_function("pagoda_attention")
    without_kernel = call.selected is not None or call.relative_bias is not None
    if kernel is None or call.query.dtype not in DTYPE_CODES or without_kernel:
        return attention_reference(*arguments)
    batch, heads, _, queries, keys, _, value_dim = sizes
    attn_mask = _expanded(call.attn_mask, (batch, heads, queries, keys))
    row = heads * value_dim
    strides = (queries * row, value_dim, row, 1)
    result = call.query.new_empty_strided((batch, heads, queries, value_dim), strides)
    if result.numel():
        kernel(_packed(call, attn_mask, sizes, result))
    return result


def _checked_sizes(call: _Call) -> tuple[int, ...]:
    """Raise ``ValueError`` for shapes and dtypes that do not fit; else B, H, Hk, Tq, Tk, D, Dv."""
    query, key, value = call.query, call.key, call.value
    batch, heads, queries, dim = query.shape
    key_batch, kv_heads, keys, key_dim = key.shape
    if key_batch != batch or key_dim != dim or not kv_heads or heads % kv_heads:
        raise ValueError(
            f"key of shape {tuple(key.shape)} does not fit query of shape {tuple(query.shape)}; "
            "batch and head size must agree and key heads must divide query heads"
        )
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(f"value of shape {tuple(value.shape)} does not fit key of shape {tuple(key.shape)}")
    check_per_head("sinks", call.sinks, heads)
    check_per_head("alibi_slopes", call.alibi_slopes, heads)
    check_selected(call.selected, batch, queries)
    check_relative_bias(call.relative_bias, batch, heads, queries)
    if key.dtype != query.dtype or value.dtype != query.dtype:
        raise ValueError(f"query, key and value have dtypes {query.dtype}, {key.dtype}, {value.dtype}; make them one")
    return batch, heads, kv_heads, queries, keys, dim, value.shape[3]


def _expanded(attn_mask: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor | None:
    """The mask as the kernel reads it: of that shape, in a dtype that it knows."""
    if attn_mask is None:
        return None
    try:
        expanded = attn_mask.expand(shape)
    except RuntimeError:
        raise ValueError(f"attn_mask of shape {tuple(attn_mask.shape)} does not broadcast to {shape}") from None
    return expanded if expanded.dtype in DTYPE_CODES else expanded.float()


def _packed(call: _Call, attn_mask: torch.Tensor | None, sizes: tuple[int, ...], result: torch.Tensor) -> bytes:
    """The kernel's struct of arguments; what it points to must outlive the kernel's run."""
    query, key, value, sinks, slopes = call.query, call.key, call.value, call.sinks, call.alibi_slopes
    return _ARGUMENTS.pack(
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        0 if attn_mask is None else attn_mask.data_ptr(),
        0 if sinks is None else sinks.data_ptr(),
        0 if slopes is None else slopes.data_ptr(),
        result.data_ptr(),
        DTYPE_CODES[query.dtype],
        0 if attn_mask is None else DTYPE_CODES[attn_mask.dtype],
        0 if sinks is None else DTYPE_CODES[sinks.dtype],
        0 if slopes is None else DTYPE_CODES[slopes.dtype],
        *sizes,
        *query.stride(),
        *key.stride(),
        *value.stride(),
        *((0, 0, 0, 0) if attn_mask is None else attn_mask.stride()),
        0 if sinks is None else sinks.stride(0),
        0 if slopes is None else slopes.stride(0),
        call.is_causal,
        call.sliding_window,
        call.chunk,
        torch.get_num_threads(),
        call.scale,
        call.softcap,
    )


attention = register_operator(
    _SCHEMA,
    Facts(over="all", invariant=False, kind="attention", spelled_out=True),
    fake=_attention_fake,
    reference=attention_reference,
    cpu=attention_cpu,
)
