"""Plain-torch meaning of the attention operators: oracle of the tests, fallback without a compiler."""

from __future__ import annotations

from typing import Any

import torch

from .arguments import AttentionArguments, PagedAttentionArguments
from .attention.int8_rows import check_scales, dequantize_rows, quantize_rows
from .attention.relative_bias import scores_of_relative_bias
from .attention.selected_keys import mask_of_selected

aten = torch.ops.aten

_Call = AttentionArguments[torch.Tensor] | PagedAttentionArguments[torch.Tensor]


def attention_reference(*arguments: Any) -> torch.Tensor:
    """Softmax attention of every query over the keys that it sees: ``pagoda::attention``.

    Score of query i and key j: ``s = scale · q·k``; ``s = softcap · tanh(s / softcap)``; plus
    ``alibi_slopes[h] · (j - i)``; plus ``relative_bias[h, i, i - j]``; plus the mask; then softmax in fp32, with one
    extra logit per head if there are sinks (Xiao et al. 2023, as in gpt-oss: it takes weight and has no value). The
    Tq × Tk scores are built here; the kernel has no such buffer.

    Args:
        arguments: the fields of :class:`AttentionArguments`, in order.

    Returns:
        ``[B, H, Tq, Dv]`` in query's dtype, stored as ``[B, Tq, H, Dv]``. Rows that see no key are zero.

    Raises:
        RuntimeError: of the operator, where grad mode is on and an input requires grad.
        ValueError: shapes or dtypes that do not fit.
    """
    call: AttentionArguments[torch.Tensor] = AttentionArguments(*arguments)
    query_positions = torch.arange(call.query.shape[2], device=call.query.device)
    bias = _position_bias(call, query_positions, call.key.shape[2], call.is_causal)
    if call.selected is not None:
        bias = bias.masked_fill(~mask_of_selected(call.selected, call.key.shape[2]), -torch.inf)
    if call.relative_bias is not None:
        keys = call.key.shape[2]
        bias = bias + scores_of_relative_bias(call.relative_bias, query_positions, keys, bias.dtype)
    if call.attn_mask is not None:
        bias = bias + _mask_bias(call.attn_mask, bias.dtype)
    result = _attend(call, call.query, call.key, call.value, bias)
    return result.transpose(1, 2).contiguous().transpose(1, 2)


