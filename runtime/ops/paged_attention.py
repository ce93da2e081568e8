"""`pagoda::paged_attention`: write the step's keys and values into the paged cache, then attend over it."""

from __future__ import annotations

import struct

import torch

from .int8_rows import check_scales
from .native import DTYPE_CODES, FLOAT_CODES, kernel_function
from .reference import paged_attention_reference
from .registration import check_per_head, register_operator

_SCHEMA = (
    "paged_attention(Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor slot_mapping, Tensor block_table, Tensor query_start_loc, Tensor seq_lens, Tensor? sinks, "
    "Tensor? alibi_slopes, float scale, int sliding_window, int chunk, float softcap, "
    "Tensor(c!)? key_scale, Tensor(d!)? value_scale, bool batch_invariant=False) -> Tensor"
)
_CACHE_CODES = {**FLOAT_CODES, torch.int8: 4}
# Field for field the struct PagedAttentionArguments of csrc/attention.cpp; packing all at once is several
# times faster than filling a ctypes.Structure.
_ARGUMENTS = struct.Struct("=56q2d")


def _paged_attention_fake(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object) -> torch.Tensor:
    return query.new_empty((1, query.shape[2], query.shape[1], value.shape[3])).transpose(1, 2)


def paged_attention_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    scale: float,
    sliding_window: int,
    chunk: int,
    softcap: float,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    batch, heads, tokens, dim = query.shape
    num_blocks, block_size, kv_heads, _ = key_cache.shape
    value_dim = value.shape[3]
    sequences, table_width = block_table.shape
    if batch != 1 or not kv_heads or heads % kv_heads or key.shape != (1, kv_heads, tokens, dim):
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and key_cache {tuple(key_cache.shape)} do "
            "not fit; make them [1, H, T, D], [1, Hk, T, D], [num_blocks, block_size, Hk, D], Hk dividing H"
        )
    if key_cache.shape[3] != dim or value.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"key_cache {tuple(key_cache.shape)} and value {tuple(value.shape)} do not fit key "
            f"{tuple(key.shape)}; head sizes of keys, and heads and tokens of values, must agree"
        )
    if value_cache.shape != (num_blocks, block_size, kv_heads, value_dim):
        raise ValueError(
            f"value_cache has shape {tuple(value_cache.shape)}; "
            f"key_cache and value ask for {(num_blocks, block_size, kv_heads, value_dim)}"
        )
    if slot_mapping.shape != (tokens,) or query_start_loc.shape != (sequences + 1,) or seq_lens.shape != (sequences,):
        raise ValueError(
            f"slot_mapping {tuple(slot_mapping.shape)}, query_start_loc {tuple(query_start_loc.shape)} and "
            f"seq_lens {tuple(seq_lens.shape)} must be [{tokens}], [{sequences + 1}] and [{sequences}]"
        )
    check_per_head("sinks", sinks, heads)
    check_per_head("alibi_slopes", alibi_slopes, heads)
    dtype, cache_dtype = query.dtype, key_cache.dtype
    if key.dtype != dtype or value.dtype != dtype or value_cache.dtype != cache_dtype:
        raise ValueError(
            f"query, key and value have dtypes {dtype}, {key.dtype}, {value.dtype} and the caches "
            f"{cache_dtype}, {value_cache.dtype}; each group must share one"
        )
    check_scales(key_cache, key_scale, value_scale)
    kernel = kernel_function("pagoda_paged_attention")
    if kernel is None or dtype not in FLOAT_CODES or cache_dtype not in _CACHE_CODES:
        if batch_invariant:
            reason = "the C++ kernels" if kernel is None else f"a kernel for {dtype} over a cache of {cache_dtype}"
            raise RuntimeError(f"pagoda::paged_attention needs {reason}; compile without batch_invariant")
        return paged_attention_reference(
            query,
            key,
            value,
            key_cache,
            value_cache,
            slot_mapping,
            block_table,
            query_start_loc,
            seq_lens,
            sinks,
            alibi_slopes,
            scale,
            sliding_window,
            chunk,
            softcap,
            key_scale,
            value_scale,
        )
    slot_mapping = _plain(slot_mapping, torch.int64)
    block_table = _plain(block_table, torch.int32)
    query_start_loc = _plain(query_start_loc, torch.int32)
    seq_lens = _plain(seq_lens, torch.int32)
    result = query.new_empty((1, tokens, heads, value_dim))
    status = kernel(
        _ARGUMENTS.pack(
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
            0 if alibi_slopes is None else alibi_slopes.data_ptr(),
            0 if key_scale is None else key_scale.data_ptr(),
            0 if value_scale is None else value_scale.data_ptr(),
            result.data_ptr(),
            DTYPE_CODES[dtype],
            _CACHE_CODES[cache_dtype],
            0 if sinks is None else DTYPE_CODES[sinks.dtype],
            0 if alibi_slopes is None else DTYPE_CODES[alibi_slopes.dtype],
            heads,
            kv_heads,
            tokens,
            sequences,
            table_width,
            num_blocks,
            block_size,
            dim,
            value_dim,
            *query.stride()[1:],
            *key.stride()[1:],
            *value.stride()[1:],
            *key_cache.stride(),
            *value_cache.stride(),
            *((0, 0, 0) if key_scale is None else key_scale.stride()),
            *((0, 0, 0) if value_scale is None else value_scale.stride()),
            0 if sinks is None else sinks.stride(0),
            0 if alibi_slopes is None else alibi_slopes.stride(0),
            sliding_window,
            chunk,
            torch.get_num_threads(),
            batch_invariant,
            scale,
            softcap,
        )
    )
    if status:
        _raise_failure(status, key_cache, slot_mapping, block_table, query_start_loc, seq_lens)
    return result.transpose(1, 2)


