"""`pagoda::paged_attention`: write the step's keys and values into the paged cache, then attend over it."""

from __future__ import annotations

import struct
from typing import Any

import torch

from ..arguments import PagedAttentionArguments
from ..native import DTYPE_CODES, FLOAT_CODES, kernel_function
from ..reference import paged_attention_reference
from ..registration import Facts, check_per_head, register_operator
from .int8_rows import check_scales
from .relative_bias import check_relative_bias
from .selected_keys import check_selected, mask_of_selected

_SCHEMA = (
    "paged_attention(Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor slot_mapping, Tensor block_table, Tensor query_start_loc, Tensor seq_lens, Tensor? sinks, "
    "Tensor? alibi_slopes, float scale, int sliding_window, int chunk, float softcap, "
    "Tensor(c!)? key_scale, Tensor(d!)? value_scale, Tensor? selected=None, Tensor? relative_bias=None, "
    "bool batch_invariant=False) -> Tensor"
)
_CACHE_CODES = {**FLOAT_CODES, torch.int8: 4}
# Field for field the struct PagedAttentionArguments of csrc/attention.cpp; packing all at once is several
# times faster than filling a ctypes.Structure.
_ARGUMENTS = struct.Struct("=64q2d")
_Call = PagedAttentionArguments[torch.Tensor]


def _paged_attention_fake(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object) -> torch.Tensor:
    return query.new_empty((1, query.shape[2], query.shape[1], value.shape[3])).transpose(1, 2)


def paged_attention_cpu(*arguments: Any) -> torch.Tensor:
    """:func:`paged_attention_reference` by the C++ kernel, for CPU tensors; else the reference.

    Args:
        arguments: as the reference.

    Raises:
        RuntimeError: ``batch_invariant`` without a kernel for it.
        ValueError: as the reference, but nothing is written then.
    """
    call: _Call = PagedAttentionArguments(*arguments)
    sizes = _checked_sizes(call)
    kernel = kernel_function("pagoda_paged_attention")
    if (
        kernel is None
        or call.query.dtype not in FLOAT_CODES
        or call.key_cache.dtype not in _CACHE_CODES
        or not _takes(call)
    ):
        if call.batch_invariant:
            dtypes = f"a kernel for {call.query.dtype} over a cache of {call.key_cache.dtype}"
            reason = "the C++ kernels" if kernel is None else dtypes
            raise RuntimeError(f"pagoda::paged_attention needs {reason}; compile without batch_invariant")
        return paged_attention_reference(*arguments)
    heads, _, tokens, *_, value_dim = sizes
    row = heads * value_dim
    result = call.query.new_empty_strided((1, heads, tokens, value_dim), (tokens * row, value_dim, row, 1))
    metadata = (
        _plain(call.slot_mapping, torch.int64),
        _plain(call.block_table, torch.int32),
        _plain(call.query_start_loc, torch.int32),
        _plain(call.seq_lens, torch.int32),
    )
    mask = None if call.selected is None else mask_of_selected(call.selected, _longest(call))
    status = kernel(_packed(call, metadata, sizes, result, mask))
    if status:
        _raise_failure(status, call.key_cache, *metadata)
    return result


def _checked_sizes(call: _Call) -> tuple[int, ...]:
    """Raise ``ValueError`` for shapes and dtypes that do not fit; H, Hk, T, S, W, num_blocks, block_size, D, Dv."""
    query, key, value, key_cache, value_cache = call[:5]
    batch, heads, tokens, dim = query.shape
    num_blocks, block_size, kv_heads, key_cache_dim = key_cache.shape
    key_shape, value_shape = key.shape, value.shape
    sequences, table_width = call.block_table.shape
    if batch != 1 or not kv_heads or heads % kv_heads or key_shape != (1, kv_heads, tokens, dim):
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key_shape)} and key_cache {tuple(key_cache.shape)} do "
            "not fit; make them [1, H, T, D], [1, Hk, T, D], [num_blocks, block_size, Hk, D], Hk dividing H"
        )
    if key_cache_dim != dim or value_shape[:3] != key_shape[:3]:
        raise ValueError(
            f"key_cache {tuple(key_cache.shape)} and value {tuple(value_shape)} do not fit key "
            f"{tuple(key_shape)}; head sizes of keys, and heads and tokens of values, must agree"
        )
    value_dim = value_shape[3]
    if value_cache.shape != (num_blocks, block_size, kv_heads, value_dim):
        raise ValueError(
            f"value_cache has shape {tuple(value_cache.shape)}; "
            f"key_cache and value ask for {(num_blocks, block_size, kv_heads, value_dim)}"
        )
    slots, starts, lens = call.slot_mapping.shape, call.query_start_loc.shape, call.seq_lens.shape
    if slots != (tokens,) or starts != (sequences + 1,) or lens != (sequences,):
        raise ValueError(
            f"slot_mapping {tuple(slots)}, query_start_loc {tuple(starts)} and "
            f"seq_lens {tuple(lens)} must be [{tokens}], [{sequences + 1}] and [{sequences}]"
        )
    check_per_head("sinks", call.sinks, heads)
    check_per_head("alibi_slopes", call.alibi_slopes, heads)
    check_selected(call.selected, batch, tokens)
    check_relative_bias(call.relative_bias, batch, heads, tokens)
    if call.selected is not None and call.relative_bias is not None:
        raise ValueError("selected and relative_bias cannot be combined; give one of them")
    dtype, cache_dtype = query.dtype, key_cache.dtype
    if key.dtype != dtype or value.dtype != dtype or value_cache.dtype != cache_dtype:
        raise ValueError(
            f"query, key and value have dtypes {dtype}, {key.dtype}, {value.dtype} and the caches "
            f"{cache_dtype}, {value_cache.dtype}; each group must share one"
        )
    check_scales(key_cache, call.key_scale, call.value_scale)
    return heads, kv_heads, tokens, sequences, table_width, num_blocks, block_size, dim, value_dim