def paged_attention_reference(*arguments: Any) -> torch.Tensor:
    """Causal attention of one flat step (prefill chunks and decodes mixed) over a paged KV cache.

    ``pagoda::paged_attention``. First every token's key and value go to its cache slot; then token i of sequence s,
    at position ``p = seq_lens[s] - n_s + i``, attends the positions ``j <= p`` with ``p - j < sliding_window`` and
    ``p // chunk == j // chunk``. Scores as in :func:`attention_reference`; ALiBi adds
    ``alibi_slopes[h] · (j - p)``. Of these, ``selected`` leaves those that it names. Positions that no token sees are
    never read (their blocks may be in other hands).

    Caches of int8 hold ``round(x / s)``, each head of each token with its own scale ``s = max|x| / 127``, and are
    read as ``stored · s`` (see ``int8_rows``). A float cache returns a NaN or an infinity at its own element. An int8
    cache returns NaN for all of that token's head, and so NaN for whatever attends it.

    One sequence at a time; ``batch_invariant`` asks for nothing that it could tell apart.

    Args:
        arguments: the fields of :class:`PagedAttentionArguments`, in order.

    Returns:
        ``[1, H, T, Dv]`` in query's dtype, stored as ``[1, T, H, Dv]``. Tokens of no sequence are zero.

    Raises:
        RuntimeError: of the operator, where grad mode is on and an input requires grad.
        ValueError: shapes or dtypes that do not fit, a slot or block id outside the cache, a context longer
            than its row of the block table. The caches may have been written by then.
    """
    call: PagedAttentionArguments[torch.Tensor] = PagedAttentionArguments(*arguments)
    query, key_cache, value_cache, block_table = call.query, call.key_cache, call.value_cache, call.block_table
    check_scales(key_cache, call.key_scale, call.value_scale)
    _store(call)
    block_size = key_cache.shape[1]
    dtype = _compute_dtype(query)
    result = query.new_zeros(1, query.shape[2], query.shape[1], call.value.shape[3])
    starts = call.query_start_loc.tolist()
    for sequence, context in enumerate(call.seq_lens.tolist()):
        start, end = starts[sequence], starts[sequence + 1]
        if start == end:
            continue
        if context < end - start or context > block_table.shape[1] * block_size:
            raise ValueError(
                f"seq_lens[{sequence}] is {context}; it must be at least the sequence's {end - start} new "
                f"tokens and at most the {block_table.shape[1] * block_size} slots of its block_table row"
            )
        # Only the blocks that a token can see are read: those behind a window may belong to others by now.
        first = context - (end - start)
        low = max(0, first - call.sliding_window + 1) if call.sliding_window > 0 else 0
        low = max(low, first // call.chunk * call.chunk) if call.chunk > 0 else low
        positions = torch.arange(low, context, device=query.device)
        place = (block_table[sequence].long()[positions // block_size], positions % block_size)
        keys = _stored(key_cache, call.key_scale, place, dtype)
        values = _stored(value_cache, call.value_scale, place, dtype)
        query_positions = torch.arange(first, context, device=query.device)
        bias = _position_bias(call, query_positions, context, is_causal=True)
        if call.selected is not None:
            bias = bias.masked_fill(~mask_of_selected(call.selected[:, start:end], context), -torch.inf)
        if call.relative_bias is not None:
            rows = call.relative_bias[:, :, start:end]
            bias = bias + scores_of_relative_bias(rows, query_positions, context, dtype)
        bias = bias[..., low:]
        result[:, start:end] = _attend(call, query[:, :, start:end], keys, values, bias).transpose(1, 2)
    return result.transpose(1, 2)


def _store(call: PagedAttentionArguments[torch.Tensor]) -> None:
    """Write keys and values, and the scales of int8 caches, to the tokens' slots."""
    block_size = call.key_cache.shape[1]
    written = call.slot_mapping >= 0
    slots = call.slot_mapping[written]
    place = (slots // block_size, slots % block_size)
    for rows, cache, row_scale in (
        (call.key, call.key_cache, call.key_scale),
        (call.value, call.value_cache, call.value_scale),
    ):
        new = rows[0].transpose(0, 1)[written]
        if row_scale is None:
            cache[place] = new.to(cache.dtype)
        else:
            cache[place], row_scale[place] = quantize_rows(new)


def _stored(
    cache: torch.Tensor, row_scale: torch.Tensor | None, place: tuple[torch.Tensor, ...], dtype: torch.dtype
) -> torch.Tensor:
    """The rows of a cache at ``place``, ``[1, Hk, L, D]``."""
    rows = cache[place] if row_scale is None else dequantize_rows(cache[place], row_scale[place], dtype)
    return rows.transpose(0, 1).unsqueeze(0)


def _compute_dtype(query: torch.Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def _position_bias(call: _Call, query_positions: torch.Tensor, num_keys: int, is_causal: bool) -> torch.Tensor:
    """The term of positions in the scores, ``[1, 1 or H, Tq, Tk]``: -inf where a key is unseen, else ALiBi."""
    dtype = _compute_dtype(call.query)
    i = query_positions[:, None]
    j = torch.arange(num_keys, device=query_positions.device)[None, :]
    seen = torch.ones(i.shape[0], num_keys, dtype=torch.bool, device=j.device)
    if is_causal:
        seen = seen & (j <= i)
    if call.sliding_window > 0:
        seen = seen & (i - j < call.sliding_window)
    if call.chunk > 0:
        seen = seen & (i // call.chunk == j // call.chunk)
    bias = torch.zeros(seen.shape, dtype=dtype, device=j.device).masked_fill(~seen, -torch.inf)[None, None]
    if call.alibi_slopes is not None:
        bias = bias + call.alibi_slopes.to(dtype)[None, :, None, None] * (j - i)
    return bias


def _mask_bias(attn_mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A boolean or additive mask as what it adds; the mask dtype's lowest finite value counts as -inf."""
    if attn_mask.dtype == torch.bool:
        return torch.zeros(attn_mask.shape, dtype=dtype, device=attn_mask.device).masked_fill(~attn_mask, -torch.inf)
    return attn_mask.to(dtype).masked_fill(attn_mask <= torch.finfo(attn_mask.dtype).min, -torch.inf)


def _attend(
    call: _Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """softmax(softcap(scale · q kᵀ) + bias, sinks) v, scores in fp32; rows that see nothing give zeros."""
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    dtype = _compute_dtype(query)
    key = key.to(dtype).repeat_interleave(num_heads // num_kv_heads, dim=1)
    value = value.to(dtype).repeat_interleave(num_heads // num_kv_heads, dim=1)
    scores = (query.to(dtype) @ key.transpose(2, 3)) * call.scale
    if call.softcap > 0:
        scores = call.softcap * aten.tanh(scores / call.softcap)
    scores = scores + bias
    if key.shape[2] == 0:
        return query.new_zeros(*query.shape[:3], value.shape[3])
    highest = scores.amax(dim=-1, keepdim=True)
    if call.sinks is not None:
        sink = call.sinks.to(dtype)[None, :, None, None]
        highest = aten.maximum(highest, sink)
    highest = highest.masked_fill(highest == -torch.inf, 0.0)
    weights = aten.exp(scores - highest)
    total = weights.sum(dim=-1, keepdim=True)
    if call.sinks is not None:
        total = total + aten.exp(sink - highest)
    return ((weights @ value) / total.masked_fill(total == 0, 1.0)).to(query.dtype)