def _plain(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The array that the kernel reads: ``tensor`` itself when it is as the schema says."""
    if tensor.dtype is dtype and tensor.is_contiguous():
        return tensor
    return tensor.to(dtype).contiguous()


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


_overload = register_operator(
    _SCHEMA, fake=_paged_attention_fake, reference=paged_attention_reference, cpu=paged_attention_cpu
)


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    *,
    scale: float,
    sliding_window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Causal attention of one flat step (prefill chunks and decodes mixed) over a paged KV cache.

    First every token's key and value go to its cache slot; then token i of sequence s, at position
    ``p = seq_lens[s] - n_s + i``, attends the positions ``j <= p`` with ``p - j < sliding_window`` and
    ``p // chunk == j // chunk``. Scores as in ``attention``; ALiBi adds ``alibi_slopes[h] · (j - p)``.
    Positions that no token sees are never read (their blocks may be in other hands).

    Caches of int8 hold ``round(x / s)``, each head of each token with its own scale ``s = max|x| / 127``, and are
    read as ``stored · s`` (see ``int8_rows``). A NaN or an infinity, which a float cache gives back in its place,
    makes an int8 cache give back NaN for all of that token's head, and so NaN for whatever attends it.

    Args:
        query: ``[1, H, T, D]`` fp32, bf16 or fp16 (fp64 runs the reference); the tokens of all sequences,
            flat. Any strides, in all arguments.
        key: ``[1, Hk, T, D]``, H a multiple of Hk.
        value: ``[1, Hk, T, Dv]``.
        key_cache: ``[num_blocks, block_size, Hk, D]`` fp32, bf16, fp16, not necessarily query's, or int8; written.
        value_cache: ``[num_blocks, block_size, Hk, Dv]``; written.
        slot_mapping: ``[T]`` int64; token t goes to block ``slot // block_size``, offset
            ``slot % block_size``. -1: the token is padding and is not written.
        block_table: ``[S, W]`` int32; block ids of each sequence, in order.
        query_start_loc: ``[S + 1]`` int32; sequence s owns the tokens from ``query_start_loc[s]`` up to
            ``query_start_loc[s + 1]``.
        seq_lens: ``[S]`` int32; context length of each sequence, this step's tokens included.
        sinks, alibi_slopes, scale, sliding_window, chunk, softcap: as in ``attention``.
        key_scale, value_scale: of int8 caches, ``[num_blocks, block_size, Hk]`` float32; written. None for others.
        batch_invariant: a token's result does not change by a bit with the other tokens of the step, the other
            sequences, the blocks' size or the number of threads: its keys are cut by their positions alone.

    Returns:
        ``[1, H, T, Dv]`` in query's dtype, stored as ``[1, T, H, Dv]``. Tokens of no sequence are zero.

    Raises:
        RuntimeError: grad mode is on and an input requires grad; or ``batch_invariant`` without a kernel for it.
        ValueError: shapes or dtypes that do not fit, a slot or block id outside the cache, a context longer
            than its row of the block table. Nothing is written then.
    """
    return _overload(
        query,
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        block_table,
        query_start_loc,
        seq_lens,
        sinks,
        alibi_slopes,
        scale,
        sliding_window,
        chunk,
        softcap,
        key_scale,
        value_scale,
        batch_invariant,
    )
