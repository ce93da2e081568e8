"""The computation that all `npu::` attention operators share: one sequence after the other, in fp32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch

from .attention_caches import Scales, read_paged
from .attention_layouts import Layout, batch_lengths, packed_bounds, parse_layout
from .attention_masks import NO_LIMIT, check_compressed_mask, check_full_mask, visible_pairs
from .numerics import widened

NO_KERNEL = {"query": [torch.int8], "key": [torch.int32]}
"""What all of the operators lack: queries that are rounded, and 4 bits."""


@dataclass(frozen=True)
class AttentionCall:
    """Arguments of one attention operator under common names; see :mod:`.attention` for their meaning.

    ``names`` has the operator's own names of those that it spells otherwise; ``stacked_scale`` and so on are of keys
    and values together.
    """

    names: Mapping[str, str]
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    input_layout: str
    heads: int
    kv_heads: int
    scale: float
    query_lengths: Sequence[int] | None = None
    kv_lengths: Sequence[int] | None = None
    atten_mask: torch.Tensor | None = None
    pse_shift: torch.Tensor | None = None
    sparse_mode: int = 0
    pre_tokens: int = NO_LIMIT
    next_tokens: int = NO_LIMIT
    inner_precise: int = 0
    block_table: torch.Tensor | None = None
    block_size: int = 0
    query_rope: torch.Tensor | None = None
    key_rope: torch.Tensor | None = None
    key_scale: torch.Tensor | None = None
    key_offset: torch.Tensor | None = None
    key_mode: int = 0
    value_scale: torch.Tensor | None = None
    value_offset: torch.Tensor | None = None
    value_mode: int = 0
    stacked_scale: torch.Tensor | None = None
    stacked_offset: torch.Tensor | None = None
    stacked_mode: int = 0
    sinks: torch.Tensor | None = None
    want_lse: bool = False

    @cached_property
    def key_scales(self) -> Scales | None:
        return self._scales("key", 0)

    @cached_property
    def value_scales(self) -> Scales | None:
        return self._scales("value", 1)

    def _scales(self, part: str, place: int) -> Scales | None:
        """Those of its own win over the stacked ones."""
        name = f"{part}_scale"
        scale, offset, mode = (getattr(self, f"{part}_{what}") for what in ("scale", "offset", "mode"))
        if self.key_scale is None and self.stacked_offset is not None:
            offset = _of_stack(self.stacked_offset, place)
        if self.key_scale is None and self.stacked_scale is not None:
            name, mode = "stacked_scale", self.stacked_mode
            scale = _of_stack(self.stacked_scale, place)
        return None if scale is None else Scales(self.names[name], scale, offset, mode)


def _of_stack(stacked: torch.Tensor, place: int) -> torch.Tensor:
    if stacked.shape[:1] != (2,):
        raise ValueError(f"antiquant scales or offsets have shape {tuple(stacked.shape)}; keys' and values' are 2")
    return stacked[place : place + 1]


def attend(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """``softmax(scale · q kᵀ [+ pse_shift], hidden pairs left out) v`` for every sequence of ``call``.

    Returns:
        The result in the output layout and the dtype of ``query``, contiguous, and ``log Σ exp`` of the scores in
        fp32 (``[0]`` unless requested; -inf where a query sees no key). Queries that see no key, and rows behind
        the length of a sequence, are 0.

    Raises:
        ValueError: arguments that the vendor's documents forbid.
        NotImplementedError: what has no CPU kernel.
    """
    layout = parse_layout(call.input_layout, call.query)
    kv_heads = call.kv_heads or call.heads
    _check(call, layout, kv_heads)
    query = layout.heads_first(call.query, call.heads)
    if call.query_rope is not None:
        query = torch.cat([query, layout.heads_first(call.query_rope, call.heads)], -1)
    tokens = query.shape[-2]
    if layout.packed:
        bounds = packed_bounds(call.names["query_lengths"], call.query_lengths, tokens)
        spans = list(pairwise(bounds))
    else:
        name = call.names.get("query_lengths", "query")
        spans = [(0, length) for length in batch_lengths(name, call.query_lengths, query.shape[0], tokens)]
        if tokens == 1 and call.query_rope is None and any(end != 1 for _, end in spans):
            raise ValueError(f"{name} is {call.query_lengths}; input_layout {layout.name!r} with S = 1 ignores it")
    sequences = len(spans)
    reader = _Reader(call, layout, kv_heads, sequences)
    hidden = _hidden_pairs(call, layout, sequences, tokens, reader.capacity)

    wide = widened(query)
    output = wide.new_zeros((*query.shape[:-1], reader.value_dim))
    lse = torch.full((*query.shape[:-1], 1), float("-inf"))
    for sequence, (start, end) in enumerate(spans):
        kv_length = reader.lengths[sequence]
        if start == end or kv_length == 0:
            continue
        place = (slice(None), slice(start, end)) if layout.packed else (sequence, slice(None), slice(start, end))
        visible = _visible(call, layout, tokens, hidden, sequence, end - start, kv_length)
        key, value = reader.read(sequence)
        bias = None
        if call.pse_shift is not None:
            bias = widened(call.pse_shift[sequence % len(call.pse_shift), :, : end - start, :kv_length])
        output[place], lse[place] = _softmax_attention(wide[place], key, value, call.scale, visible, bias, call.sinks)
    returned = layout.arranged(output.to(call.query.dtype))
    if not call.want_lse:
        return returned, torch.empty(0)
    return returned, (lse.transpose(0, 1) if layout.packed else lse).contiguous()


def result_dtype(query: torch.Tensor, query_rope: torch.Tensor | None, quantized: bool) -> torch.dtype:
    """Dtype of an attention result: int8 where it is ``quantized``, and no int8 query gives itself back."""
    if quantized:
        return torch.int8
    if query.dtype is torch.int8:
        return torch.float16 if query_rope is None else query_rope.dtype
    return query.dtype


class _Reader:
    """Keys and values of each sequence as ``[KN, length, D]``, wherever they lie."""

    def __init__(self, call: AttentionCall, layout: Layout, kv_heads: int, sequences: int) -> None:
        self._call, self._layout, self._kv_heads = call, layout, kv_heads
        name, given = call.names["kv_lengths"], call.kv_lengths
        if call.block_table is not None:
            table = call.block_table
            if table.dtype is not torch.int32 or table.dim() != 2 or table.shape[0] != sequences:
                raise ValueError(
                    f"block_table has shape {tuple(table.shape)} and dtype {table.dtype}; it must be int32 with one "
                    f"row for each of the {sequences} sequences"
                )
            if not given or (layout.packed and len(given) != sequences):
                raise ValueError(
                    f"{name} has {len(given or [])} entries; with a block table it holds the context length of each "
                    f"of the {sequences} sequences (per sequence, not cumulative)"
                )
            self.capacity = table.shape[1] * call.block_size
            self.lengths = batch_lengths(name, given, sequences, self.capacity)
            self.value_dim = _paged_dim(call.value, kv_heads)
            return
        self._key, self._value = layout.heads_first(call.key, kv_heads), layout.heads_first(call.value, kv_heads)
        self._rope = None if call.key_rope is None else layout.heads_first(call.key_rope, kv_heads)
        for tensor_name, tensor in (("key", self._key), ("value", self._value)):
            if tensor.shape[-3] != kv_heads or (not layout.packed and len(tensor) != sequences):
                raise ValueError(
                    f"{tensor_name} has shape {tuple(getattr(call, tensor_name).shape)}; input_layout "
                    f"{layout.name!r} with {kv_heads} key/value heads asks for "
                    f"{'that many heads' if layout.packed else f'a batch of {sequences}'}"
                )
        self.capacity = self._key.shape[-2]
        if self._value.shape[-2] != self.capacity:
            raise ValueError(
                f"key holds {self.capacity} tokens and value {self._value.shape[-2]}; give both one length"
            )
        self.value_dim = self._value.shape[-1]
        if not layout.packed:
            self.lengths = batch_lengths(name, given, sequences, self.capacity)
            return
        self._bounds = packed_bounds(name, given, self.capacity)
        if len(self._bounds) != sequences + 1:
            raise ValueError(
                f"{name} has {len(self._bounds) - 1} entries and {call.names['query_lengths']} {sequences}; "
                "give both for the same sequences"
            )
        self.lengths = [end - start for start, end in pairwise(self._bounds)]

    def read(self, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        length = self.lengths[sequence]
        call = self._call
        blocks = None
        if call.block_table is not None:
            blocks = call.block_table[sequence, : -(-length // call.block_size)].long()
            if int(blocks.min()) < 0 or int(blocks.max()) >= len(call.key):
                raise ValueError(
                    f"block_table holds {blocks.tolist()} for sequence {sequence} of {length} tokens; the cache has "
                    f"{len(call.key)} blocks"
                )
            key = read_paged(call.key, blocks, length, self._kv_heads)
            value = read_paged(call.value, blocks, length, self._kv_heads)
            rope = None if call.key_rope is None else read_paged(call.key_rope, blocks, length, self._kv_heads)
        else:
            key, value = self._of(sequence, self._key), self._of(sequence, self._value)
            rope = None if self._rope is None else self._of(sequence, self._rope)
        key = widened(key) if call.key_scales is None else call.key_scales.applied(key, sequence, blocks)
        value = widened(value) if call.value_scales is None else call.value_scales.applied(value, sequence, blocks)
        return key if rope is None else torch.cat([key, widened(rope)], -1), value

    def _of(self, sequence: int, tensor: torch.Tensor) -> torch.Tensor:
        if self._layout.packed:
            return tensor[:, self._bounds[sequence] : self._bounds[sequence + 1]]
        return tensor[sequence, :, : self.lengths[sequence]]


def _softmax_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    visible: torch.Tensor | None,
    bias: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    # query: [N, S, D]; key, value: [KN, L, D]. Head h reads key/value head h // (N / KN).
    heads, length, dim = query.shape
    key, value = key.to(query.dtype), value.to(query.dtype)
    grouped = query.reshape(key.shape[0], -1, dim)
    scores = (grouped @ key.transpose(1, 2)).view(heads, length, -1) * scale
    if bias is not None:
        scores = scores + bias
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    peak = scores.amax(-1, keepdim=True)
    if sinks is not None:
        logit = sinks.to(scores.dtype)[:, None, None]
        peak = torch.maximum(peak, logit)
    # exp(scores - lse) would carry the rounding of lse, which grows with the scores: the weights would not sum to 1.
    weights = torch.exp(scores - peak.masked_fill(peak == float("-inf"), 0))
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(logit - peak)
    lse = peak + total.log()
    weights = weights / total.masked_fill(total == 0, 1)
    output = weights.view(key.shape[0], -1, key.shape[1]) @ value
    return output.view(heads, length, -1), lse


def _visible(
    call: AttentionCall,
    layout: Layout,
    query_size: int,
    hidden: torch.Tensor | None,
    sequence: int,
    query_length: int,
    kv_length: int,
) -> torch.Tensor | None:
    rows = None if hidden is None else hidden[sequence % len(hidden)]
    if layout.packed or query_size > 1 or call.query_rope is not None:
        return visible_pairs(call.sparse_mode, rows, query_length, kv_length, call.pre_tokens, call.next_tokens)
    if call.pre_tokens < kv_length - 1 or call.next_tokens < 0:
        raise ValueError(
            f"pre_tokens is {call.pre_tokens} and next_tokens {call.next_tokens} for one query over {kv_length} "
            f"keys; input_layout {call.input_layout!r} with S = 1 is documented to ignore them: use TND"
        )
    return None if rows is None else ~rows[:1, :kv_length]


def _hidden_pairs(
    call: AttentionCall, layout: Layout, sequences: int, query_size: int, kv_size: int
) -> torch.Tensor | None:
    if call.sparse_mode in (2, 3, 4):
        check_compressed_mask(call.atten_mask, call.sparse_mode)
        return None
    if call.atten_mask is None:
        if call.sparse_mode == 1:
            raise ValueError("sparse_mode is 1 and atten_mask is None; pass the full mask, or sparse_mode 0")
        return None
    if layout.packed:
        raise ValueError(
            f"atten_mask is given with sparse_mode {call.sparse_mode} and input_layout {layout.name!r}; packed "
            "layouts take no full mask: use sparse_mode 2, 3 or 4 with the (2048, 2048) one"
        )
    return check_full_mask(call.atten_mask, sequences, query_size, kv_size)


def _paged_dim(cache: torch.Tensor, kv_heads: int) -> int:
    if cache.dim() == 3:
        return cache.shape[2] // kv_heads
    return cache.shape[3] if cache.dim() == 4 else cache.shape[2] * cache.shape[4]


def _check(call: AttentionCall, layout: Layout, kv_heads: int) -> None:
    """Raise for what the limits of the operators do not say."""
    query, key = call.query, call.key
    if call.sparse_mode == 9:
        raise NotImplementedError("sparse_mode is 9; tree masks have no CPU kernel")
    if call.sinks is not None and call.want_lse:
        raise NotImplementedError("the log-sum-exp together with learnable_sink has no CPU kernel")
    quantized = key.dtype is torch.int8
    if quantized != (call.key_scales is not None) or quantized != (call.value_scales is not None):
        raise ValueError("int8 keys and values need their scales, and only they take them")
    if quantized:
        modes = (getattr(call.key_scales, "mode", None), getattr(call.value_scales, "mode", None))
        if modes[0] != modes[1] and modes != (0, 1):
            raise ValueError(f"key and value have antiquant modes {modes}; they must be equal, or 0 and 1")
        if layout.packed:
            raise ValueError(f"int8 keys and values are not taken in input_layout {layout.name!r}; use BNSD or BSND")
        length = layout.batch_length_heads(query, call.heads)[1]
        if length > 1 and (modes[0] not in (0, 1) or (call.block_table is not None and key.dim() != 5)):
            raise ValueError(
                f"int8 keys and values with {length} queries a sequence take antiquant modes 0 and 1, and with a "
                "block table only FRACTAL_NZ caches"
            )
    if call.pse_shift is not None:
        pse_shift = call.pse_shift
        if layout.packed:
            raise ValueError(
                f"pse_shift is not taken in input_layout {layout.name!r}; use a layout with a batch axis"
            )
        _, length, _ = layout.batch_length_heads(query, call.heads)
        if call.block_table is None:
            kv_length = layout.heads_first(key, kv_heads).shape[-2]
        else:
            kv_length = call.block_table.shape[-1] * call.block_size
        if (
            pse_shift.dim() != 4
            or pse_shift.shape[1] != call.heads
            or len(pse_shift) not in (1, len(query))
            or pse_shift.shape[2] < length
            or pse_shift.shape[3] < kv_length
        ):
            raise ValueError(
                f"pse_shift has shape {tuple(pse_shift.shape)}; it must be (1 or {len(query)}, {call.heads}, at "
                f"least {length}, at least {kv_length})"
            )
