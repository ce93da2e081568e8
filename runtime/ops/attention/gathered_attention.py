"""Paged attention in plain ATen operators with static shapes: the fallback of lowering on Ascend."""

from __future__ import annotations

import torch

from ..arguments import PagedAttentionArguments
from .int8_rows import dequantize_rows

aten = torch.ops.aten


def gathered_attention(
    call: PagedAttentionArguments[torch.Tensor],
    query: torch.Tensor,
    padded_tokens: torch.Tensor,
    row_of_token: torch.Tensor,
    scales_by_head: bool = False,
) -> torch.Tensor:
    """Attention of a step's queries over caches that hold its keys already.

    Blocks of each sequence are gathered, queries padded to the longest sequence of the step; scores are taken in
    the queries' dtype, softmax in fp32. Memory: ``S * W * block_size`` rows of keys and of values.

    Args:
        call: of ``pagoda::paged_attention``; its query, key, value and slots are not read, and entries of its block
            table past a sequence's length name any block.
        query: ``[T, H, D]``.
        padded_tokens: ``[S, M]`` int64, as ``StepMetadata.padded_tokens``.
        row_of_token: ``[T]`` int64, as ``StepMetadata.row_of_token``.
        scales_by_head: scales are ``[num_blocks, Hk, block_size]``.

    Returns:
        ``[T, H, Dv]``.
    """
    block_table, seq_lens = call.block_table, call.seq_lens
    sequences, longest = padded_tokens.shape
    heads, dim = query.shape[1:]
    kv_heads, value_dim = call.value_cache.shape[2:]
    group = heads // kv_heads
    queries = query[padded_tokens].view(sequences, longest, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
    pairs = (call.key_cache, call.key_scale), (call.value_cache, call.value_scale)
    keys, values = (_blocks(*pair, block_table, query.dtype, scales_by_head) for pair in pairs)
    keys, values = keys.permute(0, 2, 3, 1), values.permute(0, 2, 1, 3)
    context = keys.shape[3]

    counts = call.query_start_loc[1:] - call.query_start_loc[:-1]
    i = (seq_lens - counts)[:, None] + torch.arange(longest, device=query.device)
    j = torch.arange(context, device=query.device)
    i, j = i[:, :, None], j[None, None, :]
    # What lies behind a sequence's end may be anything, even no number; padding rows must not see it either.
    inside = j < seq_lens[:, None, None]
    seen = (j <= i) & inside
    if call.sliding_window > 0:
        seen = seen & (i - j < call.sliding_window)
    if call.chunk > 0:
        chunks = torch.div(i, call.chunk, rounding_mode="floor") == torch.div(j, call.chunk, rounding_mode="floor")
        seen = seen & chunks

    # [S, Hk, group * M, D] @ [S, Hk, D, L]
    scores = queries.reshape(sequences, kv_heads, group * longest, dim) @ keys
    scores = scores.view(sequences, kv_heads, group, longest, context).float() * call.scale
    if call.softcap > 0:
        scores = call.softcap * aten.tanh(scores / call.softcap)
    if call.alibi_slopes is not None:
        slopes = call.alibi_slopes.float().view(1, kv_heads, group, 1, 1)
        scores = scores + slopes * (j - i)[:, None, None]
    scores = scores.masked_fill(~seen[:, None, None], torch.finfo(torch.float32).min)
    if call.sinks is not None:
        extra = call.sinks.float().view(1, kv_heads, group, 1, 1).expand(sequences, -1, -1, longest, 1)
        weights = aten.softmax(aten.cat((scores, extra), -1), -1)[..., :-1]
    else:
        weights = aten.softmax(scores, -1)
    values = values.masked_fill(~inside.transpose(1, 2)[:, None], 0.0)
    weights = weights.to(values.dtype).view(sequences, kv_heads, group * longest, context)
    out = (weights @ values).view(sequences, kv_heads, group, longest, value_dim)
    rows = out.permute(0, 3, 1, 2, 4).reshape(sequences * longest, heads, value_dim)
    return rows[row_of_token].to(query.dtype)


def _blocks(
    cache: torch.Tensor,
    scale: torch.Tensor | None,
    block_table: torch.Tensor,
    dtype: torch.dtype,
    scales_by_head: bool,
) -> torch.Tensor:
    """The blocks of each sequence, one after the other: ``[S, W * block_size, Hk, D]``."""
    rows = cache[block_table]
    if scale is not None:
        scales = scale[block_table]
        rows = dequantize_rows(rows, scales.transpose(-1, -2) if scales_by_head else scales, dtype)
    return rows.flatten(1, 2)