def _takes(call: _Call) -> bool:
    """True if the kernel reads the dtype of the bias by distance, where there is one."""
    return call.relative_bias is None or call.relative_bias.dtype in DTYPE_CODES


def _longest(call: _Call) -> int:
    """The most keys that a sequence can have in this step: no more than its row of the block table has slots."""
    lens = call.seq_lens
    longest = int(lens.max()) if lens.numel() else 0
    return max(0, min(longest, call.block_table.shape[1] * call.key_cache.shape[1]))


def _plain(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The array that the kernel reads: ``tensor`` itself when it is as the schema says."""
    if tensor.dtype is dtype and tensor.is_contiguous():
        return tensor
    return tensor.to(dtype).contiguous()


def _packed(
    call: _Call,
    metadata: tuple[torch.Tensor, ...],
    sizes: tuple[int, ...],
    result: torch.Tensor,
    mask: torch.Tensor | None,
) -> bytes:
    """The kernel's struct of arguments; what it points to must outlive the kernel's run."""
    query, key, value, key_cache, value_cache = call[:5]
    sinks, slopes, key_scale, value_scale = call.sinks, call.alibi_slopes, call.key_scale, call.value_scale
    relative = call.relative_bias
    slot_mapping, block_table, query_start_loc, seq_lens = metadata
    return _ARGUMENTS.pack(
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        slot_mapping.data_ptr(),
        block_table.data_ptr(),
        query_start_loc.data_ptr(),
        seq_lens.data_ptr(),
        0 if sinks is None else sinks.data_ptr(),
        0 if slopes is None else slopes.data_ptr(),
        0 if key_scale is None else key_scale.data_ptr(),
        0 if value_scale is None else value_scale.data_ptr(),
        0 if mask is None else mask.data_ptr(),
        0 if relative is None else relative.data_ptr(),
        result.data_ptr(),
        DTYPE_CODES[query.dtype],
        _CACHE_CODES[key_cache.dtype],
        0 if sinks is None else DTYPE_CODES[sinks.dtype],
        0 if slopes is None else DTYPE_CODES[slopes.dtype],
        0 if relative is None else DTYPE_CODES[relative.dtype],
        *sizes,
        *query.stride()[1:],
        *key.stride()[1:],
        *value.stride()[1:],
        *key_cache.stride(),
        *value_cache.stride(),
        *((0, 0, 0) if key_scale is None else key_scale.stride()),
        *((0, 0, 0) if value_scale is None else value_scale.stride()),
        0 if sinks is None else sinks.stride(0),
        0 if slopes is None else slopes.stride(0),
        0 if mask is None else mask.stride(0),
        *((0, 0, 0, 0) if relative is None else (*relative.stride()[1:], relative.shape[3])),
        call.sliding_window,
        call.chunk,
        torch.get_num_threads(),
        call.batch_invariant,
        call.scale,
        call.softcap,
    )


def _raise_failure(
    status: int,
    key_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    """Raise what the kernel's status (a code, and the index of the culprit above 8 bits) stands for."""
    code, index = status & 0xFF, status >> 8
    num_blocks, block_size = key_cache.shape[:2]
    if code == 1:
        raise ValueError(
            f"slot_mapping[{index}] is {int(slot_mapping[index])}; the cache has {num_blocks * block_size} slots"
        )
    if code == 2:
        raise ValueError(
            f"query_start_loc[{index}] is {int(query_start_loc[index])}; the offsets must start at 0, not "
            f"fall and not exceed the {slot_mapping.shape[0]} tokens"
        )
    if code == 3:
        tokens = int(query_start_loc[index + 1] - query_start_loc[index])
        raise ValueError(
            f"seq_lens[{index}] is {int(seq_lens[index])}; it must be at least the sequence's {tokens} new "
            f"tokens and at most the {block_table.shape[1] * block_size} slots of its block_table row"
        )
    raise ValueError(
        f"block_table[{index}] is {block_table[index].tolist()}; "
        f"a block within seq_lens[{index}] is not one of the cache's {num_blocks}"
    )


paged_attention = register_operator(
    _SCHEMA,
    Facts(over="sequences", invariant=True, kind="attention", spelled_out=False),
    fake=_paged_attention_fake,
    reference=paged_attention_reference,
    cpu=paged_attention_cpu,
)
