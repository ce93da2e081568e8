"""Paged attention in plain ATen operators of static kind: what lowering falls back to on Ascend."""

from __future__ import annotations

import torch

from .int8_rows import dequantise_rows


def gathered_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    padded_tokens: torch.Tensor,
    row_of_token: torch.Tensor,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    scale: float,
    sliding_window: int,
    chunk: int,
    softcap: float,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of a step's queries over caches that hold its keys already.

    Blocks of each sequence are gathered, queries padded to the longest sequence of the step; scores are taken in
    the queries' dtype, softmax in fp32. Memory: ``S * W * block_size`` rows of keys and of values.

    Args:
        query: ``[T, H, D]``.
        key_cache: ``[num_blocks, block_size, Hk, D]``.
        value_cache: ``[num_blocks, block_size, Hk, Dv]``.
        block_table: ``[S, W]`` int32; entries past a sequence's length name any block.
        query_start_loc: ``[S + 1]`` int32.
        seq_lens: ``[S]`` int32.
        padded_tokens: ``[S, M]`` int64, as ``StepMetadata.padded_tokens``.
        row_of_token: ``[T]`` int64, as ``StepMetadata.row_of_token``.
        sinks: ``[H]`` or None.
        alibi_slopes: ``[H]`` or None.
        scale: of the raw scores.
        sliding_window: 0 for none.
        chunk: 0 for none.
        softcap: 0 for none.
        key_scale, value_scale: of int8 caches, ``[num_blocks, block_size, Hk]`` float32.

    Returns:
        ``[T, H, Dv]``.
    """
    sequences, longest = padded_tokens.shape
    heads, dim = query.shape[1:]
    kv_heads, value_dim = value_cache.shape[2:]
    group = heads // kv_heads
    queries = query[padded_tokens].view(sequences, longest, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
    keys = _blocks(key_cache, key_scale, block_table, query.dtype).permute(0, 2, 3, 1)
    values = _blocks(value_cache, value_scale, block_table, query.dtype).permute(0, 2, 1, 3)
    context = keys.shape[3]

    counts = query_start_loc[1:] - query_start_loc[:-1]
    i = (seq_lens - counts)[:, None] + torch.arange(longest, device=query.device)
    j = torch.arange(context, device=query.device)
    i, j = i[:, :, None], j[None, None, :]
    # What lies behind a sequence's end may be anything, even no number; padding rows must not see it either.
    inside = j < seq_lens[:, None, None]
    seen = (j <= i) & inside
    if sliding_window > 0:
        seen = seen & (i - j < sliding_window)
    if chunk > 0:
        chunks = torch.div(i, chunk, rounding_mode="floor") == torch.div(j, chunk, rounding_mode="floor")
        seen = seen & chunks

    # [S, Hk, group * M, D] @ [S, Hk, D, L]
    scores = queries.reshape(sequences, kv_heads, group * longest, dim) @ keys
    scores = scores.view(sequences, kv_heads, group, longest, context).float() * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        slopes = alibi_slopes.float().view(1, kv_heads, group, 1, 1)
        scores = scores + slopes * (j - i)[:, None, None]
    scores = scores.masked_fill(~seen[:, None, None], torch.finfo(torch.float32).min)
    if sinks is not None:
        extra = sinks.float().view(1, kv_heads, group, 1, 1).expand(sequences, -1, -1, longest, 1)
        weights = torch.softmax(torch.cat((scores, extra), -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1)
    values = values.masked_fill(~inside.transpose(1, 2)[:, None], 0.0)
    weights = weights.to(values.dtype).view(sequences, kv_heads, group * longest, context)
    out = (weights @ values).view(sequences, kv_heads, group, longest, value_dim)
    rows = out.permute(0, 3, 1, 2, 4).reshape(sequences * longest, heads, value_dim)
    return rows[row_of_token].to(query.dtype)


def _blocks(
    cache: torch.Tensor, scale: torch.Tensor | None, block_table: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The blocks of each sequence, one after the other: ``[S, W * block_size, Hk, D]``."""
    rows = cache[block_table]
    if scale is not None:
        rows = dequantise_rows(rows, scale[block_table], dtype)
    return rows.flatten(1, 2)
