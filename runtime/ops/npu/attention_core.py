"""The computation that all `npu::` attention operators share: one sequence after the other, in fp32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch

from .attention_caches import Scales, check_paged_cache, read_paged
from .attention_layouts import Layout, batch_lengths, packed_bounds, parse_layout
from .attention_limits import LATENT_DIM, AttentionSizes, blocks, extents, head_dims
from .attention_masks import NO_LIMIT, check_compressed_mask, check_full_mask, visible_pairs
from .numerics import widened

_MAX_GROUP = 64
# With heads of 512 dims and rope, by the document's section on MLA.
_MAX_LATENT_GROUP = 128
_SINK_MAX_VALUE_DIM = 128


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


def attend(call: AttentionCall, *, fused: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """``softmax(scale · q kᵀ [+ pse_shift], hidden pairs left out) v`` for every sequence of ``call``.

    Args:
        call: of an operator.
        fused: whether the limits of npu_fused_infer_attention_score hold.

    Returns:
        The result in the output layout and the dtype of ``query``, contiguous, and ``log Σ exp`` of the scores in
        fp32 (``[0]`` unless asked for; -inf where a query sees no key). Queries that see no key, and rows behind
        the length of a sequence, are 0.

    Raises:
        ValueError: arguments that the vendor's documents forbid.
        NotImplementedError: what has no CPU kernel.
    """
    layout = parse_layout(call.input_layout, call.query)
    kv_heads = call.kv_heads or call.heads
    _check(call, layout, kv_heads, fused)
    query = layout.heads_first(call.query, call.heads)
    if call.query_rope is not None:
        query = torch.cat([query, layout.heads_first(call.query_rope, call.heads)], -1)
    tokens = query.shape[-2]
    if layout.packed:
        bounds = packed_bounds(call.names["query_lengths"], call.query_lengths, tokens)
        spans = list(pairwise(bounds))
    else:
        # With one query per sequence the operator ignores the list.
        given = None if tokens == 1 else call.query_lengths
        name = call.names.get("query_lengths", "query")
        spans = [(0, length) for length in batch_lengths(name, given, query.shape[0], tokens)]
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
            if call.key.dim() == 5 or call.key_rope is None or call.key_rope.dim() == call.key.dim():
                nz = call.key.dtype is torch.int8 or (call.query_rope is not None and _query_dim(call) == LATENT_DIM)
                for tensor_name in ("key", "value", "key_rope"):
                    tensor = getattr(call, tensor_name)
                    if tensor is not None:
                        check_paged_cache(tensor_name, tensor, layout.inputs, kv_heads, call.block_size, nz)
            else:
                raise ValueError(
                    f"key_rope has {call.key_rope.dim()} dims and key {call.key.dim()}; page both in one format"
                )
            self.capacity = table.shape[1] * call.block_size
            self.lengths = batch_lengths(name, given, sequences, self.capacity)
            self.value_dim = _paged_dim(call.value, kv_heads)
            return
        if call.key.dim() != call.query.dim():
            raise ValueError(
                f"query and key have shapes {tuple(call.query.shape)} and {tuple(call.key.shape)}; without a block "
                "table they have one layout"
            )
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
        single = not layout.packed and query_size == 1 and call.query_rope is None
        if not single or call.atten_mask is not None:
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


def _query_dim(call: AttentionCall) -> int:
    return call.query.shape[-1] // (call.heads if call.input_layout.startswith("BSH") else 1)


def _paged_dim(cache: torch.Tensor, kv_heads: int) -> int:
    if cache.dim() == 3:
        return cache.shape[2] // kv_heads
    return cache.shape[3] if cache.dim() == 4 else cache.shape[2] * cache.shape[4]


def _check(call: AttentionCall, layout: Layout, kv_heads: int, fused: bool) -> None:
    highest = 1 if layout.single(call.query) else 3
    if not 0 <= call.inner_precise <= highest:
        raise ValueError(f"inner_precise is {call.inner_precise}; it must be between 0 and {highest} for this query")
    query, key = call.query, call.key
    latent = call.query_rope is not None and call.heads > 0 and _query_dim(call) == LATENT_DIM
    group = _MAX_LATENT_GROUP if latent else _MAX_GROUP
    if call.heads <= 0 or call.heads % kv_heads or call.heads // kv_heads > group:
        raise ValueError(
            f"there are {call.heads} query heads and {kv_heads} key/value heads; the second must divide the first, "
            f"by at most {group}"
        )
    if layout.inputs == "BSH" and query.shape[2] % call.heads:
        raise ValueError(f"query has shape {tuple(query.shape)}; {call.heads} heads do not divide its last dim")
    heads = layout.heads_first(query, call.heads).shape[-3]
    if heads != call.heads:
        raise ValueError(f"query has {heads} heads in layout {layout.name!r}, but num_heads is {call.heads}")
    if not query.is_floating_point():
        raise NotImplementedError(f"query has dtype {query.dtype}; quantized queries have no CPU kernel")
    if key.dtype is torch.int32:
        raise NotImplementedError("key has dtype int32; int4 keys and values have no CPU kernel")
    quantized = key.dtype is torch.int8
    if call.value.dtype is not key.dtype or (not quantized and key.dtype is not query.dtype):
        raise ValueError(
            f"query, key and value have dtypes {query.dtype}, {key.dtype} and {call.value.dtype}; they must be one, "
            "or key and value int8"
        )
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
    if (call.query_rope is None) != (call.key_rope is None):
        raise ValueError("one of query_rope and key_rope is given; give both or neither")
    if call.query_rope is not None and (
        call.query_rope.dtype is not query.dtype or call.query_rope.shape[:-1] != query.shape[:-1]
    ):
        raise ValueError(
            f"query_rope has shape {tuple(call.query_rope.shape)} and dtype {call.query_rope.dtype}; all but its "
            f"last dim and its dtype must be those of query, {tuple(query.shape)} and {query.dtype}"
        )
    if not 0 <= call.sparse_mode <= 4:
        if call.sparse_mode == 9:
            raise NotImplementedError("sparse_mode is 9; tree masks have no CPU kernel")
        raise ValueError(f"sparse_mode is {call.sparse_mode}; it must be 0, 1, 2, 3 or 4")
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
    if call.sinks is not None:
        _check_sinks(call)
    _check_sizes(call, layout, kv_heads, fused)


def _check_sizes(call: AttentionCall, layout: Layout, kv_heads: int, fused: bool) -> None:
    query, paged, quantized = call.query, call.block_table is not None, call.key.dtype is torch.int8
    dim = _query_dim(call)
    if not paged and call.key.dim() != query.dim():
        return  # of another layout, which the reader of keys refuses

    def dims_of(tensor: torch.Tensor) -> int:
        if paged:
            return _paged_dim(tensor, kv_heads)
        return tensor.shape[-1] // (kv_heads if layout.inputs == "BSH" else 1)

    if dims_of(call.key) != dim:
        raise ValueError(f"heads of {dim} dims in query, {dims_of(call.key)} in key")
    if not fused:
        return
    batch, queries, _ = (None, None, None) if layout.packed else layout.batch_length_heads(query, call.heads)
    lengths = call.query_lengths
    keys = None
    if call.block_table is not None:
        keys = call.block_table.shape[-1] * call.block_size
    elif not layout.packed:
        keys = layout.heads_first(call.key, kv_heads).shape[-2]
    rope = call.query_rope
    sizes = AttentionSizes(
        layout=layout.name,
        heads=call.heads,
        kv_heads=kv_heads,
        dims=(dim, dims_of(call.key), dims_of(call.value)),
        rope_dim=0 if rope is None else rope.shape[-1] // (call.heads if layout.inputs == "BSH" else 1),
        sparse_mode=call.sparse_mode,
        wants_lse=call.want_lse,
        # FRACTAL_NZ caches of int8 have blocks of their own sizes.
        block_size=call.block_size if paged and not (quantized and call.key.dim() == 5) else 0,
        queries=queries,
        sequences=len(lengths or ()) if layout.packed else batch,
        keys=None if layout.packed else keys,
        int8=quantized,
    )
    reason = head_dims(sizes) or blocks(sizes) or extents(sizes)
    if reason:
        raise ValueError(reason)


def _check_sinks(call: AttentionCall) -> None:
    sinks = call.sinks
    assert sinks is not None
    if call.input_layout not in ("TND", "NTD_TND"):
        raise ValueError(f"learnable_sink is given with input_layout {call.input_layout!r}; it needs TND or NTD_TND")
    # bf16 is the device's only dtype; a graph that is checked in fp32 has its sinks in fp32 too.
    allowed = (torch.bfloat16, *({call.query.dtype} & {torch.float32, torch.float64}))
    if sinks.shape != (call.heads,) or sinks.dtype not in allowed:
        raise ValueError(
            f"learnable_sink has shape {tuple(sinks.shape)} and dtype {sinks.dtype}; it must be bfloat16 with one "
            f"entry for each of the {call.heads} query heads"
        )
    value_dim = (
        call.value.shape[-1] if call.block_table is None else _paged_dim(call.value, call.kv_heads or call.heads)
    )
    if value_dim > _SINK_MAX_VALUE_DIM:
        raise ValueError(f"value has head size {value_dim}; with learnable_sink it is at most {_SINK_MAX_VALUE_DIM}")
    if call.want_lse:
        raise NotImplementedError("the log-sum-exp together with learnable_sink has no CPU kernel")
