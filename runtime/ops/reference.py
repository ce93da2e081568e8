"""Plain-torch meaning of the attention operators: oracle of the tests, fallback without a compiler."""

from __future__ import annotations

import torch

from .int8_rows import check_scales, dequantise_rows, quantise_rows


def attention_reference(
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
    """What ``pagoda::attention`` means; see ``attention.attention`` for shapes. Builds the Tq × Tk scores."""
    query_positions = torch.arange(query.shape[2], device=query.device)
    bias = _position_bias(
        query_positions, key.shape[2], alibi_slopes, is_causal, sliding_window, chunk, _compute_dtype(query)
    )
    if attn_mask is not None:
        bias = bias + _mask_bias(attn_mask, bias.dtype)
    result = _attend(query, key, value, bias, sinks, scale, softcap)
    return result.transpose(1, 2).contiguous().transpose(1, 2)


def paged_attention_reference(
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
    """What ``pagoda::paged_attention`` means; see ``paged_attention.paged_attention``.

    One sequence at a time; ``batch_invariant`` asks for nothing that it could tell apart.
    Unlike the kernel it may have written to the caches when it raises.
    """
    check_scales(key_cache, key_scale, value_scale)
    block_size = key_cache.shape[1]
    written = slot_mapping >= 0
    slots = slot_mapping[written]
    place = (slots // block_size, slots % block_size)
    for rows, cache, row_scale in ((key, key_cache, key_scale), (value, value_cache, value_scale)):
        new = rows[0].transpose(0, 1)[written]
        if row_scale is None:
            cache[place] = new.to(cache.dtype)
        else:
            cache[place], row_scale[place] = quantise_rows(new)

    result = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
    starts = query_start_loc.tolist()
    for sequence, context in enumerate(seq_lens.tolist()):
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
        low = max(0, first - sliding_window + 1) if sliding_window > 0 else 0
        low = max(low, first // chunk * chunk) if chunk > 0 else low
        positions = torch.arange(low, context, device=query.device)
        place = (block_table[sequence].long()[positions // block_size], positions % block_size)
        keys, values = (
            rows.transpose(0, 1).unsqueeze(0)
            for rows in (
                _stored(key_cache, key_scale, place, _compute_dtype(query)),
                _stored(value_cache, value_scale, place, _compute_dtype(query)),
            )
        )
        bias = _position_bias(
            torch.arange(first, context, device=query.device),
            context,
            alibi_slopes,
            True,
            sliding_window,
            chunk,
            _compute_dtype(query),
        )[..., low:]
        attended = _attend(query[:, :, start:end], keys, values, bias, sinks, scale, softcap)
        result[:, start:end] = attended.transpose(1, 2)
    return result.transpose(1, 2)


def _stored(
    cache: torch.Tensor, row_scale: torch.Tensor | None, place: tuple[torch.Tensor, ...], dtype: torch.dtype
) -> torch.Tensor:
    """The rows of a cache at ``place``."""
    return cache[place] if row_scale is None else dequantise_rows(cache[place], row_scale[place], dtype)


def _compute_dtype(query: torch.Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def _position_bias(
    query_positions: torch.Tensor,
    num_keys: int,
    alibi_slopes: torch.Tensor | None,
    is_causal: bool,
    sliding_window: int,
    chunk: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """What positions add to the scores, ``[1, 1 or H, Tq, Tk]``: -inf where a key is unseen, else ALiBi."""
    i = query_positions[:, None]
    j = torch.arange(num_keys, device=query_positions.device)[None, :]
    seen = torch.ones(i.shape[0], num_keys, dtype=torch.bool, device=j.device)
    if is_causal:
        seen &= j <= i
    if sliding_window > 0:
        seen &= i - j < sliding_window
    if chunk > 0:
        seen &= i // chunk == j // chunk
    bias = torch.zeros(seen.shape, dtype=dtype, device=j.device).masked_fill_(~seen, -torch.inf)[None, None]
    if alibi_slopes is not None:
        bias = bias + alibi_slopes.to(dtype)[None, :, None, None] * (j - i)
    return bias


def _mask_bias(attn_mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A boolean or additive mask as what it adds; the mask dtype's lowest finite value counts as -inf."""
    if attn_mask.dtype == torch.bool:
        return torch.zeros(attn_mask.shape, dtype=dtype, device=attn_mask.device).masked_fill_(~attn_mask, -torch.inf)
    return attn_mask.to(dtype).masked_fill(attn_mask <= torch.finfo(attn_mask.dtype).min, -torch.inf)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """softmax(softcap(scale · q kᵀ) + bias, sinks) v, scores in fp32; rows that see nothing give zeros."""
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    dtype = _compute_dtype(query)
    key = key.to(dtype).repeat_interleave(num_heads // num_kv_heads, dim=1)
    value = value.to(dtype).repeat_interleave(num_heads // num_kv_heads, dim=1)
    scores = (query.to(dtype) @ key.transpose(2, 3)) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + bias
    if key.shape[2] == 0:
        return query.new_zeros(*query.shape[:3], value.shape[3])
    highest = scores.amax(dim=-1, keepdim=True)
    if sinks is not None:
        sink = sinks.to(dtype)[None, :, None, None]
        highest = torch.maximum(highest, sink)
    highest = highest.masked_fill(highest == -torch.inf, 0.0)
    weights = torch.exp(scores - highest)
    total = weights.sum(dim=-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sink - highest)
    return ((weights @ value) / total.masked_fill(total == 0, 1.0)).to(query.dtype)
